"""Parameter groups, AdamW and its offloaded form, and the moving average of the weights.

Weight decay applies only to the matrices of linear layers. The type of a parameter's module
decides, never its name.

The average replaces the weights in validation and exports. After each step, average = d * average +
(1 - d) * weights, d = min(ema_decay, (1 + t) / (10 + t)) after t earlier steps, so the first
weights are forgotten soon. A skipped step averages the same weights again. It is float32 and laid
out like the weights: no communication, and the same in every layout. Source: Polyak & Juditsky
1992; the warm-up is TensorFlow's ExponentialMovingAverage's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from cellmill.config.plugin import import_object
from cellmill.config.run import Train
from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.blocks import is_linear
from cellmill.parallel.apply import reshard
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import any_part, get_mesh, to_local
from cellmill.parallel.torch_private import move_all, version_of
from cellmill.train.step_guard import AsyncScalars


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear layers."""
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    return {f"{name}.weight".removeprefix(".") for name in linear}


def adamw(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def build_optimizer(
    model: nn.Module,
    train: Train,
    cpu_offload: str | None = None,
    extras: Callable[[str], Mapping[str, float]] = lambda name: {},
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of `model`, after `materialize`.

    A pipeline stage may have no trained parameter. Keys of a group are `params`, on one mesh;
    `weight_decay`; `lr_scale`, a factor of the scheduled rate, which the loop sets; `matrices`, for
    `OptimizerConfig.matrix_state_names`; and the `state_names` of its parameters. `extras` returns
    options of a parameter's group by plain name (`Method.group`).
    """
    config = train.optimizer
    decayed = decayed_parameters(model)
    matrices = set[str]()
    if config.matrix_state_names is not None:
        blocks = any_part(model).plan.blocks
        matrices = {name for name in decayed if plain_name(name).startswith(f"{blocks}.")}
    # one group for each mesh: the fused step takes no list of tensors on different meshes
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        weight_decay = train.weight_decay if name in decayed else 0.0
        options: dict[str, Any] = {"weight_decay": weight_decay, "lr_scale": 1.0}
        for key, value in extras(plain_name(name)).items():
            if key not in options:
                raise ConfigError(
                    f"finetune: group of {name}: unknown key {key!r}; {did_you_mean(key, options)}"
                )
            options[key] = value
        is_matrix = name in matrices
        options["matrices"] = is_matrix
        options["state_names"] = config.matrix_state_names if is_matrix else config.state_names
        group_key = (get_mesh(parameter), *sorted(options.items()))
        groups.setdefault(group_key, {"params": [], **options})["params"].append(parameter)
    build = config.load() if cpu_offload != "optimizer" else import_object(config.offloaded or "")
    optimizer: torch.optim.Optimizer = build(list(groups.values()) or [{"params": []}], train)
    return optimizer


def get_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's state of a parameter, created as zeros if there is none."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        for group in optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                names = group["state_names"]
        for name in names:
            state[name] = torch.zeros_like(parameter.detach())
            if name == "step":
                state[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return state


class WeightAverage:
    """Average of the trained parameters of `model`, after `materialize`, from their first values."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self._parts: list[tuple[str, Tensor, Tensor]] = []
        """Plain name, parameter and average."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._parts.append((plain_name(name), parameter, parameter.detach().clone()))

    def update(self, step: int) -> None:
        """Move towards the weights after step `step`, from 0. No communication."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        averages = [to_local(average) for _, _, average in self._parts]
        weights = [to_local(weight).detach() for _, weight, _ in self._parts]
        if averages:
            move_all(averages, weights, share)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by plain name, not copied.

        Of a tied parameter that this rank has twice, it is the last copy.
        """
        return {name: average for name, _, average in self._parts}

    @torch.no_grad()
    def fill_tied_copies(self) -> None:
        """Copy what was loaded into `tensors` to the other copies of tied parameters."""
        loaded = self.tensors()
        for name, _, average in self._parts:
            if loaded[name] is not average:
                average.copy_(loaded[name])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the average for a while; its weights come back bit for bit.

        No communication.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # a forward pass may have left the old weights gathered
        for _, parameter, average in self._parts:
            weights = to_local(parameter)
            averages = to_local(average)
            previous = weights.clone()
            weights.copy_(averages)
            averages.copy_(previous)


@dataclass
class _Host:
    """Pinned copies of this rank's shard of a parameter and of its gradient."""

    weights: Tensor
    gradient: Tensor
    version: tuple[int, int] | None = None
    """`_version_of` the parameter when `weights` equalled it; loading a checkpoint changes it."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) on the CPU, for float32 parameters on a device.

    Gradients are copied to pinned host memory; fused AdamW updates this rank's shards there, and
    the new weights are copied back without blocking. The moments, half of the state of
    mixed-precision training, take no device memory. Each step moves 4 bytes for each local element
    in each direction. It waits only for gradients, group by group, so that one group is computed
    while the next is copied. Source: ZeRO-Offload, Ren et al. 2021, section 4.
    """

    found_inf: Tensor | None = None
    """Scalar on any device; the step changes nothing if it is 1, as in fused AdamW."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        defaults = {
            "lr": train.lr,
            "betas": (train.beta1, train.beta2),
            "eps": 1e-8,
            "weight_decay": 0.0,
        }
        super().__init__(groups, defaults)
        self._hosts: dict[Tensor, _Host] = {}
        pin = torch.accelerator.is_available()
        for group in self.param_groups:
            for parameter in group["params"]:
                # a DTensor stays one: checkpoints need its placement
                host = parameter.detach().to("cpu")
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(host),
                    "exp_avg_sq": torch.zeros_like(host),
                }
                if _needs_copy(to_local(parameter)):
                    weights = torch.empty_like(to_local(host), pin_memory=pin)
                    gradient = torch.empty_like(to_local(host), pin_memory=pin)
                    self._hosts[parameter] = _Host(weights, gradient)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        trained = []
        for group in self.param_groups:
            trained.append([p for p in group["params"] if p.grad is not None])
        # copied before the gradients
        found_inf = None if self.found_inf is None else AsyncScalars(self.found_inf)
        arrivals = [self._fetch(parameters) for parameters in trained]
        if found_inf is not None and any(found_inf.read()):
            return
        for group, parameters, arrival in zip(self.param_groups, trained, arrivals):
            if arrival is not None:
                arrival.synchronize()
            weights = []
            gradients = []
            for parameter in parameters:
                host = self._hosts.get(parameter)
                weights.append(to_local(parameter) if host is None else host.weights)
                gradients.append(to_local(parameter.grad) if host is None else host.gradient)
            states = [self.state[parameter] for parameter in parameters]
            adamw_step(
                weights,
                gradients,
                [to_local(state["exp_avg"]) for state in states],
                [to_local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter in parameters:
                host = self._hosts.get(parameter)
                if host is not None:
                    # ordered before the next forward pass, whose gradients are awaited before
                    # `weights` changes again
                    to_local(parameter).copy_(host.weights, non_blocking=True)
                    host.version = _version_of(parameter)

    def _fetch(self, parameters: list[Tensor]) -> torch.cuda.Event | None:
        """Start copying gradients, and weights written from outside; return their arrival."""
        for parameter in parameters:
            host = self._hosts.get(parameter)
            if host is not None:
                host.gradient.copy_(to_local(parameter.grad), non_blocking=True)
                if host.version != _version_of(parameter):
                    host.weights.copy_(to_local(parameter), non_blocking=True)
        if not parameters or to_local(parameters[0]).device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(to_local(parameters[0]).device))
        return event


def _version_of(parameter: Tensor) -> tuple[int, int]:
    """Return a value that changes when the parameter is written in place or moved."""
    local = to_local(parameter)
    return local.data_ptr(), version_of(local)


def _needs_copy(shard: Tensor) -> bool:
    return shard.device.type != "cpu"
