"""QC and gene names: equal to a plain reference in any block size, and one line when nothing is
left.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import vocabulary_of

from cellmill import open_cells
from cellmill.config.options import PreprocessOptions
from cellmill.data.arrays import select_columns
from cellmill.data.genes.names import match_columns
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import DataError
from cellmill.files import read_json, sha256_file
from cellmill.stages import data as stage

Make = Callable[..., Path]
GENES = ["TP53", "MT-CO1", "BRCA2", "FANCD1", "ENSG00000000003.15", "nothing", "C10orf11", "DPM1"]
IDS = [
    "ENSG00000141510",
    "ENSG00000198804",
    "ENSG00000139618",
    "ENSG00000000003",
    "ENSG00000148655",
    "ENSG00000000419",
]


def run(
    path: Path, out: Path, counts: str = "X", gene_column: str | None = None, **options: Any
) -> tuple[ad.AnnData, dict[str, Any]]:
    loose = {"min_genes": 0, "min_cells": 0, "max_mito_frac": 1.0}
    checked = PreprocessOptions.model_validate({"preprocess": loose | options})
    report = out.with_suffix(".json")
    given = {"input": path, "counts": counts, "gene_column": gene_column}
    stage.preprocess(options=checked, dataset="d", out=out, report=report, **given)
    return open_cells(out), read_json(report)


@pytest.fixture
def panel(make_h5ad: Make) -> Path:
    random = np.random.default_rng(2)
    matrix = random.poisson(1.2, (60, len(GENES))).astype(np.float32)
    matrix[3] = 0
    matrix[:, 7] = 0
    matrix[8, 7] = 4
    obs = pd.DataFrame(
        {"label": pd.Categorical(["rare", *["a", "b"] * 29, "rare2"]), "age": np.arange(60.0)},
        index=[f"cell_{i}" for i in range(60)],
    )
    return make_h5ad(sp.csr_matrix(matrix), genes=GENES, obs=obs)


def reference(path: Path, options: dict[str, Any]) -> pd.DataFrame:
    """The same filters on a dense frame."""
    data = ad.read_h5ad(path)
    frame = data.to_df().drop(columns="nothing")
    frame["BRCA2"] += frame.pop("FANCD1")  # an alias
    frame.columns = IDS
    total = frame.sum(axis=1)
    detected = (frame > 0).sum(axis=1)
    mito = frame["ENSG00000198804"] / total.clip(lower=1)
    keep = (total >= max(1, options.get("min_counts", 1))) & (
        detected >= options.get("min_genes", 0)
    )
    frame = frame[keep & (mito <= options.get("max_mito_frac", 1))]
    frame = frame.loc[:, (frame > 0).sum() >= max(1, options.get("min_cells", 0))]
    return frame.loc[frame.sum(axis=1) > 0, sorted(frame.columns)]


@pytest.fixture
def message(tmp_path: Path) -> Callable[..., str]:
    """The one line of a preprocessing that is refused and writes nothing."""

    def refuse(path: Path, **options: Any) -> str:
        with pytest.raises(DataError) as error:
            run(path, tmp_path / "out.h5ad", **options)
        assert not [*tmp_path.glob("out.*")]
        return str(error.value).removeprefix(f"{path}: ")

    return refuse


@pytest.mark.parametrize("row_block", [1, 7, 4096])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_genes": 4},
        {"min_counts": 9},
        {"max_mito_frac": 0.2},
        {"min_cells": 30, "min_genes": 3},
    ],
)
def test_kept_counts_equal_a_dense_reference(
    panel: Path, tmp_path: Path, options: dict[str, Any], row_block: int
) -> None:
    got, report = run(panel, tmp_path / "out.h5ad", row_block=row_block, **options)
    wanted = reference(panel, options)
    pd.testing.assert_frame_equal(got.to_df(), wanted, check_dtype=False, check_names=False)
    assert report["cells"] == {"in": 60, "out": len(wanted), "dropped": report["cells"]["dropped"]}
    assert sum(report["cells"]["dropped"].values()) == 60 - len(wanted)
    assert (
        report["genes"]["in"] - sum(report["genes"]["dropped"].values())
        == report["genes"]["out"]
        == wanted.shape[1]
    )
    assert report["nnz"] == int((wanted > 0).to_numpy().sum())


def test_the_report_counts_every_dropped_cell(panel: Path, tmp_path: Path) -> None:
    got, report = run(panel, tmp_path / "out.h5ad", min_genes=2, min_cells=2)
    assert report["dataset"] == "d"
    file = {"file": "raw.h5ad", "sha256": sha256_file(panel), "bytes": panel.stat().st_size}
    assert report["source"] == file | {"counts": "X", "source": "", "licence": ""}
    assert report["cells"]["dropped"]["no counts"] == 1
    assert report["genes"] == {
        "in": 8,
        "out": 5,
        "dropped": {
            "not gene expression": 0,
            "no Ensembl id": 1,
            "summed into another": 1,
            "min_cells": 1,
        },
    }
    assert report["coverage"]["examples"] == ["nothing"]
    assert report["coverage"]["summed"] == {"ENSG00000139618": ["BRCA2", "FANCD1"]}
    assert report["coverage"]["frac"] == 7 / 8
    assert report["dtype"] == "uint16"
    for name in ("n_genes", "n_counts", "mito_frac"):
        histogram = report["histograms"][name]
        assert (sum(histogram["before"]), sum(histogram["after"])) == (60, got.n_obs)
        assert len(histogram["edges"]) == len(histogram["before"]) + 1
    assert report["quantiles"]["at"][3] == 0.5
    assert report["quantiles"]["n_counts"]["after"][3] > 0


@pytest.mark.parametrize(
    ("options", "drops"),
    [
        ({"min_genes": 5}, "preprocess.min_genes 5 drops {} of 60 cells; lower it to keep them"),
        (
            {"max_mito_frac": 0.01},
            "preprocess.max_mito_frac 0.01 drops {} of 60 cells; raise it to keep them",
        ),
        ({"min_genes": 2}, None),
    ],
)
def test_an_option_that_drops_most_cells_is_named(
    panel: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    drops: str | None,
) -> None:
    _, report = run(panel, tmp_path / "out.h5ad", **options)
    assert (report["cells"]["out"] < 30) == (drops is not None)
    shown = (drops or "").format(report["cells"]["dropped"][next(iter(options))])
    line = f"d: warning: quality control drops more than half of the cells: {shown}\n"
    assert (line in capsys.readouterr().out) == (drops is not None)


def test_ids_and_obs_are_kept(panel: Path, tmp_path: Path) -> None:
    got, _ = run(panel, tmp_path / "out.h5ad", min_genes=1)
    assert list(got.var_names) == sorted(IDS)
    assert got.var["symbol"].tolist() == ["TSPAN6", "DPM1", "BRCA2", "TP53", "LRMDA", "MT-CO1"]
    source = ad.read_h5ad(panel).obs
    pd.testing.assert_frame_equal(got.obs, source.drop(index="cell_3"))
    got, _ = run(panel, tmp_path / "out.h5ad", min_counts=12, keep_obs=["label"])
    assert list(got.obs) == ["label"]
    assert set(got.obs["label"].cat.categories) == set(got.obs["label"])


def test_columns_of_one_name_are_genes_of_their_ids_or_summed(
    make_h5ad: Make, tmp_path: Path
) -> None:
    matrix = np.array([[1, 2, 4, 8], [0, 3, 0, 5]], np.float32)
    names = ["TBCE", "BRCA2", "TBCE", "BRCA2"]
    ids = ["ENSG00000284770", "", "ENSG00000285053", ""]
    with pytest.warns(UserWarning, match="Variable names are not unique"):
        path = make_h5ad(matrix, var=pd.DataFrame({"gene_ids": ids}, index=names))
    made, report = run(path, tmp_path / "out.h5ad", min_genes=0)
    assert list(made.var_names) == ["ENSG00000139618", "ENSG00000284770", "ENSG00000285053"]
    assert made.X.toarray().tolist() == [[10, 1, 4], [8, 0, 0]]
    assert report["coverage"]["summed"] == {"ENSG00000139618": ["BRCA2", "BRCA2"]}
    vocabulary = vocabulary_of(["ENSG00000139618", "ENSG00000285053"])
    with open_counts(path) as reader:
        target = match_columns(reader, vocabulary).target
        [block] = reader.rows()
    assert select_columns(block, target, 2).toarray().tolist() == [[10, 4], [8, 0]]


def test_counts_on_unknown_names_are_warned_about(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lost, warned in ((1, False), (3, True)):
        path = make_h5ad(
            np.array([[99 - lost, 1, lost]], np.float32), genes=["TP53", "BRCA2", "odd"]
        )
        run(path, tmp_path / "out.h5ad")
        printed = capsys.readouterr().out
        assert f"d: {1 - lost / 100:.1%} of counts on genes with an Ensembl id\n" in printed
        line = f"d: warning: {lost / 100:.1%} of its counts are on genes whose names are not known, most of them on "
        assert (f"{line}'odd'; " in printed) == ("warning" in printed) == warned


def test_a_cell_left_without_genes_is_dropped(make_h5ad: Make, tmp_path: Path) -> None:
    matrix = np.zeros((5, 3), np.float32)
    matrix[:4, 0] = 1
    matrix[4, 1] = 9
    got, report = run(make_h5ad(matrix, genes=GENES[:3]), tmp_path / "out.h5ad", min_cells=2)
    assert list(got.obs_names) == ["cell_0", "cell_1", "cell_2", "cell_3"]
    assert report["cells"]["dropped"]["no gene left"] == 1


def test_antibodies_are_not_genes(make_h5ad: Make, tmp_path: Path) -> None:
    var = pd.DataFrame(
        {"feature_types": ["Gene Expression", "Antibody Capture"]}, index=["CD4", "CD19"]
    )
    got, report = run(make_h5ad(np.ones((4, 2), np.float32), var=var), tmp_path / "out.h5ad")
    assert got.var["symbol"].tolist() == ["CD4"]
    assert report["genes"]["dropped"]["not gene expression"] == 1
    var["feature_types"] = "Antibody Capture"
    with pytest.raises(
        DataError, match=r"no genes: no var\['feature_types'\] is 'Gene Expression'"
    ):
        run(make_h5ad(np.ones((4, 2), np.float32), var=var), tmp_path / "none.h5ad")
    assert report["coverage"]["frac"] == 1.0


def test_wide_counts_are_kept_in_32_bits(make_h5ad: Make, tmp_path: Path) -> None:
    matrix = np.array([[40_000, 40_000]], np.float32)
    got, report = run(make_h5ad(matrix, genes=["BRCA2", "FANCD1"]), tmp_path / "out.h5ad")
    assert got.X.toarray().tolist() == [[80_000]]
    assert report["dtype"] == "uint32"
    # blocks of narrow and of wide counts, in which genes change places
    matrix = np.array([[1, 2, 65_535], [65_536, 0, 3], [2**32 - 256, 70_000, 5]], np.float32)
    got, _ = run(
        make_h5ad(matrix, "three.h5ad", genes=[IDS[0], IDS[5], IDS[2]]),
        tmp_path / "out.h5ad",
        row_block=1,
    )
    assert (got.to_df()[[IDS[0], IDS[5], IDS[2]]].to_numpy() == matrix).all()


def test_low_coverage_suggests_the_other_organism(
    panel: Path, make_h5ad: Make, message: Callable[..., str], tmp_path: Path
) -> None:
    assert message(panel, organism="mouse") == (
        "0 of 8 genes (0.0%) map to a mouse Ensembl id, preprocess.min_coverage_frac is 0.5; "
        "87.5% map as human: set preprocess.organism to human"
    )
    odd = make_h5ad(np.ones((4, 3), np.float32), "odd.h5ad", genes=["TP53", "x1", "x2"])
    assert message(odd) == (
        "1 of 3 genes (33.3%) map to a human Ensembl id, preprocess.min_coverage_frac is 0.5; "
        "unknown: 'x1', 'x2'; name genes by Ensembl id or symbol, or set a lower "
        "preprocess.min_coverage_frac in a configuration"
    )
    assert "0 of 3 genes" in message(odd, organism="mouse", min_coverage_frac=0)
    assert run(odd, tmp_path / "odd_out.h5ad", organism=None)[0].n_vars == 3


def test_an_empty_result_names_the_responsible_filter(
    panel: Path, make_h5ad: Make, message: Callable[..., str]
) -> None:
    mito = make_h5ad(np.ones((4, 2), np.float32), "mito.h5ad", genes=["TP53", "MT-CO1"])
    zeros = make_h5ad(np.zeros((4, 2), np.float32), "zeros.h5ad", genes=["TP53", "MT-CO1"])
    for option, value in (("min_genes", 200), ("min_counts", 500)):
        drops = f"no counts drops 1, {option} {value} drops 59; lower preprocess.{option}"
        assert message(panel, **{option: value}) == f"none of 60 cells is left after QC: {drops}"
    assert message(mito, max_mito_frac=0.2) == (
        "none of 4 cells is left after QC: max_mito_frac 0.2 drops 4; raise preprocess.max_mito_frac"
    )
    assert message(zeros) == "none of 4 cells is left after QC: none has a count"
    assert message(mito, min_cells=5) == (
        "none of 2 genes is left after QC: none is detected in 5 of the 4 cells that pass; lower preprocess.min_cells"
    )


def test_an_input_that_is_replaced_while_it_is_read_is_refused(
    panel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = stage.preprocess_cells
    copy = tmp_path / "copy.h5ad"
    copy.write_bytes(panel.read_bytes())
    out = tmp_path / "o.h5ad"
    line = f"{panel}: it changed while it was read; run preprocess again"
    for change in (lambda: copy.replace(panel), lambda: panel.write_bytes(b"other"), panel.unlink):

        def measured_and_changed(
            *given: Any, change: Callable[[], object] = change
        ) -> dict[str, Any]:
            report = measured(*given)
            change()
            return report

        monkeypatch.setattr(stage, "preprocess_cells", measured_and_changed)
        before = panel.read_bytes()
        with pytest.raises(DataError) as caught:
            run(panel, out)
        assert str(caught.value) == line
        assert not [*tmp_path.glob("o.*")]
        panel.write_bytes(before)


def test_rows_too_sparse_for_cells_are_bins_or_empty_droplets(
    make_h5ad: Make, message: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    bins = random.poisson(0.3, (3000, 8)).astype(np.float32)
    path = make_h5ad(sp.csr_matrix(bins), "bins.h5ad", genes=IDS + GENES[:2])
    line = (
        "half of the rows have at most 2 counts, as empty droplets or 2 um bins of Visium "
        "HD: use the filtered matrix, "
    )
    assert message(path, min_genes=200).endswith(f"; {line}or bins of 8 or 16 um")
    run(path, tmp_path / "kept.h5ad")
    assert f"d: warning: {line}" in capsys.readouterr().out
