"""The vocabulary of a corpus: exact counts, pooled medians, highly variable and listed genes;
refused when damaged.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill import open_cells
from cellmill.config.corpus import Shard, VocabularyConfig
from cellmill.config.options import TrainOptions, VocabularyOptions
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes import passes
from cellmill.data.genes.build import Medians, build_vocabulary
from cellmill.data.genes.vocabulary import Vocabulary, VocabularyCells
from cellmill.data.inputs.h5 import count_dtype
from cellmill.data.inputs.packed_cells import write_packed
from cellmill.data.shards.writer import write_shards
from cellmill.errors import ConfigError, DataError
from cellmill.stages import data as stage
from cellmill.stages.training_inputs import fit_options
from tests.models import config_json

Make = Callable[..., Path]


def built(*paths: Path, **options: Any) -> Vocabulary:
    return build_vocabulary(paths, VocabularyConfig.model_validate(options))


def refusal(*paths: Path, **options: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as error:
        built(*paths, **options)
    return str(error.value)


def reference(*paths: Path) -> tuple[dict[str, int], dict[str, float]]:
    """Cells and exact medians of each gene, with everything in memory."""
    values: dict[str, list[float]] = {}
    for path in paths:
        data = ad.read_h5ad(path)
        dense = data.X.toarray().astype(np.float64)
        dense *= 1e4 / np.maximum(dense.sum(axis=1, keepdims=True), 1)
        for gene, column in zip(data.var_names, dense.T):
            values.setdefault(gene, []).extend(column[column > 0])
    return {g: len(v) for g, v in values.items()}, {
        g: float(np.median(v)) for g, v in values.items() if v
    }


@pytest.mark.parametrize("value", [2.0**-10, 0.37, 1.0, 9_999.9, 1e4])
def test_a_median_is_within_half_a_percent(value: float) -> None:
    medians = Medians(1)
    medians.add(np.zeros(1, np.int64), np.array([value]))
    assert medians.medians(np.array([0]))[0] == pytest.approx(value, rel=0.005)


def test_cells_are_counted_over_all_files(simulated: Path, parts: list[Path]) -> None:
    n_cells, medians = reference(*parts)
    got = build_vocabulary(parts)
    assert got.gene_ids == sorted(g for g, n in n_cells.items() if n)
    assert got.n_cells.tolist() == [n_cells[g] for g in got.gene_ids]
    np.testing.assert_allclose(got.medians, [medians[g] for g in got.gene_ids], rtol=0.005)
    assert got.symbols == ad.read_h5ad(simulated).var["symbol"][got.gene_ids].tolist()
    assert build_vocabulary(parts[::-1]).digest == got.digest


def test_genes_that_a_model_has_take_its_medians(simulated: Path, tmp_path: Path) -> None:
    own = build_vocabulary([simulated])
    path = tmp_path / "theirs.tsv"
    theirs = replace(
        own, gene_ids=[*own.gene_ids[:-1], "ENSG00000999999"], medians=own.medians + np.float32(1)
    )
    theirs.write(path)
    got = built(simulated, medians=str(path))
    np.testing.assert_array_equal(got.medians, [*theirs.medians[:-1], own.medians[-1]])
    assert (got.gene_ids, got.n_cells.tolist()) == (own.gene_ids, own.n_cells.tolist())
    replace(own, gene_ids=[f"ENSG9{i:010d}" for i in range(own.n_genes)]).write(path)
    fault = f"vocabulary.medians: {path}: it has no gene of the corpus; name another model"
    assert refusal(simulated, medians=str(path)) == fault


def test_min_cells_limits_the_vocabulary(simulated: Path) -> None:
    n_cells, _ = reference(simulated)
    assert built(simulated, min_cells=100).gene_ids == sorted(
        g for g, n in n_cells.items() if n >= 100
    )
    top = sorted(n_cells, key=lambda g: (-n_cells[g], g))[:25]
    assert built(simulated, max_genes=25).gene_ids == sorted(top)


def test_the_vocabulary_reads_back_equal(simulated: Path, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.tsv"
    stage.vocabulary(
        options=VocabularyOptions.model_validate({"vocabulary": {}}), cells=[simulated], out=path
    )
    table = pd.read_csv(path, sep="\t")
    assert list(table.columns) == ["token_id", "gene_id", "symbol", "n_cells", "median"]
    assert table["token_id"].tolist() == list(range(len(table)))
    assert tuple(table["gene_id"][:2]) == SPECIAL
    got = Vocabulary.read(path)
    made = build_vocabulary([simulated])
    assert got.digest == hashlib.sha256(path.read_bytes()).hexdigest() == made.digest
    assert (got.medians == made.medians).all()
    assert got.n_tokens == got.n_genes + 2 == len(table)
    assert got.rows_of([got.gene_ids[3], "unknown", got.gene_ids[0]]).tolist() == [3, -1, 0]


def test_quantiles_are_within_half_a_percent_in_any_order(
    simulated: Path, parts: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "vocabulary.tsv"
    built(*parts, quantiles=True).write(out)
    got = Vocabulary.read(out)
    dense = ad.read_h5ad(simulated).X.toarray().astype(np.float64)
    values = dense / dense.sum(axis=1, keepdims=True) * 1e4
    exact = np.quantile(values[values > 0], np.arange(1001) / 1000, method="inverted_cdf")
    assert got.quantiles is not None
    np.testing.assert_allclose(np.expm1(got.quantiles.astype(np.float64)), exact, rtol=0.0052)
    assert (
        got.digest == built(*parts[::-1], quantiles=True).digest != build_vocabulary(parts).digest
    )


def test_bins_are_fitted_to_the_vocabulary_of_the_run_or_refused(
    simulated: Path, tmp_path: Path
) -> None:
    tokens = {"tokenizer": "binned", "binning": "quantile_corpus", "bins": 4}
    others: dict[str, Any] = {"stream": {}, "model": {}, "parallel": {}, "train": {"steps": 1}}
    options = TrainOptions.model_validate(others | {"tokens": tokens})
    no_shards = cast(Any, None)
    path = tmp_path / "vocabulary.tsv"
    built(simulated, quantiles=True).write(path)
    quantiles = Vocabulary.read(path).quantiles
    assert quantiles is not None
    assert (
        fit_options(options, path, no_shards).tokens.model_dump()["edges"]
        == quantiles[[250, 500, 750]].tolist()
    )
    once = fit_options(options, path, no_shards)
    assert fit_options(once, path, no_shards) == once
    stored = tokens | {"edges": [0.5, 1.0, 4.0]}
    (tmp_path / "config.json").write_text(config_json(tokens=stored))
    tuned = fit_options(options, path, no_shards, init_from=tmp_path)
    assert tuned.tokens.model_dump()["edges"] == stored["edges"], "bins that the model knows"
    (tmp_path / "config.json").write_text(config_json(tokens={"tokenizer": "binned"}))
    assert fit_options(options, path, no_shards, init_from=tmp_path) == once
    build_vocabulary([simulated]).write(path)
    with pytest.raises(
        DataError, match=r"has no quantiles, which tokens\.tokenizer binned is fitted to; set vocab"
    ):
        fit_options(options, path, no_shards)


def test_a_damaged_vocabulary_is_named_with_its_line(simulated: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.tsv"
    built(simulated, max_genes=4).write(path)
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    quantiles = "last line: expected #quantiles and at least two ascending numbers"
    for damaged, message in (
        (
            "",
            "not a complete vocabulary: expected columns token_id, gene_id, symbol, n_cells, median",
        ),
        (text[:-1], "not a complete vocabulary: its last line is cut; copy it again"),
        ("".join(lines[:3]), "not a vocabulary: no genes, or a duplicate"),
        ("".join(lines[:1] + lines[2:]), "line 2: expected token 0: <pad>"),
        (
            "".join(lines[:4] + lines[5:]),
            "line 5: expected token 3: gene id, symbol, n_cells, median",
        ),
        (
            text.replace("\n4\t" + lines[5].split("\t")[1], "\n4\t" + lines[4].split("\t")[1]),
            "or a duplicate",
        ),
        (text.replace(lines[3].split("\t")[4], "nan\n"), "a median is not a positive number"),
        *(
            (f"{text}#quantiles{numbers}\n", quantiles)
            for numbers in ("", "\t1\t0.5", "\t0\tx", "\t0\tnan")
        ),
    ):
        path.write_text(damaged)
        with pytest.raises(DataError, match=message):
            Vocabulary.read(path)
    with pytest.raises(DataError, match=r"none\.tsv: no such file"):
        Vocabulary.read(tmp_path / "none.tsv")


def test_datasets_without_a_gene_in_common_are_refused(make_h5ad: Make) -> None:
    ones = sp.csr_matrix(np.ones((3, 2), np.float32))
    human = make_h5ad(ones, "human.h5ad", genes=["ENSG1", "ENSG2"])
    mouse = make_h5ad(ones, "mouse.h5ad", genes=["ENSMUSG1", "ENSMUSG2"])
    more = make_h5ad(ones, "more.h5ad", genes=["ENSG2", "ENSG3"])
    assert refusal(human, more, mouse) == (
        f"{mouse}: no genes in common with the other datasets of the corpus (its first is ENSMUSG1); "
        "if it is of another organism, set preprocess.reference_organism or organism_column, or put it in a corpus "
        "of its own"
    )
    assert built(human, more).n_genes == 3


@pytest.mark.parametrize(
    ("genes", "options", "message"),
    [
        (
            ["A", "B", "A"],
            {},
            "var names are not unique: 'A' occurs 2 times; preprocess the file, which sums counts of",
        ),
        (["A\tB", "C"], {}, "'A\\tB' cannot name a gene: "),
        (["<mask>", "C"], {}, "'<mask>' cannot name a gene: "),
        (
            ["A", "B"],
            {"min_cells": 4},
            "no gene is left for the vocabulary: none of 2 is detected in 4 cells, at most in 3; lower "
            "vocabulary.min_cells",
        ),
        (
            ["TP53"],
            {"protein_coding": True},
            "vocabulary.protein_coding requires Ensembl ids, got gene 'TP53'; set ",
        ),
    ],
)
def test_cells_that_have_no_vocabulary_are_refused(
    genes: list[str], options: dict[str, Any], message: str, make_h5ad: Make
) -> None:
    path = make_h5ad(np.ones((3, len(genes)), np.float32), genes=genes)
    assert refusal(path, **options).removeprefix(f"{path}: ").startswith(message)


@pytest.fixture(scope="module")
def parts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The simulated cells as two files of other gene orders, and with genes that the other lacks."""
    folder = tmp_path_factory.mktemp("parts")
    data = ad.read_h5ad(simulated)
    halves = data[:250], data[250:, ::-1]
    paths = [folder / "a.h5ad", folder / "b.h5ad"]
    for path, half in zip(paths, halves):
        detected = np.asarray((half.X > 0).sum(axis=0)).ravel() > 0
        half[:, detected].copy().write_h5ad(path)
    return paths


def scanpy_genes(path: Path, flavor: str, n: int) -> set[str]:
    """Genes that scanpy selects on a file that fits."""
    scanpy = pytest.importorskip("scanpy")
    if flavor == "seurat_v3":
        pytest.importorskip("skmisc")
    data = ad.read_h5ad(path)
    data.X = sp.csr_matrix(data.X, dtype=np.float64)
    data = data[:, np.asarray(data.X.sum(axis=0)).ravel() > 0].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if flavor == "seurat":
            scanpy.pp.normalize_total(data, target_sum=1e4)
            scanpy.pp.log1p(data)
        scanpy.pp.highly_variable_genes(data, flavor=flavor, n_top_genes=n)
    return set(data.var_names[data.var["highly_variable"]])


@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3"])
# of flavor seurat, genes 60 and 61 have one score: rounding and scanpy's version choose between
# them
@pytest.mark.parametrize("n", [61, *(pytest.param(n, marks=pytest.mark.full) for n in (15, 200))])
def test_variable_genes_equal_scanpy_over_files_and_blocks(
    parts: list[Path], simulated: Path, flavor: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scanpy_genes(simulated, flavor, n)
    monkeypatch.setattr(passes, "BLOCK", 37)
    assert set(built(*parts, select=flavor, max_genes=n).gene_ids) == wanted
    assert wanted != set(built(*parts, max_genes=n).gene_ids)


@pytest.mark.parametrize("select", ["detected", "seurat", "seurat_v3"])
def test_variable_genes_are_a_prefix_of_the_order_by_variability(
    parts: list[Path], select: str, tmp_path: Path
) -> None:
    if select == "seurat_v3":
        pytest.importorskip("skmisc")
    path = tmp_path / "vocabulary.tsv"
    built(*parts, select=select, max_genes=200, variability=True, quantiles=True).write(path)
    got = Vocabulary.read(path)
    assert got.variability is not None
    assert got.quantiles is not None
    order = [got.gene_ids[row] for row in np.argsort(got.variability)]
    kept = {
        *built(*parts, select="seurat" if select == "detected" else select, max_genes=60).gene_ids
    }
    kept &= {*got.gene_ids} if select == "detected" else kept
    assert {*order[: len(kept)]} == kept
    assert len(kept) > 5
    text = path.read_text()
    path.write_text(text.replace("#variability\t", "#variability\t0\t"))
    with pytest.raises(
        DataError, match=r"line 204: expected #variability and a position for each gene"
    ):
        Vocabulary.read(path)


def test_variable_genes_need_a_number() -> None:
    with pytest.raises(ValueError, match="select seurat requires max_genes, the number of genes"):
        VocabularyConfig(select="seurat")


def test_seurat_v3_needs_its_package(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skmisc.loess", None)
    assert refusal(simulated, select="seurat_v3", max_genes=9) == (
        "vocabulary.select seurat_v3 requires skmisc.loess, which is missing: pip install 'cellmill[hvg]'"
    )


def test_a_list_of_names_selects_genes(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["ENSG00000141510", "ENSG00000139618", "ENSG00000000003", "ENSG00000000419"]
    cells = make_h5ad(sp.csr_matrix(np.ones((3, 4))), genes=ids)
    listed = tmp_path / "genes.txt"
    listed.write_text(
        "\ufeffTP53\r\nFANCD1\r\nENSG00000000003.15\r\n\r\nMYC\r\nTP53\r\n", encoding="utf-8"
    )
    got = built(cells, genes=str(listed))
    assert got.gene_ids == sorted(ids[:3])  # FANCD1 is an alias of BRCA2
    assert capsys.readouterr().out == f"{listed}: 1 of 4 genes are not in the corpus, such as MYC\n"
    for text, message in (
        ("rubbish\n", "none of its 1 genes is in the corpus"),
        ("\n", "empty; list one gene a line"),
    ):
        listed.write_text(text)
        assert message in refusal(cells, genes=str(listed))


def test_protein_coding_genes_equal_gencode(make_h5ad: Make) -> None:
    # TP53, XIST of both
    ids = ["ENSG00000141510", "ENSG00000229807", "ENSMUSG00000059552", "ENSMUSG00000086503"]
    cells = make_h5ad(sp.csr_matrix(np.ones((3, 4))), genes=ids)
    assert built(cells, protein_coding=True).gene_ids == [ids[0], ids[2]]


DONORS = ["d0", "d1", "d2", "d3", "d4"]


@pytest.fixture
def donors(tmp_path: Path) -> Path:
    """Cells of five donors; gene A varies in all of them, gene d2 in donor d2 alone, and so on."""
    random = np.random.default_rng(3)
    donor = np.repeat(DONORS, 40)
    genes = [f"ENSG0000000{number:04d}" for number in range(2000)]
    counts = random.poisson(random.uniform(1, 9, 2000), (200, 2000))
    for number, name in enumerate(DONORS):
        own = donor == name
        counts[own, number] = random.choice([0, 0, 0, 20], own.sum())
    obs = pd.DataFrame({"donor": donor}, index=[f"cell_{row}" for row in range(200)])
    matrix = sp.csr_matrix(counts.astype(np.uint16))
    path = tmp_path / "donors.h5ad"
    write_packed(path, obs, pd.DataFrame(index=genes), [matrix], "genes", count_dtype(60))
    return path


def options_of(**shard: Any) -> Shard:
    return Shard.model_validate({"cells_per_shard": 64, "val_frac": 0.2, "test_frac": 0.2} | shard)


def cells_of(folder: Path, split: str) -> list[str]:
    """Names of a split's cells, by the files that anndata opens."""
    return [
        name
        for path in sorted(folder.glob(f"{split}-*.h5ad"))
        for name in ad.read_h5ad(path).obs_names
    ]


@pytest.mark.parametrize("select", ["detected", "seurat"])
@pytest.mark.parametrize(
    "split", [{"split_by": "donor"}, {}, {"split_by": "donor", "seed": 4}, {"seed": 5}]
)
def test_only_training_cells_choose_genes(
    donors: Path, tmp_path: Path, select: str, split: dict[str, Any]
) -> None:
    shard = options_of(**split)
    chosen = VocabularyConfig.model_validate({"select": select, "max_genes": 8})
    if not chosen.reads_split(shard):
        return
    got = build_vocabulary([donors], chosen, shard)
    write_shards([donors], got, shard, tmp_path / "shards" / "manifest.json")
    names = [name.partition(":")[2] for name in cells_of(tmp_path / "shards", "train")]
    data = open_cells(donors)
    assert got.training == VocabularyCells(len(names), 200, split.get("split_by", ""))
    assert 0 < len(names) < 200
    training = tmp_path / "training.h5ad"
    data[sorted(names, key=list(data.obs_names).index)].copy().write_h5ad(training)
    wanted = built(training, select=select, max_genes=8)
    assert (got.gene_ids, got.n_cells.tolist()) == (wanted.gene_ids, wanted.n_cells.tolist())
    assert (got.medians == wanted.medians).all()


def test_a_gene_that_varies_only_in_held_out_cells_is_dropped(donors: Path, tmp_path: Path) -> None:
    shard = options_of(split_by="donor")
    options = VocabularyConfig(select="seurat", max_genes=30)
    got = build_vocabulary([donors], options, shard)
    write_shards([donors], got, shard, tmp_path / "shards" / "manifest.json")
    names = [name.partition(":")[2] for name in cells_of(tmp_path / "shards", "train")]
    trained = {*ad.read_h5ad(donors).obs["donor"][names]}
    assert len(trained) == 3
    own = {name: f"ENSG0000000{number:04d}" for number, name in enumerate(DONORS)}
    assert {*own.values()} & {*got.gene_ids} == {own[name] for name in trained}
    assert {*own.values()} <= {*build_vocabulary([donors], options).gene_ids}


def test_the_file_names_the_training_cells(
    donors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = VocabularyOptions.model_validate({"vocabulary": {"quantiles": True}})
    out = tmp_path / "v.tsv"
    for split, line in (
        (
            '{"split_by": "donor", "val_frac": 0.2}',
            "120 training cells of 200 cells (shard.split_by donor)",
        ),
        (None, "all cells"),
    ):
        stage.vocabulary(options=options, cells=[donors], out=out, split=split)
        assert f"genes and medians are those of {line}\n" in capsys.readouterr().out
        got = Vocabulary.read(out)
        assert str(got.training or "all cells") == line
        assert got.quantiles is not None
    stage.vocabulary(options=options, cells=[donors], out=out, split='{"split_by": "donor"}')
    text = out.read_text()
    for good, bad in (("#training_cells\t", "#training_cells\tx"), ("\t200\tdonor", "\t3\tdonor")):
        out.write_text(text.replace(good, bad))
        with pytest.raises(
            DataError, match="expected #training_cells, two numbers of cells, and the column"
        ):
            Vocabulary.read(out)
