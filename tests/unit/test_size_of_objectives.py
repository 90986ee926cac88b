"""Models of every objective, likelihood and pooling can be measured, with sequence parallel too."""

from __future__ import annotations

from typing import Any

import pytest

from cellmill.planner.size import measure
from tests.models import model_on_cpu, spec

PARTS: dict[str, Any] = {"cell_decoding": {"likelihood": "nb"}, "masked_value": {"weight": 0.3, "renormalize": True}}


@pytest.mark.parametrize("pooling", ["cls", "attention"])
def test_a_sum_with_a_learned_pooling_is_measured(pooling: str) -> None:
    given: Any = {"hidden": 16, "layers": 1, "heads": 2, "objective": "sum", "parts": PARTS, "pooling": pooling}
    whole, half = measure(spec(120, **given)), measure(spec(120, **given), 2, sequence_parallel=True)
    assert whole.parameters == sum(p.numel() for p in model_on_cpu(120, **given).parameters())
    assert half.parameters < whole.parameters
    assert half.workspace_of(4096) > 0
