"""Muon: orthogonal updates for the matrices of the blocks, AdamW for the rest, and skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellmill.config.checks import check_together
from cellmill.config.options import TrainOptions
from cellmill.config.run import Train
from cellmill.errors import ConfigError
from cellmill.train.muon import Muon, orthogonalised, owners
from cellmill.train.optimizer import build_optimizer, state_of
from tests.models import model_on_cpu

TRAIN = Train(steps=1, optimizer="muon", lr=0.1, weight_decay=0.5)
MODEL = {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2, "objective": "cell_decoding"}


def _model(seed: int = 0) -> Any:
    model, generator = model_on_cpu(20, **MODEL), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_singular_values_of_an_update_are_about_one_and_its_directions_those_of_the_matrix(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalised(matrix) @ v.T
    assert ((found.diagonal() > 0.6) & (found.diagonal() < 1.3)).all()
    torch.testing.assert_close(found, found.diagonal().diag(), atol=1e-5, rtol=0)
    assert not orthogonalised(torch.zeros(shape)).any()


def test_two_steps_are_muon_for_matrices_of_blocks_and_adamw_for_the_rest() -> None:
    model, plain = _model(), _model()
    optimizer = build_optimizer(model, TRAIN)
    adamw = build_optimizer(plain, TRAIN.model_copy(update={"optimizer": "adamw"}))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        optimizer.step()
        adamw.step()
    for (name, found), rest in zip(model.named_parameters(), plain.parameters()):
        expected, momentum, gradient = before[name], torch.zeros_like(found), found.grad
        assert gradient is not None
        for _ in range(2):
            momentum = 0.95 * momentum + gradient
            scale = 0.1 * 0.2 * max(found.shape) ** 0.5
            if found.ndim == 2:
                expected = 0.95 * expected - scale * orthogonalised(0.95 * momentum + gradient)
        if _is_matrix(name, found):
            torch.testing.assert_close(found.detach(), expected, msg=name)
            torch.testing.assert_close(optimizer.state[found]["momentum"], momentum, msg=name)
        else:
            assert torch.equal(found, rest), name
            assert set(optimizer.state[found]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_skipped_step_changes_nothing_even_if_gradients_are_not_finite() -> None:
    model = _model()
    optimizer = build_optimizer(model, TRAIN)
    assert isinstance(optimizer, Muon)
    optimizer.step()
    states = [state for parameter in model.parameters() for state in state_of(optimizer, parameter).values()]
    before = [tensor.detach().clone() for tensor in (*model.parameters(), *states)]
    for parameter in model.parameters():
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, (*model.parameters(), *states)))


def test_owners_have_about_the_same_work() -> None:
    shapes = [(64, 192), (64, 64), (64, 256), (256, 64)] * 5
    chosen = owners(shapes, 4)
    work = [sum(m * n * min(m, n) for (m, n), owner in zip(shapes, chosen) if owner == rank) for rank in range(4)]
    assert max(work) / min(work) < 1.2
    assert owners([(8, 8)], 4) == [0]


def test_offloading_is_refused() -> None:
    given = {"train": {"steps": 1, "optimizer": "muon"}, "parallel": {"cpu_offload": "optimizer"}}
    options = TrainOptions.model_validate({name: given.get(name, {}) for name in TrainOptions.model_fields})
    with pytest.raises(ConfigError, match=r"requires train\.optimizer adamw, got muon"):
        check_together(options)
