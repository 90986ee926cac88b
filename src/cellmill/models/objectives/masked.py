"""masked_value and masked_gene: predict the values, or the genes, of masked tokens.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step,
cell, position). In training, `random_frac` of the masked tokens show random content and `keep_frac`
their own (Devlin et al. 2019): a random gene of the vocabulary, or the value of a random visible
gene of the cell. The second loss predicts the same targets from the cell's vector and the visible
half of each masked token (scGPT, Cui et al. 2024, GEPC).

masked_value: cross-entropy of bins, squared error of continuous values. Genes differ far more in
their mean than cells in a gene, so values are judged by R² *over the gene mean*, and by the
correlation after subtracting the gene mean from both. Values depend on the sum of all counts of a
cell, hidden counts included; with `renormalize` the model sees values of visible counts only.
Without it, both metrics include this leak.

masked_gene: the output matrix is the gene embedding, the baseline the frequency of genes in the
training cells.

Legend: T tokens of the batch, N targets, H hidden, V tokens of the vocabulary.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

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
    r2_over,
    r2_verdict,
    value_loss,
)
from cellmill.models.objectives.views import make_tokens
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import rows_at, token_logits

NEVER = 2**63 - 1  # the highest draw
# last keys of a masked token's draws
FATE = 2
CONTENT = 3


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: Tensor  # (N,) int64, ascending: all masked tokens, also those that show content
    answers: Tensor  # (N,): hidden genes (int64 token ids) or hidden values
    n_targets: Tensor

    def hide_targets(self, hides_gene: bool) -> Self:
        """Return the batch with the gene, or the value, of every target hidden."""
        if hides_gene:
            return replace(self, genes=self.genes.index_fill(0, self.targets, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, self.targets, 0),
            value_hidden=self.value_hidden.index_fill(0, self.targets, True),
        )


class MaskedObjective(Objective):
    """Base of both; needs a model with `states`, `inputs` and `cell_vectors`."""

    config: MaskedObjectiveConfig
    hides_gene: bool

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        self.n_tokens = n_tokens
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
        config = self.config
        # validation hides everything that is masked
        shows_content = self._shows_content and self.training
        cell, position = positions(batch)
        keys = keyed_token_bits(batch.cells, cell, seed, step, position)
        is_gene = batch.genes > PAD_TOKEN  # neither padding nor an end of the cell
        masked = self._draw_mask(torch.where(is_gene, keys, NEVER), cell, len(batch.lengths))
        masked = masked & is_gene
        targets = masked.nonzero().flatten()
        # (T,) bool: masked tokens that are hidden, keep their content, or show random content
        hidden = masked
        kept = torch.zeros_like(masked)
        if shows_content:
            fates = keyed_bits(keys, FATE)
            kept = masked & (fates >= threshold(1 - config.keep_frac)) & (config.keep_frac > 0)
            is_below = fates < threshold(1 - config.keep_frac - config.random_frac)
            hidden = masked & ~kept & is_below
        random = masked & ~kept & ~hidden
        genes = batch.genes
        values = batch.values
        value_hidden = torch.zeros_like(masked)
        if isinstance(config, MaskedValueConfig) and config.renormalize:
            values = self._renormalize(batch, ~masked | kept)
        if self.hides_gene:
            genes = genes.masked_fill(hidden, MASK_TOKEN)
            if shows_content:
                n_genes = self.n_tokens - len(SPECIAL)
                random_genes = len(SPECIAL) + keyed_bits(keys, CONTENT) % n_genes
                genes = torch.where(random, random_genes, genes)
        else:
            # a random value is that of a visible token of the cell; without one it is hidden
            donors = (is_gene & ~masked).nonzero().flatten()
            donor_cell = cell[donors]
            n_donors = torch.bincount(donor_cell, minlength=len(batch.lengths))[cell]
            value_hidden = hidden | (random & (n_donors == 0))
            random = random & (n_donors > 0)
            first_donor = torch.searchsorted(donor_cell, cell)
            chosen = first_donor + keyed_bits(keys, CONTENT) % n_donors.clamp(min=1)
            random_values = values[donors[chosen[random]]]
            values = values.masked_fill(value_hidden, 0)
            values[random] = random_values
        return MaskedBatch.prepared(
            batch,
            (seed, step),
            genes=genes,
            values=values,
            value_hidden=value_hidden,
            value_known=~masked | self.hides_gene,
            targets=targets,
            answers=(batch.genes if self.hides_gene else batch.values)[targets],
            n_targets=torch.tensor(len(targets), device=keys.device),
        )

    def _draw_mask(self, draws: Tensor, cell: Tensor, n_cells: int) -> Tensor:
        """(T,) int64 each -> (T,) bool: masked tokens, the lowest draw of a cell in any case."""
        lowest = torch.full((n_cells,), NEVER, device=draws.device)
        lowest = lowest.scatter_reduce(0, cell, draws, "amin")
        return (draws < threshold(self.config.mask_frac)) | (draws == lowest[cell])

    def _renormalize(self, batch: Batch, visible: Tensor) -> Tensor:
        """(T,) bool -> (T,): values from the counts of visible tokens only, 0 for others."""
        assert batch.counts is not None, "the batch has no counts"
        counts = batch.counts * visible
        genes = batch.genes.numpy()
        tokens = make_tokens(genes, counts.numpy(), batch.cu_seqlens.numpy(), self.tokenizer)
        values = torch.zeros_like(batch.values)
        values[counts > 0] = tokens["values"]
        return values

    def loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        targets = prepared.targets
        loss = self.head_loss(model, model.head(states[targets]), prepared)
        weight = self.config.cell_loss_weight
        if not weight:
            return loss
        cells = model.cell_vectors(states, prepared).to(states.dtype)
        # the targets are embedded again: the last pipeline stage does not receive the embeddings
        queried = prepared.hide_targets(self.hides_gene) if self._shows_content else prepared
        target_cells = rows_at(cells, prepared.cell[targets])
        queries = torch.cat([target_cells, model.inputs(queried, targets)], dim=-1)
        return loss + weight * self.head_loss(model, model.cell_head(queries), prepared)

    @property
    def _shows_content(self) -> bool:
        """True if some masked tokens show random content or their own."""
        return self.config.random_frac + self.config.keep_frac > 0

    def head_loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """Return the summed loss of predictions from the states (N, H) of a head."""
        raise NotImplementedError


def _make_head(model: Any, width: int) -> nn.Module:
    """Make a layer from `width` to the width of the model."""
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

    def head_loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        return value_loss(self.predict(model, states, prepared), prepared.answers, self._first_bin)

    def predict(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """(N, H) -> float32 values (N,), or logits of bins (N, bins)."""
        out: Tensor = model.value_out(states).float()
        if self._is_class:
            return out
        return out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[Tensor, ...]:
        """Return vocabulary row, true value and predicted value (or bin) of each target."""
        targets = prepared.targets
        predicted = self.predict(model, model.head(model.states(prepared)[targets]), prepared)
        if predicted.ndim == 2:
            predicted = expected_bins(predicted, self._first_bin)
        return prepared.genes[targets] - len(SPECIAL), prepared.answers, predicted

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        genes = observed[0]
        values, predicted = (array.astype(np.float64) for array in observed[1:])
        gene_means = train.mean[genes]
        mse = float(np.mean((values - predicted) ** 2))
        mse_gene = float(np.mean((values - gene_means) ** 2))
        mse_global = float(np.mean((values - train.global_mean) ** 2))
        r2 = r2_over(mse_gene, mse)
        # correlation after subtracting gene means
        x = values - gene_means
        x = x - x.mean()
        y = predicted - gene_means
        y = y - y.mean()
        scale = math.sqrt(float(x @ x) * float(y @ y))
        metrics = {
            "n_targets": len(values),
            "r2_over_gene_mean": r2,
            "r2_over_global_mean": r2_over(mse_global, mse),
            "pearson_gene_centred": float(x @ y) / scale if scale > 0 else None,
            "mse": mse,
            "mse_gene_mean": mse_gene,
            "mse_global_mean": mse_global,
        }
        return metrics, r2_verdict("prediction of masked values", "the gene's training mean", r2)

    @property
    def _first_bin(self) -> int:
        """Number of the first bin; 0 is the bin of genes without counts."""
        return 0 if self.tokens.zero_frac else 1

    @property
    def _is_class(self) -> bool:
        return self.tokens.value_kind == "class"


class MaskedGene(MaskedObjective):
    hides_gene = True
    gene_rows = frozenset({"gene_bias"})

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        model.gene_bias = nn.Parameter(torch.empty(n_tokens))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        return zeros if name == "gene_bias" else None

    def head_loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        return token_loss(states, model.gene_embedding.weight, model.gene_bias, prepared.answers)

    def predict(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """(N, H) -> float32 logits of genes (N, V)."""
        return token_logits(states, model.gene_embedding.weight, model.gene_bias)

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[Tensor, ...]:
        """Return vocabulary row, top-1 correctness and cross-entropy of each target."""
        answers = prepared.answers
        states = model.states(prepared)[prepared.targets]
        logits = self.predict(model, model.head(states), prepared)
        losses = F.cross_entropy(logits, answers, reduction="none")
        return answers - len(SPECIAL), logits.argmax(1) == answers, losses

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        genes, correct, cross_entropy = observed
        frequency = (train.n + 1) / (train.n.sum() + len(train.n))
        base_loss = float(-np.log(frequency[genes]).mean())
        loss = float(cross_entropy.astype(np.float64).mean())
        metrics = {
            "n_targets": len(genes),
            "accuracy": float(correct.mean()),
            "accuracy_frequency": float((genes == int(train.n.argmax())).mean()),
            "cross_entropy": loss,
            "cross_entropy_frequency": base_loss,
        }
        name = "prediction of masked genes"
        against = "gene frequency in training cells"
        return metrics, loss_verdict(name, against, loss - base_loss)
