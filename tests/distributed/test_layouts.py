"""Every layout trains the same model: loss and gradient norm equal those of one process, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"strategy": "fsdp", "sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"strategy": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD of 4": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD", "shard_size": 4},
    "NO_SHARD": {"strategy": "fsdp", "sharding_strategy": "NO_SHARD"},
}
STEPS = 6


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_are_those_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    curves = pool.run("curve", corpus=corpus, options=options(LAYOUTS[layout]), folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about a number that is global"


@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD"])
def test_accumulation_changes_nothing(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    small = options(LAYOUTS[layout], train={"token_budget": 100})
    curves = pool.run("curve", corpus=corpus, options=small, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", ["ddp", "FULL_SHARD", "HYBRID_SHARD"])
def test_activation_checkpointing_changes_nothing(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    recomputed = options(LAYOUTS[layout] | {"activation_checkpointing": "full"})
    curves = pool.run("curve", corpus=corpus, options=recomputed, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD"])
def test_bf16_stays_near_fp32(pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str) -> None:
    half = options(LAYOUTS[layout] | {"precision": "bf16-mixed"})
    curves = np.array(
        pool.run("curve", corpus=corpus, options=half, folder=str(tmp_path), steps=STEPS)[0],
    )
    assert not np.array_equal(curves, reference), "bf16-mixed computed in fp32"
    np.testing.assert_allclose(curves[:, 0], reference[:, 0], rtol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_begin_bitwise_equal(pool: Pool, alone: None, corpus: str, layout: str) -> None:
    expected = cases.initial_parameters(corpus, options())
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS[layout])):
        assert {n: p["bytes"] for n, p in found.items()} == {n: p["bytes"] for n, p in expected.items()}


def test_hybrid_shard_shards_inside_a_node_and_replicates_across(pool: Pool, corpus: str) -> None:
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS["HYBRID_SHARD"])):
        for name, parameter in found.items():
            assert parameter["mesh"] == [2, 2], name
            assert parameter["placements"] == ["R", "S(0)"], name
            if parameter["full"][0] % 2 == 0:
                assert parameter["local"][0] == parameter["full"][0] // 2, name


@pytest.mark.parametrize("layout", ["ddp", "NO_SHARD", "HYBRID_SHARD"])
def test_ranks_hold_the_same_parameters_after_20_steps(pool: Pool, corpus: str, tmp_path: Path, layout: str) -> None:
    found = pool.run(
        "parameters_after", corpus=corpus, options=options(LAYOUTS[layout]), folder=str(tmp_path), steps=20
    )
    assert all(parameters == found[0] for parameters in found)


def test_an_epoch_that_leaves_a_rank_without_cells_does_not_hang(pool: Pool, corpus: str, tmp_path: Path) -> None:
    # 3 cells a lane and step over some 42: the last batch of an epoch is short
    uneven = options(LAYOUTS["HYBRID_SHARD"], train={"global_batch": 12})
    curves = pool.run("curve", corpus=corpus, options=uneven, folder=str(tmp_path), steps=32)
    assert len(curves[0]) == 32
    assert np.isfinite(curves[0]).all()
