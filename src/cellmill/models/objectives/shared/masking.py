"""Base of masked_value and masked_gene: which tokens are masked, and what the model sees of them.

A token is a gene and its value. The target of a masked token is its value in masked_value, and its gene
in masked_gene; the model always sees the other one. Each token is masked independently with
probability `mask_frac`, by a hash of (seed, step, cell, position), and at least one token of each cell
is. A masked token is one of these (Devlin et al. 2019):

- *hidden*: the model does not see the target. In validation all masked tokens are hidden.
- *kept*: the model sees the target. In training these are a fraction `keep_frac` of the masked tokens.
- *replaced*: the model sees a random gene of the vocabulary, or the value of a random visible token of
  the cell. In training these are a fraction `random_frac`.

Tokens that are not masked are *visible*. A second loss, times `cell_loss_weight`, predicts the same
targets from the cell's vector and what is always shown of the token (scGPT, Cui et al. 2024, GEPC).

Legend: C cells, T tokens of the batch, N targets, H width of the model.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import MaskedObjectiveConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, EncoderBatch, positions
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits, threshold
from cellmill.models.draws import MASK_IN_VIEW_KEY, MASK_OUTCOME_KEY
from cellmill.models.objective import Objective, ObjectiveModel
from cellmill.parallel.vocab_parallel import rows_at

HIGHEST_DRAW = 2**63 - 1  # the largest possible draw


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """The tokens as the model sees them, and the targets of masked tokens."""

    target_tokens: Tensor  # `(N,)` int64, ascending: index of each masked token
    targets: Tensor  # `(N,)`: genes (int64 token ids) or values of these tokens
    n_targets: Tensor  # N

    def with_all_hidden(self, predicts_genes: bool) -> Self:
        """Return the batch with every masked token hidden, also those that are kept or replaced."""
        masked = self.target_tokens
        if predicts_genes:
            return replace(self, token_ids=self.token_ids.index_fill(0, masked, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, masked, 0),
            value_hidden=self.value_hidden.index_fill(0, masked, True),
        )


@dataclass(frozen=True)
class Mask:
    """Tokens that are masked, and what becomes of each. All fields are `(T,)`.

    Padding and the ends of a cell are neither visible nor masked.
    """

    token_cells: Tensor  # int64: index of the token's cell
    draws: Tensor
    """int64: 63 random bits. A draw below a threshold masks the token; further draws are keyed by it."""
    visible: Tensor  # bool
    masked: Tensor  # bool; each masked token is hidden, kept or replaced
    hidden: Tensor  # bool
    kept: Tensor  # bool
    replaced: Tensor  # bool


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene.

    It needs a model with `states`, and masked_gene one with `gene_embedding`; with a cell loss also
    `inputs`, `cell_vectors` and `plan`.
    """

    config: MaskedObjectiveConfig
    former_names = MappingProxyType({"hide": "corrupt", "hides_all": "hides_all_masked"})
    predicts_genes: bool  # True if targets are genes, False if they are values

    @property
    def hides_all_masked(self) -> bool:
        """True if all masked tokens are hidden in training too: none is kept or replaced."""
        return self.config.random_frac + self.config.keep_frac == 0

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        model.head = _make_head(model, model.width)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = _make_head(model, model.vector_width + model.width)
            # the cell loss embeds its targets again, so it reads the modules of the model's input too
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, vocab_size))

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the layer from states to predictions; return the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> MaskedBatch:
        """Draw the mask of a batch, and hide or replace the targets."""
        mask = self._draw_mask(batch, seed, step)
        target_tokens = mask.masked.nonzero().flatten()
        token_ids_or_values = batch.token_ids if self.predicts_genes else batch.values
        return MaskedBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            **self.corrupt(batch, mask),
            target_tokens=target_tokens,
            targets=token_ids_or_values[target_tokens],
            n_targets=torch.tensor(len(target_tokens), device=target_tokens.device),
        )

    def _draw_mask(self, batch: Batch, seed: int, step: int) -> Mask:
        """Draw which tokens are masked, and which of them are hidden, kept or replaced."""
        token_cells, position = positions(batch)
        view_key = (MASK_IN_VIEW_KEY,) if self.in_view else ()
        mask_draws = keyed_token_bits(batch.cell_ids, token_cells, seed, step, position, *view_key)
        is_gene = batch.token_ids > PAD_TOKEN  # neither padding nor an end of the cell
        masked = self._choose_masked(mask_draws, is_gene, token_cells, len(batch.lengths))
        hidden = masked
        kept = torch.zeros_like(masked)
        if self.training and not self.hides_all_masked:
            hidden, kept = self._draw_hidden_and_kept(mask_draws, masked)
        return Mask(
            token_cells=token_cells,
            draws=mask_draws,
            visible=is_gene & ~masked,
            masked=masked,
            hidden=hidden,
            kept=kept,
            replaced=masked & ~kept & ~hidden,
        )

    def _choose_masked(
        self, mask_draws: Tensor, is_gene: Tensor, token_cells: Tensor, n_cells: int
    ) -> Tensor:
        """Mask genes with draws below `mask_frac`, and each cell's lowest draw; `(T,)` bool."""
        # in a cell with genes, the token of the lowest draw is a gene
        draws = torch.where(is_gene, mask_draws, HIGHEST_DRAW)
        lowest = torch.full((n_cells,), HIGHEST_DRAW, device=draws.device)
        lowest = lowest.scatter_reduce(0, token_cells, draws, "amin")
        masked = (draws < threshold(self.config.mask_frac)) | (draws == lowest[token_cells])
        return masked & is_gene  # in a cell without genes, every draw is the lowest

    def _draw_hidden_and_kept(self, mask_draws: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Draw which masked tokens are hidden and which are kept, `(T,)` bool each.

        A second draw, keyed by the first, hides the token if it is low and keeps it if it is high. In
        between the token is replaced.
        """
        keep_frac = self.config.keep_frac
        hidden_frac = 1 - keep_frac - self.config.random_frac
        draws = keyed_bits(mask_draws, MASK_OUTCOME_KEY)
        # `threshold(1)` is the highest draw itself, so with keep_frac 0 `>=` would keep that one
        kept = masked & (draws >= threshold(1 - keep_frac)) & (keep_frac > 0)
        hidden = masked & ~kept & (draws < threshold(hidden_frac))
        return hidden, kept

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide or replace the targets as `mask` says; return the changed fields of the batch."""
        raise NotImplementedError

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: MaskedBatch) -> Tensor:
        target_tokens = prepared.target_tokens
        loss = self.head_loss(model, model.head(states[target_tokens]), prepared)
        weight = self.config.cell_loss_weight
        if not weight:
            return loss
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        # the targets are embedded again: the last pipeline stage does not receive the embeddings
        all_hidden = (
            prepared if self.hides_all_masked else prepared.with_all_hidden(self.predicts_genes)
        )
        # no variable holds the two tensors, so their memory is free before the head runs
        head_inputs = torch.cat(
            [
                rows_at(vectors, prepared.token_cells[target_tokens]),
                model.inputs(all_hidden, target_tokens),
            ],
            dim=-1,
        )
        return loss + weight * self.head_loss(model, model.cell_head(head_inputs), prepared)

    def head_loss(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        """Sum the loss of predictions from the head's output `(N, H)`, a float32 scalar."""
        raise NotImplementedError


def _make_head(model: ObjectiveModel, width: int) -> nn.Module:
    """Make a layer from `width` to the width of the model, with activation and norm."""
    layer = nn.Linear(width, model.width)
    norm = nn.LayerNorm(model.width, eps=model.head_norm_eps)
    return nn.Sequential(layer, model.head_activation(), norm)
