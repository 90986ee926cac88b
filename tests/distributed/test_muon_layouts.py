"""Muon in the layouts: matrices in shards get the update that they get in one process, in another layout too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_through_layouts
from tests.distributed.pool import Pool

COURSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"strategy": "ddp"}, {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ({"sharding_strategy": "FULL_SHARD"}, {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ({"pp": 2, "tp": 2}, {"sharding_strategy": "HYBRID_SHARD"}),
]
"""Layouts of the first and of the last three steps."""
EACH, STEPS = 3, 6


def _options(layout: dict[str, Any]) -> dict[str, Any]:
    train = {
        "optimizer": "muon",
        "token_budget": 512,
        "lr": 5e-3,
        "schedule": "constant",
        "checkpoint_every_steps": EACH,
    }
    return options(layout, train=train) | {"objective": {"name": "cell_decoding"}}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Curve of one process."""
    return np.array(cases.curve(corpus, _options({}), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.parametrize("course", COURSES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, course: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    assert_curve_through_layouts(pool, given, [_options(layout) for layout in course], EACH, reference)
