"""AdamW on the CPU for parameters on a device (ZeRO-Offload).

Gradients are copied to pinned host memory, fused AdamW updates this rank's shards there, and the new weights are copied
back without blocking. The moments, half of the state of mixed-precision training, take no device memory. Each step
moves 4 bytes for each local element in each direction. It waits only for gradients, group by group, so that one group
is computed while the next is copied.

Source: ZeRO-Offload, Ren et al. 2021, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from cellmill.config.run import Train
from cellmill.parallel.mesh import local_of
from cellmill.parallel.torch_private import version_of
from cellmill.train.step_guard import AsyncScalars


@dataclass
class _Host:
    """Pinned copies of this rank's shard of a parameter and of its gradient."""

    weights: torch.Tensor
    gradient: torch.Tensor
    version: tuple[int, int] | None = None
    """`_version_of` the parameter that `weights` equals; loading a checkpoint changes it."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) of float32 parameters, also DTensors, with its state on the CPU."""

    found_inf: torch.Tensor | None = None
    """Scalar on any device; the step changes nothing where it is 1, as in fused AdamW."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        defaults = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._hosts: dict[torch.Tensor, _Host] = {}
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            host = parameter.detach().to("cpu")  # a DTensor stays one: checkpoints need its placement
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(host),
                "exp_avg_sq": torch.zeros_like(host),
            }
            if _needs_copy(local_of(parameter)):
                pin = torch.accelerator.is_available()
                weights, gradient = (torch.empty_like(local_of(host), pin_memory=pin) for _ in range(2))
                self._hosts[parameter] = _Host(weights, gradient)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        found_inf = None if self.found_inf is None else AsyncScalars(self.found_inf)  # copied before the gradients
        copies = [self._fetch(parameters) for parameters in trained]
        if found_inf is not None and any(found_inf.read()):
            return
        for group, parameters, copied in zip(self.param_groups, trained, copies):
            if copied is not None:
                copied.synchronize()
            self._update(group, parameters)

    def _fetch(self, parameters: list[torch.Tensor]) -> torch.cuda.Event | None:
        """Start copying gradients, and weights written from outside; return the event of their arrival."""
        for parameter in parameters:
            host = self._hosts.get(parameter)
            if host is not None:
                host.gradient.copy_(local_of(parameter.grad), non_blocking=True)
                if host.version != _version_of(parameter):
                    host.weights.copy_(local_of(parameter), non_blocking=True)
        if not parameters or local_of(parameters[0]).device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(local_of(parameters[0]).device))
        return event

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        hosts, states = [self._hosts.get(p) for p in parameters], [self.state[p] for p in parameters]
        adamw(
            [local_of(p) if host is None else host.weights for p, host in zip(parameters, hosts)],
            [local_of(p.grad) if host is None else host.gradient for p, host in zip(parameters, hosts)],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
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
                # ordered before the next forward pass, whose gradients are awaited before `weights` changes again
                local_of(parameter).copy_(host.weights, non_blocking=True)
                host.version = _version_of(parameter)


def _version_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes when the parameter is written in place or moved."""
    own = local_of(parameter)
    return own.data_ptr(), version_of(own)


def _needs_copy(shard: torch.Tensor) -> bool:
    return shard.device.type != "cpu"
