"""next_gene: predict each next gene of a cell in rank order, its value, and the end of the cell.

The likelihood of a cell is a chain of predictions. Before each gene, the state of the previous token
predicts:

- whether the cell continues or ends. The loss is the binary cross-entropy.
- if the cell continues, which gene comes next. The loss is the cross-entropy over the vocabulary. The
  matrix of the output layer is the gene embedding.
- given that gene, its value. The loss is the cross-entropy of bins, or the squared error of continuous
  values.

Before the first gene of a cell, a learned vector takes the place of the state. A cell with `max_tokens`
tokens may have been cut, so the end of such a cell is not a target.

In `judge`, the candidates for the next gene are the genes that the cell does not have yet. `cellmill
generate` draws from the same candidates. The baseline predicts the frequencies of genes at similar ranks
in training cells, among the same candidates (`shared/rank_baseline.py`).

In the shapes below, "tokens" are all tokens of a batch, "targets" are the tokens to predict, "width" is
the width of the model, and "vocabulary" is the number of token ids.
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
from cellmill.models.objectives.shared.rank_baseline import RankBaseline
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits


@dataclass(frozen=True, kw_only=True)
class NextGeneBatch(EncoderBatch):
    """Whole cells, with the tokens to predict and the ends of cells to predict."""

    target_tokens: Tensor  # (targets,) int64, ascending: the indices of all tokens except padding
    is_first: Tensor  # (targets,) bool: True for the first token of a cell
    last_tokens: Tensor  # (ends,) int64: the index of the last token of each cell that was not cut
    n_targets: Tensor  # int64 scalar: the number of targets


class NextGeneObservations(NamedTuple):
    """Observations of next genes, (targets,) each: tensors in `observe`, and arrays in `judge`."""

    genes: Any  # int64: the vocabulary rows of the true genes
    positions_in_cell: Any  # int64: the position of each gene in its cell, from 0
    is_correct: Any  # bool: True if the true gene has the highest logit of all candidates
    losses: Any  # float32: the cross-entropy of the true gene among the candidates


class NextValueObservations(NamedTuple):
    """Observations of the values of the same genes, (targets,) each.

    In the result of `observe` they come after the `NextGeneObservations`.
    """

    values: Any  # the true values
    predicted: Any  # the predicted values; for bins the mean bin under the predicted probabilities


class NextGene(Objective):
    """Predict each next gene of a cell, the gene's value, and the cell's end, from the state before.

    The model must be causal and have a `gene_embedding`. The cells must be whole: a view may lack the last
    genes of a cell, and the end of the view would then not be the end of the cell.
    """

    config: NextGeneConfig
    # names that subclasses may no longer define, each with its present name
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
        """True if tokens have values that can be predicted, and the loss of values has a weight."""
        return self.tokens.value_kind in ("class", "scalar") and self.config.value_loss_weight > 0

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the learned vector `start`, and the heads that predict genes, ends and values."""
        width = model.width
        model.start = nn.Parameter(torch.empty(width))
        model.gene_bias = nn.Parameter(torch.empty(vocab_size))
        model.end = nn.Linear(width, 1)
        names = ("start", "gene_bias", "end", "gene_embedding")
        if not self.has_value_head:
            return names

        layer = nn.Linear(2 * width, width)
        model.value_head = nn.Sequential(layer, nn.GELU(), nn.LayerNorm(width))
        # all tokens are detected genes, so bin 0 of undetected genes is not predicted
        n_outputs = self.tokens.n_values - 1 if self.tokens.values_are_bins else 1
        model.value_out = nn.Linear(width, n_outputs)
        return (*names, "value_head", "value_out")

    def initial_value(self, name: str) -> Fill | None:
        return {"start": normal(STD), "gene_bias": zeros}.get(name)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> NextGeneBatch:
        _, positions_in_cell = positions(batch)
        is_token = batch.token_ids != PAD_TOKEN
        target_tokens = is_token.nonzero().flatten()

        # A cell with fewer than `max_tokens` tokens was not cut. Padding consists of cells of their own,
        # which have no end to predict
        lengths = batch.cu_seqlens.diff()
        is_whole = (lengths > 0) & (lengths < self.tokens.max_tokens)
        last_tokens = batch.cu_seqlens[1:].long()[is_whole] - 1
        last_tokens = last_tokens[is_token[last_tokens]]

        return NextGeneBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            target_tokens=target_tokens,
            is_first=positions_in_cell[target_tokens] == 0,
            last_tokens=last_tokens,
            n_targets=torch.tensor(len(target_tokens), device=target_tokens.device),
        )

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: NextGeneBatch) -> Tensor:
        prior_states = self.select_prior_states(model, states, prepared)
        token_ids = prepared.token_ids[prepared.target_tokens]
        loss = token_loss(prior_states, model.gene_embedding.weight, model.gene_bias, token_ids)

        # the binary cross-entropy of ends: a cell does not end before a target, but ends after its last
        # token
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
        """Select the state before each target, (targets, width), from `states` (tokens, width).

        Before the first token of a cell it is the learned vector `start`.
        """
        earlier = states[(prepared.target_tokens - 1).clamp(min=0)]
        return torch.where(prepared.is_first[:, None], model.start.to(states.dtype), earlier)

    def predict_gene_logits(self, model: ObjectiveModel, prior_states: Tensor) -> Tensor:
        """Predict the logits of all token ids as the next token, (targets, vocabulary) float32.

        `prior_states` are (targets, width). Special tokens have logits too, although they are never
        targets.
        """
        return token_logits(prior_states, model.gene_embedding.weight, model.gene_bias)

    def predict_end_logits(self, model: ObjectiveModel, states: Tensor) -> Tensor:
        """Predict the logit that the cell ends after each of n `states` (n, width), as (n,) float32."""
        # Of many tokens only one is the last of its cell. A bias that starts at 0 would take thousands of
        # steps to learn this. So log(max_tokens) is subtracted: the odds of an end start at about one to
        # `max_tokens`
        return model.end(states).float().squeeze(-1) - math.log(self.tokens.max_tokens)

    def predict_values(
        self, model: ObjectiveModel, prior_states: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Predict the values of the next genes, (targets,) float32, or the logits of bins, (targets, bins).

        `prior_states` are (targets, width). `token_ids` (targets,) int64 are the token ids of the genes.
        """
        embedded = embed_tokens(token_ids, model.gene_embedding.weight).to(prior_states.dtype)
        queries = torch.cat([prior_states, embedded], dim=-1)
        out: Tensor = model.value_out(model.value_head(queries)).float()
        return out if self.tokens.values_are_bins else out.squeeze(-1)

    def observe(self, model: ObjectiveModel, prepared: NextGeneBatch) -> Tensors:
        """Return `NextGeneObservations`, followed by `NextValueObservations` if values are predicted.

        The targets are all genes of a cell in their order, one cell after another.
        """
        # without padding every token is a target, so `cu_seqlens` also divides the targets into cells
        n_tokens = len(prepared.token_ids)
        assert len(prepared.target_tokens) == n_tokens, "expected a batch without padding"
        prior_states = self.select_prior_states(model, model.states(prepared), prepared)
        observed_cells = []
        for start, end in pairwise(prepared.cu_seqlens.tolist()):
            observed_cells.append(
                self._observe_cell(model, prior_states[start:end], prepared.token_ids[start:end])
            )
        observed = tuple(torch.cat(tensors) for tensors in zip(*observed_cells))
        if not self.has_value_head:
            return observed

        predicted = self.predict_values(model, prior_states, prepared.token_ids)
        if self.tokens.values_are_bins:
            predicted = expected_bins(predicted)
        return (*observed, *NextValueObservations(prepared.values, predicted))

    def _observe_cell(
        self, model: ObjectiveModel, prior_states: Tensor, token_ids: Tensor
    ) -> NextGeneObservations:
        """Observe the predictions of all genes of one cell.

        `token_ids` (n,) are the token ids of the cell's genes, and `prior_states` (n, width) the states
        before them. At each position the candidates are the genes that the cell does not have yet.
        """
        logits = self.predict_gene_logits(model, prior_states)  # (n, vocabulary)
        positions_in_cell = torch.arange(len(token_ids), device=token_ids.device)

        # (vocabulary,): the last position at which each token id is a candidate. A gene of the cell is a
        # candidate up to its own position, and a gene that the cell lacks is a candidate at every position.
        # A special token never is
        candidate_until = torch.full((logits.shape[1],), len(token_ids), device=token_ids.device)
        candidate_until = candidate_until.index_put((token_ids,), positions_in_cell)
        candidate_until[: len(SPECIAL)] = -1
        logits = logits.masked_fill(candidate_until < positions_in_cell[:, None], -torch.inf)

        return NextGeneObservations(
            genes=token_ids - len(SPECIAL),
            positions_in_cell=positions_in_cell,
            is_correct=logits.argmax(1) == token_ids,
            losses=F.cross_entropy(logits, token_ids, reduction="none"),
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare predicted genes with `RankBaseline`, and predicted values with the mean of the gene.

        Values are compared only if the model predicts them.
        """
        n_fields = len(NextGeneObservations._fields)
        observations = NextGeneObservations(*observed[:n_fields])
        metrics, verdicts = _judge_genes(observations, statistics)
        value_arrays = observed[n_fields:]
        if value_arrays:
            values, predicted = NextValueObservations(*value_arrays)
            r2 = _compute_value_r2(values, predicted, statistics.mean[observations.genes])
            metrics["value_r2_over_gene_mean"] = r2
            verdicts += r2_verdicts("prediction of the next value", "the gene's training mean", r2)
        return metrics, verdicts


def _judge_genes(observations: NextGeneObservations, statistics: GeneStatistics) -> Judgement:
    """Compare predicted genes with the frequencies of genes at similar ranks in training cells."""
    genes, positions_in_cell, is_correct, losses = observations
    loss = float(losses.astype(np.float64).mean())

    assert statistics.by_rank is not None, "statistics without ranks"
    baseline = RankBaseline(statistics.by_rank)
    baseline_is_correct, baseline_losses = baseline.score(genes, positions_in_cell)
    baseline_loss = float(baseline_losses.mean())

    metrics = {
        "n_targets": len(genes),
        "accuracy": float(is_correct.mean()),
        "accuracy_rank_frequency": float(baseline_is_correct.mean()),
        "cross_entropy": loss,
        "cross_entropy_rank_frequency": baseline_loss,
    }
    name = "prediction of the next gene"
    against = "gene frequency at similar ranks in training cells"
    return metrics, cross_entropy_verdicts(name, against, loss - baseline_loss)


def _compute_value_r2(
    values: np.ndarray, predicted: np.ndarray, gene_means: np.ndarray
) -> float | None:
    """Compute R² of predicted values over the mean value of each target's gene, (targets,) each."""
    values = values.astype(np.float64)
    error = float(np.square(values - predicted.astype(np.float64)).sum())
    baseline_error = float(np.square(values - gene_means).sum())
    return r2_over(baseline_error, error)
