"""Models of every objective, likelihood and pooling can be measured, with sequence parallel too."""

from __future__ import annotations

from typing import Any

import pytest

from cellmill.planner.size import measure
from tests.models import model_on_cpu, spec

PARTS: dict[str, Any] = {"cell_decoding": {"likelihood": "nb"}, "masked_value": {"weight": 0.3, "renormalize": True}}


@pytest.mark.parametrize("pooling", [pytest.param("cls", marks=pytest.mark.full), "attention"])
def test_a_sum_with_a_learned_pooling_is_measured(pooling: str) -> None:
    given: Any = {"hidden": 16, "layers": 1, "heads": 2, "objective": "sum", "parts": PARTS, "pooling": pooling}
    whole, half = measure(spec(120, **given)), measure(spec(120, **given), 2, sequence_parallel=True)
    assert whole.parameters == sum(p.numel() for p in model_on_cpu(120, **given).parameters())
    assert half.parameters < whole.parameters
    assert half.workspace_of(4096) > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_flops_of_a_family_whose_rows_are_cells_do_not_depend_on_the_tokens(layers: int) -> None:
    hidden, genes = 32, 300
    size = measure(spec(genes, family="profile", hidden=hidden, layers=layers, objective="cell_decoding", view="drop"))
    # forward and backward are 6 FLOPs per weight and cell: up and down of each block, the decoder and its table
    blocks, decoder = 6 * layers * 8 * hidden**2, 6 * (hidden * 256 + 256 * (genes + 2))
    assert size.pair_flops == 0
    assert size.flops(1, 0, 0) == pytest.approx(0, abs=1)
    assert size.blocks * size.block.flops_per_cell == pytest.approx(blocks)
    assert size.flops(1000, 1e6, 1) == pytest.approx(blocks + decoder)
