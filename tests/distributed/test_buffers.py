"""Buffers have their values on every rank of every layout, and checkpoints keep the persistent ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cellmill.config import plugin
from tests.distributed import buffered, cases
from tests.distributed.conformance import BOTH_CUT, LAYOUTS
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.tiers import quick

STEPS = 4
SPREAD: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("ddp", "HYBRID_SHARD", BOTH_CUT)},
    "FULL_SHARD, offloaded, recomputed": LAYOUTS["FULL_SHARD"]
    | {"cpu_offload": "full", "activation_checkpointing": "full"},
    "pp 2": {"pp": 2, "sharding_strategy": "FULL_SHARD"},
    "pp 2, ZBV": {"pp": 2, "schedule": "ZBV", "sharding_strategy": "FULL_SHARD"},
}
PERSISTENT = {"order", *(f"blocks.{index}.scale" for index in range(4))}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    buffered.register()
    yield
    del plugin.BUILT_IN["family"]["buffered"]


def run(parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    model = {"family": "buffered", "layers": 4}
    train = {"steps": STEPS, "schedule": "constant", "checkpoint_every_steps": 2} | train
    return options(parallel, model=model, train=train)


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    return buffered.curve_and_buffers(corpus, run({}), str(tmp_path_factory.mktemp("one")), STEPS)


@pytest.mark.parametrize("layout", quick(SPREAD, ["pp 2"]))
def test_every_rank_has_the_buffers_of_one_process_and_a_checkpoint_restores_them(
    pool: Pool, corpus: str, reference: tuple[Any, Any, Any], tmp_path: Path, layout: str
) -> None:
    curve, expected, _ = reference
    assert expected.keys() == PERSISTENT | {"offsets"}
    assert all(any(content) for content in expected.values())
    first = {"corpus": corpus, "options": run(SPREAD[layout]), "folder": str(tmp_path)}
    halves = [pool.run("buffered.curve_and_buffers", steps=2, **first)]
    halves += [pool.run("buffered.curve_and_buffers", steps=STEPS, load=True, **first)]
    for half, part in zip(halves, (curve[:2], curve[2:])):
        np.testing.assert_allclose(np.array(half[0][0]), np.array(part), atol=5e-6, rtol=5e-6)
        for _, before, after in half:
            assert before.items() <= expected.items()
            assert after == before
            assert {"order", "offsets"} <= before.keys()
    assert set().union(*(before for _, before, _ in halves[0])) == expected.keys()
    names = buffered.checkpointed(str(tmp_path))
    assert names >= PERSISTENT
    assert "offsets" not in names


def test_an_export_has_the_persistent_buffers_and_a_loaded_model_all_of_them(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    _, expected, _ = buffered.curve_and_buffers(corpus, run({}), str(tmp_path / "train"), STEPS)
    loaded = cases.exported(corpus, tmp_path / "train", tmp_path / "model")
    assert {name: loaded[name].numpy().tobytes() for name in expected} == expected
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == loaded.keys() - {"offsets"}
    assert written["order"].dtype == torch.int64
