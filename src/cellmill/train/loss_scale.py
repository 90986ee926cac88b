"""Dynamic loss scaling: what keeps small gradients above the smallest float16 number, without waiting for a device.

The loss is multiplied before the backward pass and gradients are divided after it, so that norm and clipping are of
true ones. After a step that was skipped because they were not finite on some process (`skip.py`) the scale halves, and
doubles after `GROWTH_STEPS` good ones. It is a tensor on the device.

Source: Micikevicius et al. 2018 (mixed precision training), section 3.2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

INITIAL = 2.0**16
GROWTH_STEPS = 2000


class LossScale:
    """The factor of the loss. Every method is to be called alike by every rank; none of them communicates.

    Parameters
    ----------
    device
        Where gradients are reduced.
    value, good_steps
        As `read` gave them, of the run that goes on; None at its beginning.
    """

    def __init__(self, device: torch.device, value: float | None = None, good_steps: int = 0) -> None:
        self.value = torch.tensor(INITIAL if value is None else value, dtype=torch.float32, device=device)
        """float32 scalar."""
        self.good_steps = torch.tensor(good_steps, dtype=torch.int32, device=device)

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

    def adapt(self, applied: torch.Tensor) -> torch.Tensor:
        """Halves the scale where a step was not `applied`, a bool scalar that all processes have alike.

        Returns a copy of the scale of the next step.
        """
        overflowed = (~applied).to(self.value)
        torch._amp_update_scale_(self.value, self.good_steps, overflowed, 2.0, 0.5, GROWTH_STEPS)
        return self.value.clone()

    def read(self) -> tuple[float, int]:
        """Value and good steps since it last changed. Waits for the device."""
        return float(self.value), int(self.good_steps)


def _shard(gradient: torch.Tensor) -> torch.Tensor:
    """This process's share of it: to scale is the same for shards and for parts of a sum."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.trigger_wait() if isinstance(own, AsyncCollectiveTensor) else own
