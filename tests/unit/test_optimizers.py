"""Optimizers and their groups, and the learning rate of each step."""

import copy
import math
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from cellmill.config import plugin
from cellmill.config.checks import check_together
from cellmill.config.parts.methods import AdamWConfig, OptimizerConfig
from cellmill.config.run import Train, learning_rate
from cellmill.errors import ConfigError
from cellmill.planner.measure.meter import OperationMeter
from cellmill.train import optimizer as optimizers
from cellmill.train.muon import Muon, choose_owners, orthogonalise
from cellmill.train.optimizer import OffloadedAdamW, build_optimizer, get_state
from cellmill.train.step_guard import step_if
from tests.models import model_on_cpu, seeded, train_options

TRAIN = Train.model_validate({"steps": 1, "optimizer": "muon", "lr": 0.1, "weight_decay": 0.5})
MODEL = {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2, "objective": "cell_decoding"}


def _model(seed: int = 0) -> Any:
    model = model_on_cpu(20, **MODEL)
    generator = seeded(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_singular_values_of_an_update_are_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=seeded(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    # in the directions of the matrix the update is diagonal
    update = u.T @ orthogonalise(matrix) @ v.T
    values = update.diagonal()
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(update, values.diag(), atol=1e-5, rtol=0)
    zeros = torch.zeros(shape)
    assert not orthogonalise(zeros).any()


def test_only_matrices_of_blocks_are_stepped_by_muon() -> None:
    model = _model()
    plain = _model()
    optimizer = build_optimizer(model, TRAIN)
    train = TRAIN.model_copy(update={"optimizer": AdamWConfig(name="adamw")})
    adamw = build_optimizer(plain, train)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = []
    for step in range(2):
        generator = seeded(step)
        gradient_by_name = {}
        for (name, parameter), twin in zip(model.named_parameters(), plain.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
            twin.grad = gradient.clone()
            gradient_by_name[name] = gradient.clone()
        gradients.append(gradient_by_name)
        optimizer.step()
        adamw.step()
    of_adamw = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not _is_matrix(name, parameter):
            assert torch.equal(parameter, of_adamw[name]), name
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            continue
        expected = before[name]
        momentum = torch.zeros_like(parameter)
        rate = 0.1 * 0.2 * max(parameter.shape) ** 0.5
        for gradient_by_name in gradients:
            gradient = gradient_by_name[name]
            momentum = 0.95 * momentum + gradient
            update = orthogonalise(0.95 * momentum + gradient)
            expected = 0.95 * expected - rate * update
        torch.testing.assert_close(parameter.detach(), expected, msg=name)
        torch.testing.assert_close(state["momentum"], momentum, msg=name)


def test_a_skipped_step_ignores_infinite_gradients() -> None:
    model = _model()
    optimizer = build_optimizer(model, TRAIN)
    assert isinstance(optimizer, Muon)
    optimizer.step()
    states = []
    for parameter in model.parameters():
        states += get_state(optimizer, parameter).values()
    tensors = [*model.parameters(), *states]
    before = [tensor.detach().clone() for tensor in tensors]
    for parameter in model.parameters():
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for tensor, expected in zip(tensors, before):
        assert torch.equal(tensor, expected)


def test_muon_leaves_a_matrix_without_a_gradient_as_it_is() -> None:
    trained = nn.Parameter(torch.eye(3))
    without_gradient = nn.Parameter(torch.eye(3))
    trained.grad = torch.ones(3, 3)
    group = {"params": [trained, without_gradient], "weight_decay": 0.5, "matrices": True}
    Muon([group], Train(steps=1, lr=0.1)).step()
    assert not torch.equal(trained, torch.eye(3))
    assert torch.equal(without_gradient, torch.eye(3))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_of_muon_allocates_as_much_as_planned(sharded: bool) -> None:
    n = 50
    matrices = [nn.Parameter(torch.ones(32, 32)) for _ in range(n)]
    for matrix in matrices:
        matrix.grad = torch.ones(32, 32)
    optimizer = Muon([{"params": matrices, "weight_decay": 0.0, "matrices": True}], TRAIN)
    optimizer.step()
    if sharded:  # over a group of one rank
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        [shared] = optimizer._shared
        shared.group = dist.group.WORLD
        shared.blocks = [[(0, 32, 0, 32)]] * n
        shared.owned = [[*range(n)]]
    try:
        meter = OperationMeter()
        with meter, meter.window() as window:
            optimizer.step()
    finally:
        if sharded:
            dist.destroy_process_group()
    copies = window.peak_bytes() / (n * 32 * 32 * 4)
    assert copies == pytest.approx(TRAIN.optimizer.count_step_copies(sharded), rel=0.1)


def test_owners_have_about_the_same_work() -> None:
    shapes = [(64, 192), (64, 64), (64, 256), (256, 64)] * 5
    chosen = choose_owners(shapes, 4)
    work = [0, 0, 0, 0]
    for (m, n), owner in zip(shapes, chosen):
        work[owner] += m * n * min(m, n)
    assert max(work) / min(work) < 1.2
    assert choose_owners([(8, 8)], 4) == [0]


def test_an_installed_optimizer_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("toy_momentum", "cellmill_toy.options:ToyMomentum", "cellmill.optimizer")
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [point] if group == point.group else []
    )
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugin")
    given = {"name": "toy_momentum", "decay": 0.5}
    train = Train.model_validate({"steps": 1, "lr": 0.1, "weight_decay": 0.0, "optimizer": given})
    assert train.optimizer.states_per_parameter == 1
    assert train.model_dump(mode="json")["optimizer"] == given
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, train)
    for finite in (True, False):
        model.weight.grad = torch.ones(2, 2)
        step_if(torch.tensor(finite), optimizer, train.optimizer.fused)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 0.5)
    assert list(get_state(optimizer, model.bias)) == ["momentum"]
    for other in (given, "muon"):
        options = train_options(
            train={"steps": 1, "optimizer": other}, parallel={"cpu_offload": "optimizer"}
        )
        with pytest.raises(
            ConfigError, match=r"requires train\.optimizer adamw, got (toy_momentum|muon); set"
        ):
            check_together(options)
    monkeypatch.delitem(sys.modules, "cellmill_toy.options")


def test_an_optimizer_without_options_is_stored_as_its_name() -> None:
    default = Train(steps=1)
    assert default.model_dump(mode="json")["optimizer"] == "adamw"
    assert default.model_dump(mode="python")["optimizer"] == "adamw"
    for name, choice in OptimizerConfig.built_in().items():
        train = Train.model_validate({"steps": 1, "optimizer": name})
        assert type(train.optimizer) is choice
        assert train.model_dump()["optimizer"] == name
        assert Train.model_validate(train.model_dump()) == train
        assert train.optimizer.states_per_parameter == 2


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
def test_offloaded_adamw_is_bitwise_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    # as if the parameters were on a GPU
    monkeypatch.setattr(optimizers, "_needs_copy", lambda shard: copied)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    offloaded = copy.deepcopy(plain)
    first = next(offloaded.parameters())
    train = Train(steps=1, weight_decay=0.3)
    theirs = build_optimizer(plain, train)
    ours = build_optimizer(offloaded, train, "optimizer")
    assert type(ours) is OffloadedAdamW
    for step in range(6):
        x = torch.randn(4, 5, generator=seeded(step))
        before = first.detach().clone()
        for model, optimizer in ((plain, theirs), (offloaded, ours)):
            parameters = [*model.parameters()]
            if step == 3:  # a weight is written between two steps
                with torch.no_grad():
                    parameters[0].fill_(1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            model(x).square().sum().backward()
            if step == 1:
                parameters[-1].grad = None
            optimizer.found_inf = torch.tensor(float(step == 4))
            optimizer.step()
            optimizer.zero_grad()
        for parameter, expected in zip(offloaded.parameters(), plain.parameters()):
            assert torch.equal(parameter, expected), step
        is_skipped = torch.equal(first, before)
        assert is_skipped == (step == 4), "only the step that overflowed is skipped"
    for parameter, expected in zip(offloaded.parameters(), plain.parameters()):
        state = ours.state[parameter]
        expected_state = theirs.state[expected]
        assert state.keys() == expected_state.keys()
        for key, value in state.items():
            assert torch.equal(value, expected_state[key])


@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_an_optimizer_without_trained_parameters_steps(offload: str | None) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = build_optimizer(frozen, Train(steps=1), offload)
    step_if(torch.tensor(True), optimizer)
    optimizer.step()
    assert not optimizer.state


SCHEDULED = Train(steps=100, lr=2.0, warmup_steps=10, min_lr_frac=0.1)
WSD = {"schedule": "wsd", "decay_frac": 0.2}
COSINE = {
    step: 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * (step - 9) / 90)) for step in (10, 55, 99)
}
LINEAR = {step: 2 - 1.8 * (step - 9) / 90 for step in (10, 55, 99)}
CONSTANT_AND_LINEAR = dict.fromkeys(range(10, 80), 2.0) | {
    step: 2 - 1.8 * (step - 79) / 20 for step in range(80, 100)
}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, {0: 0.2, 4: 1.0, 9: 2.0} | COSINE),
        ({"warmup_steps": 0}, {0: 0.2 + 0.9 * (1 + math.cos(math.pi / 100)), 99: 0.2}),
        ({"schedule": "linear"}, {9: 2.0} | LINEAR),
        ({"schedule": "constant"}, {4: 1.0} | dict.fromkeys(range(9, 100), 2.0)),
        (WSD, {4: 1.0} | CONSTANT_AND_LINEAR),
        # warm-up and decay do not fit: after the warm-up
        (WSD | {"decay_frac": 1.0}, {9: 2.0, 54: 1.1, 99: 0.2}),
        # the decay is rounded up to whole steps: 12.5 of 100 are the last 13
        (WSD | {"decay_frac": 0.125}, {86: 2.0, 87: 2.0 - 1.8 / 13, 99: 0.2}),
    ],
    ids=["cosine", "no warm-up", "linear", "constant", "wsd", "wsd all decay", "wsd rounded"],
)
def test_the_rate_of_a_step_is_the_closed_form_of_its_schedule(
    changes: dict[str, Any], rates: dict[int, float]
) -> None:
    train = SCHEDULED.model_copy(update=changes)
    for step, rate in rates.items():
        assert learning_rate(train, step, 100) == pytest.approx(rate)
