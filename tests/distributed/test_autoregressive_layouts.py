"""Family autoregressive in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, curves_of_one_process
from tests.distributed.pool import Pool

MODEL = {"family": "autoregressive", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("continuous", {"strategy": "ddp"}),
    ("continuous", {"sharding_strategy": "HYBRID_SHARD"}),
    ("continuous", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("continuous", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("binned", {"tp": 4}),
    ("binned", {"pp": 2, "tp": 2, "sequence_parallel": True}),
]
STEPS = 4


def _options(tokenizer: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": 256, "checkpoint_every_steps": 2}  # several micro-batches a step
    sections = {"model": MODEL, "objective": {"name": "next_gene"}}
    return options(layout, train=train, tokens={"tokenizer": tokenizer}) | sections


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process."""
    given = {name: _options(name) for name in ("continuous", "binned")}
    return curves_of_one_process(corpus, given, tmp_path_factory, STEPS)


@pytest.mark.parametrize(("tokenizer", "layout"), CASES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, tokenizer: str, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(tokenizer, layout), "folder": str(tmp_path), "steps": STEPS}
    assert_curve_in_every_rank(pool, given, references[tokenizer])


def test_a_run_of_one_process_goes_on_in_another_layout(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    cases.curve(options=_options("continuous"), steps=2, **given)
    layout = {"pp": 2, "sharding_strategy": "FULL_SHARD"}
    curves = pool.run("curve", options=_options("continuous", layout), steps=STEPS, load=True, **given)
    np.testing.assert_allclose(np.array(curves[0]), references["continuous"][2:], atol=5e-6, rtol=5e-6)
