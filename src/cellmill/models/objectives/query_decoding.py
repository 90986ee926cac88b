"""query_decoding: a decoder that is told a gene predicts its value, zeros included, from the cell's vector alone.

The visible genes of a cell are encoded once and pooled to its vector. For each asked gene, hidden from the encoder, the
decoder multiplies a projection of the vector with an embedding of the gene, and feed-forward layers turn the product
into two numbers: the log-odds that the gene is detected, and its value if it is. Genes that are not asked cost nothing.

The loss is the cross-entropy of detection plus, for detected genes, the squared error of the value: the likelihood of a
zero-inflated normal distribution of unit variance. Undetected genes are asked less often than they are hidden; the
logarithm of that ratio is added to the log-odds in the loss (King & Zeng 2001, prior correction), so that the model's
own log-odds are those of hidden genes and no rare query needs a large weight.

Figures are of hidden genes, each asked one weighted with the number that it stands for, against the gene's detection
rate and mean in training cells.

Legend: C cells, N queries, D width of the decoder.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.tokens import Tokenizer
from cellmill.models.batch import TensorBatch
from cellmill.models.encoder_batch import EncoderBatch, whole
from cellmill.models.feed_forward import FeedForward
from cellmill.models.initial import with_std
from cellmill.models.objective import GeneStatistics, Objective
from cellmill.models.objectives.asked_genes import AskedBatch, draw_asked
from cellmill.models.objectives.config import QueryDecodingConfig
from cellmill.parallel.cpu_matmul import Linear
from cellmill.parallel.vocab_parallel import embed_tokens
from cellmill.runs.verdict import Verdict, compare


@dataclass(frozen=True, kw_only=True)
class QueryBatch(EncoderBatch):
    """The shown tokens and the asked genes."""

    query_cell: torch.Tensor
    """(N,) int64: index of the cell."""
    query_genes: torch.Tensor
    """(N,) int64: token ids."""
    query_values: torch.Tensor
    """(N,) float32: values of the whole cell, 0 where not detected."""
    query_weights: torch.Tensor
    """(N,) float32: number of hidden genes that each stands for."""
    log_ratios: torch.Tensor
    """(N,) float32: log of the weight of the cell's undetected genes over that of its detected ones."""
    n_targets: torch.Tensor
    """N."""


class QueryDecoding(Objective):
    """See the module; needs a model with `cell_vectors`."""

    config: QueryDecodingConfig
    tensor = MappingProxyType({"query_genes": "vocabulary", "query_bias": "vocabulary"})
    gene_rows = frozenset({"query_genes.weight", "query_bias.weight"})
    n_genes: int
    """Genes of the vocabulary."""

    def __init__(self, config: QueryDecodingConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.tokenizer: Tokenizer = tokens.load()(tokens)

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add the decoder."""
        self.n_genes, width = n_tokens - len(SPECIAL), self.config.decoder_hidden
        model.query_genes = with_std(nn.Embedding(n_tokens, width), 1.0)
        model.query_cell = with_std(Linear(model.vector_width, width), model.vector_width**-0.5)
        model.query_layers = nn.ModuleList(
            FeedForward(width, 4 * width, dropout=0.0, index=index) for index in range(self.config.decoder_layers)
        )
        model.query_norm = nn.LayerNorm(width)
        model.query_out = Linear(width, 2)
        model.query_bias = with_std(nn.Embedding(n_tokens, 2), 0.0)
        return ("query_genes", "query_cell", "query_layers", "query_norm", "query_out", "query_bias")

    def view(self, batch: TensorBatch, *, seed: int, step: int) -> AskedBatch:
        """Return the visible genes of each cell, and the asked ones."""
        return draw_asked(batch, self.tokenizer, self.config, self.n_genes, seed=seed, step=step)

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> QueryBatch:
        """Pair a view with its queries."""
        assert isinstance(batch, AskedBatch), "expected a view"
        return QueryBatch(
            **vars(whole(batch, (seed, step))),
            query_cell=batch.asked_cell,
            query_genes=batch.asked_gene,
            query_values=batch.asked_value,
            query_weights=batch.asked_weight,
            log_ratios=_log_ratios(batch),
            n_targets=torch.tensor(len(batch.asked_gene)),
        )

    def loss(self, model: Any, states: torch.Tensor, prepared: QueryBatch) -> torch.Tensor:
        """Return the summed loss of the queries, a float32 scalar."""
        log_odds, values = self.answers(model, states, prepared)
        detected = (prepared.query_values > 0).float()
        detection = F.binary_cross_entropy_with_logits(log_odds + prepared.log_ratios, detected, reduction="sum")
        return detection + (detected * (values - prepared.query_values).square()).sum()

    def answers(self, model: Any, states: torch.Tensor, prepared: QueryBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-odds of detection and value if detected of each query, (N,) float32 each."""
        cells = model.query_cell(model.cell_vectors(states, prepared).to(states.dtype))
        genes = embed_tokens(prepared.query_genes, model.query_genes.weight)
        x = cells[prepared.query_cell] * genes
        for layer in model.query_layers:
            x = layer.inner(x, None)
        out = model.query_out(model.query_norm(x)).float()
        log_odds, values = (out + embed_tokens(prepared.query_genes, model.query_bias.weight).float()).unbind(1)
        return log_odds, values

    def observe(self, model: Any, prepared: QueryBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, true value, log-odds, value if detected, and weight of each query."""
        log_odds, values = self.answers(model, model.states(prepared), prepared)
        rows = prepared.query_genes - len(SPECIAL)
        return rows, prepared.query_values, log_odds, values, prepared.query_weights

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return figures beside those of the gene's detection rate and mean in training cells, and two verdicts.

        R² is None where the true values have no variance around the mean.
        """
        genes, (values, log_odds, predicted, weights) = observed[0], (part.astype(np.float64) for part in observed[1:])
        detected = values > 0
        rate = (train.n + 1) / (train.n_cells + 2)  # a gene of all or none of the training cells
        entropies = [
            np.average(np.logaddexp(0, np.where(detected, -odds, odds)), weights=weights)
            for odds in (log_odds, np.log(rate / (1 - rate))[genes])
        ]
        expected = predicted / (1 + np.exp(-log_odds))
        means = (train.n / train.n_cells * train.mean)[genes]
        r2 = _r2(values, expected, means, weights)
        figures = {
            "n_targets": len(genes),
            "detection_cross_entropy": float(entropies[0]),
            "detection_cross_entropy_rate": float(entropies[1]),
            "r2_over_gene_mean": r2,
            "r2_of_detected_over_gene_mean": _r2(values, predicted, train.mean[genes], weights * detected),
        }
        against = "the gene's detection rate in training cells"
        saved = float(entropies[0] - entropies[1])
        verdicts = [compare("detection of hidden genes", against, "nats cross-entropy", saved, lower_is_better=True)]
        if r2 is not None:
            against = "the gene's training mean, zeros included"
            verdicts.append(compare("prediction of hidden values", against, "R²", r2))
        return figures, verdicts


def _log_ratios(batch: AskedBatch) -> torch.Tensor:
    detected = batch.asked_value > 0
    weights = torch.ones(2, len(batch.lengths))  # of undetected and detected genes, equal in a cell
    weights[detected.long(), batch.asked_cell] = batch.asked_weight
    return (weights[0] / weights[1]).log()[batch.asked_cell]


def _r2(values: np.ndarray, predicted: np.ndarray, reference: np.ndarray, weights: np.ndarray) -> float | None:
    model, base = (float(weights @ np.square(values - given)) for given in (predicted, reference))
    return 1 - model / base if base > 0 else None
