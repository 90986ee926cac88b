"""Offloaded AdamW equals torch's bit for bit, in place and on copies of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cellmill.config.run import Train
from cellmill.train import offload
from cellmill.train.offload import OffloadedAdamW
from cellmill.train.optimizer import build_optimizer
from cellmill.train.step_guard import step_if

copied_or_not = pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])


def _pair(monkeypatch: pytest.MonkeyPatch, copied: bool) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return two equal models with torch's AdamW and ours; `copied` as if the parameters were on a GPU."""
    monkeypatch.setattr(offload, "_needs_copy", lambda shard: copied)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    train = Train(steps=1, weight_decay=0.3)
    return models, [build_optimizer(models[0], train), build_optimizer(models[1], train, "optimizer")]


def _step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], step: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    for model, optimizer in zip(models, optimizers):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        model(x).square().sum().backward()
        if step == 1:
            model[2].bias.grad = None  # type: ignore[index, union-attr]
        optimizer.step()
        optimizer.zero_grad()


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@copied_or_not
def test_offloaded_adamw_equals_torchs_bit_for_bit(monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    models, optimizers = _pair(monkeypatch, copied)
    assert type(optimizers[1]) is OffloadedAdamW
    for step in range(5):
        _step(models, optimizers, step)
        assert all(torch.equal(a, b) for a, b in zip(*map(_parameters, models))), step
    for ours, theirs in zip(models[1].parameters(), models[0].parameters()):
        states: list[dict[str, Any]] = [optimizers[1].state[ours], optimizers[0].state[theirs]]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@copied_or_not
def test_weights_written_between_steps_are_used(monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    models, optimizers = _pair(monkeypatch, copied)
    _step(models, optimizers, 0)
    with torch.no_grad():
        for model in models:
            model[0].weight.copy_(torch.ones(7, 5))  # type: ignore[index, union-attr, operator]
    _step(models, optimizers, 2)
    assert all(torch.equal(a, b) for a, b in zip(*map(_parameters, models)))


@copied_or_not
def test_a_step_that_overflowed_changes_nothing(monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    models, optimizers = _pair(monkeypatch, copied)
    for optimizer in optimizers:
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    _step(models, optimizers, 0)
    before = [tensor.clone() for tensor in _parameters(models[1])]
    for optimizer in optimizers:
        optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    _step(models, optimizers, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(models[1])))
    for optimizer in optimizers:
        optimizer.found_inf.zero_()  # type: ignore[attr-defined]
    _step(models, optimizers, 3)
    assert all(torch.equal(a, b) for a, b in zip(*map(_parameters, models)))


@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_an_optimizer_of_a_stage_without_trained_parameters_steps(offload: str | None) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2).requires_grad_(False), Train(steps=1), offload)
    step_if(torch.tensor(True), optimizer)
    optimizer.step()
    assert not optimizer.state
