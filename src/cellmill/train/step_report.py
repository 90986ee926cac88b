"""Numbers of a step on their way from the device to metrics.jsonl: parts of the loss, and scalars.

All ranks have the same numbers. They are copied from the device together, and read one step late.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cellmill.models.objective import Objective
from cellmill.train.step_guard import AsyncScalars


class LossParts:
    """Weights and names of the parts of an objective's loss; no names if the loss has no parts."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.names = list(objective.part_weights)
        self.labelled: dict[str, int] = {}
        """Index of each part with a target per cell, by name."""
        for index, (name, part) in enumerate(objective.parts_by_name().items()):
            if part.has_target_per_cell:
                self.labelled[name] = index
        self.weights: Tensor | float = 1.0
        if self.names:
            self.weights = torch.tensor(list(objective.part_weights.values()), device=device)
            is_validated = [part.in_validation_loss for part in objective.parts_by_name().values()]
            self.is_validated = torch.tensor(is_validated, device=device)

    def divisors(self, targets: Tensor) -> Tensor:
        """Return the divisors of the losses, () or (parts,).

        A part without targets has loss 0, but a loss without any target is 0 / 0.
        """
        return targets.clamp(min=1) if self.names and targets.any() else targets

    def validation_loss(self, losses: Tensor, targets: Tensor) -> float:
        """Return the weighted loss of the parts that choose a checkpoint; NaN if none has a target,
        since 0 would be the best of the run for ever.
        """
        if self.names:
            if not targets[self.is_validated].any():
                return math.nan
            losses = torch.where(self.is_validated, losses, 0)
        return (losses * self.weights).sum().item()

    def name_losses(self, prefix: str, losses: Sequence[float]) -> dict[str, float]:
        """Return the unweighted loss of each part, by its name in metrics.jsonl."""
        return {f"{prefix}_{name}": loss for name, loss in zip(self.names, losses)}

    def labelled_fracs(self, targets: Sequence[float], cells: float) -> dict[str, float]:
        """Return the fraction of a step's cells with a target, by its name in metrics.jsonl."""
        fracs = {}
        for name, index in self.labelled.items():
            key = f"labelled_frac_{name}" if name else "labelled_frac"
            fracs[key] = targets[index] / cells
        return fracs


class StepScalars(NamedTuple):
    """Numbers of a step that are known on the device: global, and equal on all ranks."""

    norm: float  # gradient norm
    loss_scale: float  # loss scale of the next step; 0 without a scale
    loss: float
    bad_norms: float  # ranks whose gradient norm is not finite
    stops: float  # ranks that got a stop signal
    checkpoints_due: float  # data-parallel ranks 0 for which a checkpoint is due
    cells: float
    tokens: float
    flops: float
    part_losses: list[float]
    readings: list[float]  # `local_readings`, in a logged step
    targets: list[float]  # targets of each part

    @staticmethod
    def pack(norm: Tensor, loss_scale: Tensor, summed: Tensor, targets: Tensor) -> Tensor:
        """Return all numbers in one tensor; `summed` are those from the loss to the readings."""
        first = torch.stack([norm.detach().to(summed), loss_scale.to(summed)])
        return torch.cat([first, summed, targets.reshape(-1).to(summed)])

    @classmethod
    def unpack(cls, numbers: list[float], n_losses: int) -> Self:
        """Return the numbers of `pack`; `n_losses` is the number of parts, 0 for one loss."""
        n_targets = max(n_losses, 1)
        norm, loss_scale, loss, bad_norms, stops, due, cells, tokens, flops, *lists = numbers
        return cls(
            norm,
            loss_scale,
            loss,
            bad_norms,
            stops,
            due,
            cells,
            tokens,
            flops,
            part_losses=lists[:n_losses],
            readings=lists[n_losses:-n_targets],
            targets=lists[-n_targets:],
        )


@dataclass
class StepReport:
    """A step whose scalars are being copied from the device."""

    step: int
    scalars: AsyncScalars  # `StepScalars.pack`
    lr: float
    waited_s: float
    ended: float  # time of its last call, so that rates do not depend on when the report is read
    local_loss: Tensor  # this rank's share of the loss
    cells: list[np.ndarray]  # ids of this rank's cells
