"""Base of masked_value and masked_gene: which tokens are masked, and what the model sees of these tokens.

A token is a gene and its value. Objective masked_value predicts the values of masked tokens, and the
model always sees their genes. Objective masked_gene predicts the genes of masked tokens, and the model
always sees their values. So the target of a masked token is either its value or its gene.

Each token is masked with probability `mask_frac`, independently of other tokens, by a hash of (seed,
step, cell, position). At least one token of each cell is masked. A masked token is one of these (Devlin
et al. 2019):

- *hidden*: the model does not see the target. In validation all masked tokens are hidden.
- *kept*: the model sees the target. In training a fraction `keep_frac` of the masked tokens is kept.
- *replaced*: the model sees a wrong target. In training a fraction `random_frac` of the masked tokens is
  replaced. Objective masked_gene shows a random gene of the vocabulary. Objective masked_value shows the
  value of a random visible token of the cell.

Tokens that are not masked are *visible*.

With `cell_loss_weight` there is a second loss, multiplied by this weight. It predicts the same targets
from the cell's vector and from what the model always sees of the token (scGPT, Cui et al. 2024, GEPC).

In the shapes below, "tokens" are all tokens of a batch, and "targets" are the masked tokens.
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

HIGHEST_DRAW = 2**63 - 1  # the largest number that `keyed_bits` can return


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """The tokens as the model sees them, and the targets of the masked tokens."""

    target_tokens: Tensor  # (targets,) int64, ascending: the index of each masked token
    targets: Tensor  # (targets,): the genes (int64 token ids) or the values of these tokens
    n_targets: Tensor  # int64 scalar: the number of targets

    def with_all_hidden(self, predicts_genes: bool) -> Self:
        """Return the batch with every masked token hidden, even if the token is kept or replaced here."""
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
    """The masked tokens of a batch, and what the model sees of each. All fields are (tokens,).

    Padding, and the special tokens at the ends of a cell, are neither visible nor masked.
    """

    token_cells: Tensor  # int64: the index in the batch of the token's cell
    draws: Tensor
    """int64: a random number of 63 bits for each token.

    A number below the threshold, or the lowest number of the cell, masks the token. Further random
    numbers of the token, such as for its replacement, have this number as their key.
    """
    visible: Tensor  # bool: True for genes that are not masked
    masked: Tensor  # bool: True for genes that are masked, each of which is one of the three below
    hidden: Tensor  # bool: the model does not see the target
    kept: Tensor  # bool: the model sees the target
    replaced: Tensor  # bool: the model sees a wrong target


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene.

    The model must have `states`, and for masked_gene also `gene_embedding`. With `cell_loss_weight` the
    model must also have `inputs`, `cell_vectors` and `plan`.
    """

    config: MaskedObjectiveConfig
    # names that subclasses may no longer define, each with its present name
    former_names = MappingProxyType({"hide": "corrupt", "hides_all": "hides_all_masked"})
    predicts_genes: bool  # True if targets are genes, False if they are values

    @property
    def hides_all_masked(self) -> bool:
        """True if training hides all masked tokens, as validation does: no token is kept or replaced."""
        return self.config.random_frac + self.config.keep_frac == 0

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        model.head = _make_head(model, model.width)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = _make_head(model, model.vector_width + model.width)
            # the cell loss embeds the masked tokens again, so it also reads the modules of the model's
            # input (`plan.begin`)
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, vocab_size))

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the layer that turns the head's output into predictions.

        Return the names of all modules and parameters that this layer reads.
        """
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> MaskedBatch:
        """Draw which tokens are masked, and hide or replace the targets of these tokens."""
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
        """Draw which tokens are masked, and which masked tokens are hidden, kept or replaced."""
        token_cells, position = positions(batch)
        # another part of a sum drew the view with the same keys, so masks in a view need a further key
        view_key = (MASK_IN_VIEW_KEY,) if self.in_view else ()
        mask_draws = keyed_token_bits(batch.cell_ids, token_cells, seed, step, position, *view_key)
        is_gene = batch.token_ids > PAD_TOKEN  # neither <pad> nor <cls> nor <eos>
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
        """Choose which tokens are masked, (tokens,) bool.

        These are the genes whose random number is below the threshold of `mask_frac`, and in each cell the
        gene with the lowest random number. `mask_draws` are the random numbers, (tokens,) int64.
        """
        # padding and special tokens get the highest number, so that the lowest number of a cell with genes
        # belongs to a gene
        draws = torch.where(is_gene, mask_draws, HIGHEST_DRAW)
        lowest = torch.full((n_cells,), HIGHEST_DRAW, device=draws.device)
        lowest = lowest.scatter_reduce(0, token_cells, draws, "amin")
        masked = (draws < threshold(self.config.mask_frac)) | (draws == lowest[token_cells])
        return masked & is_gene  # in a cell without genes, every token has the lowest number

    def _draw_hidden_and_kept(self, mask_draws: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Draw which masked tokens are hidden and which are kept, (tokens,) bool each.

        Each token has a second random number, keyed by its first. A low number hides the token, a high
        number keeps it, and a number in between replaces it.
        """
        keep_frac = self.config.keep_frac
        hidden_frac = 1 - keep_frac - self.config.random_frac
        draws = keyed_bits(mask_draws, MASK_OUTCOME_KEY)
        # With keep_frac 0 no token is kept. `threshold(1)` is the highest draw, not above it, so `>=`
        # alone would keep a token with the highest draw
        kept = masked & (draws >= threshold(1 - keep_frac)) & (keep_frac > 0)
        hidden = masked & ~kept & (draws < threshold(hidden_frac))
        return hidden, kept

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide or replace the targets of masked tokens. Return the changed fields of the batch by name."""
        raise NotImplementedError

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: MaskedBatch) -> Tensor:
        target_tokens = prepared.target_tokens
        loss = self.head_loss(model, model.head(states[target_tokens]), prepared)
        weight = self.config.cell_loss_weight
        if not weight:
            return loss

        # the cell loss: predict the same targets from the cell's vector and the rest of the token
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        # The masked tokens are embedded again, with their targets hidden: the last pipeline stage, which
        # computes the loss, does not receive the embeddings of the first
        all_hidden = (
            prepared if self.hides_all_masked else prepared.with_all_hidden(self.predicts_genes)
        )
        # no variable holds the two inputs of `cat`, so their memory is freed before the head runs
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
        """Sum the loss over the targets, a float32 scalar, from the head's output (targets, width)."""
        raise NotImplementedError


def _make_head(model: ObjectiveModel, width: int) -> nn.Module:
    """Make a head: a linear layer from `width` to the width of the model, an activation and a norm."""
    layer = nn.Linear(width, model.width)
    norm = nn.LayerNorm(model.width, eps=model.head_norm_eps)
    return nn.Sequential(layer, model.head_activation(), norm)
