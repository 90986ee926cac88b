"""Shared parts of the masked objectives: token masks, the batch as the encoder sees it, heads, and the cell's loss.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step, cell, place), so that a
token is masked in every layout or in none. Hidden content is replaced before the model sees it, so it cannot leak.
In training, `random_frac` of the masked tokens show random content instead and `keep_frac` their own (Devlin et al.
2019): a random gene of the vocabulary, or the value of a random visible gene of the cell.

The second loss predicts the same targets from the cell's embedding and the visible half of each masked token
(scGPT, Cui et al. 2024, GEPC). Predictions are computed at masked tokens only: at 15 % masked and 20,000 genes they
would otherwise be most of the work.

Legend: T tokens of the batch, N targets, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from cellmill.config.tokens import SPECIAL
from cellmill.data.tokens import Tokenizer
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits, threshold
from cellmill.models.encoder_batch import EncoderBatch, center_of
from cellmill.models.objective import Objective
from cellmill.models.objectives.config import MaskedObjectiveConfig
from cellmill.models.objectives.views import visible_values
from cellmill.parallel.cpu_matmul import Linear
from cellmill.parallel.segments import rows_at

NEVER = 2**63 - 1  # above every draw
FATE, CONTENT = 2, 3  # last keys of a masked token's draws


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: torch.Tensor
    """(targets,) int64, ascending: positions of the masked tokens, also of those that show content."""
    answers: torch.Tensor
    """(targets,): hidden genes (int64 token ids) or hidden values."""
    n_targets: torch.Tensor

    def hiding_targets(self, hides_gene: bool) -> Self:
        """Return the batch with the gene, or the value, of every target hidden, also where the model is shown one."""
        if hides_gene:
            return replace(self, genes=self.genes.index_fill(0, self.targets, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, self.targets, 0),
            value_hidden=self.value_hidden.index_fill(0, self.targets, True),
        )


@dataclass(frozen=True)
class Fates:
    """Treatment of the content of masked tokens, (tokens,) bool each; every masked token has one fate."""

    hidden: torch.Tensor
    random: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def drawn(cls, keys: torch.Tensor, masked: torch.Tensor, config: MaskedObjectiveConfig) -> Self:
        """Draw the fates of `masked` tokens, (tokens,) bool, from their keys."""
        draws = keyed_bits(keys, FATE)
        kept = masked & (draws >= threshold(1 - config.keep_frac)) & (config.keep_frac > 0)
        hidden = masked & ~kept & (draws < threshold(1 - config.keep_frac - config.random_frac))
        return cls(hidden, masked & ~kept & ~hidden, kept)


def mask(
    batch: TensorBatch,
    hides_gene: bool,
    config: MaskedObjectiveConfig,
    seed: int,
    step: int,
    tokenizer: Tokenizer | None = None,
    random_tokens: int | None = None,
) -> MaskedBatch:
    """Draw the mask of a batch and hide the genes of masked tokens, or their values.

    With `tokenizer`, the visible values are made again from the counts of visible tokens. `random_tokens` is the number
    of tokens of the vocabulary; None hides all that is masked, as validation does.
    """
    cell, place = positions(batch)
    keys = keyed_bits(batch.cells[cell], seed, step, place)
    is_gene = batch.genes > PAD_TOKEN  # neither padding nor an end of the cell
    draws = torch.where(is_gene, keys, NEVER)
    lowest = torch.full((len(batch.lengths),), NEVER, device=keys.device).scatter_reduce(0, cell, draws, "amin")
    masked = ((draws < threshold(config.mask_frac)) | (draws == lowest[cell])) & is_gene
    targets = masked.nonzero().flatten()
    none = torch.zeros_like(masked)
    fates = Fates(masked, none, none) if random_tokens is None else Fates.drawn(keys, masked, config)
    seen = batch
    if tokenizer is not None:
        seen = replace(batch, values=visible_values(batch, cell, ~masked | fates.kept, tokenizer))
    genes, values, hidden = seen.genes, seen.values, none
    if hides_gene:
        genes = genes.masked_fill(fates.hidden, MASK_TOKEN)
        if random_tokens is not None:
            others = len(SPECIAL) + keyed_bits(keys, CONTENT) % (random_tokens - len(SPECIAL))
            genes = torch.where(fates.random, others, genes)
    else:
        values, hidden = _with_random_values(values, fates, is_gene & ~masked, keys, cell)
    return MaskedBatch(
        genes=genes,
        values=values,
        value_hidden=hidden,
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


def _with_random_values(
    values: torch.Tensor, fates: Fates, visible: torch.Tensor, keys: torch.Tensor, cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens,) values, with 0 where hidden and that of a `visible` token of the cell where random; hidden ones, bool.

    Random ones are hidden in a cell without visible tokens.
    """
    donors = visible.nonzero().flatten()
    n = torch.bincount(cell[donors], minlength=int(cell.max()) + 1 if len(cell) else 0)[cell]
    first = torch.searchsorted(cell[donors], cell)
    random = fates.random & (n > 0)
    hidden = fates.hidden | (fates.random & ~random)
    chosen = (first + keyed_bits(keys, CONTENT) % n.clamp(min=1))[random]
    shown = values.masked_fill(hidden, 0)
    shown[random] = values[donors[chosen]]
    return shown, hidden


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene; needs a model with `states`, `inputs` and `cell_vectors`."""

    config: MaskedObjectiveConfig
    hides_gene: bool
    tokenizer: Tokenizer | None = None
    """Makes visible values again, where not None."""

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `head`, `cell_head` if the second loss is on, and the objective's own output."""
        hidden, self.n_tokens = model.width, n_tokens
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
        random_tokens = self.n_tokens if self._splits and self.training else None
        return mask(batch, self.hides_gene, self.config, seed, step, self.tokenizer, random_tokens)

    def loss(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss over masked tokens, a float32 scalar."""
        targets = prepared.targets
        loss = self.loss_of(model, model.head(states[targets]), prepared)
        if self.config.cell_loss_weight:
            cells = model.cell_vectors(states, prepared).to(states.dtype)
            # the targets are embedded again: the last stage of a pipeline does not receive the embeddings
            of_cells = rows_at(cells, prepared.cell[targets])
            asked = prepared.hiding_targets(self.hides_gene) if self._splits else prepared
            queries = torch.cat([of_cells, model.inputs(asked, targets)], dim=-1)
            loss = loss + self.config.cell_loss_weight * self.loss_of(model, model.cell_head(queries), prepared)
        return loss

    @property
    def _splits(self) -> bool:
        """True if some masked tokens show content."""
        return self.config.random_frac + self.config.keep_frac > 0

    def loss_of(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed loss of predictions from the states (N, H) of a head."""
        raise NotImplementedError


def _head(model: Any, width: int) -> nn.Module:
    hidden = model.width
    return nn.Sequential(Linear(width, hidden), model.head_activation(), nn.LayerNorm(hidden, eps=model.head_norm_eps))
