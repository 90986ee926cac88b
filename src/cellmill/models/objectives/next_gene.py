"""next_gene: predict each next gene of a cell in rank order, its value, and the end of the cell.

The likelihood of a cell is a chain of predictions from the state before each gene:

- whether the cell continues or ends: binary cross-entropy.
- if it continues, the next gene: cross-entropy over the vocabulary. The matrix of the output layer is
  the gene embedding.
- given that gene, its value: cross-entropy of bins, or squared error of continuous values.

Before the first gene the state is a learned vector. A cell with as many tokens as `max_tokens` may
have been cut, so its end is not a target.

A gene is judged among the genes that the cell does not have yet, from which `cellmill generate` draws
too. The baseline is the gene frequency at similar ranks in training cells, among the same genes.

Legend: T tokens of the batch, N targets, H width of the model, V size of the vocabulary.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import NextGeneConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.rank_order import rank_buckets
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, EncoderBatch, positions
from cellmill.models.initial import STD, Fill, normal, zeros
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    ObjectiveModel,
    Tensors,
    cross_entropy_verdicts,
    expected_bins,
    r2_over,
    r2_verdicts,
    value_loss,
)
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits


@dataclass(frozen=True, kw_only=True)
class NextGeneBatch(EncoderBatch):
    """Whole cells, and which of their tokens and ends are predicted."""

    target_tokens: Tensor  # `(N,)` int64, ascending: index of each token except padding
    is_first: Tensor  # `(N,)` bool: True for the first token of a cell
    last_tokens: Tensor  # `(ends,)` int64: index of the last token of each cell that was not cut
    n_targets: Tensor  # N


class NextGeneObservations(NamedTuple):
    """Observations of next genes, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    position: Any  # int64: position in the cell
    is_correct: Any  # bool: the gene has the highest logit of all candidates
    losses: Any  # float32: cross-entropy among the candidates


class NextValueObservations(NamedTuple):
    """Observations of the values of these genes, `(N,)` each; follow `NextGeneObservations`."""

    values: Any
    predicted: Any  # values, or expected bins


class NextGene(Objective):
    """Predict each next gene of a cell, its value and the cell's end from the state before it.

    It needs a causal model with `gene_embedding`, and whole cells: a view ends before its cell.
    """

    config: NextGeneConfig
    former_names = MappingProxyType(
        {
            "predicts_values": "has_value_head",
            "gene_logits": "predict_gene_logits",
            "end_logits": "predict_end_logits",
        }
    )
    gene_rows = frozenset({"gene_bias"})

    @property
    def has_value_head(self) -> bool:
        """True if the tokens have values to predict and their loss has a weight."""
        return self.tokens.value_kind in ("class", "scalar") and self.config.value_loss_weight > 0

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add `start`, the state before the first gene, and the heads of genes, ends and values."""
        width = model.width
        model.start = nn.Parameter(torch.empty(width))
        model.gene_bias = nn.Parameter(torch.empty(vocab_size))
        model.end = nn.Linear(width, 1)
        names = ("start", "gene_bias", "end", "gene_embedding")
        if not self.has_value_head:
            return names
        layer = nn.Linear(2 * width, width)
        model.value_head = nn.Sequential(layer, nn.GELU(), nn.LayerNorm(width))
        # tokens are detected genes, whose bins count from 1
        n_outputs = self.tokens.n_values - 1 if self.tokens.values_are_bins else 1
        model.value_out = nn.Linear(width, n_outputs)
        return (*names, "value_head", "value_out")

    def initial_value(self, name: str) -> Fill | None:
        return {"start": normal(STD), "gene_bias": zeros}.get(name)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> NextGeneBatch:
        _, position = positions(batch)
        is_token = batch.token_ids != PAD_TOKEN
        target_tokens = is_token.nonzero().flatten()
        lengths = batch.cu_seqlens.diff()
        is_whole = (lengths > 0) & (lengths < self.tokens.max_tokens)
        last_tokens = batch.cu_seqlens[1:].long()[is_whole] - 1
        return NextGeneBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            target_tokens=target_tokens,
            is_first=position[target_tokens] == 0,
            # a cell of padding has no end to predict
            last_tokens=last_tokens[is_token[last_tokens]],
            n_targets=torch.tensor(len(target_tokens), device=target_tokens.device),
        )

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: NextGeneBatch) -> Tensor:
        prior_states = self.select_prior_states(model, states, prepared)
        token_ids = prepared.token_ids[prepared.target_tokens]
        loss = token_loss(prior_states, model.gene_embedding.weight, model.gene_bias, token_ids)
        # binary cross-entropy: a cell continues before each target, and ends after its last token
        end_logits_before_targets = self.predict_end_logits(model, prior_states)
        end_logits_after_last = self.predict_end_logits(model, states[prepared.last_tokens])
        loss = loss + F.softplus(end_logits_before_targets).sum()
        loss = loss + F.softplus(-end_logits_after_last).sum()
        if not self.has_value_head:
            return loss
        predicted = self.predict_values(model, prior_states, token_ids)
        values = prepared.values[prepared.target_tokens]
        return loss + self.config.value_loss_weight * value_loss(predicted, values)

    def select_prior_states(
        self, model: ObjectiveModel, states: Tensor, prepared: NextGeneBatch
    ) -> Tensor:
        """Select the state before each target, `(N, H)`, from states `(T, H)`."""
        earlier = states[(prepared.target_tokens - 1).clamp(min=0)]
        return torch.where(prepared.is_first[:, None], model.start.to(states.dtype), earlier)

    def predict_gene_logits(self, model: ObjectiveModel, prior_states: Tensor) -> Tensor:
        """Predict logits of the next token, `(N, V)` float32.

        Special tokens are included, although never targets.
        """
        return token_logits(prior_states, model.gene_embedding.weight, model.gene_bias)

    def predict_end_logits(self, model: ObjectiveModel, states: Tensor) -> Tensor:
        """Predict the logit of the cell ending at each of n `states` `(n, H)`: `(n,)` float32."""
        # start near the chance of an end, one in many tokens: a bias that starts at 0 would take
        # thousands of steps to learn it
        return model.end(states).float().squeeze(-1) - math.log(self.tokens.max_tokens)

    def predict_values(
        self, model: ObjectiveModel, prior_states: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Predict values `(N,)` float32, or logits of bins `(N, bins)`.

        `prior_states` are `(N, H)`; `token_ids` `(N,)` are the next genes.
        """
        embedded = embed_tokens(token_ids, model.gene_embedding.weight).to(prior_states.dtype)
        queries = torch.cat([prior_states, embedded], dim=-1)
        out: Tensor = model.value_out(model.value_head(queries)).float()
        return out if self.tokens.values_are_bins else out.squeeze(-1)

    def observe(self, model: ObjectiveModel, prepared: NextGeneBatch) -> Tensors:
        """Return `NextGeneObservations`, then `NextValueObservations` if values are predicted.

        Genes are in order, cell after cell.
        """
        # without padding, offsets of tokens are offsets of targets
        n_tokens = len(prepared.token_ids)
        assert len(prepared.target_tokens) == n_tokens, "expected a batch without padding"
        prior_states = self.select_prior_states(model, model.states(prepared), prepared)
        cells = []
        for start, end in pairwise(prepared.cu_seqlens.tolist()):
            cells.append(
                self._observe_cell(model, prior_states[start:end], prepared.token_ids[start:end])
            )
        observed = tuple(torch.cat(tensors) for tensors in zip(*cells))
        if not self.has_value_head:
            return observed
        predicted = self.predict_values(model, prior_states, prepared.token_ids)
        if self.tokens.values_are_bins:
            predicted = expected_bins(predicted)
        return (*observed, *NextValueObservations(prepared.values, predicted))

    def _observe_cell(
        self, model: ObjectiveModel, prior_states: Tensor, token_ids: Tensor
    ) -> NextGeneObservations:
        """Observe a cell's tokens from their ids `(n,)` and the states before them, `(n, H)`.

        Candidates are genes that the cell does not have yet.
        """
        logits = self.predict_gene_logits(model, prior_states)  # `(n, V)`
        position = torch.arange(len(token_ids), device=token_ids.device)
        # `(V,)`: last position at which each token is a candidate: a gene's own position in the cell,
        # the cell's length for a gene that it lacks, -1 (never) for special tokens
        candidate_until = torch.full((logits.shape[1],), len(token_ids), device=token_ids.device)
        candidate_until = candidate_until.index_put((token_ids,), position)
        candidate_until[: len(SPECIAL)] = -1
        logits = logits.masked_fill(candidate_until < position[:, None], -torch.inf)
        return NextGeneObservations(
            genes=token_ids - len(SPECIAL),
            position=position,
            is_correct=logits.argmax(1) == token_ids,
            losses=F.cross_entropy(logits, token_ids, reduction="none"),
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score predicted genes against `RankBaseline`, and values if the model predicts them."""
        n_fields = len(NextGeneObservations._fields)
        genes, position, is_correct, losses = NextGeneObservations(*observed[:n_fields])
        value_arrays = observed[n_fields:]
        assert statistics.by_rank is not None, "statistics without ranks"
        baseline = RankBaseline(statistics.by_rank)
        baseline_is_correct, baseline_losses = baseline.score(genes, position)
        loss = float(losses.astype(np.float64).mean())
        baseline_loss = float(baseline_losses.mean())
        metrics: dict[str, Any] = {
            "n_targets": len(genes),
            "accuracy": float(is_correct.mean()),
            "accuracy_rank_frequency": float(baseline_is_correct.mean()),
            "cross_entropy": loss,
            "cross_entropy_rank_frequency": baseline_loss,
        }
        name = "prediction of the next gene"
        against = "gene frequency at similar ranks in training cells"
        verdicts = cross_entropy_verdicts(name, against, loss - baseline_loss)
        if value_arrays:
            observations = NextValueObservations(*value_arrays)
            values, predicted = (array.astype(np.float64) for array in observations)
            error = float(np.square(values - predicted).sum())
            baseline_error = float(np.square(values - statistics.mean[genes]).sum())
            r2 = r2_over(baseline_error, error)
            metrics["value_r2_over_gene_mean"] = r2
            verdicts += r2_verdicts("prediction of the next value", "the gene's training mean", r2)
        return metrics, verdicts


class RankBaseline:
    """Prediction of the next gene from gene frequencies at similar ranks in training cells.

    Ranks are in buckets (`data.rank_order.rank_buckets`). Candidates are genes that are not in the cell
    yet.
    """

    def __init__(self, by_rank: np.ndarray) -> None:
        """`by_rank` `(buckets, genes)` int64 counts the tokens of training cells."""
        n_genes = by_rank.shape[1]
        # each bucket gets `n_genes` pseudocounts, spread like the frequencies over all buckets
        overall = (by_rank.sum(0) + 1) / (by_rank.sum() + n_genes)
        smoothed = by_rank + n_genes * overall
        # `(buckets, genes)`: frequencies, float64 above 0, and vocabulary rows by falling frequency
        self.frequencies: np.ndarray = smoothed / smoothed.sum(1, keepdims=True)
        self.genes_by_frequency: np.ndarray = np.argsort(-self.frequencies, axis=1, kind="stable")

    def score(self, genes: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute correctness, bool, and cross-entropy, float64, of each prediction, `(N,)`.

        `genes` are vocabulary rows, cell after cell, and `position` their positions in the cell,
        `(N,)` int64 each.
        """
        buckets = rank_buckets(position)
        is_correct = np.zeros(len(genes), bool)
        cross_entropy = np.zeros(len(genes))
        cell_starts = np.flatnonzero(position == 0)
        for start, end in pairwise([*cell_starts, len(genes)]):
            for bucket in np.unique(buckets[start:end]):
                scored_positions = np.flatnonzero(buckets[start:end] == bucket)
                scored = start + scored_positions
                is_correct[scored], cross_entropy[scored] = self._score_bucket(
                    bucket, genes[start:end], scored_positions
                )
        return is_correct, cross_entropy

    def _score_bucket(
        self, bucket: int, cell_genes: np.ndarray, scored_positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score predictions of one cell, all in one bucket: `(predictions,)` each.

        `cell_genes` are the genes of the cell in order, `scored_positions` the positions to score,
        `(predictions,)` int64.

        A gene is a candidate up to its own position in the cell, and a gene that the cell lacks at all
        positions. The most frequent candidate at a position is the first gene by frequency that is one
        for as long or longer: where the running maximum of `candidate_until` reaches the position. In a
        cell with genes 0 and 2, of four:

            genes_by_frequency    0 3 2 1
            candidate_until       0 2 1 2
            running maximum       0 2 2 2
            predicted             0 at position 0, 3 at position 1
        """
        frequency = self.frequencies[bucket][cell_genes]
        # total frequency of the candidates: at least the gene's own, in spite of rounding
        earlier_frequency = np.cumsum(frequency) - frequency
        candidate_frequency = np.maximum(1 - earlier_frequency, frequency)
        cross_entropy = np.log(candidate_frequency[scored_positions] / frequency[scored_positions])
        genes_by_frequency = self.genes_by_frequency[bucket]
        candidate_until = np.full(len(genes_by_frequency), len(cell_genes))
        candidate_until[cell_genes] = np.arange(len(cell_genes))
        running_max = np.maximum.accumulate(candidate_until[genes_by_frequency])
        predicted = genes_by_frequency[np.searchsorted(running_max, scored_positions)]
        return predicted == cell_genes[scored_positions], cross_entropy
