"""Bridges to other packages: the cells that they read, the lines without the package, and with it
the values.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.io import write_elem

from cellmill.data.arrays import log_normalise
from cellmill.data.inputs.h5 import create_h5
from cellmill.evaluate.features.components import fit_own_components
from cellmill.evaluate.inference.files import write_embedding
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.tasks.integration import measures
from tests.unit.evaluated import BRIDGES, run_bridge

PACKAGES = {  # script, module, version that was tested, key of section `bridges`
    "scib-metrics": ("scib_bridge", "scib_metrics", "0.5.10", "scib-metrics"),
    "cz-benchmarks": ("cz_bridge", "czbenchmarks", "0.15.1", "cz-benchmarks"),
    # on predicted cells: test_predict_changes.py
    "cell-eval": ("cell_bridge", "cell_eval", "0.8.2", "cell-eval"),
    "cell-eval2": ("cell2_bridge", "cell_eval2", "0.20.0", "cell-eval2"),
    "scvi-tools": ("zoo_scvi", "scvi", "1.4.2", "scvi"),  # of presets: test_external.py
    "harmonypy": ("zoo_harmony", "harmonypy", "2.1.0", "harmony"),
}
BATCH_MEASURES = {
    "bras",
    "ilisi_knn",
    "isolated_labels",
    "kbet",
    "kbet_per_label",
    "pcr_comparison",
}


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    """160 cells of two types and a rare one in two batches: every fourth trained on, some without
    label or batch.
    """
    generator = np.random.default_rng(0)
    labels = np.array(["a", "b"] * 80, object)
    labels[:3], labels[5], labels[7] = "rare", None, None
    batches = np.where(generator.random(160) < 0.4, "x", "y").astype(object)
    batches[9] = None
    means = np.where(labels[:, None] == "a", *generator.gamma(1, 2, (2, 1, 70)))
    counts = sp.csr_matrix(generator.poisson(means).astype(np.int32))
    vectors = generator.normal(size=(160, 8)).astype(np.float32)
    vectors[labels == "a", 0] += 3
    vectors[11] = np.nan
    columns = {"type": pd.Categorical(labels), "batch": pd.Categorical(batches)}
    obs = pd.DataFrame(columns, index=[f"cell {i}" for i in range(160)])
    paths = {name: tmp_path / f"{name}.h5ad" for name in ("cells", "embedding")}
    paths |= {"metrics": tmp_path / "metrics.json", "umap": tmp_path / "umap.tsv"}
    paths["out"] = tmp_path / "made" / "out.json"
    with create_h5(paths["cells"]) as file:
        write_elem(file, "/", ad.AnnData(counts, obs))
    write_embedding(paths["embedding"], obs, vectors, {"model_digest": ""})
    datasets = {"cells": {"cells": "heldout"}}
    paths["metrics"].write_text(json.dumps({"options": {"seed": 0}, "datasets": datasets}))
    lines = [f"cells\tcell {i}\t0\t0\t{int(i % 4 > 0)}" for i in range(160) if i != 11] + [
        "other\tcell 4\t0\t0\t1"
    ]
    paths["umap"].write_text("\n".join(["dataset\tobs_name\tx\ty\theldout", *lines]))
    return argparse.Namespace(**paths, label="type", batch="batch")


@pytest.fixture
def embedded_cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BRIDGES))
    return importlib.import_module("embedded_cells")


def expected_cells() -> list[int]:
    """Scored, embedded, with a label that is not rare and a batch."""
    return [i for i in range(160) if i % 4 and i not in (1, 2, 5, 7, 9, 11)]


def test_cells_match_those_of_the_tasks(given: argparse.Namespace, embedded_cells: Any) -> None:
    cells = embedded_cells.read_cells(given)
    chosen = expected_cells()
    assert cells.names.tolist() == [f"cell {i}" for i in chosen]
    assert cells.dropped == {"rare": 2}
    stored = ad.read_h5ad(given.cells)
    assert cells.labels.tolist() == stored.obs["type"].iloc[chosen].tolist()
    assert cells.batches.tolist() == stored.obs["batch"].iloc[chosen].tolist()
    assert np.array_equal(
        cells.features["embedding"], ad.read_h5ad(given.embedding).obsm["X_cellmill"][chosen]
    )
    own = fit_own_components(log_normalise(stored.X[chosen]))
    theirs = cells.features["PCA50"]
    assert theirs.shape == own.shape == (len(chosen), 50)
    # of near components, ARPACK gives so many digits
    np.testing.assert_allclose(theirs, own, atol=5e-3)
    given.metrics.write_text(
        json.dumps({"options": {"seed": 0}, "datasets": {"cells": {"cells": "all"}}})
    )
    given.batch = "absent"
    every = embedded_cells.read_cells(given)
    assert every.batches is None
    assert every.names.tolist() == [f"cell {i}" for i in range(160) if i not in (0, 1, 2, 5, 7, 11)]


def test_large_samples_of_cells_match_those_of_the_tasks(
    given: argparse.Namespace, embedded_cells: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_cells, "MAX_CELLS", 60)
    given.batch = "absent"
    drawn = embedded_cells.read_cells(given)
    obs = ad.read_h5ad(given.cells).obs
    scored = obs.iloc[[i for i in range(160) if i % 4 and i != 11]]
    expected = choose_cells(scored["type"], 10, 0, max_cells=60)
    assert 20 < len(drawn.names) <= 60
    assert drawn.names.tolist() == scored.index[expected.cells].tolist()


def test_without_a_label_a_bridge_ends_in_a_line(
    given: argparse.Namespace, embedded_cells: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_cells, "FEWEST", 100)
    for label, message in (
        ("kind", f"{given.embedding}: no obs column 'kind'; there are: type, batch"),
        (
            "type",
            "cells: 0 classes of type have at least 100 scored cells, expected two or more; raise shard.test_frac, or "
            "name another label in the table of datasets",
        ),
    ):
        given.label = label
        with pytest.raises(SystemExit) as ended:
            embedded_cells.read_cells(given)
        assert ended.value.code == f"cellmill: {message}"
    given.metrics.write_text(given.metrics.read_text().replace('"heldout"', '"all"'))
    with pytest.raises(SystemExit, match="expected two or more; name another label in the table"):
        embedded_cells.read_cells(given)
    given.umap.write_text("dataset\tobs_name\tx\ty\theldout\n")
    with pytest.raises(
        SystemExit, match=r"umap.tsv: no cell of cells, .*set evaluate.effort to full"
    ):
        embedded_cells.read_cells(given)


@pytest.mark.parametrize("package", PACKAGES)
def test_without_its_package_a_bridge_fails_in_one_line(package: str, tmp_path: Path) -> None:
    script, module, tested, key = PACKAGES[package]
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(
        f"raise ModuleNotFoundError('No module named {module}')"
    )
    words = [sys.executable, "-W", "ignore", str(BRIDGES / f"{script}.py")]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"cellmill: {package} cannot be imported by {sys.executable} (No module named {module}); install {package} "
        f"(tested: {tested}) in an environment of its own and set bridges: {{{key}: PATH_OF_ITS_PYTHON}}, or run "
        "snakemake with --sdm conda\n"
    )


def test_a_result_is_written_whole_or_not_at_all(
    given: argparse.Namespace, embedded_cells: Any
) -> None:
    cells = embedded_cells.read_cells(given)
    values = {"embedding": {"good": 0.5, "undefined": float("nan")}, "PCA50": {"good": 1}}
    embedded_cells.write_result(given, "numpy", cells, values)
    made = json.loads(given.out.read_text())
    assert made["rows"] == [
        {"name": "embedding", "kind": "model", "metric": "good", "value": 0.5},
        {"name": "embedding", "kind": "model", "metric": "undefined", "value": None},
        {"name": "PCA50", "kind": "baseline", "metric": "good", "value": 1.0},
    ]
    about = {
        "package": "numpy",
        "version": np.__version__,
        "dataset": "cells",
        "label": "type",
        "batch": "batch",
        "n_cells": len(expected_cells()),
        "n_classes": 2,
        "dropped_classes": {"rare": 2},
    }
    assert {key: made[key] for key in about} == about
    before = given.out.read_bytes()
    given.label = {1}  # not JSON
    with pytest.raises(TypeError):
        embedded_cells.write_result(given, "numpy", cells, values)
    assert given.out.read_bytes() == before
    assert [path.name for path in given.out.parent.iterdir()] == ["out.json"]


def values_of(package: str, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    values = run_bridge(package, PACKAGES[package][0], **vars(given))
    assert list(values) == ["embedding", "PCA50"]
    assert all(isinstance(value, float) for of in values.values() for value in of.values())
    return values


def test_scib_metrics_gives_what_our_measures_give(
    given: argparse.Namespace, embedded_cells: Any
) -> None:
    values = values_of("scib-metrics", given)
    cells = embedded_cells.read_cells(given)
    labels, batches = (
        np.unique(of, return_inverse=True)[1] for of in (cells.labels, cells.batches)
    )
    before = measures.measure_batch_variance(cells.features["PCA50"], batches).mean()
    for name, vectors in cells.features.items():
        assert values[name]["silhouette_label"] == pytest.approx(
            measures.measure_silhouettes(vectors, labels).mean(), abs=1e-4
        )
        assert values[name]["bras"] == pytest.approx(
            measures.measure_bras(vectors, batches, labels).mean(), abs=1e-4
        )
        pcr = 1 - measures.measure_batch_variance(vectors, batches).mean() / before
        assert values[name]["pcr_comparison"] == pytest.approx(max(pcr, 0), abs=1e-4)
    given.batch = "absent"
    assert (
        set(values["embedding"]) - set(values_of("scib-metrics", given)["embedding"])
        == BATCH_MEASURES
    )


def test_cz_benchmarks_runs_its_tasks(given: argparse.Namespace, embedded_cells: Any) -> None:
    values = values_of("cz-benchmarks", given)
    cells = embedded_cells.read_cells(given)
    labels = np.unique(cells.labels, return_inverse=True)[1]
    for name, vectors in cells.features.items():
        ours = measures.measure_silhouettes(vectors, labels).mean()
        assert values[name]["Embedding: silhouette_score"] == pytest.approx(ours, abs=1e-4)
    assert values["embedding"]["Label Prediction: mean_fold_accuracy: lr"] > 0.8
    assert {name.partition(":")[0] for name in values["embedding"]} == {
        *("Clustering", "Embedding", "Label Prediction", "Batch Integration")
    }


@pytest.mark.parametrize(
    "batch",
    [
        pd.Series(["a", None, "b"], dtype=object),
        pd.Series(["a", None, "b"], dtype="string"),
        pd.Series(["a", None, "b"], dtype="category"),
        pd.Series(pd.array(["a", None, "b"], dtype="string")).astype("category"),
    ],
    ids=["object", "string", "category", "category of strings"],
)
def test_a_missing_batch_is_text_for_every_preset(
    batch: pd.Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BRIDGES))
    found = importlib.import_module("zoo_cells").batches_of(
        SimpleNamespace(obs=pd.DataFrame({"batch": batch}))
    )
    assert found.tolist() == ["a", "nan", "b"]


def test_numbers_are_batches_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BRIDGES))
    module = importlib.import_module("zoo_cells")
    assert module.batches_of(SimpleNamespace(obs=pd.DataFrame({"batch": [2, 1]}))).tolist() == [
        "2",
        "1",
    ]
    assert module.batches_of(SimpleNamespace(obs=pd.DataFrame({"donor": [2, 1]}))) is None
