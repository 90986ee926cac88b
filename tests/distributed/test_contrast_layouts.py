"""supervised_contrastive in the layouts: cells of the whole global batch are compared, however it is spread and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LABEL = {"label_column": "cell_type"}
PARTS = {
    "supervised_contrastive": LABEL | {"weight": 0.3},
    "cell_decoding": {"decoder_hidden": 16, "view_loss": "vicreg"},
    "masked_value": {"weight": 0.5},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "alone": {"name": "supervised_contrastive", "temperature": 0.3} | LABEL,
    "sum": {"name": "sum", "parts": PARTS},
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("alone", {"strategy": "ddp"}, 256),
    ("alone", {"sharding_strategy": "HYBRID_SHARD"}, 256),
    ("alone", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}, 4096),
    ("alone", {"sharding_strategy": "FULL_SHARD", "pp": 2, "microbatches": 4}, 4096),
    ("sum", {"sharding_strategy": "HYBRID_SHARD"}, 256),
]
STEPS = 4
Lines = list[dict[str, float]]


def _options(objective: str, token_budget: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": token_budget, "val_every_steps": 2}
    return options(layout, train=train) | {"objective": OBJECTIVES[objective]}


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """Lines of one process with one micro-batch a step."""
    return {
        name: cases.logged(corpus, _options(name, 8192), str(tmp_path_factory.mktemp("one")), STEPS)
        for name in OBJECTIVES
    }


def _assert_equal(lines: Lines, expected: Lines) -> None:
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, other in zip(lines, expected):
        np.testing.assert_allclose(list(line.values()), list(other.values()), atol=5e-6, rtol=5e-6, err_msg=str(other))


@pytest.mark.parametrize(("objective", "layout", "token_budget"), CASES, ids=str)
def test_losses_and_validation_are_those_of_one_process(
    pool: Pool,
    corpus: str,
    references: dict[str, Lines],
    tmp_path: Path,
    objective: str,
    layout: dict[str, Any],
    token_budget: int,
) -> None:
    given = _options(objective, token_budget, layout)
    found = pool.run("logged", corpus=corpus, options=given, folder=str(tmp_path), steps=STEPS)
    _assert_equal(found[0], references[objective])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_micro_batch_is_any_part_of_a_step(
    references: dict[str, Lines], alone: None, corpus: str, tmp_path: Path, objective: str
) -> None:
    assert any("val_loss" in line for line in references[objective])
    _assert_equal(cases.logged(corpus, _options(objective, 128), str(tmp_path), STEPS), references[objective])
