"""Shared parts of the masked objectives: token masks, the batch as the encoder sees it, heads, and the cell's loss.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step, cell, place), so that a
token is masked in every layout or in none. Hidden content is replaced before the model sees it, so it cannot leak.

The second loss predicts the same targets from the cell's embedding and the visible half of each masked token
(scGPT, Cui et al. 2024, GEPC). Predictions are computed at masked tokens only: at 15 % masked and 20,000 genes they
would otherwise be most of the work.

Legend: T tokens of the batch, N targets, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cellmill.data.tokens import Tokenizer
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits, threshold
from cellmill.models.encoder_batch import EncoderBatch, center_of
from cellmill.models.objective import Objective
from cellmill.models.objectives.config import MaskedObjectiveConfig
from cellmill.models.objectives.views import visible_values
from cellmill.parallel.cpu_matmul import Linear

NEVER = 2**63 - 1  # above every draw


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: torch.Tensor
    """(targets,) int64, ascending: positions of the masked tokens."""
    answers: torch.Tensor
    """(targets,): hidden genes (int64 token ids) or hidden values."""
    n_targets: torch.Tensor


def mask(
    batch: TensorBatch, hides_gene: bool, mask_frac: float, seed: int, step: int, tokenizer: Tokenizer | None = None
) -> MaskedBatch:
    """Draw the mask of a batch and hide the genes of masked tokens, or their values.

    With `tokenizer`, the visible values are made again from the counts of visible tokens.
    """
    cell, place = positions(batch)
    keys = keyed_bits(batch.cells[cell], seed, step, place)
    is_gene = batch.genes > PAD_TOKEN  # neither padding nor an end of the cell
    draws = torch.where(is_gene, keys, NEVER)
    lowest = torch.full((len(batch.lengths),), NEVER, device=keys.device).scatter_reduce(0, cell, draws, "amin")
    masked = ((draws < threshold(mask_frac)) | (draws == lowest[cell])) & is_gene
    targets = masked.nonzero().flatten()
    seen = batch
    if tokenizer is not None:
        seen = replace(batch, values=visible_values(batch, cell, ~masked, tokenizer))
    return MaskedBatch(
        genes=batch.genes.masked_fill(masked, MASK_TOKEN) if hides_gene else batch.genes,
        values=seen.values if hides_gene else seen.values.masked_fill(masked, 0),
        value_hidden=torch.zeros_like(masked) if hides_gene else masked,
        center=center_of(seen, cell, torch.ones_like(masked) if hides_gene else ~masked),
        cell=cell,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        token_keys=keyed_bits(keys, 1),  # hashed again: dropout must not depend on the mask
        cell_keys=keyed_bits(batch.cells, seed, step),
        levels=batch.levels,
        covariate_rows=batch.covariate_rows,
        targets=targets,
        answers=(batch.genes if hides_gene else batch.values)[targets],
        n_targets=torch.tensor(len(targets), device=keys.device),
    )


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene; needs a model with `states`, `inputs` and `cell_vectors`."""

    config: MaskedObjectiveConfig
    hides_gene: bool
    tokenizer: Tokenizer | None = None
    """Makes visible values again, where not None."""

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `head`, `cell_head` if the second loss is on, and the objective's own output."""
        hidden = model.width
        model.head = _head(model, hidden)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = _head(model, 2 * hidden)
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, n_tokens))

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add the layer from states to predictions; return the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> MaskedBatch:
        """Mask a fraction of the tokens."""
        return mask(batch, self.hides_gene, self.config.mask_frac, seed, step, self.tokenizer)

    def loss(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss over masked tokens, a float32 scalar."""
        targets = prepared.targets
        loss = self.loss_of(model, model.head(states[targets]), prepared)
        if self.config.cell_loss_weight:
            cells = model.cell_vectors(states, prepared).to(states.dtype)
            # the targets are embedded again: the last stage of a pipeline does not receive the embeddings
            queries = torch.cat([cells[prepared.cell[targets]], model.inputs(prepared, targets)], dim=-1)
            loss = loss + self.config.cell_loss_weight * self.loss_of(model, model.cell_head(queries), prepared)
        return loss

    def loss_of(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss of predictions from the states (N, H) of a head."""
        raise NotImplementedError


def _head(model: Any, width: int) -> nn.Module:
    hidden = model.width
    return nn.Sequential(Linear(width, hidden), model.head_activation(), nn.LayerNorm(hidden, eps=model.head_norm_eps))
