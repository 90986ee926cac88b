"""view_loss vicreg in the layouts: its statistics are those of the global batch, however that is spread and cut."""

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

MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1},
    "profile": {"family": "profile", "hidden": 32, "layers": 2, "dropout": 0.1},
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("encoder", {"strategy": "ddp"}, 256),
    ("encoder", {"sharding_strategy": "HYBRID_SHARD"}, 256),
    ("encoder", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}, 4096),
    ("profile", {"strategy": "ddp"}, 4096),
    # a rank needs a new schedule of torch where its lengths change, its data-parallel peer maybe not
    ("encoder", {"sharding_strategy": "FULL_SHARD", "pp": 2, "microbatches": 4}, 4096),
]
STEPS = 4


def _options(model: str, token_budget: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"invariance_weight": 1, "variance_weight": 1, "covariance_weight": 0.04}
    objective = {"objective": "cell_decoding", "view_loss": "vicreg"} | weights
    return options(layout, train={"token_budget": token_budget}) | split(MODELS[model] | objective)


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process with one micro-batch a step."""
    return curves_of_one_process(corpus, {name: _options(name, 4096) for name in MODELS}, tmp_path_factory, STEPS)


@pytest.mark.parametrize(("model", "layout", "token_budget"), CASES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool,
    corpus: str,
    references: dict[str, np.ndarray],
    tmp_path: Path,
    model: str,
    layout: dict[str, Any],
    token_budget: int,
) -> None:
    given = {
        "corpus": corpus,
        "options": _options(model, token_budget, layout),
        "folder": str(tmp_path),
        "steps": STEPS,
    }
    assert_curve_in_every_rank(pool, given, references[model])


def test_a_micro_batch_is_any_part_of_a_step(
    references: dict[str, np.ndarray], alone: None, corpus: str, tmp_path: Path
) -> None:
    found = cases.curve(corpus, _options("encoder", 128), str(tmp_path), STEPS)
    np.testing.assert_allclose(np.array(found), references["encoder"], atol=5e-6, rtol=5e-6)
