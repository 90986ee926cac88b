"""The complete task on the page of parts runs as it stands there."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.methods import EMBEDDING, TRAINING_COMPONENTS
from cellmill.evaluate.task import Context, run_task

ROOT = Path(__file__).resolve().parents[2]
MODULES = re.compile(r"^```python\n# my_package/(\w+)\.py\n(.*?)^```", re.M | re.S)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Options of the task, from a package that has the modules of the page."""
    package = tmp_path / "my_package"
    package.mkdir()
    page = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
    for name, source in MODULES.findall(page):
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("my_package.options").SameLabelConfig()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def embedded(context: Context) -> Context:
    """The context with a random embedding."""
    vectors = np.random.default_rng(1).normal(size=context.vectors.shape).astype(np.float32)
    return replace(context, vectors=vectors, feature_cache=FeatureCache())


def test_the_documented_task_scores_nearest_neighbours(config: Any, embedded: Context) -> None:
    result = run_task(config.load()(config), embedded)
    chosen = labelled_cells(embedded, "same_label", config.min_cells, "min_cells")
    features = cell_features(embedded, chosen.cells)
    shown = {row.method: row.scores["same label"].mean for row in result.rows}
    assert [*shown] == [EMBEDDING, TRAINING_COMPONENTS]
    for method, share in shown.items():
        nearest = NearestNeighbors(n_neighbors=1).fit(features[method])
        neighbors = nearest.kneighbors(return_distance=False)[:, 0]
        assert share == pytest.approx(np.mean(chosen.labels[neighbors] == chosen.labels))
    [verdict] = result.verdicts
    assert (verdict.compared, verdict.against) == (EMBEDDING.name, TRAINING_COMPONENTS.name)
    assert result.figures == chosen.figures


def test_the_documented_task_is_skipped_without_a_label(config: Any, embedded: Context) -> None:
    assert config.missing_role([]) == "label"
    result = run_task(config.load()(config), replace(embedded, roles={}))
    assert result.skipped == "the dataset has no label column"
