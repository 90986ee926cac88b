"""Layouts with three mesh axes, on eight processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate 2 x shard 2 x tp 2": {"sharding_strategy": "HYBRID_SHARD", "tp": 2},
    "the same, sequence parallel": {"sharding_strategy": "HYBRID_SHARD", "tp": 2, "sequence_parallel": True},
}
STEPS = 5


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    """Eight processes, as two nodes of four."""
    made = Pool(world=8, local_world=4)
    yield made
    made.close()


@pytest.mark.parametrize("objective", ["masked_value", "masked_gene"])
def test_three_axes_train_the_model_of_one_process(
    eight: Pool, alone: None, corpus: str, tmp_path: Path, objective: str
) -> None:
    model = {"objective": objective}
    expected = cases.curve(corpus, options(model=model), str(tmp_path / "one"), STEPS)
    for name, layout in LAYOUTS.items():
        spread = options(layout, model=model)
        curves = eight.run("curve", corpus=corpus, options=spread, folder=str(tmp_path / name), steps=STEPS)
        np.testing.assert_allclose(np.array(curves[0]), np.array(expected), atol=5e-6, rtol=5e-6, err_msg=name)
        assert all(curve == curves[0] for curve in curves), name


def test_initial_weights_are_bitwise_equal_with_three_axes(eight: Pool, alone: None, corpus: str) -> None:
    expected = cases.initial_parameters(corpus, options())
    for found in eight.run("initial_parameters", corpus=corpus, options=options(next(iter(LAYOUTS.values())))):
        assert {n: p["bytes"] for n, p in found.items()} == {n: p["bytes"] for n, p in expected.items()}
        qkv = found["blocks.0.qkv.weight"]
        assert (qkv["mesh"], qkv["full"], qkv["local"]) == ([2, 2, 2], [96, 32], [24, 32])
