"""query_decoding: predict the value of a queried gene, zeros included, from the cell's vector.

For each queried gene, hidden from the encoder, the decoder multiplies a projection of the cell's
vector with an embedding of the gene, and feed-forward layers turn the product into the value. The
loss is the squared error; values are judged by R² over the gene's mean in training cells, zeros
included. `docs/quality.md` compares it with a zero-inflated loss, and with adding the gene's embedding
instead of multiplying by it.

A gene of the vocabulary is hidden with the probability that its cell drew, whether it is detected
or not, so the detection rate of hidden genes is the rate of all genes. Querying every hidden gene would
cost too much. So option `max_asked` bounds the queries of hidden detected genes of a cell, and
`undetected_ratio` times as many are of undetected genes. The importance weight of a query is the number of
hidden genes per query of its cell, separately for detected and undetected genes. Metrics use these weights,
so they are means over all hidden genes. The loss scales them to mean 1 in each cell. Genes that
`tokens.max_tokens` cuts from a cell count as undetected.

Legend: C cells, T tokens of the batch, N queries, H width of a state, E width of a cell's vector.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import QueryDecodingConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch, positions
from cellmill.models.blocks import FeedForward
from cellmill.models.counter_rng import host_state, keyed_token_bits
from cellmill.models.draws import HIDDEN_FRAC_KEY, UNDETECTED_KEY
from cellmill.models.initial import with_std
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    ObjectiveModel,
    r2_over,
    r2_verdicts,
)
from cellmill.models.objectives.shared.views import (
    TokenCounts,
    draw_hidden_frac,
    draw_hidden_genes,
    tokenize_counts,
)
from cellmill.parallel.vocab_parallel import embed_tokens, rows_at


class Queries(NamedTuple):
    """Queried genes, `(N,)` each, and what the decoder is to predict of them."""

    cells: Tensor  # int64: index of the cell, ascending among detected and among undetected genes
    token_ids: Tensor  # int64
    targets: Tensor  # float32: values in the whole cell, 0 for undetected genes
    importance_weights: Tensor
    """float32: hidden genes per query. For undetected genes their number is the expected one, so the
    weight may be below 1.
    """


@dataclass(frozen=True, kw_only=True)
class QueryView(Batch):
    """The shown tokens, and the queries: of detected genes, then of undetected genes."""

    queries: Queries


@dataclass(frozen=True, kw_only=True)
class QueryBatch(EncoderBatch):
    """The shown tokens, and the queries as the loss reads them."""

    # as `cells`, `token_ids` and `targets` of the view's `Queries`
    query_cells: Tensor
    query_token_ids: Tensor
    query_targets: Tensor
    query_weights: Tensor
    """`(N,)` float32: `importance_weights`, scaled to mean 1 in each cell. So in the loss a cell counts
    by its queries, not by its hidden genes.
    """
    importance_weights: Tensor  # as in the view's `Queries`; `judge` reads them
    n_targets: Tensor  # N


class QueryObservations(NamedTuple):
    """Observations of queries, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    values: Any
    predicted: Any
    weights: Any  # `importance_weights`


class TokenDraws(NamedTuple):
    """The tokens of a batch, and which of them are hidden from the encoder."""

    token_cells: Tensor  # `(T,)` int64: index of the token's cell
    is_hidden: Tensor  # `(T,)` bool
    random_order: Tensor
    """`(T,)` int64: the hidden tokens with the lowest numbers are queried. The same random numbers hide
    tokens, but those of hidden tokens are in random order too.
    """
    hidden_frac: Tensor  # `(C,)` float64: probability with which a gene of the cell is hidden


class QueryDecoding(Objective):
    """Predict the values of queried genes, zeros included, from the vector of a cell's view."""

    config: QueryDecodingConfig
    tensor_parallel_styles = MappingProxyType(
        {"query_genes": "vocabulary", "query_bias": "vocabulary"}
    )
    gene_rows = frozenset({"query_genes.weight", "query_bias.weight"})
    n_genes: int  # genes of the vocabulary; set by `attach`

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.n_genes = vocab_size - len(SPECIAL)
        width = self.config.decoder_hidden
        # a gene's embedding multiplies the cell's vector, projected to the same width
        model.query_genes = with_std(nn.Embedding(vocab_size, width), 1.0)
        model.query_cell = with_std(nn.Linear(model.vector_width, width), model.vector_width**-0.5)
        model.query_layers = nn.ModuleList(
            FeedForward(width, 4 * width, dropout=0.0, index=index)
            for index in range(self.config.decoder_layers)
        )
        model.query_norm = nn.LayerNorm(width)
        model.query_out = nn.Linear(width, 1)
        model.query_bias = with_std(nn.Embedding(vocab_size, 1), 0.0)
        return (
            "query_genes",
            "query_cell",
            "query_layers",
            "query_norm",
            "query_out",
            "query_bias",
        )

    def view(self, batch: Batch, *, seed: int, step: int) -> QueryView:
        """Draw the shown tokens and the queries of each cell of a batch with counts, on the CPU."""
        assert batch.counts is not None, "the batch has no counts"
        draws = self._draw_tokens(batch, seed, step)
        detected = self._query_detected(batch, draws)
        undetected = self._query_undetected(batch, draws, detected.cells, seed, step)
        queries = Queries(*(torch.cat(tensors) for tensors in zip(detected, undetected)))
        shown = (batch.counts * ~draws.is_hidden).numpy()
        shown_cells = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), shown)
        return QueryView(
            **tokenize_counts(shown_cells, self.tokenizer),
            **batch.arrays("cell"),
            queries=queries,
        )

    def _draw_tokens(self, batch: Batch, seed: int, step: int) -> TokenDraws:
        """Draw which tokens are hidden, each with the probability of its cell."""
        token_cells, position = positions(batch)
        cell_rng_states = host_state(batch.cell_ids.numpy(), seed, step)
        hidden_frac = draw_hidden_frac(cell_rng_states, self.config, HIDDEN_FRAC_KEY)
        is_hidden, token_states = draw_hidden_genes(
            token_cells.numpy(), position.numpy(), hidden_frac, cell_rng_states
        )
        return TokenDraws(
            token_cells=token_cells,
            is_hidden=torch.from_numpy(is_hidden),
            # 63 bits, as in `keyed_bits`: int64 has no more for numbers of at least 0
            random_order=torch.from_numpy((token_states >> np.uint64(1)).view(np.int64)),
            hidden_frac=torch.from_numpy(hidden_frac),
        )

    def _query_detected(self, batch: Batch, draws: TokenDraws) -> Queries:
        """Query at most `max_asked` hidden tokens of each cell."""
        n_cells = len(batch.lengths)
        queried_tokens = _choose_hidden_tokens(draws, self.config.max_asked)
        query_cells = draws.token_cells[queried_tokens]
        # `(C,)` each
        n_queries = torch.bincount(query_cells, minlength=n_cells)
        n_hidden = torch.bincount(draws.token_cells[draws.is_hidden], minlength=n_cells)
        weights = n_hidden / n_queries.clamp(min=1)  # hidden genes per query, float32
        return Queries(
            cells=query_cells,
            token_ids=batch.token_ids[queried_tokens],
            targets=batch.values[queried_tokens],
            importance_weights=weights[query_cells],
        )

    def _query_undetected(
        self, batch: Batch, draws: TokenDraws, detected_cells: Tensor, seed: int, step: int
    ) -> Queries:
        """Query undetected genes of each cell, `undetected_ratio` times as many as detected ones.

        They are drawn with replacement. Which undetected genes are hidden is not drawn: weights are
        computed from the expected number. `detected_cells` are the cells of queries of detected genes.
        Another cell is treated as if it had one such query: without its zeros, metrics would overestimate
        how often genes are detected.
        """
        # `(C,)` each
        n_undetected_genes = self.n_genes - batch.cu_seqlens.diff().long()
        n_detected_queries = torch.bincount(detected_cells, minlength=len(batch.lengths))
        # a number just above an integer by a rounding error becomes this integer
        n_expected = n_detected_queries.clamp(min=1).double() * self.config.undetected_ratio
        n_queries = (n_expected - 1e-6).ceil().long()
        n_queries = torch.where(n_undetected_genes > 0, n_queries, 0)
        weights = draws.hidden_frac * n_undetected_genes / n_queries.clamp(min=1)
        # `(queries,)` each. A random number modulo the undetected genes of the cell chooses one of them
        query_cells = torch.repeat_interleave(n_queries)
        draw_number = _index_in_cell(query_cells, n_queries)
        bits = keyed_token_bits(
            batch.cell_ids, query_cells, seed, step, draw_number, UNDETECTED_KEY
        )
        index = bits % n_undetected_genes[query_cells]
        genes = _find_undetected(batch, self.n_genes, query_cells, index)
        return Queries(
            cells=query_cells,
            token_ids=genes + len(SPECIAL),
            targets=torch.zeros(len(query_cells)),
            importance_weights=weights[query_cells].float(),
        )

    def prepare(self, batch: Batch, *, seed: int, step: int) -> QueryBatch:
        assert isinstance(batch, QueryView), "expected a view"
        n_cells = len(batch.lengths)
        queries = batch.queries
        weights = queries.importance_weights.double()
        # `(C,)`: factor that makes the mean weight of a cell's queries 1
        sums = torch.bincount(queries.cells, weights, n_cells)
        scale = torch.bincount(queries.cells, minlength=n_cells) / sums
        return QueryBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            query_cells=queries.cells,
            query_token_ids=queries.token_ids,
            query_targets=queries.targets,
            query_weights=(weights * scale[queries.cells]).float(),
            importance_weights=queries.importance_weights,
            n_targets=torch.tensor(len(queries.cells)),
        )

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: QueryBatch) -> Tensor:
        errors = self.predict_targets(model, states, prepared) - prepared.query_targets
        return (prepared.query_weights * errors.square()).sum()

    def predict_targets(
        self, model: ObjectiveModel, states: Tensor, prepared: QueryBatch
    ) -> Tensor:
        """Predict the value of each query, `(N,)` float32, from states `(T, H)`."""
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        return self.predict_queries(model, vectors, prepared.query_cells, prepared.query_token_ids)

    def predict_queries(
        self, model: ObjectiveModel, vectors: Tensor, query_cells: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Predict the value of each query, `(N,)` float32, from `vectors` `(C, E)`.

        `query_cells`, indices of vectors, and `token_ids` are `(N,)` int64.
        """
        embedded = embed_tokens(token_ids, model.query_genes.weight)
        x = rows_at(model.query_cell(vectors), query_cells) * embedded
        for layer in model.query_layers:
            x = layer(x, row_keys=None)  # no dropout
        biases = embed_tokens(token_ids, model.query_bias.weight)
        return (model.query_out(model.query_norm(x)).float() + biases.float()).squeeze(1)

    def observe(self, model: ObjectiveModel, prepared: QueryBatch) -> QueryObservations:
        return QueryObservations(
            genes=prepared.query_token_ids - len(SPECIAL),
            values=prepared.query_targets,
            predicted=self.predict_targets(model, model.states(prepared), prepared),
            weights=prepared.importance_weights,
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score mean squared errors, zeros included: of the model, and of the gene's training mean.

        Values are those of whole cells, in the queries and in the mean.
        """
        queries = QueryObservations(*observed)
        values = queries.values.astype(np.float64)
        predicted = queries.predicted.astype(np.float64)
        weights = queries.weights.astype(np.float64)
        # mean over all training cells: detection rate times the mean of detected values
        means = (statistics.n_tokens / statistics.n_cells * statistics.mean)[queries.genes]
        mse = float(np.average(np.square(values - predicted), weights=weights))
        baseline_mse = float(np.average(np.square(values - means), weights=weights))
        r2 = r2_over(baseline_mse, mse)
        metrics = {
            "n_targets": len(values),
            "mse": mse,
            "mse_gene_mean": baseline_mse,
            "detected_frac": float(np.average(values > 0, weights=weights)),
            "r2_over_gene_mean": r2,
        }
        against = "the gene's training mean, zeros included"
        return metrics, r2_verdicts("prediction of hidden genes", against, r2)


def _choose_hidden_tokens(draws: TokenDraws, max_per_cell: int) -> Tensor:
    """Choose at most `max_per_cell` hidden tokens of each cell, by the lowest `random_order`.

    Return their indices, `(chosen,)` int64, ascending.
    """
    hidden_tokens = draws.is_hidden.nonzero().flatten()
    # sort by cell, and in each cell by random order
    hidden_tokens = hidden_tokens[draws.random_order[hidden_tokens].argsort()]
    hidden_tokens = hidden_tokens[draws.token_cells[hidden_tokens].argsort(stable=True)]
    cells = draws.token_cells[hidden_tokens]
    index = _index_in_cell(cells, torch.bincount(cells))
    return hidden_tokens[index < max_per_cell].sort().values


def _find_undetected(batch: Batch, n_genes: int, draw_cells: Tensor, index: Tensor) -> Tensor:
    """Find the undetected gene of each draw by its `index` among the undetected genes of the cell.

    `draw_cells`, `index` and the result, vocabulary rows, are `(draws,)` int64. A row is `index` plus the
    number of detected genes before it. In a cell that detects genes 0, 3 and 4 of 7:

        undetected genes         1 2 5 6
        their index              0 1 2 3
        detected genes before    1 1 3 3
    """
    token_cells, position = positions(batch)
    # `(T,)`: vocabulary rows of detected genes, ascending in each cell
    first_row = token_cells * n_genes
    rows = (first_row + batch.token_ids - len(SPECIAL)).sort().values - first_row
    # `(T,)`: number of undetected genes before each detected one, ascending in each cell
    n_undetected_before = rows - position
    # search all cells at once: an offset per cell makes the numbers ascend over the whole batch
    cell_offset = n_genes + 1
    ascending = n_undetected_before + token_cells * cell_offset
    n_tokens_before = torch.searchsorted(ascending, index + draw_cells * cell_offset, right=True)
    n_detected_before = n_tokens_before - batch.cu_seqlens[draw_cells]
    return index + n_detected_before


def _index_in_cell(item_cells: Tensor, n_items: Tensor) -> Tensor:
    """Number the items of each cell from 0: `(items,)` int64.

    `item_cells` `(items,)` has each item's cell, ascending; `n_items` `(C,)` is the number of items
    of each cell.
    """
    first_item = n_items.cumsum(0) - n_items
    return torch.arange(len(item_cells)) - first_item[item_cells]
