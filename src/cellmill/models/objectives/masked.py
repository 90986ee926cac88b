"""masked_value and masked_gene: predict the values, or the genes, of masked tokens.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step,
cell, position). Of the masked tokens, `keep_frac` show their own content in training and
`random_frac` random content: a random gene of the vocabulary, or the value of a random visible gene
of the cell (Devlin et al. 2019). The rest is hidden. A second loss, times `cell_loss_weight`,
predicts the same targets from the cell's vector and the visible half of each target: the gene for
masked_value, the value for masked_gene (scGPT, Cui et al. 2024, GEPC).

masked_value: cross-entropy of bins, squared error of continuous values. Genes differ far more in
their mean than cells in a gene, so values are judged by R² *over the gene mean*, and by the
correlation after subtracting the gene mean from both. Values depend on the sum of all counts of a
cell, hidden counts included; with `renormalize` the model sees values of visible counts only.
Without it, both metrics include this leak.

masked_gene: the output matrix is the gene embedding, the baseline the frequency of genes in the
training cells.

Legend: C cells, T tokens of the batch, N targets, H width of the model, V tokens of the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import MaskedObjectiveConfig, MaskedValueConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, EncoderBatch, positions
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits, threshold
from cellmill.models.initial import STD, Fill, normal, zeros
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    expected_bins,
    loss_verdict,
    pearson,
    r2_over,
    r2_verdict,
    value_loss,
)
from cellmill.models.objectives.shared.views import make_tokens
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import rows_at, token_logits

HIGHEST_DRAW = 2**63 - 1  # draw of tokens that are not genes
# Last key of each further draw of a token, after the bits that mask it.
FATE = 2  # whether the model sees the token's own content, random content, or none
CONTENT = 3  # the random content


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: Tensor  # `(N,)` int64, ascending: all masked tokens, also those that show content
    answers: Tensor  # `(N,)`: hidden genes (int64 token ids) or hidden values
    n_targets: Tensor

    def hide_targets(self, hides_gene: bool) -> Self:
        """Hide the gene, or the value, of every target; return a new batch."""
        if hides_gene:
            return replace(self, genes=self.genes.index_fill(0, self.targets, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, self.targets, 0),
            value_hidden=self.value_hidden.index_fill(0, self.targets, True),
        )


class ValueObservations(NamedTuple):
    """Observations of masked_value, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    values: Any
    predicted: Any  # values, or expected bins


class GeneObservations(NamedTuple):
    """Observations of masked_gene, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    is_right: Any  # bool: the gene has the highest logit
    losses: Any  # float32: cross-entropy


@dataclass(frozen=True)
class Mask:
    """Tokens that are masked, and what the model sees of each. All fields are `(T,)`."""

    cell: Tensor  # int64: index of the token's cell
    keys: Tensor  # int64: keys of the token's further draws
    visible: Tensor  # bool: genes that are not masked
    masked: Tensor  # bool: tokens to predict, of which each is hidden, kept or random
    hidden: Tensor  # bool
    kept: Tensor  # bool: shows its own content
    random: Tensor  # bool: shows random content


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene; needs a model with `states`, `inputs` and `cell_vectors`."""

    config: MaskedObjectiveConfig
    hides_gene: bool

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        model.head = _make_head(model, model.width)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = _make_head(model, 2 * model.width)
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, n_tokens))

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add the layer from states to predictions; return the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> MaskedBatch:
        """Draw the mask of a batch and hide the genes of masked tokens, or their values."""
        mask = self._draw_mask(batch, seed, step)
        targets = mask.masked.nonzero().flatten()
        content = batch.genes if self.hides_gene else batch.values
        values_known = torch.ones_like(mask.masked) if self.hides_gene else ~mask.masked
        return MaskedBatch.prepared(
            batch,
            (seed, step),
            **self.hide(batch, mask),
            value_known=values_known,
            targets=targets,
            answers=content[targets],
            n_targets=torch.tensor(len(targets), device=targets.device),
        )

    def _draw_mask(self, batch: Batch, seed: int, step: int) -> Mask:
        cell, position = positions(batch)
        keys = keyed_token_bits(batch.cells, cell, seed, step, position)
        is_gene = batch.genes > PAD_TOKEN  # neither padding nor an end of the cell
        masked = self._choose_masked(keys, is_gene, cell, len(batch.lengths))
        hidden = masked
        kept = torch.zeros_like(masked)
        # validation hides everything that is masked
        if self._shows_content and self.training:
            hidden, kept = self._draw_fates(keys, masked)
        return Mask(
            cell=cell,
            keys=keys,
            visible=is_gene & ~masked,
            masked=masked,
            hidden=hidden,
            kept=kept,
            random=masked & ~kept & ~hidden,
        )

    def _choose_masked(self, keys: Tensor, is_gene: Tensor, cell: Tensor, n_cells: int) -> Tensor:
        """Return which tokens are masked: draws below `mask_frac`, and each cell's lowest; `(T,)` bool."""
        draws = torch.where(is_gene, keys, HIGHEST_DRAW)
        lowest = torch.full((n_cells,), HIGHEST_DRAW, device=draws.device)
        lowest = lowest.scatter_reduce(0, cell, draws, "amin")
        masked = (draws < threshold(self.config.mask_frac)) | (draws == lowest[cell])
        return masked & is_gene

    def _draw_fates(self, keys: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return which masked tokens are hidden, and which show their own content, `(T,)` bool each.

        Fates are from low to high: the token is hidden, shows random content, or its own.
        """
        keep_frac = self.config.keep_frac
        hidden_frac = 1 - keep_frac - self.config.random_frac
        fates = keyed_bits(keys, FATE)
        # without keep_frac nothing is kept: the highest fate reaches even the threshold of 1
        kept = masked & (fates >= threshold(1 - keep_frac)) & (keep_frac > 0)
        hidden = masked & ~kept & (fates < threshold(hidden_frac))
        return hidden, kept

    def hide(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide the content of hidden tokens and replace that of random ones; return the new fields."""
        raise NotImplementedError

    def loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        targets = prepared.targets
        loss = self.head_loss(model, model.head(states[targets]), prepared)
        weight = self.config.cell_loss_weight
        if not weight:
            return loss
        cells = model.cell_vectors(states, prepared).to(states.dtype)
        # the targets are embedded again: the last pipeline stage does not receive the embeddings
        queried = prepared.hide_targets(self.hides_gene) if self._shows_content else prepared
        # both parts stay unnamed, so their memory is free before the head runs
        queries = torch.cat(
            [rows_at(cells, prepared.cell[targets]), model.inputs(queried, targets)], dim=-1
        )
        return loss + weight * self.head_loss(model, model.cell_head(queries), prepared)

    @property
    def _shows_content(self) -> bool:
        """Return True if some masked tokens show random content or their own."""
        return self.config.random_frac + self.config.keep_frac > 0

    def head_loss(self, model: Any, head_output: Tensor, prepared: MaskedBatch) -> Tensor:
        """Return the summed loss of predictions from the head's output `(N, H)`, a float32 scalar."""
        raise NotImplementedError


def _make_head(model: Any, width: int) -> nn.Module:
    """Return a layer from `width` to the width of the model, with activation and norm."""
    layer = nn.Linear(width, model.width)
    norm = nn.LayerNorm(model.width, eps=model.head_norm_eps)
    return nn.Sequential(layer, model.head_activation(), norm)


class MaskedValue(MaskedObjective):
    config: MaskedValueConfig
    hides_gene = False

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        model.hidden_value = nn.Parameter(torch.empty(model.width))
        n_outputs = self.tokens.n_values - self._first_bin if self._is_class else 1
        model.value_out = nn.Linear(model.width, n_outputs)
        return ("value_out",)

    def initial_value(self, name: str) -> Fill | None:
        return normal(STD) if name == "hidden_value" else None

    def hide(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide values, or replace them by the value of a random visible token of the cell."""
        values = batch.values
        if self.config.renormalize:
            values = self._renormalize(batch, mask.visible | mask.kept)
        n_donors = torch.bincount(mask.cell[mask.visible], minlength=len(batch.lengths))  # `(C,)`
        # a cell without a visible token has its random tokens hidden
        has_donor = (n_donors > 0)[mask.cell]
        hidden = mask.hidden | (mask.random & ~has_donor)
        random = mask.random & has_donor
        shown = values.masked_fill(hidden, 0)
        shown[random] = values[_choose_donors(mask, random, n_donors)]
        return {"values": shown, "value_hidden": hidden}

    def _renormalize(self, batch: Batch, shows_value: Tensor) -> Tensor:
        """Return values `(T,)` made from the counts of shown values only, with 0 for the others.

        `shows_value` `(T,)` bool is True for a token whose own value the model sees.
        """
        assert batch.counts is not None, "the batch has no counts"
        counts = batch.counts * shows_value
        genes = batch.genes.numpy()
        tokens = make_tokens(genes, counts.numpy(), batch.cu_seqlens.numpy(), self.tokenizer)
        values = torch.zeros_like(batch.values)
        values[counts > 0] = tokens["values"]
        return values

    def head_loss(self, model: Any, head_output: Tensor, prepared: MaskedBatch) -> Tensor:
        return value_loss(
            self.predict_from_head(model, head_output, prepared), prepared.answers, self._first_bin
        )

    def predict_from_head(self, model: Any, head_output: Tensor, prepared: MaskedBatch) -> Tensor:
        """Return values `(N,)` float32, or logits of bins `(N, bins)`, from the head's output `(N, H)`."""
        out: Tensor = model.value_out(head_output).float()
        if self._is_class:
            return out
        return out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]

    def observe(self, model: Any, prepared: MaskedBatch) -> ValueObservations:
        targets = prepared.targets
        predicted = self.predict_from_head(
            model, model.head(model.states(prepared)[targets]), prepared
        )
        if predicted.ndim == 2:
            predicted = expected_bins(predicted, self._first_bin)
        return ValueObservations(
            genes=prepared.genes[targets] - len(SPECIAL),
            values=prepared.answers,
            predicted=predicted,
        )

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        targets = ValueObservations(*observed)
        values = targets.values.astype(np.float64)
        predicted = targets.predicted.astype(np.float64)
        gene_means = train.mean[targets.genes]
        mse = float(np.mean((values - predicted) ** 2))
        mse_gene = float(np.mean((values - gene_means) ** 2))
        mse_global = float(np.mean((values - train.global_mean) ** 2))
        r2 = r2_over(mse_gene, mse)
        metrics = {
            "n_targets": len(values),
            "r2_over_gene_mean": r2,
            "r2_over_global_mean": r2_over(mse_global, mse),
            "pearson_gene_centred": pearson(values - gene_means, predicted - gene_means),
            "mse": mse,
            "mse_gene_mean": mse_gene,
            "mse_global_mean": mse_global,
        }
        return metrics, r2_verdict("prediction of masked values", "the gene's training mean", r2)

    @property
    def _first_bin(self) -> int:
        """Return the number of the first bin; 0 is the bin of genes without counts."""
        return 0 if self.tokens.zero_frac else 1

    @property
    def _is_class(self) -> bool:
        return self.tokens.value_kind == "class"


def _choose_donors(mask: Mask, random: Tensor, n_donors: Tensor) -> Tensor:
    """Return a random visible token of the same cell for each `random` token, `(random,)` int64.

    `random` is `(T,)` bool. `n_donors` `(C,)` is the number of visible tokens of each cell.
    """
    donors = mask.visible.nonzero().flatten()  # tokens, cell after cell
    first_donor = n_donors.cumsum(0) - n_donors  # `(C,)`: index in `donors`
    cell = mask.cell[random]
    draws = keyed_bits(mask.keys[random], CONTENT)
    return donors[first_donor[cell] + draws % n_donors[cell]]


class MaskedGene(MaskedObjective):
    hides_gene = True
    gene_rows = frozenset({"gene_bias"})
    n_genes: int  # genes of the vocabulary; set by `attach`

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        self.n_genes = n_tokens - len(SPECIAL)
        model.gene_bias = nn.Parameter(torch.empty(n_tokens))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        return zeros if name == "gene_bias" else None

    def hide(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide genes, or replace them by a random gene of the vocabulary."""
        genes = batch.genes.masked_fill(mask.hidden, MASK_TOKEN)
        if self._shows_content and self.training:
            random_genes = len(SPECIAL) + keyed_bits(mask.keys, CONTENT) % self.n_genes
            genes = torch.where(mask.random, random_genes, genes)
        return {"genes": genes}

    def head_loss(self, model: Any, head_output: Tensor, prepared: MaskedBatch) -> Tensor:
        table = model.gene_embedding.weight
        return token_loss(head_output, table, model.gene_bias, prepared.answers)

    def predict_from_head(self, model: Any, head_output: Tensor, prepared: MaskedBatch) -> Tensor:
        """Return logits of genes, `(N, V)` float32, from the head's output `(N, H)`."""
        return token_logits(head_output, model.gene_embedding.weight, model.gene_bias)

    def observe(self, model: Any, prepared: MaskedBatch) -> GeneObservations:
        answers = prepared.answers
        states = model.states(prepared)[prepared.targets]
        logits = self.predict_from_head(model, model.head(states), prepared)
        return GeneObservations(
            genes=answers - len(SPECIAL),
            is_right=logits.argmax(1) == answers,
            losses=F.cross_entropy(logits, answers, reduction="none"),
        )

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        genes, is_right, losses = GeneObservations(*observed)
        # add one: no gene has frequency 0
        frequency = (train.n + 1) / (train.n.sum() + len(train.n))
        base_loss = float(-np.log(frequency[genes]).mean())
        loss = float(losses.astype(np.float64).mean())
        metrics = {
            "n_targets": len(genes),
            "accuracy": float(is_right.mean()),
            "accuracy_frequency": float((genes == int(train.n.argmax())).mean()),
            "cross_entropy": loss,
            "cross_entropy_frequency": base_loss,
        }
        name = "prediction of masked genes"
        against = "gene frequency in training cells"
        return metrics, loss_verdict(name, against, loss - base_loss)
