"""Columns of the table of datasets: filters as pandas evaluates them, roles, and refusals before
counts are read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.io import mmwrite

from cellmill.config import load_config
from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import Dataset, ObsColumns, filter_columns
from cellmill.data.inputs.formats import declared_names, open_counts
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.check import check_datasets
from cellmill.data.prepare.obs import ObsChoice, choose_obs
from cellmill.errors import DataError, UserError
from tests.unit.small_corpus import prepare_by_commands
from tests.unit.test_inputs import FORMATS
from tests.unit.test_named_files import write_config

Make = Callable[..., Path]
N = 40


@pytest.fixture
def obs() -> pd.DataFrame:
    random = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "assay": pd.Categorical(
                random.choice(["10x 3' v3", "10x 3' v2", "Smart-seq2 & co"], N)
            ),
            "is_primary_data": random.random(N) < 0.7,
            "in text": pd.Categorical(random.random(N) < 0.5),
            "age": random.integers(10, 90, N),
            "guide": pd.Categorical(random.choice(["NT", "TP53", "MYC"], N)),
            "batch": random.choice(["x", "y"], N),
            "lane": random.integers(1, 4, N),
            "nM": random.choice(["0", "10", "2.5"], N),
        },
        index=[f"cell_{i}" for i in range(N)],
    )
    frame.loc["cell_0", "assay"] = None
    return frame


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Look up the names of the table's one dataset, `columns` by name, before anything runs."""
    monkeypatch.chdir(tmp_path)

    def run(path: Path | str, options: str = "", **columns: str) -> None:
        check_datasets(load_config(write_config(Path(), options, one={"path": path, **columns})))

    return run


@pytest.fixture
def raw(make_h5ad: Make, obs: pd.DataFrame) -> Path:
    matrix = np.random.default_rng(0).poisson(3, (N, 4)).astype(np.float32) + 1
    return make_h5ad(sp.csr_matrix(matrix), genes=["TP53", "MYC", "BRCA2", "DPM1"], obs=obs)


def chosen(path: Path, keep_obs: list[str] | None, **columns: str) -> ObsChoice:
    with open_counts(path) as reader:
        return choose_obs(reader, keep_obs, ObsColumns.model_validate(columns))


FILTERS = [
    """is_primary_data and assay == "10x 3' v3" """,
    """assay in ["10x 3' v2", 'Smart-seq2 & co'] | age > 60""",
    "20 <= age < 50 and not is_primary_data",
    "`in text` & ~(lane == 2)",
    "assay == assay and lane not in (1, 3)",
    "age != lane and batch != 'x'",
]


@pytest.mark.parametrize("condition", FILTERS)
def test_a_filter_keeps_the_cells_that_pandas_query_keeps(
    raw: Path, obs: pd.DataFrame, condition: str
) -> None:
    keep = chosen(raw, None, filter=condition).keep
    obs["in text"] = obs["in text"].astype(bool)
    wanted = obs.query(condition.replace("(1, 3)", "[1, 3]").strip(), engine="python").index
    assert 0 < len(wanted) < N
    assert list(obs.index[keep]) == list(wanted)


LEIDEN = [["0", "3", "10"][number % 3] for number in range(10)]
COMPARED: dict[str, list[bool] | str] = {
    "leiden != 3": [text != "3" for text in LEIDEN],
    "leiden not in [3, 10]": [text == "0" for text in LEIDEN],
    "~leiden.isin([3, 10])": [text == "0" for text in LEIDEN],
    "leiden.ne(3) and n.eq(n)": [text != "3" for text in LEIDEN],
    "ct.isin([2])": "2 (number) with ct (text)",
    "leiden < 10 & doublet != True": [text != "10" and i % 4 > 0 for i, text in enumerate(LEIDEN)],
    "1 < leiden <= n + 3 and ct in ['B', '3']": [
        1 < int(text) <= number + 3 and number % 2 == 0 for number, text in enumerate(LEIDEN)
    ],
    "not leiden == '3'": [text != "3" for text in LEIDEN],
    "ct.str.startswith('B') == False": [number % 2 == 1 for number in range(10)],
    "ct != 3": "3 (number) with ct (text)",
    "ct != n": "ct (text) with n (number)",
    "leiden != '10' and leiden != 3": "'10' (text) with leiden (number)",
    "n not in ['3']": "'3' (text) with n (number)",
    "ok != 'True'": "'True' (text) with ok (number)",
}


@pytest.mark.parametrize("condition", COMPARED)
def test_a_filter_compares_texts_of_numbers_with_numbers(make_h5ad: Make, condition: str) -> None:
    obs = pd.DataFrame(
        {
            "leiden": pd.Categorical(LEIDEN),
            "ct": pd.Categorical(["B", "2"] * 5),
            "doublet": pd.Categorical([["True", "False"][number % 4 > 0] for number in range(10)]),
            "n": np.arange(10),
            "ok": [True, False] * 5,
        },
        index=[f"cell{number}" for number in range(10)],
    )
    path = make_h5ad(sp.csr_matrix(np.ones((10, 2), np.float32)), genes=["TP53", "MYC"], obs=obs)
    wanted = COMPARED[condition]
    if isinstance(wanted, str):
        with pytest.raises(DataError) as caught:
            chosen(path, None, filter=condition)
        assert str(caught.value) == (
            f"{path}: filter {condition!r} compares {wanted}; write texts in quotes, "
            "and numbers, True and False without"
        )
    else:
        assert chosen(path, None, filter=condition).keep.tolist() == wanted


def test_a_filter_reads_numbers_of_a_text_table(tmp_path: Path) -> None:
    mmwrite(tmp_path / "matrix.mtx", sp.coo_matrix(np.ones((2, 3), np.int64)))
    (tmp_path / "genes.tsv").write_text("TP53\nMYC\n")
    (tmp_path / "cells.csv").write_text("cell,n_umi\nc1,7\nc2,NA\nc3,20\n")
    for condition, wanted in {
        "n_umi > 8": [False, False, True],
        "n_umi != 20": [True, True, False],
        "n_umi != 'NA'": [True, False, True],
    }.items():
        assert chosen(tmp_path, None, filter=condition).keep.tolist() == wanted


def test_a_filter_reads_booleans_of_which_some_are_missing(make_h5ad: Make, tmp_path: Path) -> None:
    cells = [f"cell{number}" for number in range(6)]
    flags = pd.Categorical([True, False, None] * 2, categories=[False, True])
    obs = pd.DataFrame({"flag": flags}, index=cells)
    matrix = np.ones((6, 2), np.float32)
    stored = make_h5ad(sp.csr_matrix(matrix), genes=["TP53", "MYC"], obs=obs)
    mmwrite(tmp_path / "matrix.mtx", sp.coo_matrix(matrix.T.astype(np.int64)))
    (tmp_path / "genes.tsv").write_text("TP53\nMYC\n")
    lines = [f"{cell},{flag}\n" for cell, flag in zip(cells, ["True", "False", "NA"] * 2)]
    (tmp_path / "cells.csv").write_text("cell,flag\n" + "".join(lines))
    for path in (stored, tmp_path):
        for condition, kept in {
            "flag == True": [True, False, False],
            "flag != True": [False, True, True],
            "flag != False": [True, False, True],
        }.items():
            assert chosen(path, None, filter=condition).keep.tolist() == kept * 2


def test_the_columns_of_a_filter_are_known_without_pandas() -> None:
    condition = """`in text` & (assay == "a `b` c" or lane in [1, 2]) and assay != lane"""
    assert filter_columns(condition) == ["in text", "assay", "lane"]
    fault = r"^filter: cannot be read \(.+\); expected a condition such as is_primary_data and"
    with pytest.raises(ValueError, match=fault):
        filter_columns("age ==")


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "one of labels": (
        {"label": "age | asay"},
        "no obs column 'asay' (the dataset's label); did you mean 'assay'?",
    ),
    "a role": (
        {"donor": "man"},
        "no obs column 'man' (the dataset's donor); there are: assay, is_primary_data",
    ),
    "a column": (
        {"filter": "assy == 'a'"},
        "no obs column 'assy' (the dataset's filter); did you mean 'assay'?",
    ),
    "a control": (
        {"perturbation": "guide", "control": "nt"},
        "no 'nt' (the dataset's control) in obs column 'guide'; did you mean 'NT'?",
    ),
    "a value": (
        {"filter": "assay == '10x 3 v3'"},
        "filter \"assay == '10x 3 v3'\" keeps none of 40 cells: "
        "assay is \"10x 3' v2\", \"10x 3' v3\", 'Smart-seq2 & co'",
    ),
    "no condition": (
        {"filter": "age"},
        "filter 'age' is not a condition: age is int64; compare it with a value",
    ),
    "types": (
        {"filter": "guide > 3"},
        "filter 'guide > 3' compares 3 (number) with guide (text); ",
    ),
    "a dose": ({"dose": "assay"}, "obs column 'assay' (the dataset's dose) expected numbers, got "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_column_is_named_before_anything_runs(
    raw: Path, case: str, check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, fault = WRONG[case]
    monkeypatch.setattr(CountsReader, "rows", lambda *_: pytest.fail("counts were read"))
    with pytest.raises(DataError) as caught:
        chosen(raw, None, **columns)
    assert str(caught.value).startswith(f"{raw}: {fault}")
    assert "\n" not in str(caught.value)
    if fault.startswith("no "):  # a name, which is looked for before anything runs
        fault = fault.replace("the dataset's ", "")
        with pytest.raises(UserError) as early:
            check(raw, **columns)
        assert str(early.value).startswith(f"t.tsv: dataset one: {raw} has {fault}")


def test_controls_are_checked_as_they_are_read(
    make_h5ad: Make, obs: pd.DataFrame, check: Callable[..., None]
) -> None:
    dose = np.arange(N) % 3
    obs["pert"] = pd.Categorical(np.where(dose == 0, None, "TP53"))
    obs["dose"] = pd.Categorical(dose.astype(float))
    path = make_h5ad(sp.csr_matrix(np.ones((N, 2), np.float32)), genes=["TP53", "MYC"], obs=obs)
    for column, control, code in (("pert", "nan", 0), ("dose", "1", 1)):
        columns = {"perturbation": column, "control": control}
        check(path, **columns)
        assert chosen(path, None, **columns).obs["is_control"].tolist() == (dose == code).tolist()


def test_roles_are_columns_of_cells_in_every_format(
    raw: Path, obs: pd.DataFrame, tmp_path: Path
) -> None:
    row = {
        "path": raw,
        "label": "assay|in text",
        "filter": "age > 20",
        "batch": "lane",
        "perturbation": "guide",
    }
    options = (
        "preprocess: {min_genes: 1, max_mito_frac: 1, keep_obs: [age]}\nshard: {split_by: batch}\n"
    )
    config = write_config(tmp_path, options, one=row | {"control": "NT", "dose": "nM"})
    [cells], manifest = prepare_by_commands(config, tmp_path)
    wanted = obs[obs["age"] > 20]
    got = ad.read_h5ad(cells).obs
    assert list(got) == ["age", "assay", "in text", "batch", "perturbation", "dose", "is_control"]
    assert list(got.index) == list(wanted.index)
    assert got["batch"].tolist() == wanted["lane"].tolist()
    assert got["perturbation"].tolist() == wanted["guide"].tolist()
    assert got["dose"].tolist() == [float(value) for value in wanted["nM"]]
    assert got["is_control"].tolist() == (wanted["guide"] == "NT").tolist()
    parts = [ad.read_h5ad(path).obs for path in sorted(manifest.parent.glob("*.h5ad"))]
    assert sorted(name for part in parts for name in part.index) == sorted(
        f"one:{name}" for name in wanted.index
    )
    lanes = [set(part["batch"]) for part in parts]
    assert sum(map(len, lanes)) == wanted["lane"].nunique()  # each lane in one split
    joined = pd.concat(parts)
    assert joined["is_control"].tolist() == (joined["perturbation"] == "NT").tolist()


def test_a_column_with_the_name_of_a_role_is_kept_under_another(
    raw: Path, obs: pd.DataFrame
) -> None:
    frame = chosen(raw, None, batch="lane").obs
    assert frame["batch_original"].tolist() == obs["batch"].tolist()
    assert frame["batch"].tolist() == frame["lane"].tolist() == obs["lane"].tolist()
    assert list(chosen(raw, None, batch="batch").obs) == list(obs)
    with pytest.raises(DataError, match="label 'batch' is also a role, which the table"):
        chosen(raw, None, batch="lane", label="batch")


def test_a_dataset_may_set_options() -> None:
    corpus = Preprocess(min_genes=200, organism="human", keep_obs=["a"])
    own = {"organism": "none", "min_genes": "20", "max_mito_frac": "1"}
    row = Dataset.model_validate({"dataset": "d", "path": "p"} | own)
    assert row.preprocess(corpus) == Preprocess(
        min_genes=20, organism=None, max_mito_frac=1, keep_obs=["a"]
    )
    assert Dataset(dataset="d", path="p").preprocess(corpus) == corpus
    with pytest.raises(ValueError, match="control is a value of the perturbation or the condition"):
        ObsColumns(control="NT")
    with pytest.raises(ValueError, match="guide is read to check the controls; set control"):
        ObsColumns(perturbation="target", guide="barcode")
    with pytest.raises(ValueError, match="orthologs is read with reference_organism alone"):
        Preprocess(orthologs="x.tsv")


@pytest.mark.parametrize("form", ["zarr 2 csr_matrix", "zarr 3 csr_matrix", "loom"])
def test_columns_of_every_format_are_checked(
    counts: sp.csr_matrix, tmp_path: Path, check: Callable[..., None], form: str
) -> None:
    path = FORMATS[form](counts, tmp_path)
    check(path, counts="X", label="depth")
    with pytest.raises(
        UserError, match=r"has no obs column 'dept' \(label\); did you mean 'depth'\?"
    ):
        check(path, counts="X", label="dept")
    with pytest.raises(UserError, match=r"has no matrix 'unspliced' \(counts\)"):
        check(path, counts="unspliced", label="depth")


def test_damaged_names_are_left_to_the_stage(raw: Path, tmp_path: Path) -> None:
    def names_after(
        change: Callable[[h5py.File], None],
    ) -> tuple[list[str], list[str] | None] | None:
        with h5py.File(raw, "a") as file:
            change(file)
        with declared_names(raw) as names:
            return None if names is None else (names.columns, names.categories_of("guide"))

    def order(value: Any) -> Callable[[h5py.File], None]:
        return lambda file: file["obs"].attrs.__setitem__("column-order", value)

    def spoil(file: h5py.File) -> None:
        del file["obs/guide/categories"]
        file["obs/guide/categories"] = 7

    known = names_after(lambda file: None)
    assert known is not None
    assert known[1] == ["MYC", "NT", "TP53"]
    assert names_after(order(np.array(known[0], "S"))) == known
    assert names_after(spoil) == (known[0], None)
    assert [names_after(order(damaged)) for damaged in (h5py.Empty("S4"), 3)] == [None, None]
    (tmp_path / "c.zarr" / "obs").mkdir(parents=True)
    for text in ("{}", "[]", '"text"', "null", '{"attributes": 3}'):
        (tmp_path / "c.zarr" / "obs" / "zarr.json").write_text(text)
        with declared_names(tmp_path / "c.zarr") as names:
            assert names is None


CHECKED: dict[str, tuple[dict[str, str], str, str]] = {
    "counts": (
        {"counts": "spliced"},
        "",
        "t.tsv: dataset one: {raw} has no matrix 'spliced' (counts)",
    ),
    "keep_obs": (
        {},
        "preprocess: {keep_obs: [aged]}",
        "{raw}: no obs column 'aged' (preprocess.keep_obs)",
    ),
    "split": (
        {},
        "shard: {split_by: donor}",
        "shard.split_by: not all datasets have an obs",
    ),
    "covariate": (
        {"donor": "lane"},
        "tokens: {covariates: [donors]}",
        "tokens.covariates: no dataset of its corpus has an obs column 'donors'; did you mean 'donor'?",
    ),
}


@pytest.mark.parametrize("case", CHECKED)
def test_names_of_options_are_looked_for_before_anything_runs(
    raw: Path, check: Callable[..., None], case: str
) -> None:
    columns, options, message = CHECKED[case]
    with pytest.raises(UserError) as caught:
        check(raw, options, **columns)
    assert str(caught.value).startswith(message.format(raw=raw))
    check("not-made-yet.h5ad", options, **columns)  # left to stage preprocess
    # a column that the table gives is known
    check(raw, "shard: {split_by: donor}", donor="lane", label="guide")


KINDS = ["MYC", "NA", "", "TP53", "NA", "MYC", "nan", "TP53", "MYC", "TP53"]
WITHOUT = [kind in ("NA", "", "nan") for kind in KINDS]
NAMED: dict[str, tuple[dict[str, str], str, list[Any]]] = {
    "filter of NA": ({"filter": 'kind != "NA"'}, "keep", [kind != "NA" for kind in KINDS]),
    "filter of an empty text": ({"filter": 'kind == ""'}, "keep", [kind == "" for kind in KINDS]),
    "filter of a list": (
        {"filter": 'kind not in ["NA", "nan", ""]'}, "keep", [not missing for missing in WITHOUT],
    ),
    "control": (
        {"perturbation": "kind", "control": "NA"}, "is_control", [kind == "NA" for kind in KINDS],
    ),
    "control, and cells without a perturbation": (
        {"perturbation": "kind", "control": "NA"}, "perturbation",
        [None if kind in ("", "nan") else kind for kind in KINDS],
    ),
    "missing values as control": (
        {"perturbation": "kind", "control": "TP53"}, "perturbation",
        [None if missing else kind for kind, missing in zip(KINDS, WITHOUT)],
    ),
    "map that drops": (
        {"label": "kind", "label_map": "NA\t\nMYC\tmyc\n"}, "kind",
        [None if missing else kind.replace("MYC", "myc") for kind, missing in zip(KINDS, WITHOUT)],
    ),
    "map that renames": (
        {"label": "kind", "label_map": "NA\tguide\n"}, "kind",
        ["guide" if kind == "NA" else kind or None for kind in KINDS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_options_name_the_texts_of_missing_values(case: str, tmp_path: Path) -> None:
    columns, name, wanted = NAMED[case]
    table = tmp_path / "table.csv"
    rows = [f"cell{number},{kind},3,1\n" for number, kind in enumerate(KINDS)]
    table.write_text("".join(["cell,kind,TP53,MYC\n", *rows]))
    if "label_map" in columns:
        path = tmp_path / "map.tsv"
        path.write_text("from\tto\n" + columns["label_map"])
        columns = columns | {"label_map": str(path)}
    choice = chosen(table, None, **columns)
    got = choice.keep.tolist() if name == "keep" else choice.obs[name].astype(object).tolist()
    assert [None if value != value else value for value in got] == [
        None if value == "nan" else value for value in wanted
    ]
