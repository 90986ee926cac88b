"""Parameter groups of the optimizer, gradual unfreezing, and the exponential moving average of the weights.

Weight decay applies only to the matrices of linear layers. The type of a parameter's module decides, never its name.

Parameters that begin to train later have their gradients dropped until then, not frozen: DistributedDataParallel and
FSDP2 record at the start what requires a gradient. Without a gradient the optimizer leaves a parameter unchanged.

The average replaces the weights in validation and exports. After each step, average = d * average + (1 - d) * weights,
d = min(ema_decay, (1 + t) / (10 + t)) after t earlier steps, so the first weights are forgotten soon. A skipped step
averages the same weights again. It is float32 and laid out like the weights: no communication, and the same in every
layout. Source: Polyak & Juditsky 1992; the warm-up is TensorFlow's ExponentialMovingAverage's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cellmill.config.plugin import import_object
from cellmill.config.run import Train
from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.blocks import is_linear
from cellmill.parallel.apply import reshard
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import local_of, mesh_of
from cellmill.parallel.stages import any_part
from cellmill.parallel.torch_private import move_all


def adamw(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def build_optimizer(
    model: nn.Module,
    train: Train,
    cpu_offload: str | None = None,
    extras: Callable[[str], Mapping[str, float]] = lambda name: {},
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of `model`, after `materialize`; a pipeline stage may have none.

    Keys of its groups: `params`, on one mesh; `weight_decay`; `lr_scale`, a factor of the scheduled rate, which the
    loop sets; `matrices`, for `OptimizerConfig.matrix_state_names`; and the `state_names` of its parameters. `extras`
    returns options of a parameter's group by plain name (`Method.group`).
    """
    config, decayed, matrices = train.optimizer, decayed_parameters(model), set[str]()
    if config.matrix_state_names is not None:
        blocks = any_part(model).plan.blocks
        matrices = {name for name in decayed if plain_name(name).startswith(f"{blocks}.")}
    # one group for each mesh: the fused step takes no list of tensors on different meshes
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            defaults: dict[str, Any] = {"weight_decay": train.weight_decay if name in decayed else 0.0, "lr_scale": 1.0}
            options = defaults | dict(extras(plain_name(name)))
            for key in options.keys() - defaults.keys():
                raise ConfigError(f"finetune: group of {name}: unknown key {key!r}; {did_you_mean(key, defaults)}")
            options["matrices"] = name in matrices
            options["state_names"] = config.matrix_state_names if name in matrices else config.state_names
            alike = (mesh_of(parameter), *sorted(options.items()))
            groups.setdefault(alike, {"params": [], **options})["params"].append(parameter)
    build = config.load() if cpu_offload != "optimizer" else import_object(config.offloaded or "")
    optimizer: torch.optim.Optimizer = build(list(groups.values()) or [{"params": []}], train)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of a parameter, created as zeros if there is none."""
    if not optimizer.state[parameter]:
        group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {
            name: step if name == "step" else torch.zeros_like(parameter.detach()) for name in group["state_names"]
        }
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    return state


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear layers."""
    return {f"{name}.weight" if name else "weight" for name, module in model.named_modules() if is_linear(module)}


class Unfreezing:
    """First steps, from 0, of the parameters that a rank holds: `Method.first_step` of their plain names."""

    def __init__(self, model: nn.Module, first_step: Callable[[str], int]) -> None:
        steps = {name: first_step(plain_name(name)) for name, p in model.named_parameters() if p.requires_grad}
        self.later = {name: step for name, step in steps.items() if step > 0}

    def drop_gradients(self, model: nn.Module, step: int) -> None:
        """Drop gradients of what does not train yet in step `step`, from 0. No communication."""
        if step >= max(self.later.values(), default=0):
            return
        for name, parameter in model.named_parameters():
            if self.later.get(name, 0) > step:
                parameter.grad = None


class WeightAverage:
    """Average of the parameters of `model`, after `materialize`, that require a gradient; begins with their values."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        trained = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
        self._parts = [(name, parameter, parameter.detach().clone()) for name, parameter in trained]

    def update(self, step: int) -> None:
        """Move towards the weights after step `step`, from 0. No communication."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        if self._parts:
            _, weights, averages = zip(*self._parts)
            move_all([*map(local_of, averages)], [local_of(weight).detach() for weight in weights], share)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average by plain name, not copied; of a tied parameter that this rank has twice the last one."""
        return {name: average for name, _, average in self._parts}

    @torch.no_grad()
    def fill_tied_copies(self) -> None:
        """Copy what was loaded into `tensors` to the other copy of a tied parameter that this rank has twice."""
        loaded = self.tensors()
        for name, _, average in self._parts:
            if loaded[name] is not average:
                average.copy_(loaded[name])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the average for a while; its weights come back bit for bit. No communication."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # weights that a forward pass left gathered would be those of before
        for _, parameter, average in self._parts:
            own, other = local_of(parameter), local_of(average)
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)
