"""Poolings of the encoder are their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellmill.config.checks import check_together
from cellmill.config.options import TrainOptions
from cellmill.errors import ConfigError
from cellmill.models.batch import to_tensors
from cellmill.models.cell_encoder import attended_state
from tests.models import KEYS
from tests.unit.test_cell_decoding import _cells, _model


def _encoder(pooling: str, **options: Any) -> Any:
    model = _model("encoder", pooling=pooling, **options)
    if pooling == "attention":
        torch.nn.init.normal_(model.pool_query, generator=torch.Generator().manual_seed(0))
    return model


def test_the_vector_of_cls_is_the_last_state_of_a_token_before_the_cell() -> None:
    model, batch = _encoder("cls").eval(), to_tensors(_cells((5,)))
    x = torch.cat(
        [model.cell_token[None], model.inputs(model.objective.prepare(model.objective.view(batch, **KEYS), **KEYS))]
    )
    n = len(x)
    for block in model.blocks:
        x = block(x, torch.tensor([0, n], dtype=torch.int32), [n], torch.arange(n))
    prepared = model.prepare(model.view(batch, **KEYS), **KEYS)
    torch.testing.assert_close(model.cell_vectors(model.states(prepared), prepared), model.norm(x)[:1])


def test_attention_is_a_softmax_over_each_cell() -> None:
    model, batch = _encoder("attention").eval(), to_tensors(_cells((7, 1, 20)))
    prepared = model.prepare(model.view(batch, **KEYS), **KEYS)
    states = 100 * torch.randn(sum(prepared.lengths), 16)  # a softmax that is not shifted would overflow
    expected = [
        (part @ model.pool_query / 4).softmax(0) @ part if len(part) else torch.zeros(16)
        for part in states.split(prepared.lengths)
    ]
    torch.testing.assert_close(model.cell_vectors(states, prepared), torch.stack(expected), rtol=1e-4, atol=1e-4)
    mean = _model("encoder").cell_vectors(states, prepared)
    torch.testing.assert_close(attended_state(states, prepared, torch.zeros(16)), mean, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "attention"])
def test_a_pooling_that_no_loss_trains_is_refused(pooling: str) -> None:
    sections = {"tokens": {}, "stream": {}, "parallel": {}, "train": {"steps": 1}, "model": {"pooling": pooling}}
    masked = {"name": "masked_value", "cell_loss_weight": 0}
    both = {"name": "sum", "parts": {"cell_decoding": {}, "masked_value": {"cell_loss_weight": 0}}}
    check_together(TrainOptions.model_validate(sections | {"objective": both}))
    with pytest.raises(ConfigError) as raised:
        check_together(TrainOptions.model_validate(sections | {"objective": masked}))
    assert str(raised.value) == (
        f"model.pooling {pooling}: expected an objective that reads the cell's vector, got masked_value with "
        "cell_loss_weight 0; set it above 0, or pooling to mean"
    )
