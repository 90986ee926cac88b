"""The notebook-like example leaves in an AnnData what scanpy's users, and the commands, expect there."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

from cellmill.cli import main
from tests.unit.evaluated import with_config
from tests.unit.exported import export_model

EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "examples" / "in-scanpy.py"


def test_the_example_in_scanpy_has_vectors_graph_and_labels_where_they_are_expected(
    simulated: Path, corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scanpy", reason="the package scanpy is not installed")
    monkeypatch.chdir(tmp_path)
    cells, runs = tmp_path / "data" / "demo" / "pbmc68k.h5ad", tmp_path / "results" / "runs"
    for path in (cells, runs / "demo" / "model"):
        path.parent.mkdir(parents=True)
    cells.symlink_to(simulated)
    (runs / "demo" / "model").symlink_to(corpus["model"])
    levels = {"cell_type": ("a", "b", "c", "<missing>")}
    classify: dict[str, Any] = {"objective": "classification", "label_column": "cell_type", "levels": levels}
    annotator = export_model(runs / "annotator" / "model", corpus["model"] / "vocabulary.tsv", seed=1, **classify)
    with_config(annotator, classifier={"label_column": "cell_type", "labels": ["a", "b", "c"], "calibration": None})
    threads = torch.get_num_threads()
    exec(compile(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name, "exec"), {})
    made, before = ad.read_h5ad("analysed.h5ad"), ad.read_h5ad(simulated)
    np.testing.assert_array_equal(made.X.toarray(), before.X.toarray())
    torch.set_num_threads(threads)  # numba, in UMAP, has set all cores, with which sums may end in another bit
    assert main(["embed", "--model", str(corpus["model"]), "--input", str(simulated), "--out", "embedded.h5ad"]) == 0
    embedded = ad.read_h5ad("embedded.h5ad")
    np.testing.assert_array_equal(made.obsm["X_cellmill"], embedded.obsm["X_cellmill"])
    assert made.uns["cellmill"]["model_digest"] == embedded.uns["cellmill"]["model_digest"]
    assert made.uns["neighbors"]["params"]["use_rep"] == "X_cellmill"
    assert made.obsp["connectivities"].shape == (made.n_obs, made.n_obs)
    assert made.obsm["X_umap"].shape == (made.n_obs, 2)
    probabilities = made.obsm["cellmill_probabilities"]
    best = np.array(made.uns["cellmill_prediction"]["labels"])[probabilities.argmax(1)]
    expected = np.where(probabilities.max(1) < 0.5, "unknown", best)
    np.testing.assert_array_equal(made.obs["cellmill_label"], expected)
    assert len({*expected}) > 1
