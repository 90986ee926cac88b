"""Labels of datasets with other columns and vocabularies become one, under one name, before anything reads them."""

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.config import load_config
from cellmill.config.datasets import ObsColumns
from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.check import check_datasets, check_inputs
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import UserError
from cellmill.files import read_json
from tests.unit.small_corpus import prepare_by_commands
from tests.unit.test_named_files import write_config

Make = Callable[..., Path]
N, GENES = 24, ["TP53", "MYC", "BRCA2", "DPM1"]


def _dataset(make: Make, name: str, obs: dict[str, object]) -> Path:
    matrix = np.random.default_rng(len(name)).poisson(3, (N, len(GENES))).astype(np.float32) + 1
    frame = pd.DataFrame(obs, index=[f"{name}_{i}" for i in range(N)])
    return make(sp.csr_matrix(matrix), f"{name}.h5ad", genes=GENES, obs=frame)


@pytest.fixture
def raw(make_h5ad: Make) -> Path:
    kinds = pd.Categorical(["T", "B", None, "HSC", "junk", "T"] * 4)
    return _dataset(
        make_h5ad, "one", {"kind": kinds, "cluster": [1.0, 2.0, np.nan] * 8, "cell_type": ["x"] * N, "batch": ["T"] * N}
    )


def _map(folder: Path, text: str, name: str = "map.tsv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_mapped_labels_have_the_name_of_the_table_and_others_stay(raw: Path, tmp_path: Path) -> None:
    path = _map(tmp_path, "from\tto\nT\tT cell\njunk\t\n")
    columns = ObsColumns(label="kind", label_name="cell_type", label_map=str(path))
    with open_counts(raw) as reader:
        chosen = choose_obs(reader, None, columns)
        few = choose_obs(reader, ["cluster"], columns).obs
    obs = ad.read_h5ad(raw).obs
    expected = obs["kind"].astype(object).map({"T": "T cell", "B": "B", "HSC": "HSC"})
    assert chosen.obs["cell_type"].astype(object).where(expected.notna(), None).tolist() == [
        None if pd.isna(value) else value for value in expected
    ]
    assert chosen.obs["kind"].equals(obs["kind"])
    assert set(chosen.obs["cell_type_original"]) == {"x"}  # a column of that name, as for roles
    assert list(few) == ["cluster", "cell_type"]
    some = np.arange(N) < 12
    assert chosen.label_report(some) == {
        "labels": {"cell_type": {"renamed": {"T": 4}, "kept": {"B": 2, "HSC": 2}, "made_missing": {"junk": 2}}}
    }


def test_one_column_may_be_two_labels_each_with_a_map_of_its_own(raw: Path, tmp_path: Path) -> None:
    with open_counts(raw) as reader:
        kinds = sorted(set(reader.obs["kind"].dropna().astype(str)))
        coarse = _map(tmp_path, "from\tto\n" + "".join(f"{kind}\tall\n" for kind in kinds), "coarse.tsv")
        fine = _map(tmp_path, f"from\tto\n{kinds[0]}\tfirst\n", "fine.tsv")
        given = {"label": "kind|kind|kind", "label_name": "coarse|fine|kind", "label_map": f"{coarse}|{fine}|"}
        obs = choose_obs(reader, None, ObsColumns.model_validate(given)).obs
    assert set(obs["coarse"].dropna()) == {"all"}
    assert set(obs["fine"].dropna()) == {"first", *kinds[1:]}
    assert set(obs["kind"].dropna().astype(str)) == set(kinds)


def test_a_label_keeps_its_name_and_whole_numbers_are_text_as_in_shards(raw: Path, tmp_path: Path) -> None:
    path = _map(tmp_path, "from\tto\n1\tone\n2\ttwo\n")
    with open_counts(raw) as reader:
        obs = choose_obs(reader, None, ObsColumns(label="kind|cluster", label_map=f"|{path}")).obs
        renamed = choose_obs(reader, [], ObsColumns(label="kind", label_name="cell_type")).obs
    assert obs["cluster"].astype(object).fillna("none").tolist() == ["one", "two", "none"] * 8
    assert obs["cluster_original"].tolist()[:2] == [1, 2]
    assert list(renamed) == ["cell_type"]
    assert renamed["cell_type"].tolist() == ad.read_h5ad(raw).obs["kind"].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "T\tT cell\nHSK\tstem\n",
            ", line 3: no cell of {raw} has label 'HSK' in obs column 'kind'; did you mean 'HSC",
        ),
        ("T\tT cell\n\nT\tT lymphocyte\n", ", line 4: 'T' is also in line 2; remove one"),
        ("\tT cell\n", ", line 2: expected a label in column from, got none; fill it in"),
        ("", ": no labels; add a line with the columns from and to for each label to rename"),
        ("from\nT\n", ": expected the columns from, to, got no 'to'; add it"),
        ("from\tinto\nT\tx\n", ": unknown column 'into'; did you mean"),
    ],
)
def test_a_wrong_map_is_an_error_of_its_line_before_and_in_the_stage(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _map(tmp_path, text if text.startswith("from") else f"from\tto\n{text}")
    message = "map.tsv" + message.format(raw=raw)
    with open_counts(raw) as reader, pytest.raises(UserError) as caught:
        choose_obs(reader, None, ObsColumns(label="kind", label_map=path.name))
    assert str(caught.value).startswith(message)
    with pytest.raises(UserError) as caught:
        check_datasets(load_config(write_config(tmp_path, OPTIONS, one=_row(raw, "kind", "map.tsv"))))
    assert str(caught.value).startswith(message)


OPTIONS = (
    "preprocess: {min_genes: 1, max_mito_frac: 1, keep_obs: []}\nshard: {cells_per_shard: 64}\n"
    "objective: {name: classification, label_column: cell_type}\n"
)


def _row(path: Path, label: str, label_map: str | Path) -> dict[str, object]:
    return {"path": path, "label": label, "label_name": "cell_type", "label_map": label_map}


def test_columns_that_do_not_fit_the_labels_are_refused(raw: Path, tmp_path: Path) -> None:
    for columns, message in (
        ({"label_map": "m.tsv"}, "label_map: expected one for each label, 0, got 1"),
        ({"label": "a|b", "label_name": "c"}, "label_name: expected one for each label, 2, got 1"),
        ({"label": "a|b", "label_name": "c|c"}, "label_name: two labels are called 'c'"),
        ({"label": "a", "label_name": "batch"}, "label_name: expected a name of its own for label 'a', got 'batch'"),
    ):
        with pytest.raises(ValueError, match=message):
            ObsColumns.model_validate(columns)
    path = _map(tmp_path, "from\tto\nT\tT cell\n")
    with open_counts(raw) as reader:
        with pytest.raises(UserError, match="label 'batch' is also a role, which the table gives to 'kind'"):
            choose_obs(reader, None, ObsColumns(label="batch", batch="kind", label_map=str(path)))
        renamed = choose_obs(reader, [], ObsColumns(label="batch", label_name="lane", batch="kind")).obs
    assert (list(renamed), set(renamed["lane"])) == (["batch", "lane"], {"T"})
    pipeline = load_config(write_config(tmp_path, OPTIONS, one=_row(raw, "kind", "none.tsv")))
    check_datasets(pipeline)
    with pytest.raises(UserError, match=r"t\.tsv: dataset one: label_map: none\.tsv: no such file$"):
        check_inputs(pipeline)


def test_two_datasets_of_other_columns_and_vocabularies_are_one_label_in_shards(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _dataset(make_h5ad, "first", {"kind": ["T", "B"] * (N // 2)})
    second = _dataset(make_h5ad, "second", {"annotation": ["T lymphocyte", "B cell", "HSC"] * (N // 3)})
    one = _map(tmp_path, "from\tto\nT\tT cell\nB\tB cell\n", "1.tsv")
    two = _map(tmp_path, "from\tto\nT lymphocyte\tT cell\n", "2.tsv")
    rows = {"first": _row(first, "kind", one), "second": _row(second, "annotation", two)}
    config = write_config(tmp_path, OPTIONS, **rows)
    pipeline = load_config(config)
    check_datasets(pipeline)
    pipeline.check_datasets("c.yaml")
    cells, manifest = prepare_by_commands(config, tmp_path)
    assert read_json(cells[1].with_suffix(".json"))["labels"]["cell_type"] == {
        "renamed": {"T lymphocyte": 8},
        "kept": {"B cell": 8, "HSC": 8},
        "made_missing": {},
    }
    said = "second: label cell_type: renamed 8 cells of 1 labels; left as they are 16 cells of 2 labels ("
    assert f"{said}'B cell' 8, 'HSC' 8)" in capsys.readouterr().out
    assert Manifest.read(manifest).levels({"cell_type": "label"}) == {"cell_type": ("B cell", "HSC", "T cell")}
    joined = pd.concat([ad.read_h5ad(path).obs for path in sorted(manifest.parent.glob("*.h5ad"))])
    assert joined["cell_type"].value_counts().to_dict() == {"B cell": 20, "T cell": 20, "HSC": 8}
