"""query_decoding: predict the value of a queried gene, zeros included, from the cell's vector.

A query is one gene of one cell, and the gene is hidden from the encoder. The decoder multiplies a
projection of the cell's vector by an embedding of the gene, and feed-forward layers turn the product into
the value. The loss is the squared error. `judge` reports R² over the mean value of the gene in training
cells, zeros included. `docs/quality.md` compares this loss with a zero-inflated loss, and the product with
a sum of the vector and the gene's embedding.

*Which genes are hidden.* Each cell draws a probability, and each gene of the vocabulary is hidden from the
cell with this probability, whether the gene is detected or not. So the fraction of detected genes is, on
average, the same among hidden genes as among all genes.

*Which genes are queried.* To query every hidden gene would cost too much. Of a cell's hidden detected genes,
at most `max_asked` are queried. Of the cell's undetected genes, `undetected_ratio` times this number are
queried.

*Weights.* The importance weight of a query is the number of hidden genes of the cell, divided by the number
of queries of the cell. It is computed separately for detected and for undetected genes. The metrics use
these weights, so they are means over all hidden genes. The loss scales the weights to mean 1 in each cell.
Genes that `tokens.max_tokens` cuts from a cell count as undetected.

In the shapes below, "cells" and "tokens" are all cells and all tokens of a batch. "width" is the width of a
state, and "vector width" the width of a cell's vector.
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

ROUNDING_TOLERANCE = 1e-6
"""Numbers of queries are rounded up, unless they exceed an integer by at most this rounding error."""


class Queries(NamedTuple):
    """The queried genes with the values to predict, (queries,) each."""

    cells: Tensor
    """int64: the index in the batch of each query's cell.

    The indices ascend among the queries of detected genes, and among the queries of undetected genes.
    """
    token_ids: Tensor  # int64
    targets: Tensor  # float32: the value of the gene in the whole cell, 0 for an undetected gene
    importance_weights: Tensor
    """float32: the number of hidden genes per query.

    The number of hidden undetected genes is not drawn. So the weight of an undetected gene contains the
    expected number, and may be below 1.
    """


@dataclass(frozen=True, kw_only=True)
class QueryView(Batch):
    """The shown tokens, and the queries: first of detected genes, then of undetected genes."""

    queries: Queries


@dataclass(frozen=True, kw_only=True)
class QueryBatch(EncoderBatch):
    """The shown tokens, and the queries in the form that the loss reads, (queries,) each."""

    # `cells`, `token_ids` and `targets` of the view's `Queries`, unchanged
    query_cells: Tensor
    query_token_ids: Tensor
    query_targets: Tensor
    query_weights: Tensor
    """float32: the importance weights, scaled to mean 1 in each cell.

    So the weight of a cell in the loss is its number of queries, not its number of hidden genes.
    """
    importance_weights: Tensor  # `importance_weights` of the view's `Queries`, which `judge` reads
    n_targets: Tensor  # int64 scalar: the number of queries


class QueryObservations(NamedTuple):
    """Observations of queries, (queries,) each: tensors in `observe`, and arrays in `judge`."""

    genes: Any  # int64: the vocabulary rows of the queried genes
    values: Any  # the true values
    predicted: Any  # the predicted values
    weights: Any  # the importance weights


class TokenDraws(NamedTuple):
    """Random draws for the tokens of a batch: which tokens are hidden, and which of these are queried."""

    token_cells: Tensor  # (tokens,) int64: the index in the batch of the token's cell
    is_hidden: Tensor  # (tokens,) bool: True if the token is hidden from the encoder
    query_order: Tensor
    """(tokens,) int64: a random number of each token. Hidden tokens with the lowest numbers are queried.

    The same random numbers decide which tokens are hidden. Among the hidden tokens of a cell, the order of
    these numbers is random.
    """
    hidden_frac: Tensor  # (cells,) float64: the probability that a gene is hidden from the cell


class QueryDecoding(Objective):
    """Predict the values of queried genes, zeros included, from the vector of a cell's view."""

    config: QueryDecodingConfig
    tensor_parallel_styles = MappingProxyType(
        {"query_genes": "vocabulary", "query_bias": "vocabulary"}
    )
    gene_rows = frozenset({"query_genes.weight", "query_bias.weight"})
    n_genes: int  # the number of genes in the vocabulary; `attach` sets it

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.n_genes = vocab_size - len(SPECIAL)
        width = self.config.decoder_hidden
        # The cell's vector is projected to the width of the decoder by `query_cell`, and multiplied by the
        # gene's embedding
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
        """Draw the shown tokens and the queries of each cell, on the CPU. The batch must have counts."""
        assert batch.counts is not None, "the batch has no counts"
        draws = self._draw_tokens(batch, seed, step)
        of_detected = self._query_detected(batch, draws)
        of_undetected = self._query_undetected(batch, draws, of_detected.cells, seed, step)
        queries = Queries(*(torch.cat(fields) for fields in zip(of_detected, of_undetected)))

        # a hidden token has count 0 in the view, and `tokenize_counts` leaves it out
        shown = (batch.counts * ~draws.is_hidden).numpy()
        shown_cells = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), shown)
        return QueryView(
            **tokenize_counts(shown_cells, self.tokenizer),
            **batch.arrays("cell"),
            queries=queries,
        )

    def _draw_tokens(self, batch: Batch, seed: int, step: int) -> TokenDraws:
        """Draw which tokens are hidden. Each token is hidden with the probability that its cell drew."""
        token_cells, position = positions(batch)
        cell_rng_states = host_state(batch.cell_ids.numpy(), seed, step)
        hidden_frac = draw_hidden_frac(cell_rng_states, self.config, HIDDEN_FRAC_KEY)
        is_hidden, token_states = draw_hidden_genes(
            token_cells.numpy(), position.numpy(), hidden_frac, cell_rng_states
        )
        return TokenDraws(
            token_cells=token_cells,
            is_hidden=torch.from_numpy(is_hidden),
            # drop the lowest bit: 63 bits fit into int64 without becoming negative
            query_order=torch.from_numpy((token_states >> np.uint64(1)).view(np.int64)),
            hidden_frac=torch.from_numpy(hidden_frac),
        )

    def _query_detected(self, batch: Batch, draws: TokenDraws) -> Queries:
        """Query at most `max_asked` hidden tokens of each cell."""
        n_cells = len(batch.lengths)
        queried_tokens = _choose_hidden_tokens(draws, self.config.max_asked)
        query_cells = draws.token_cells[queried_tokens]

        # the number of queries, of hidden tokens, and of hidden tokens per query, (cells,) each
        n_queries = torch.bincount(query_cells, minlength=n_cells)
        n_hidden = torch.bincount(draws.token_cells[draws.is_hidden], minlength=n_cells)
        weights = n_hidden / n_queries.clamp(min=1)
        return Queries(
            cells=query_cells,
            token_ids=batch.token_ids[queried_tokens],
            targets=batch.values[queried_tokens],
            importance_weights=weights[query_cells],
        )

    def _query_undetected(
        self, batch: Batch, draws: TokenDraws, detected_cells: Tensor, seed: int, step: int
    ) -> Queries:
        """Query `undetected_ratio` undetected genes for each query of a detected gene of the same cell.

        The undetected genes are drawn with replacement. Which undetected genes are hidden is not drawn:
        the weights contain the expected number of hidden undetected genes.

        `detected_cells` are the cells of the queries of detected genes. A cell without such a query is
        treated as if it had one. Otherwise the zeros of this cell would be missing, and metrics would
        overestimate how often genes are detected.
        """
        # the number of undetected genes, the number of queries, and the weight of a query, (cells,) each
        n_undetected = self.n_genes - batch.cu_seqlens.diff().long()
        n_detected_queries = torch.bincount(detected_cells, minlength=len(batch.lengths))
        n_wanted = n_detected_queries.clamp(min=1).double() * self.config.undetected_ratio
        n_queries = (n_wanted - ROUNDING_TOLERANCE).ceil().long()
        n_queries = torch.where(n_undetected > 0, n_queries, 0)
        weights = draws.hidden_frac * n_undetected / n_queries.clamp(min=1)

        # A random number, modulo the number of undetected genes of the cell, chooses one of these genes.
        # All tensors are (queries,)
        query_cells = torch.repeat_interleave(n_queries)
        draw_number = _index_in_cell(query_cells, n_queries)
        random_numbers = keyed_token_bits(
            batch.cell_ids, query_cells, seed, step, draw_number, UNDETECTED_KEY
        )
        undetected_indices = random_numbers % n_undetected[query_cells]
        genes = _find_undetected(batch, self.n_genes, query_cells, undetected_indices)
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
        # (cells,): the factor by which the mean weight of a cell's queries becomes 1
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
        """Predict the value of each query, (queries,) float32, from `states` (tokens, width)."""
        vectors = model.cell_vectors(states, prepared).to(states.dtype)
        return self.predict_queries(model, vectors, prepared.query_cells, prepared.query_token_ids)

    def predict_queries(
        self, model: ObjectiveModel, vectors: Tensor, query_cells: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Predict the value of each query, (queries,) float32, from `vectors` (cells, vector width).

        `query_cells` (queries,) int64 are the rows of `vectors` that the queries belong to, and `token_ids`
        (queries,) int64 the token ids of the queried genes.
        """
        embedded = embed_tokens(token_ids, model.query_genes.weight)
        x = rows_at(model.query_cell(vectors), query_cells) * embedded
        for layer in model.query_layers:
            x = layer(x, row_keys=None)  # without keys there is no dropout
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
        """Compare the mean squared error of the model with the error of the gene's mean in training cells.

        Zeros of undetected genes are included in the errors and in the means. All values are values in
        whole cells, not in views.
        """
        queries = QueryObservations(*observed)
        values = queries.values.astype(np.float64)
        predicted = queries.predicted.astype(np.float64)
        weights = queries.weights.astype(np.float64)
        mse = float(np.average(np.square(values - predicted), weights=weights))

        # the mean of a gene over all training cells is its detection rate times its mean detected value
        detection_rates = statistics.n_tokens / statistics.n_cells
        gene_means = (detection_rates * statistics.mean)[queries.genes]
        baseline_mse = float(np.average(np.square(values - gene_means), weights=weights))

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
    """Choose at most `max_per_cell` hidden tokens of each cell, those with the lowest `query_order`.

    Return the indices of the chosen tokens, (chosen tokens,) int64, ascending.
    """
    hidden_tokens = draws.is_hidden.nonzero().flatten()
    # sort by cell, and in each cell by `query_order`: the second sort keeps the order of the first
    hidden_tokens = hidden_tokens[draws.query_order[hidden_tokens].argsort()]
    hidden_tokens = hidden_tokens[draws.token_cells[hidden_tokens].argsort(stable=True)]
    cells = draws.token_cells[hidden_tokens]
    index_in_cell = _index_in_cell(cells, torch.bincount(cells))
    return hidden_tokens[index_in_cell < max_per_cell].sort().values


def _find_undetected(
    batch: Batch, n_genes: int, draw_cells: Tensor, undetected_indices: Tensor
) -> Tensor:
    """Find the undetected gene of each draw, as vocabulary rows (draws,) int64.

    `draw_cells` (draws,) int64 is the cell of each draw. `undetected_indices` (draws,) int64 is the index of
    the drawn gene among the undetected genes of this cell. The vocabulary row of the gene is this index
    plus the number of detected genes before the gene. In a cell that detects genes 0, 3 and 4 of 7:

        undetected genes         1 2 5 6
        index                    0 1 2 3
        detected genes before    1 1 3 3
    """
    token_cells, position = positions(batch)
    # (tokens,): the vocabulary rows of detected genes, ascending in each cell. Cells get separate ranges
    # of numbers, so that one sort sorts the genes of every cell
    cell_range_starts = token_cells * n_genes
    rows = (cell_range_starts + batch.token_ids - len(SPECIAL)).sort().values - cell_range_starts

    # (tokens,): the number of undetected genes before each detected gene, ascending in each cell
    n_undetected_before = rows - position

    # A detected gene comes before the drawn gene if the number of undetected genes before it is at most
    # the index. Again cells get separate ranges of numbers, so that one search serves all cells
    range_size = n_genes + 1
    ascending = n_undetected_before + token_cells * range_size
    wanted = undetected_indices + draw_cells * range_size
    n_tokens_before = torch.searchsorted(ascending, wanted, right=True)
    n_detected_before = n_tokens_before - batch.cu_seqlens[draw_cells]
    return undetected_indices + n_detected_before


def _index_in_cell(item_cells: Tensor, n_items: Tensor) -> Tensor:
    """Number the items of each cell from 0, (items,) int64.

    `item_cells` (items,) is the cell of each item, ascending. `n_items` (cells,) is the number of items of
    each cell.
    """
    first_item = n_items.cumsum(0) - n_items
    return torch.arange(len(item_cells)) - first_item[item_cells]
