"""Labels of datasets with other columns and vocabularies become one, under one name, before
anything reads them.
"""

import re
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.config import load_config
from cellmill.config.datasets import ObsColumns
from cellmill.data.prepare.check import check_datasets, check_inputs
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import UserError
from cellmill.files import read_json
from tests.unit.small_corpus import prepare_by_commands
from tests.unit.test_named_files import write_config
from tests.unit.test_obs_columns import chosen

Make = Callable[..., Path]
N = 24
GENES = ["TP53", "MYC", "BRCA2", "DPM1"]


def _dataset(make: Make, name: str, obs: dict[str, object]) -> Path:
    matrix = np.random.default_rng(len(name)).poisson(3, (N, len(GENES))).astype(np.float32) + 1
    frame = pd.DataFrame(obs, index=[f"{name}_{i}" for i in range(N)])
    return make(sp.csr_matrix(matrix), f"{name}.h5ad", genes=GENES, obs=frame)


@pytest.fixture
def raw(make_h5ad: Make) -> Path:
    kinds = pd.Categorical(["T", "B", None, "HSC", "junk", "T"] * 4)
    return _dataset(
        make_h5ad,
        "one",
        {
            "kind": kinds,
            "cluster": [1.0, 2.0, np.nan] * 8,
            "cell_type": ["x"] * N,
            "batch": ["T"] * N,
        },
    )


def _map(folder: Path, text: str, name: str = "map.tsv") -> Path:
    """A label map of `text`, under the usual header if that has none."""
    (folder / name).write_text(text if text.startswith("from") else f"from\tto\n{text}")
    return folder / name


def test_mapped_labels_have_the_name_of_the_table(raw: Path, tmp_path: Path) -> None:
    path = _map(tmp_path, "T\tT cell\njunk\t\n")
    columns = {"label": "kind", "label_name": "cell_type", "label_map": str(path)}
    choice = chosen(raw, None, **columns)
    obs = ad.read_h5ad(raw).obs
    expected = obs["kind"].astype(object).map({"T": "T cell", "B": "B", "HSC": "HSC"})
    assert (
        choice.obs["cell_type"].astype(object).fillna("none").tolist()
        == expected.fillna("none").tolist()
    )
    assert choice.obs["kind"].equals(obs["kind"])
    assert set(choice.obs["cell_type_original"]) == {"x"}  # a column of that name, as for roles
    assert list(chosen(raw, ["cluster"], **columns).obs) == ["cluster", "cell_type"]
    counted = {"renamed": {"T": 4}, "kept": {"B": 2, "HSC": 2}, "made_missing": {"junk": 2}}
    assert choice.report(np.arange(N) < 12, np.zeros(N)) == {"labels": {"cell_type": counted}}


def test_one_column_may_be_two_labels_with_separate_maps(raw: Path, tmp_path: Path) -> None:
    coarse = _map(tmp_path, "B\tall\nHSC\tall\nT\tall\njunk\tall\n", "coarse.tsv")
    fine = _map(tmp_path, "B\tfirst\n", "fine.tsv")
    obs = chosen(
        raw,
        None,
        label="kind|kind|kind",
        label_name="coarse|fine|kind",
        label_map=f"{coarse}|{fine}|",
    ).obs
    assert set(obs["coarse"].dropna()) == {"all"}
    assert set(obs["fine"].dropna()) == {"first", "HSC", "T", "junk"}
    assert set(obs["kind"].dropna()) == {"B", "HSC", "T", "junk"}


def test_whole_numbers_are_the_same_text_as_in_shards(raw: Path, tmp_path: Path) -> None:
    path = _map(tmp_path, "1\tone\n2\ttwo\n")
    obs = chosen(raw, None, label="kind|cluster", label_map=f"|{path}").obs
    assert obs["cluster"].astype(object).fillna("none").tolist() == ["one", "two", "none"] * 8
    assert obs["cluster_original"].tolist()[:2] == [1, 2]
    renamed = chosen(raw, [], label="kind", label_name="cell_type").obs
    assert list(renamed) == ["cell_type"]
    assert renamed["cell_type"].tolist() == obs["kind"].tolist()


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
def test_a_wrong_map_is_named_with_its_line(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _map(Path(), text)
    message = re.escape("map.tsv" + message.format(raw=raw))
    with pytest.raises(UserError, match=f"^{message}"):
        chosen(raw, None, label="kind", label_map="map.tsv")
    with pytest.raises(UserError, match=f"^{message}"):
        check_datasets(load_config(write_config(Path(), OPTIONS, one=_row(raw, "kind", "map.tsv"))))


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
        (
            {"label": "a", "label_name": "batch"},
            "label_name: expected a name of its own for label 'a', got 'batch'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ObsColumns.model_validate(columns)
    path = _map(tmp_path, "T\tT cell\n")
    with pytest.raises(
        UserError, match="label 'batch' is also a role, which the table gives to 'kind'"
    ):
        chosen(raw, None, label="batch", batch="kind", label_map=str(path))
    renamed = chosen(raw, [], label="batch", label_name="lane", batch="kind").obs
    assert (list(renamed), set(renamed["lane"])) == (["batch", "lane"], {"T"})
    pipeline = load_config(write_config(tmp_path, OPTIONS, one=_row(raw, "kind", "none.tsv")))
    check_datasets(pipeline)
    with pytest.raises(
        UserError, match=r"t\.tsv: dataset one: label_map: none\.tsv: no such file$"
    ):
        check_inputs(pipeline)


def test_two_vocabularies_become_one_label_in_shards(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _dataset(make_h5ad, "first", {"kind": ["T", "B"] * (N // 2)})
    second = _dataset(
        make_h5ad, "second", {"annotation": ["T lymphocyte", "B cell", "HSC"] * (N // 3)}
    )
    one = _map(tmp_path, "T\tT cell\nB\tB cell\n", "1.tsv")
    two = _map(tmp_path, "T lymphocyte\tT cell\n", "2.tsv")
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
    assert Manifest.read(manifest).levels({"cell_type": "label"}) == {
        "cell_type": ("B cell", "HSC", "T cell")
    }
    joined = pd.concat([ad.read_h5ad(path).obs for path in sorted(manifest.parent.glob("*.h5ad"))])
    assert joined["cell_type"].value_counts().to_dict() == {"B cell": 20, "T cell": 20, "HSC": 8}
