"""Optimizers by the name in `train.optimizer`, with weight decay only on the matrices of linear layers.

The type of a parameter's module decides, never its name: norms, biases and embeddings of any family do not decay.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cellmill.config.run import Train
from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.linear_layers import is_linear
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import mesh_of
from cellmill.parallel.pipeline_stages import PipelineStages
from cellmill.train.muon import Muon
from cellmill.train.offload import OffloadedAdamW

Groups = list[dict[str, Any]]
Build = Callable[[Groups, Train], torch.optim.Optimizer]


def _adamw(groups: Groups, train: Train) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2019."""
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def _muon(groups: Groups, train: Train) -> torch.optim.Optimizer:
    return Muon(groups, train.lr, (train.beta1, train.beta2))


OPTIMIZERS: dict[str, Build] = {"adamw": _adamw, "muon": _muon}
"""Builders by name. Fused ones skip a bad step without a wait of the host (see `step_guard.step_if`)."""
STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    OffloadedAdamW: ("step", "exp_avg", "exp_avg_sq"),
}
"""State of a parameter, zero before the first step: a scalar `step`, and tensors of the parameter's shape.

That of `Muon` depends on the parameter: `Muon.state_names`.
"""


def build_optimizer(
    model: nn.Module,
    train: Train,
    cpu_offload: str | None = None,
    extras: Callable[[str], Mapping[str, float]] = lambda name: {},
) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of `model`, after `materialize`; a pipeline stage may have none.

    Parameters
    ----------
    cpu_offload
        With "optimizer" the moments are on the CPU; with "full" the parameters already are.
    extras
        Group options of a parameter by plain name, as `Method.group`.
    """
    decayed = decayed_parameters(model)
    matrices = {name for name in decayed if _is_in_block(model, name)} if train.optimizer == "muon" else set()
    # one group for each mesh: the fused step takes no list of tensors on different meshes
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            defaults = {"weight_decay": train.weight_decay if name in decayed else 0.0, "lr_scale": 1.0}
            options = defaults | dict(extras(plain_name(name)))
            for key in options.keys() - defaults.keys():
                raise ConfigError(f"finetune: group of {name}: unknown key {key!r}; {did_you_mean(key, defaults)}")
            options["matrices"] = name in matrices
            alike = (mesh_of(parameter), *sorted(options.items()))
            groups.setdefault(alike, {"params": [], **options})["params"].append(parameter)
    given = list(groups.values()) or [{"params": []}]
    if cpu_offload != "optimizer":
        return OPTIMIZERS[train.optimizer](given, train)
    if train.optimizer != "adamw":
        raise ConfigError(f"parallel.cpu_offload optimizer requires train.optimizer adamw, got {train.optimizer}")
    return OffloadedAdamW(given, lr=train.lr, betas=(train.beta1, train.beta2))


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of a parameter, made as zeros where there is none."""
    if not optimizer.state[parameter]:
        zeros = parameter.detach()
        optimizer.state[parameter] = {
            name: torch.zeros_like(zeros)
            if name != "step"
            else torch.zeros((), dtype=torch.float32, device=zeros.device)
            for name in (optimizer.state_names(parameter) if isinstance(optimizer, Muon) else STATES[type(optimizer)])
        }
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    return state


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear layers."""
    return {f"{name}.weight" if name else "weight" for name, module in model.named_modules() if is_linear(module)}


def _is_in_block(model: nn.Module, name: str) -> bool:
    """Return whether a parameter, or the same of a pipeline stage, belongs to a block."""
    part: Any = model.parts[0] if isinstance(model, PipelineStages) else model
    return plain_name(name).startswith(f"{part.plan.blocks}.")
