"""What both masked objectives share: heads over the states of masked tokens, and the loss of the cell embedding.

The second loss predicts the same targets from the cell's embedding and the visible half of each masked token
(scGPT, Cui et al. 2024, GEPC). Predictions exist at masked tokens alone: at 15 % masked and 20,000 genes they would
otherwise be most of the work.

Legend: T tokens of the batch, N targets, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cellmill.models.batch import TensorBatch
from cellmill.models.objective import Objective
from cellmill.models.objectives.config import MaskedObjectiveConfig
from cellmill.models.objectives.masking import MaskedBatch, mask
from cellmill.parallel.cpu_matmul import Linear


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene; needs a model with `states`, `inputs` and `mean_of_cells`."""

    config: MaskedObjectiveConfig
    hides_gene: bool

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `head`, `cell_head` where the second loss is on, and the objective's own output."""
        hidden = model.width
        model.head = nn.Sequential(Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = nn.Sequential(Linear(2 * hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, n_tokens))

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add what turns states into predictions; returns the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> MaskedBatch:
        """Mask a fraction of the tokens."""
        return mask(batch, self.hides_gene, self.config.mask_frac, seed, step)

    def loss(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss over masked tokens, a float32 scalar."""
        targets = prepared.targets
        loss = self.loss_of(model, model.head(states[targets]), prepared)
        if self.config.cell_loss_weight:
            cells = model.mean_of_cells(states, prepared).to(states.dtype)
            # embedded again for the targets alone: the last stage of a pipeline does not receive the embeddings
            asked = torch.cat([cells[prepared.cell[targets]], model.inputs(prepared, targets)], dim=-1)
            loss = loss + self.config.cell_loss_weight * self.loss_of(model, model.cell_head(asked), prepared)
        return loss

    def loss_of(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss of predictions from the states (N, H) of a head."""
        raise NotImplementedError
