"""Texts that mean no label are no classes, in cells, shards, training, evaluation and predictions."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.config.datasets import NO_COLUMNS, NO_LABEL, ObsColumns, plain_label
from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate.inference.label_counts import count_labels
from cellmill.report.collect import read_corpus
from cellmill.report.page import render
from cellmill.stages.training_inputs import check_levels
from tests.models import train_options
from tests.unit.small_corpus import prepare_by_commands
from tests.unit.test_named_files import write_config

Make = Callable[..., Path]

REAL = [
    "T cell",
    "B cell",
    "null cell",
    "HSC",
    "native regulatory T",
    "unknown-like B",
    "1",
    "other",
]
EMPTY = [
    "unknown",
    "",
    "nan",
    "Unassigned",
    "doublet",
    "NA",
    "#N/A",
    "<NA>",
    "Not_Annotated",
    " Unknown cells ",
    "?",
    "-",
]
EMPTY += ["Low-quality cells", "cell", "Native Cell", "'unknown'", "not assigned", "UNLABELED"]


@pytest.mark.parametrize("text", EMPTY)
def test_a_text_that_means_no_label_is_none_in_any_spelling(text: str) -> None:
    assert NO_COLUMNS.means_no_label(text)


@pytest.mark.parametrize("text", REAL)
def test_a_name_that_contains_such_a_word_is_a_label(text: str) -> None:
    assert not NO_COLUMNS.means_no_label(text)


def test_the_documented_list_is_the_one_that_is_used() -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    listed = docs.split("<!-- no label -->")[1]
    assert [text.strip() for text in listed.replace("\n", " ").strip().split(",")] == [
        f"`{text}`" for text in NO_LABEL
    ]
    assert [plain_label(text) for text in NO_LABEL] == list(NO_LABEL)


@pytest.fixture
def raw(make_h5ad: Make) -> Path:
    """Twelve cells of each of nine texts, and twelve without a value."""
    kinds = [
        "T cell",
        "B cell",
        "unknown",
        "",
        "nan",
        "Unassigned",
        "doublet",
        "HSC",
        "other",
        None,
    ] * 12
    matrix = np.random.default_rng(0).poisson(3, (len(kinds), 4)).astype(np.float32) + 1
    obs = pd.DataFrame(
        {"kind": kinds, "disease": ["unknown", "normal"] * 60},
        index=[f"cell_{i}" for i in range(len(kinds))],
    )
    return make_h5ad(
        sp.csr_matrix(matrix), "one.h5ad", genes=["TP53", "MYC", "BRCA2", "DPM1"], obs=obs
    )


def labels_of(raw: Path, **columns: str) -> Counter[str]:
    with open_counts(raw) as reader:
        obs = choose_obs(reader, None, ObsColumns.model_validate(columns)).obs
    return Counter(obs["kind"].dropna())


def test_the_table_replaces_the_list_of_missing_labels(raw: Path) -> None:
    classes = dict.fromkeys(["T cell", "B cell", "HSC", "other"], 12)
    empty = dict.fromkeys(["unknown", "", "nan", "Unassigned", "doublet"], 12)
    assert labels_of(raw, label="kind") == classes
    assert labels_of(raw, label="disease") == classes | empty, "kind is no label here"
    assert labels_of(raw, label="kind", no_label="-") == classes | empty
    given = labels_of(raw, label="kind", no_label="OTHER| hsc")
    assert given == {
        name: n for name, n in (classes | empty).items() if name not in ("other", "HSC")
    }


OPTIONS = (
    "preprocess: {min_genes: 1, max_mito_frac: 1}\nshard: {cells_per_shard: 64}\n"
    "objective: {name: classification, label_column: kind}\n"
)


def test_missing_labels_are_counted_in_log_and_page(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, OPTIONS, one={"path": raw, "label": "kind"})
    [cells], manifest = prepare_by_commands(config, tmp_path)
    assert (
        "one: label kind: 60 cells have a text that means no label, and get none: '' 12, 'Unassigned' 12, 'doublet' "
        "12, 'nan' 12, 'unknown' 12; set no_label of dataset one in the table if these are classes"
    ) in capsys.readouterr().out.splitlines()
    report = json.loads(cells.with_suffix(".json").read_text())
    assert report["no_label"] == {
        "kind": {"": 12, "Unassigned": 12, "doublet": 12, "nan": 12, "unknown": 12}
    }
    stored = ad.read_h5ad(cells).obs
    assert stored["kind"].isna().sum() == 72
    assert set(stored["disease"]) == {"unknown", "normal"}, "a role or covariate keeps its values"
    assert Manifest.read(manifest).obs_levels["kind"]["levels"] == [
        "B cell",
        "HSC",
        "T cell",
        "other",
        "<missing>",
    ]
    page = render("x", [], [read_corpus(manifest.parents[1])])
    assert (
        "Label kind: 60 cells with a text that means “no label”, counted as unlabelled: “” 12, “Unassigned” 12,"
        in " ".join(page.split())
    )


def test_a_training_on_an_undeclared_label_names_such_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = train_options(
        objective={"name": "classification", "label_column": "kind"}, model={"family": "profile"}
    )
    check_levels(options, {"kind": ("T cell", "Unassigned", "unknown", "<missing>")}, 100)
    assert capsys.readouterr().out == (
        "warning: objective.label_column kind: 'Unassigned', 'unknown' of 3 classes may mean no label; name kind as a "
        "label in the table of datasets, and these cells get none\n"
    )


def test_predictions_compare_no_text_that_means_no_label() -> None:
    obs = pd.DataFrame({"kind": ["T", "unknown", "nan", "HSC", None]}, index=list("abcde"))
    assert count_labels(obs, "one", "kind", ["T"]).unknown == {"HSC": 1}
    assert count_labels(obs, "one", "kind", ["T"]).n_labelled == 2
    assert count_labels(obs, "one", "kind", ["T", "unknown"]).n_labelled == 3, (
        "a class of the model"
    )


def test_a_control_value_on_the_list_stays_a_label(make_h5ad: Make) -> None:
    kinds = ["none", "TP53", "unknown"] * 8
    matrix = np.random.default_rng(0).poisson(3, (len(kinds), 2)).astype(np.float32) + 1
    obs = pd.DataFrame({"kind": kinds}, index=[f"cell_{i}" for i in range(len(kinds))])
    raw = make_h5ad(sp.csr_matrix(matrix), "one.h5ad", genes=["TP53", "MYC"], obs=obs)
    assert labels_of(raw, label="kind", perturbation="kind", control="none") == {
        "none": 8,
        "TP53": 8,
    }
