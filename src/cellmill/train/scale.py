"""Dynamic loss scaling: what keeps small gradients above the smallest float16 number, without waiting for a device.

The loss is multiplied before the backward pass and gradients are divided after it, so that norm and clipping are of
true ones. A step whose gradients are not finite on any process is skipped by all: the scale halves, and doubles after
`GROWTH_STEPS` good ones. Scale and verdict are tensors on the device; the fused optimizer reads the verdict there.

Source: Micikevicius et al. 2018 (mixed precision training), section 3.2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from cellmill.parallel.mesh import Mesh

INITIAL = 2.0**16
GROWTH_STEPS = 2000


class LossScale:
    """The factor of the loss. Every method but `read` is collective, or called alike by every rank.

    Parameters
    ----------
    optimizer
        Fused, or one that reads `found_inf` as a fused one does.
    value, good_steps
        As `read` gave them, of the run that goes on; None at its beginning.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, mesh: Mesh, value: float | None = None, good_steps: int = 0
    ) -> None:
        self.optimizer, self.mesh = optimizer, mesh
        self.value = torch.tensor(INITIAL if value is None else value, dtype=torch.float32, device=mesh.device)
        """float32 scalar."""
        self.good_steps = torch.tensor(good_steps, dtype=torch.int32, device=mesh.device)

    def unscale(self, model: nn.Module) -> None:
        """Divides all gradients, in place."""
        inverse = self.value.reciprocal()
        shards: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                shard = _shard(parameter.grad)
                shards.setdefault(shard.device, []).append(shard)
        for device, group in shards.items():
            torch._foreach_mul_(group, inverse.to(device))

    def judge(self, norm: torch.Tensor) -> torch.Tensor:
        """Has the optimizer skip this step where the norm of true gradients is not finite, and adapts the scale.

        Returns the norm, infinite on every rank where it is not finite on one.
        """
        bad = (~norm.isfinite()).to(self.mesh.device, torch.float32)
        # of one number already in most layouts, but all must part here or none
        skip = (self.mesh.sum(bad) > 0).float()
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        torch._amp_update_scale_(self.value, self.good_steps, skip, 2.0, 0.5, GROWTH_STEPS)
        return torch.where(skip.to(norm.device) > 0, torch.inf, norm)

    def read(self) -> tuple[float, int]:
        """Value and good steps since it last changed. Waits for the device."""
        return float(self.value), int(self.good_steps)


def _shard(gradient: torch.Tensor) -> torch.Tensor:
    """This process's share of it: to scale is the same for shards and for parts of a sum."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.trigger_wait() if isinstance(own, AsyncCollectiveTensor) else own
