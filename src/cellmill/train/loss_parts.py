"""Parts of a loss that is a weighted sum, each divided by its own number of targets; or the only loss."""

from collections.abc import Sequence

import torch

from cellmill.models.objective import Objective


class LossParts:
    """Weights and names of the parts of an objective's loss; no names for one loss."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.names = list(objective.parts)
        self.weights: torch.Tensor | float = 1.0
        if self.names:
            self.weights = torch.tensor(list(objective.parts.values()), device=device)

    def targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the divisors of a step's global number of targets, () or (parts,) int64.

        A part may lack targets where another has some: its loss is then 0, not 0 / 0.
        """
        return targets.clamp(min=1) if self.names else targets

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of mean losses, () or (parts,)."""
        return (losses * self.weights).sum()

    def of(self, losses: torch.Tensor) -> torch.Tensor:
        """(parts,): the losses to log beside their total; none of one loss."""
        return losses.reshape(-1)[: len(self.names)]

    def line(self, prefix: str, losses: Sequence[float]) -> dict[str, float]:
        """Return the unweighted loss of each part, under `prefix` and its name, for metrics.jsonl."""
        return {f"{prefix}_{name}": loss for name, loss in zip(self.names, losses)}
