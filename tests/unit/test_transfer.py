"""Task transfer: scores by hand, nothing fitted on tested cells, and labels that only one dataset
has.
"""

import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from pydantic import ValidationError
from sklearn.metrics import f1_score

from cellmill import open_cells
from cellmill.config.parts.tasks import TransferConfig
from cellmill.data.arrays import log_normalise
from cellmill.data.genes.tables import cell_ontology
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.classification.transfer import compute_transfer_features
from cellmill.evaluate.tasks.classification.transfer_cells import (
    CellGroup,
    TransferCells,
    find_copies,
    find_shared_genes,
)
from cellmill.report.collect import read_run
from cellmill.report.page import render
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import embed, evaluate, regression

IDS = ["CL:0000084", "CL:0000236", "CL:0000576", "CL:0000540"]  # T cell, B cell, monocyte, neuron
LINEAR = "all shared genes + logistic regression, unscaled"
Change = Callable[[ad.AnnData], Any]


class Datasets:
    """Simulated cells in two files, `one` and `two`, under evaluation by a model of random weights."""

    def __init__(self, corpus: dict[str, Path]) -> None:
        self.files = corpus
        cells = open_cells(self.files["cells"])
        cells.obs["type_id"] = np.array(IDS)[cells.obs["cell_type"].cat.codes]
        self.cells = {"one": cells[:200].copy(), "two": cells[200:400].copy()}

    def evaluate(
        self,
        out: Path,
        change: Change = lambda two: two,
        label: str = "cell_type",
        one: ad.AnnData | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Entries of the task in metrics.json, by dataset; `change` changes `two`, or gives other
        cells for it.
        """
        out.mkdir()
        two = self.cells["two"].copy()
        changed = change(two)
        cells = {"one": self.cells["one"] if one is None else one}
        cells["two"] = changed if isinstance(changed, ad.AnnData) else two
        for name, adata in cells.items():
            adata.write_h5ad(out / f"{name}.h5ad")
        paths = [out / f"{name}.h5ad" for name in cells]
        embeddings = [
            embed(self.files["model"], path, out / "embeddings" / path.name) for path in paths
        ]
        tasks = {"transfer": {"fit_on": ["one"]} | options}
        files = {**self.files, "cells": paths, "embedding": embeddings}
        metrics = evaluate(files, out / "metrics.json", label, tasks=tasks, cells="all")
        return {name: entry["tasks"] for name, entry in metrics["datasets"].items()}


@pytest.fixture(scope="module")
def datasets(corpus: dict[str, Path]) -> Datasets:
    return Datasets(corpus)


def half(cells: ad.AnnData) -> ad.AnnData:
    return cells[:, ::2].copy()


def _rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def test_classifiers_are_fitted_on_the_shared_genes(datasets: Datasets, tmp_path: Path) -> None:
    found = datasets.evaluate(tmp_path / "evaluate", half)
    assert found["one"]["transfer"]["skipped"] == "the classifiers are fitted on it"
    result = found["two"]["transfer"]
    one, two = (datasets.cells[name] for name in ("one", "two"))
    shared_of_one = log_normalise(sp.csr_matrix(one.X)[:, ::2])
    shared_of_two = log_normalise(sp.csr_matrix(two.X)[:, ::2])
    labels = two.obs["cell_type"].astype(str).to_numpy()
    fitted = regression(sparse=True).fit(shared_of_one, one.obs["cell_type"].astype(str))
    predicted = fitted.predict(shared_of_two)
    accuracy = (predicted == labels).mean()
    rows = _rows(result)
    row = rows[LINEAR]
    means = {name: score["mean"] for name, score in row["scores"].items()}
    assert means["accuracy"] == pytest.approx(accuracy)
    assert means["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert means["weighted_f1"] == pytest.approx(f1_score(labels, predicted, average="weighted"))
    assert 0.3 < accuracy < 1
    figures = result["figures"]
    assert figures["shared_genes"] == shared_of_one.shape[1]
    assert figures["n_fitted"] == 200
    assert figures["n_cells"] == 200
    assert {name.partition(" + ")[0] for name in rows} == {
        "embedding",
        "embedding, full panel",
        "untrained",
        "PCA50 of the training cells",
        "PCA50 of the fitted cells",
        "PCA50 of the fitted cells, scaled genes",
        "all shared genes",
        "rank-z genes, ANOVA",
        "majority",
    }
    assert result["metric"] == "accuracy"
    assert "nearness" not in row["scores"]
    assert result["sentences"][0] in html.unescape(render("r", [read_run(tmp_path)], []))
    assert {line["column"] for line in result["differences"]} == {
        "accuracy",
        "macro_f1",
        "weighted_f1",
    }
    assert [gap["column"] for gap in result["gaps"]] == ["accuracy", "macro_f1", "weighted_f1"]
    name, accuracy = result["gaps"][0]["zero"]
    assert name in ("majority", "largest class")
    _, sizes = np.unique(labels, return_counts=True)
    assert accuracy == pytest.approx(sizes.max() / len(labels))
    # the model sees only the shared genes; its vectors of all genes are in no verdict
    cut = datasets.evaluate(tmp_path / "cut", half, one=half(one))["two"]["transfer"]
    narrow = _rows(cut)
    wide = {name for name in rows if name.startswith("embedding, full panel + ")}
    assert {rows[name]["method"]["kind"] for name in wide} == {"variant"}
    assert len(wide) == 3
    assert rows.keys() - narrow.keys() == wide, "with one panel, both are the same"
    assert {name: rows[name] for name in narrow} == narrow
    own = "embedding + logistic regression"
    assert rows[own] != rows[own.replace(" +", ", full panel +")] | {"name": own, "kind": "model"}
    assert result["sentences"] == cut["sentences"]
    assert {line["compared"] for line in result["differences"]} == {
        name for name in rows if "embedding" in name
    }


@pytest.mark.full
def test_the_order_of_genes_in_a_file_changes_nothing(datasets: Datasets, tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(datasets.cells["two"].n_vars)
    both = [
        datasets.evaluate(tmp_path / "a"),
        datasets.evaluate(tmp_path / "b", lambda two: two[:, order].copy()),
    ]
    assert both[0] == both[1]


def test_tested_cells_do_not_reach_what_is_fitted(context: Context) -> None:
    cells = np.arange(100), np.arange(100, 180)
    fitted, tested = (CellGroup.read(context, context.roles["label"], among) for among in cells)
    genes = find_shared_genes([fitted, tested])
    counts = tested.counts.copy()
    counts.data[counts.indptr[40] :] *= 50  # the last 40 cells
    counts.data[counts.indptr[-2] :] = 1
    other = replace(tested, counts=counts)
    before, after = (
        compute_transfer_features(context.model, TransferCells([fitted], group, genes, n_copies=0))
        for group in (tested, other)
    )
    for name in before[0]:
        dense = [
            sp.csr_matrix(part[name]).toarray()
            for part in (before[0], after[0], before[1], after[1])
        ]
        assert np.array_equal(dense[0], dense[1]), name
        assert np.array_equal(dense[2][:40], dense[3][:40]), name
    components = ScoredMethod("PCA50 of the fitted cells")
    moved = sp.csr_matrix(before[1][components] - after[1][components])
    assert moved.nnz  # what changed is seen where it may be


def test_ids_are_scored_by_the_ontology(datasets: Datasets, tmp_path: Path) -> None:
    def relabel(two: ad.AnnData) -> None:
        ids = two.obs["type_id"].astype(str)
        # CD4-positive, of which `one` has none
        two.obs["type_id"] = ids.where(ids != IDS[0], "CL:0000624")

    result = datasets.evaluate(tmp_path / "out", relabel, label="type_id")["two"]["transfer"]
    row = _rows(result)[LINEAR]
    one, two = (datasets.cells[name] for name in ("one", "two"))
    ids = two.obs["type_id"].astype(str).to_numpy()
    is_known = ids != IDS[0]
    n_new = np.count_nonzero(~is_known)
    assert result["figures"]["new_classes"] == {"CL:0000624": n_new}
    profiles = log_normalise(sp.csr_matrix(one.X))
    fitted = regression(sparse=True).fit(profiles, one.obs["type_id"].astype(str))
    predicted = fitted.predict(log_normalise(sp.csr_matrix(two.X)))
    ontology = cell_ontology()
    nearness = []
    steps = []
    for truth, prediction in zip(np.where(is_known, ids, "CL:0000624"), predicted):
        nearness.append(ontology.nearness(truth, prediction))
        steps.append(ontology.steps(truth, prediction))
    means = {name: score["mean"] for name, score in row["scores"].items()}
    numbers = row["numbers"]
    assert means["nearness"] == pytest.approx(np.mean(np.array(nearness)[is_known]))
    assert means["nearness, new labels"] == pytest.approx(np.mean(np.array(nearness)[~is_known]))
    assert numbers["steps"] == pytest.approx(np.mean(np.array(steps)[is_known]))
    assert numbers["steps, new labels"] == pytest.approx(np.mean(np.array(steps)[~is_known]))
    assert 1 > means["nearness"] > means["accuracy"]
    assert "nearness, new labels" in {line["column"] for line in result["differences"]}

    def relabel_few(two: ad.AnnData) -> None:
        two.obs["type_id"] = (
            two.obs["type_id"].astype(str).where(np.arange(two.n_obs) >= 2, "CL:0000624")
        )

    few = datasets.evaluate(tmp_path / "few", relabel_few, label="type_id")["two"]["transfer"]
    assert "nearness, new labels" in _rows(few)[LINEAR]["scores"]
    assert "nearness, new labels" not in {line["column"] for line in few["differences"]}
    assert not any("new labels" in sentence for sentence in few["sentences"])  # of two cells
    without = datasets.evaluate(tmp_path / "off", relabel, label="type_id", ontology=False)["two"][
        "transfer"
    ]
    assert "nearness" not in _rows(without)[LINEAR]["scores"]
    fewer = {
        column: score
        for column, score in row["scores"].items()
        if not column.startswith("nearness")
    }
    assert _rows(without)[LINEAR]["scores"] == fewer
    assert _rows(without)[LINEAR]["numbers"] == {}


@pytest.mark.full
def test_additional_labels_use_the_column_of_the_same_name(
    datasets: Datasets, tmp_path: Path
) -> None:
    found = datasets.evaluate(tmp_path / "out", label="cell_type|type_id")["two"]
    names, ids = (_rows(found[task]) for task in ("transfer", "transfer of type_id"))
    assert ids[LINEAR]["scores"]["accuracy"]["mean"] == names[LINEAR]["scores"]["accuracy"]["mean"]
    assert "nearness" in ids[LINEAR]["scores"]
    assert "nearness" not in names[LINEAR]["scores"]


def test_copies_are_counted_apart(datasets: Datasets, tmp_path: Path) -> None:
    def change(two: ad.AnnData) -> None:
        counts = sp.csr_matrix(two.X).tolil()
        text = two.obs["cell_type"].astype(str)
        counts[:7] = sp.csr_matrix(datasets.cells["one"].X)[:7]
        text.iloc[10:40] = "platypus cell"
        text.iloc[40:45] = None
        two.X = counts.tocsr()
        two.obs["cell_type"] = text

    figures = datasets.evaluate(tmp_path / "out", change)["two"]["transfer"]["figures"]
    assert (figures["n_copies"], figures["new_classes"], figures["n_cells_of_new_classes"]) == (
        7,
        {"platypus cell": 30},
        30,
    )
    assert (figures["n_cells"], figures["n_unlabelled"]) == (158, 5)
    known = sp.csr_matrix([[1, 0], [0, 0]])
    asked = sp.csr_matrix([[0, 0], [1, 0], [0, 1]])
    # cells without counts are no copies
    assert find_copies(known, asked).tolist() == [False, True, False]
    none = datasets.evaluate(
        tmp_path / "none", lambda two: two.obs.__setitem__("cell_type", "platypus cell")
    )
    reason = none["two"]["transfer"]["skipped"]
    assert reason.startswith("no label in common: fitted type_")
    n_fitted = len(none["two"]["transfer"]["figures"]["fitted_classes"])
    assert f" and {n_fitted - 3} more, tested platypus cell" in reason


def test_a_dataset_without_cells_to_test_says_why(datasets: Datasets, tmp_path: Path) -> None:
    def copy(two: ad.AnnData) -> ad.AnnData:
        two.X = datasets.cells["one"].X
        two.obs["cell_type"] = two.obs["cell_type"].astype(str).where(np.arange(200) >= 5)
        return two

    found = datasets.evaluate(tmp_path / "out", copy)["two"]["transfer"]
    assert found["skipped"] == (
        "no cell is left to test: of 200 scored cells, 195 equal fitted cells and 5 have no label"
    )


def test_datasets_that_cannot_be_compared_are_refused(datasets: Datasets, tmp_path: Path) -> None:
    for wrong in ("CL:9999999", "unknown"):

        def rename(two: ad.AnnData, wrong: str = wrong) -> None:
            two.obs["type_id"] = two.obs["type_id"].astype(str).replace(IDS[1], wrong)

        with pytest.raises(DataError) as caught:
            datasets.evaluate(tmp_path / wrong, rename, label="type_id")
        assert str(caught.value) == (
            f"{tmp_path / wrong}/two.h5ad: obs column 'type_id' has '{wrong}', no term of the Cell Ontology of "
            "2026-03-26; correct it, leave it empty, or set evaluate.tasks.transfer.ontology to false"
        )
    with pytest.raises(ConfigError) as refused:
        datasets.evaluate(tmp_path / "x", fit_on=["on"])
    assert str(refused.value) == (
        "evaluate.tasks.transfer.fit_on: 'on' is not evaluated; name one of one, two, or add it to evaluate.datasets"
    )
    with pytest.raises(
        ValidationError, match="test_on: 'a' is in fit_on too; take it out of one of them"
    ):
        TransferConfig(name="transfer", fit_on=["a"], test_on=["b", "a"])
    left = datasets.evaluate(tmp_path / "y", fit_on=["two"], test_on=["one"])
    assert left["two"]["transfer"]["skipped"] == "the classifiers are fitted on it"
    assert left["one"]["transfer"]["rows"]
