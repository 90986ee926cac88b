"""Muon in the layouts: matrices in shards get the update that they get in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank
from tests.distributed.pool import Pool

LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"sharding_strategy": "FULL_SHARD"},
    {"sharding_strategy": "HYBRID_SHARD"},
    {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
    {"pp": 2, "sharding_strategy": "FULL_SHARD"},
]
STEPS = 5


def _options(layout: dict[str, Any]) -> dict[str, Any]:
    train = {"optimizer": "muon", "token_budget": 512, "lr": 5e-3}
    return options(layout, train=train) | {"objective": {"name": "cell_decoding"}}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Curve of one process."""
    return np.array(cases.curve(corpus, _options({}), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(layout), "folder": str(tmp_path), "steps": STEPS}
    assert_curve_in_every_rank(pool, given, reference)
