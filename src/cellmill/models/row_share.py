"""Share of a micro-batch in a loss over rows of all cells of a global batch; `train.batch_rows` makes it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowShare:
    """Contribution of a micro-batch to the loss of one table of rows (`Objective.loss_of_rows`)."""

    value: torch.Tensor
    """Float scalar: the loss, times the own part of the table's rows."""
    gradient: torch.Tensor
    """(n, width) float32: gradient of the loss with respect to the own rows."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the share, a float32 scalar, whose gradient with respect to the own rows (n, width) is `gradient`."""
        product = (self.gradient * rows).sum()
        return (self.value + (product - product.detach())).float()
