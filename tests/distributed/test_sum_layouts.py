"""Objective sum in the layouts: the loss of each part, gradient norms and validation are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

PARTS: dict[str, Any] = {"cell_decoding": {"decoder_hidden": 16}, "masked_value": {"weight": 0.3, "mask_frac": 0.3}}
STEPS = 4
Lines = list[dict[str, float]]


def _options(layout: dict[str, Any] | None = None, **objective: Any) -> dict[str, Any]:
    train = {"token_budget": 256, "val_every_steps": 2}
    return options(layout, train=train) | {"objective": objective or {"name": "sum", "parts": PARTS}}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Lines of one process."""
    lines = cases.logged(corpus, _options(), str(tmp_path_factory.mktemp("one")), STEPS)
    assert {"loss_cell_decoding", "loss_masked_value"} < lines[0].keys()
    assert {"val_loss_cell_decoding", "val_loss_masked_value"} < lines[-1].keys()
    return lines


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "ddp"},
        {"sharding_strategy": "HYBRID_SHARD"},
        {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
        {"pp": 2, "sharding_strategy": "FULL_SHARD"},
    ],
    ids=str,
)
def test_every_part_is_that_of_one_process(
    pool: Pool, corpus: str, reference: Lines, tmp_path: Path, layout: dict[str, Any]
) -> None:
    lines = pool.run("logged", corpus=corpus, options=_options(layout), folder=str(tmp_path), steps=STEPS)[0]
    assert [line.keys() for line in lines] == [line.keys() for line in reference]
    for line, expected in zip(lines, reference):
        np.testing.assert_allclose(list(line.values()), list(expected.values()), atol=5e-6, rtol=5e-6)


def test_a_sum_of_one_part_is_that_objective(alone: None, corpus: str, tmp_path: Path) -> None:
    sums = {"name": "sum", "parts": {"cell_decoding": {}}}
    one, other = (
        cases.curve(corpus, _options(**objective), str(tmp_path / objective["name"]), STEPS)
        for objective in ({"name": "cell_decoding"}, sums)
    )
    np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-6)
