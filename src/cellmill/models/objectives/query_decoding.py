"""query_decoding: a decoder predicts the value of a queried gene, zeros included, from the cell embedding alone.

The visible genes of a cell are encoded once and pooled to its vector. For each asked gene, hidden from the encoder, the
decoder multiplies a projection of the vector with an embedding of the gene, and feed-forward layers turn the product
into the value. Genes that are not asked cost nothing.

The loss is the squared error, undetected genes included. They are asked less often than they are hidden, so errors are
weighted with the number of hidden genes for which each query stands: predictions are expected values of hidden genes.
Values are judged by R² over the gene's mean in training cells, zeros included.

Measured on the demo's held-out cells (one seed, 250 to 300 steps): squared error gave R² .100 and accuracy of logistic
regression .798 with family profile, .080 and .736 with an autoencoder without blocks; a zero-inflated loss
(cross-entropy of detection, squared error of detected values) .092 and .773, .065 and .715. With profile and that
loss, adding vector and gene instead of multiplying gave .024 and .735, and the encoder's own gene embedding in the
queries .119 and .728.

Legend: C cells, N queries, D width of the decoder.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

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
from cellmill.parallel.segments import rows_at
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
    """(N,) float32: hidden genes for which each stands, scaled to a mean of 1 in each cell."""
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
        model.query_out = Linear(width, 1)
        model.query_bias = with_std(nn.Embedding(n_tokens, 1), 0.0)
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
            query_weights=_scaled_weights(batch),
            n_targets=torch.tensor(len(batch.asked_gene)),
        )

    def loss(self, model: Any, states: torch.Tensor, prepared: QueryBatch) -> torch.Tensor:
        """Return the summed squared error of the queries, a float32 scalar."""
        errors = self.answers(model, states, prepared) - prepared.query_values
        return (prepared.query_weights * errors.square()).sum()

    def answers(self, model: Any, states: torch.Tensor, prepared: QueryBatch) -> torch.Tensor:
        """Return the predicted value of each query, (N,) float32."""
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        return self.answers_of(model, vectors, prepared.query_cell, prepared.query_genes)

    def answers_of(self, model: Any, vectors: torch.Tensor, cell: torch.Tensor, genes: torch.Tensor) -> torch.Tensor:
        """Return predicted values, (N,) float32, from vectors (C, H); `cell` are indices of them, `genes` token ids."""
        cells = model.query_cell(vectors)
        x = rows_at(cells, cell) * embed_tokens(genes, model.query_genes.weight)
        for layer in model.query_layers:
            x = layer.inner(x, None)
        means = embed_tokens(genes, model.query_bias.weight)
        return (model.query_out(model.query_norm(x)).float() + means.float()).squeeze(1)

    def observe(self, model: Any, prepared: QueryBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, true value, predicted value and weight of each query."""
        predicted = self.answers(model, model.states(prepared), prepared)
        return prepared.query_genes - len(SPECIAL), prepared.query_values, predicted, prepared.query_weights

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return mean squares of the model and of the gene's training mean, zeros included, R² over it, and a verdict.

        R² is None where the true values do not differ from the means.
        """
        genes, (values, predicted, weights) = observed[0], (part.astype(np.float64) for part in observed[1:])
        means = (train.n / train.n_cells * train.mean)[genes]  # detection rate times the mean where detected
        mse, base = (float(np.average(np.square(values - given), weights=weights)) for given in (predicted, means))
        r2 = 1 - mse / base if base > 0 else None
        figures = {
            "n_targets": len(genes),
            "detected_frac": float(np.average(values > 0, weights=weights)),
            "mse": mse,
            "mse_gene_mean": base,
            "r2_over_gene_mean": r2,
        }
        if r2 is None:
            return figures, []
        return figures, [compare("prediction of hidden genes", "the gene's training mean, zeros included", "R²", r2)]


def _scaled_weights(batch: AskedBatch) -> torch.Tensor:
    weights = batch.asked_weight.double()
    sums = torch.zeros(len(batch.lengths), dtype=weights.dtype).index_add(0, batch.asked_cell, weights)
    asked = torch.bincount(batch.asked_cell, minlength=len(batch.lengths))
    return (weights * (asked / sums)[batch.asked_cell]).float()
