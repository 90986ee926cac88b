"""Base of masked_value and masked_gene: which tokens are masked, and what the model sees of them.

Each token is masked independently with probability `mask_frac`, by a hash of (seed, step, cell,
position), and at least one token of each cell is. Of the masked tokens, `keep_frac` show their own
content in training and `random_frac` random content: a random gene of the vocabulary, or the value of
a random visible gene of the cell (Devlin et al. 2019). The rest is hidden. A second loss, times
`cell_loss_weight`, predicts the same targets from the cell's vector and the visible half of each
target: the gene for masked_value, the value for masked_gene (scGPT, Cui et al. 2024, GEPC).

Legend: C cells, T tokens of the batch, N targets, H width of the model.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import MaskedObjectiveConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, EncoderBatch, positions
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits, threshold
from cellmill.models.draws import MASK_IN_VIEW, SHOWN_CONTENT
from cellmill.models.objective import Objective, ObjectiveModel
from cellmill.parallel.vocab_parallel import rows_at

# the largest possible draw; given to tokens that are not genes, so that those of genes are lower
HIGHEST_DRAW = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: Tensor  # `(N,)` int64, ascending: all masked tokens, also those that show content
    answers: Tensor  # `(N,)`: hidden genes (int64 token ids) or hidden values
    n_targets: Tensor

    def hide_targets(self, predicts_genes: bool) -> Self:
        """Hide the gene, or the value, of every target; return a new batch."""
        if predicts_genes:
            return replace(self, token_ids=self.token_ids.index_fill(0, self.targets, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, self.targets, 0),
            value_hidden=self.value_hidden.index_fill(0, self.targets, True),
        )


@dataclass(frozen=True)
class Mask:
    """Tokens that are masked, and what the model sees of each. All fields are `(T,)`."""

    token_cells: Tensor  # int64: index of the token's cell
    token_bits: Tensor  # int64: random bits that key the token's further draws
    visible: Tensor  # bool: genes that are not masked
    masked: Tensor  # bool: tokens to predict, of which each is hidden, kept or random
    hidden: Tensor  # bool
    kept: Tensor  # bool: shows its own content
    random: Tensor  # bool: shows random content


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene.

    It needs a model with `states`; with a cell loss also `inputs`, `cell_vectors` and `plan`.
    """

    config: MaskedObjectiveConfig
    predicts_genes: bool  # True if targets are genes, False if they are values

    @property
    def shows_content(self) -> bool:
        """True if some masked tokens show random content or their own."""
        return self.config.random_frac + self.config.keep_frac > 0

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        model.head = _make_head(model, model.width)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = _make_head(model, 2 * model.width)
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, vocab_size))

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the layer from states to predictions; return the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> MaskedBatch:
        """Draw the mask of a batch and hide the genes of masked tokens, or their values."""
        mask = self._draw_mask(batch, seed, step)
        targets = mask.masked.nonzero().flatten()
        content = batch.token_ids if self.predicts_genes else batch.values
        # a kept or random value must not enter `center`, from which targets are predicted
        value_known = torch.ones_like(mask.masked) if self.predicts_genes else ~mask.masked
        return MaskedBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            **self.hide(batch, mask),
            value_known=value_known,
            targets=targets,
            answers=content[targets],
            n_targets=torch.tensor(len(targets), device=targets.device),
        )

    def _draw_mask(self, batch: Batch, seed: int, step: int) -> Mask:
        token_cells, position = positions(batch)
        view_key = (MASK_IN_VIEW,) if self.in_view else ()
        # random bits: they are the draws that choose masked tokens, and key all further draws
        token_bits = keyed_token_bits(batch.cell_ids, token_cells, seed, step, position, *view_key)
        is_gene = batch.token_ids > PAD_TOKEN  # neither padding nor an end of the cell
        masked = self._choose_masked(token_bits, is_gene, token_cells, len(batch.lengths))
        hidden = masked
        kept = torch.zeros_like(masked)
        # validation hides everything that is masked
        if self.shows_content and self.training:
            hidden, kept = self._draw_hidden_and_kept(token_bits, masked)
        return Mask(
            token_cells=token_cells,
            token_bits=token_bits,
            visible=is_gene & ~masked,
            masked=masked,
            hidden=hidden,
            kept=kept,
            random=masked & ~kept & ~hidden,
        )

    def _choose_masked(
        self, token_bits: Tensor, is_gene: Tensor, token_cells: Tensor, n_cells: int
    ) -> Tensor:
        """Mask tokens with draws below `mask_frac`, and each cell's lowest draw; `(T,)` bool."""
        draws = torch.where(is_gene, token_bits, HIGHEST_DRAW)
        lowest = torch.full((n_cells,), HIGHEST_DRAW, device=draws.device)
        lowest = lowest.scatter_reduce(0, token_cells, draws, "amin")
        masked = (draws < threshold(self.config.mask_frac)) | (draws == lowest[token_cells])
        return masked & is_gene

    def _draw_hidden_and_kept(self, token_bits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Draw which masked tokens are hidden, and which show their own content, `(T,)` bool each.

        Low draws hide the token, middle ones show random content, and high ones its own.
        """
        keep_frac = self.config.keep_frac
        hidden_frac = 1 - keep_frac - self.config.random_frac
        draws = keyed_bits(token_bits, SHOWN_CONTENT)
        # without keep_frac nothing is kept: the highest draw reaches even the threshold of 1
        kept = masked & (draws >= threshold(1 - keep_frac)) & (keep_frac > 0)
        hidden = masked & ~kept & (draws < threshold(hidden_frac))
        return hidden, kept

    def hide(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide the content of hidden tokens and replace that of random ones; return the new fields."""
        raise NotImplementedError

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: MaskedBatch) -> Tensor:
        targets = prepared.targets
        loss = self.head_loss(model, model.head(states[targets]), prepared)
        weight = self.config.cell_loss_weight
        if not weight:
            return loss
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        # the targets are embedded again: the last pipeline stage does not receive the embeddings
        queried = prepared.hide_targets(self.predicts_genes) if self.shows_content else prepared
        # both parts stay unnamed, so their memory is free before the head runs
        queries = torch.cat(
            [rows_at(vectors, prepared.token_cells[targets]), model.inputs(queried, targets)],
            dim=-1,
        )
        return loss + weight * self.head_loss(model, model.cell_head(queries), prepared)

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
