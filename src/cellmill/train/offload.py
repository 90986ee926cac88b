"""AdamW whose moments and arithmetic are the CPU's, for parameters that stay on their device (ZeRO-Offload).

Gradients come to pinned host memory, fused AdamW updates this process's shards there, and the new weights go back
without waiting: the moments, half of what mixed-precision training keeps, take no device memory. Each shard is 4 bytes
an element over the bus in each direction and step. The step waits for gradients only, group by group, so that one
group is computed while the next arrives.

Source: ZeRO-Offload, Ren et al. 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from cellmill.train.async_scalars import AsyncScalars


@dataclass
class _Host:
    """Pinned copies of this process's shard of a parameter and of its gradient."""

    weights: torch.Tensor
    gradient: torch.Tensor
    equal_to: tuple[int, int] | None = None
    """What the parameter was (`_version_of`) when `weights` was equal to it: a checkpoint writes another."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) on the CPU; `state[parameter]` is that of `torch.optim.AdamW`, on the CPU.

    Takes what AdamW takes: dense float32 parameters, plain or DTensors, of any meshes. No communication.

    Parameters
    ----------
    groups
        Of parameters, materialised, each with its `weight_decay`.
    """

    found_inf: torch.Tensor | None = None
    """As that of fused AdamW: where it is 1, the step changes nothing. A scalar on any device."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._hosts: dict[torch.Tensor, _Host] = {}
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            there = parameter.detach().to("cpu")  # a DTensor stays one: checkpoints know which shard it is
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(there),
                "exp_avg_sq": torch.zeros_like(there),
            }
            if _is_elsewhere(_local(parameter)):
                self._hosts[parameter] = _Host(_pinned_like(_local(there)), _pinned_like(_local(there)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step over all parameters with a gradient."""
        assert closure is None, "gradients are those of the backward pass before"
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        found_inf = None if self.found_inf is None else AsyncScalars(self.found_inf)  # asked for ahead of the gradients
        arrivals = [self._fetch(parameters) for parameters in trained]
        if found_inf is not None and any(found_inf.read()):
            return
        for group, parameters, arrived in zip(self.param_groups, trained, arrivals):
            if arrived is not None:
                arrived.synchronize()
            self._update(group, parameters)

    def _fetch(self, parameters: list[torch.Tensor]) -> torch.cuda.Event | None:
        """Asks for gradients, and for weights that something else has written; returns when all will be there."""
        for parameter in parameters:
            host = self._hosts.get(parameter)
            if host is not None:
                host.gradient.copy_(_local(parameter.grad), non_blocking=True)
                if host.equal_to != _version_of(parameter):
                    host.weights.copy_(_local(parameter), non_blocking=True)
        if not parameters or _local(parameters[0]).device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(_local(parameters[0]).device))
        return event

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        hosts, states = [self._hosts.get(p) for p in parameters], [self.state[p] for p in parameters]
        adamw(
            [_local(p) if host is None else host.weights for p, host in zip(parameters, hosts)],
            [_local(p.grad) if host is None else host.gradient for p, host in zip(parameters, hosts)],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
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
        for parameter, host in zip(parameters, hosts):
            if host is not None:
                # on the stream of the next forward pass; the gradients after it are waited for before `weights` changes
                _local(parameter).copy_(host.weights, non_blocking=True)
                host.equal_to = _version_of(parameter)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This process's shard. Asked for anew each time: FSDP2 moves it in memory before its first forward pass."""
    return cast(torch.Tensor, tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _version_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Another after anything has written to it in place, or moved it."""
    own = _local(parameter)
    return own.data_ptr(), own._version


def _is_elsewhere(shard: torch.Tensor) -> bool:
    """Whether it has to be copied for the CPU to work on it."""
    return shard.device.type != "cpu"


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, pin_memory=torch.accelerator.is_available())
