"""next_gene: predict each next gene of a cell in rank order, its value, and the end of the cell.

The likelihood of a cell is a chain: from the state before each gene, the cell continues or ends
(binary cross-entropy); if it continues, a gene follows (cross-entropy over the vocabulary, whose
matrix is the gene embedding); given that gene, a value follows (cross-entropy of bins, squared
error of continuous values). Before the first gene the state is a learned vector. A cell with as
many tokens as `max_tokens` may have been cut, so its end is no target.

Genes are judged among those that the cell does not have yet, as `cellmill generate` draws them; so
is the baseline, the frequency of genes at the same rank in training cells.

Legend: T tokens of the batch, N targets, H hidden, V tokens of the vocabulary.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import NextGeneConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import rank_buckets
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, EncoderBatch, positions
from cellmill.models.initial import STD, Fill, normal, zeros
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    expected_bins,
    r2_over,
    r2_verdict,
    value_loss,
)
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits
from cellmill.runs.results import compare


@dataclass(frozen=True, kw_only=True)
class NextGeneBatch(EncoderBatch):
    """Whole cells, and which of their tokens and ends are predicted."""

    targets: Tensor  # (N,) int64, ascending: tokens to predict, all but padding
    first: Tensor  # (N,) bool: whether the target is the first token of its cell
    ends: Tensor  # (ends,) int64: last tokens of cells that were not cut
    n_targets: Tensor


class NextGene(Objective):
    """See the module; needs a causal model with `gene_embedding`."""

    config: NextGeneConfig
    gene_rows = frozenset({"gene_bias"})

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `start`, the state before the first gene; `gene_bias`; `end`; and the value's
        `value_head` and output.
        """
        hidden = model.width
        model.start = nn.Parameter(torch.empty(hidden))
        model.gene_bias = nn.Parameter(torch.empty(n_tokens))
        model.end = nn.Linear(hidden, 1)
        names = ("start", "gene_bias", "end", "gene_embedding")
        if not self.predicts_values:
            return names
        model.value_head = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.GELU(), nn.LayerNorm(hidden)
        )
        # bins count from 1
        model.value_out = nn.Linear(hidden, self.tokens.n_values - 1 if self._is_class else 1)
        return (*names, "value_head", "value_out")

    def initial_value(self, name: str) -> Fill | None:
        return {"start": normal(STD), "gene_bias": zeros}.get(name)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> NextGeneBatch:
        _, place = positions(batch)
        targets = (batch.genes != PAD_TOKEN).nonzero().flatten()
        lengths = batch.cu_seqlens.diff()
        last = batch.cu_seqlens[1:].long()[(lengths > 0) & (lengths < self.tokens.max_tokens)] - 1
        return NextGeneBatch.prepared(
            batch,
            (seed, step),
            targets=targets,
            first=place[targets] == 0,
            ends=last[batch.genes[last] != PAD_TOKEN],
            n_targets=torch.tensor(len(targets), device=targets.device),
        )

    def loss(self, model: Any, states: Tensor, prepared: NextGeneBatch) -> Tensor:
        before = self.before(model, states, prepared)
        genes = prepared.genes[prepared.targets]
        loss = token_loss(before, model.gene_embedding.weight, model.gene_bias, genes)
        goes_on = self.end_logits(model, before)
        ends = self.end_logits(model, states[prepared.ends])
        loss = loss + F.softplus(goes_on).sum() + F.softplus(-ends).sum()
        if not self.predicts_values:
            return loss
        of_values = value_loss(self.values(model, before, genes), prepared.values[prepared.targets])
        return loss + self.config.value_loss_weight * of_values

    def before(self, model: Any, states: Tensor, prepared: NextGeneBatch) -> Tensor:
        """(T, H) -> (N, H): the state before each target."""
        earlier = states[(prepared.targets - 1).clamp(min=0)]
        return torch.where(prepared.first[:, None], model.start.to(states.dtype), earlier)

    def gene_logits(self, model: Any, before: Tensor) -> Tensor:
        """(N, H) -> (N, V) float32: logits of the next token; special tokens are never targets."""
        return token_logits(before, model.gene_embedding.weight, model.gene_bias)

    def end_logits(self, model: Any, before: Tensor) -> Tensor:
        """(N, H) -> (N,) float32: logit of the cell ending there."""
        # starts near the chance of an end, one in many tokens: from 0, a bias would learn it in
        # thousands of steps
        return model.end(before).float().squeeze(-1) - math.log(self.tokens.max_tokens)

    def values(self, model: Any, before: Tensor, genes: Tensor) -> Tensor:
        """(N, H) states and (N,) next genes -> float32 values (N,), or logits of bins (N, bins)."""
        queries = torch.cat(
            [before, embed_tokens(genes, model.gene_embedding.weight).to(before.dtype)], dim=-1
        )
        out = model.value_out(model.value_head(queries)).float()
        return out if self._is_class else out.squeeze(-1)

    def observe(self, model: Any, prepared: NextGeneBatch) -> tuple[Tensor, ...]:
        """Return row, place, top-1 correctness, cross-entropy, value and prediction of each gene;
        cell by cell.
        """
        before = self.before(model, model.states(prepared), prepared)
        cells = []
        for start, end in pairwise(prepared.cu_seqlens.tolist()):
            genes = prepared.genes[start:end]
            logits = self.gene_logits(model, before[start:end])
            places = torch.arange(len(genes), device=genes.device)
            place_of = torch.full((logits.shape[1],), len(genes), device=genes.device).index_put(
                (genes,), places
            )
            place_of[: len(SPECIAL)] = -1
            logits = logits.masked_fill(place_of < places[:, None], -torch.inf)
            entropy = F.cross_entropy(logits, genes, reduction="none")
            cells.append((genes - len(SPECIAL), places, logits.argmax(1) == genes, entropy))
        observed = tuple(torch.cat(parts) for parts in zip(*cells))
        if not self.predicts_values:
            return observed
        predicted = self.values(model, before, prepared.genes)
        return (
            *observed,
            prepared.values,
            expected_bins(predicted) if self._is_class else predicted,
        )

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        """Return metrics of genes, beside a baseline that knows rank and earlier genes, R² of
        values, and verdicts.
        """
        genes, places, correct, cross_entropy, *values = observed
        assert train.by_rank is not None, "statistics without ranks"
        base_correct, base_cross_entropy = _rank_baseline(genes, places, train.by_rank)
        metrics: dict[str, Any] = {
            "n_targets": len(genes),
            "accuracy": float(correct.mean()),
            "accuracy_rank_frequency": float(base_correct.mean()),
            "cross_entropy": (own := float(cross_entropy.astype(np.float64).mean())),
            "cross_entropy_rank_frequency": (base := float(base_cross_entropy.mean())),
        }
        name = "prediction of the next gene"
        against = "gene frequency at the same rank in training cells"
        verdicts = [compare(name, against, "nats cross-entropy", own - base, lower_is_better=True)]
        if values:
            truth, predicted = (array.astype(np.float64) for array in values)
            base, own = (
                float(np.square(truth - other).sum()) for other in (train.mean[genes], predicted)
            )
            metrics["value_r2_over_gene_mean"] = r2 = r2_over(base, own)
            verdicts += r2_verdict("prediction of the next value", "the gene's training mean", r2)
        return metrics, verdicts

    @property
    def predicts_values(self) -> bool:
        return self.tokens.value_kind in ("class", "scalar") and self.config.value_loss_weight > 0

    @property
    def _is_class(self) -> bool:
        return self.tokens.value_kind == "class"


def _rank_baseline(
    genes: np.ndarray, places: np.ndarray, by_rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Correctness and cross-entropy, (N,), of smoothed frequencies at the rank, among genes not in
    the cell yet.
    """
    buckets = rank_buckets(places)
    starts = np.flatnonzero(places == 0)
    n_genes = by_rank.shape[1]
    overall = (by_rank.sum(0) + 1) / (by_rank.sum() + n_genes)
    smoothed = by_rank + n_genes * overall
    frequency = smoothed / smoothed.sum(1, keepdims=True)
    correct = np.zeros(len(genes), bool)
    cross_entropy = np.zeros(len(genes))
    cells = list(zip(starts, [*starts[1:], len(genes)]))
    for bucket in np.unique(buckets):
        order = np.argsort(-frequency[bucket], kind="stable")
        for start, stop in cells:
            cell = genes[start:stop]
            here = np.flatnonzero(buckets[start:stop] == bucket)
            if not len(here):
                continue
            own = frequency[bucket, cell]
            # frequencies that are left for genes not in the cell yet: never less than the gene's
            # own
            left = np.maximum(1 - (np.cumsum(own) - own), own)[here]
            cross_entropy[start + here] = np.log(left / own[here])
            # a gene is a candidate up to its own place, and candidates are never fewer than at a
            # later place: the most frequent one is the first whose place is not yet past
            place_of = np.full(n_genes, len(cell))
            place_of[cell] = np.arange(len(cell))
            highest = np.maximum.accumulate(place_of[order])
            correct[start + here] = order[np.searchsorted(highest, here)] == cell[here]
    return correct, cross_entropy
