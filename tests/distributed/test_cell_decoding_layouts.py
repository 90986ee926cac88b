"""Objectives cell_decoding and denoise in the layouts: views, losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, assert_curve_through_layouts, curves_of_one_process
from tests.distributed.pool import Pool
from tests.models import split

ENCODER = {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "encoder": ENCODER,
    "encoder of thinned counts, linear decoder": ENCODER | {"view": "thin", "decoder_hidden": None},
    "encoder without blocks": ENCODER | {"layers": 0, "weights": "counts"},
    "profile": {"family": "profile", "hidden": 32, "layers": 2, "dropout": 0.1},
    "denoise": {"family": "profile", "hidden": 32, "layers": 2, "objective": "denoise"},
}
DDP: dict[str, Any] = {"strategy": "ddp"}
HYBRID: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD"}
SHARDED_TP: dict[str, Any] = {"sharding_strategy": "FULL_SHARD", "tp": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("encoder", HYBRID),
    ("encoder", SHARDED_TP | {"sequence_parallel": True}),
    ("encoder of thinned counts, linear decoder", {"tp": 4}),
    ("encoder of thinned counts, linear decoder", {"pp": 2, "tp": 2, "sequence_parallel": True}),
    ("encoder without blocks", HYBRID),
    ("encoder without blocks", {"tp": 4, "sequence_parallel": True}),
    ("profile", DDP),
    ("profile", HYBRID),
    ("profile", SHARDED_TP),
]
STEPS = 4


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": 256, "checkpoint_every_steps": 2}  # several micro-batches a step
    return options(layout, train=train) | split({"objective": "cell_decoding"} | MODELS[model])


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


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [("encoder", DDP, {"pp": 2, "sharding_strategy": "FULL_SHARD"}), ("denoise", HYBRID, SHARDED_TP)],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(
    pool: Pool,
    corpus: str,
    references: dict[str, np.ndarray],
    tmp_path: Path,
    model: str,
    first: dict[str, Any],
    then: dict[str, Any],
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    course = [_options(model, layout) for layout in (first, then)]
    assert_curve_through_layouts(pool, given, course, 2, references[model])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("encoder", SHARDED_TP | {"sequence_parallel": True}),
        ("encoder", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
        ("profile", DDP),
    ],
    ids=str,
)
def test_figures_of_the_embedding_are_those_of_one_process(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    train = {"token_budget": 256, "val_every_steps": 2}
    split_of = split(MODELS[model] | {"objective": "cell_decoding"})
    one, spread = (options(parallel, train=train) | split_of for parallel in ({}, layout))
    expected = cases.embedding_figures(corpus, one, str(tmp_path / "one"), steps=4)
    assert len(expected) == 2
    assert all(1 < rank < 32 for rank, _ in expected)
    for found in pool.run("embedding_figures", corpus=corpus, options=spread, folder=str(tmp_path / "many"), steps=4):
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-3)
