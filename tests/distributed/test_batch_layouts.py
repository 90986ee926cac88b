"""Batch terms and adversary in the layouts: losses, gradient norms and the batch's share are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.models import split

OBJECTIVE = {
    "objective": "cell_decoding",
    "batch_column": "batch",
    "batch_adversary": 0.5,
    "batch_adversary_scale": 2.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4},
    "profile": {"family": "profile", "hidden": 32, "layers": 1, "decoder_hidden": None},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("encoder", {"sharding_strategy": "HYBRID_SHARD"}),
    ("encoder", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("encoder", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("profile", {"strategy": "ddp"}),
    ("profile", {"sharding_strategy": "FULL_SHARD", "tp": 2}),
]
STEPS = 4


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": 256, "val_every_steps": 2}  # several micro-batches a step
    return options(layout, train=train) | split(MODELS[model] | OBJECTIVE)


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process."""
    folders = {name: str(tmp_path_factory.mktemp("one")) for name in MODELS}
    return {name: cases.curve_and_share(corpus, _options(name), folders[name], STEPS) for name in MODELS}


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_curves_and_the_batch_s_share_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, Any], tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(model, layout), "folder": str(tmp_path), "steps": STEPS}
    found = pool.run("curve_and_share", **given)
    curve, shares = references[model]
    np.testing.assert_allclose(np.array(found[0][0]), np.array(curve), atol=5e-6, rtol=5e-6)
    np.testing.assert_allclose(np.array(found[0][1]), np.array(shares), rtol=1e-4)
    assert len(shares) == 2
    assert all(0 < share < 1 for share in shares)
    assert all(of_rank[0] == found[0][0] for of_rank in found), "ranks disagree about a number that is global"
