"""Objective query_decoding and family autoencoder in the layouts: losses and norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, curves_of_one_process
from tests.distributed.pool import Pool
from tests.models import split

OBJECTIVE = {"objective": "query_decoding", "decoder_hidden": 16, "decoder_layers": 1, "max_asked": 12}
ENCODER = {"hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "autoencoder": ENCODER | {"family": "autoencoder", "latent": 12},
    "encoder": ENCODER | {"family": "encoder"},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("autoencoder", {"strategy": "ddp"}),
    ("autoencoder", {"sharding_strategy": "HYBRID_SHARD"}),
    ("autoencoder", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("autoencoder", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("encoder", {"pp": 2, "tp": 2, "sequence_parallel": True}),
]
STEPS = 4


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": 256, "checkpoint_every_steps": 2, "val_every_steps": 2}  # several micro-batches a step
    return options(layout, train=train) | split(MODELS[model] | OBJECTIVE)


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process."""
    return curves_of_one_process(corpus, {name: _options(name) for name in MODELS}, tmp_path_factory, STEPS)


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(model, layout), "folder": str(tmp_path), "steps": STEPS}
    assert_curve_in_every_rank(pool, given, references[model])


def test_a_run_of_one_process_goes_on_in_another_layout(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    cases.curve(options=_options("autoencoder"), steps=2, **given)
    layout = {"sharding_strategy": "FULL_SHARD", "tp": 2}
    curves = pool.run("curve", options=_options("autoencoder", layout), steps=STEPS, load=True, **given)
    np.testing.assert_allclose(np.array(curves[0]), references["autoencoder"][2:], atol=5e-6, rtol=5e-6)


def test_figures_of_a_narrow_embedding_are_those_of_one_process(
    pool: Pool, alone: None, corpus: str, tmp_path: Path
) -> None:
    one, spread = (_options("autoencoder", layout) for layout in ({}, {"pp": 2, "sharding_strategy": "FULL_SHARD"}))
    expected = cases.embedding_figures(corpus, one, str(tmp_path / "one"), steps=4)
    assert [1 < rank < 12 for rank, _ in expected] == [True, True]
    for found in pool.run("embedding_figures", corpus=corpus, options=spread, folder=str(tmp_path / "many"), steps=4):
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-3)
