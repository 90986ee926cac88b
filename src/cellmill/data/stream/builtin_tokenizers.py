"""The built-in tokenizers.

The values of their tokens are log counts (`continuous`), positions (`rank`, `sequence`) or bins (`binned`).
"""

from typing import Any

import numpy as np

from cellmill.config.parts.tokens import BinnedTokens
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.data.stream.token_values import make_log_tokens, make_position_tokens
from cellmill.data.stream.tokenizer import CellTokens, KeptGenes
from cellmill.errors import ConfigError

# `_bin_cells` makes a table of counts for each cell. If the tables of all cells have more than
# `_MAX_ENTRIES` entries in total, or more than `_MAX_MEAN_ENTRIES` entries per cell, `_bin_cells` makes no
# tables: such tables take too much memory, or more time than sorting the counts of each cell
_MAX_ENTRIES = 1 << 24
_MAX_MEAN_ENTRIES = 1 << 15


class FirstGenesTokenizer:
    """Base of the built-in tokenizers. They keep the first `max_tokens` genes of each cell."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def _keep(self, cells: SparseCounts) -> KeptGenes:
        return KeptGenes(cells, self._options.max_tokens)


class ContinuousTokenizer(FirstGenesTokenizer):
    """Tokenizer with value log(1 + counts per 10,000), float32, for each gene."""

    dtype = np.dtype(np.float32)
    needs_counts = True

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        return make_log_tokens(self._keep(cells))


class RankTokenizer(FirstGenesTokenizer):
    """Tokenizer whose values are positions in the cell or sequence, int32, from 0."""

    dtype = np.dtype(np.int32)
    needs_counts = False

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        return make_position_tokens(self._keep(cells))


class BinnedTokenizer(FirstGenesTokenizer):
    """Tokenizer whose values are bins, int32, from 1.

    With `binning: quantile_cell` these are bins of the counts of each cell. Otherwise they are bins of
    log(1 + counts per 10,000), with the same edges for all cells.
    """

    dtype = np.dtype(np.int32)
    needs_counts = True

    def __init__(self, options: BinnedTokens) -> None:
        super().__init__(options)
        # edges between neighbouring bins, `(bins - 1,)`; None if each cell has edges of its own
        self._edges: np.ndarray | None = None
        if options.binning == "uniform":
            self._edges = np.linspace(0, options.max_value, options.bins + 1)[1:-1]
        elif options.binning == "quantile_corpus":
            if options.edges is None:
                raise ConfigError(
                    "tokens.binning quantile_corpus: no edges are fitted; give them as tokens.edges"
                )
            self._edges = np.array(options.edges)

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        kept = self._keep(cells)
        if self._edges is None:
            bins = _bin_cells(cells, self._options.bins)
            return CellTokens(kept.token_ids(), kept.select(bins, np.int32), kept.cu_seqlens)
        token_ids, values, cu_seqlens = make_log_tokens(kept)
        # a value at an edge is in the bin above it
        bins = 1 + np.searchsorted(self._edges, values, side="right")
        return CellTokens(token_ids, bins.astype(np.int32), cu_seqlens)


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """Find the quantile bin of each nonzero count of one cell, `(nonzeros,)` int32, from 1 to `bins`.

    There are `bins` quantiles. The bin of a count is the number of quantiles that the count reaches. This is
    scGPT's binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment of ties.
    """
    quantiles = np.quantile(counts, np.linspace(0, 1, bins))
    return np.digitize(counts, quantiles).astype(np.int32)


def _bin_cells(cells: SparseCounts, bins: int) -> np.ndarray:
    """Find the quantile bin of each nonzero count of all cells, `(nonzeros,)` int32.

    The bins are exactly the bins that `bin_counts` finds cell by cell, but no cell is sorted. Instead, each
    cell has a table: entry i of the table stands for count i, from 0 to the largest count of the cell. The
    tables of all cells follow each other in one array, `(entries,)`. Example: two cells with counts (1, 3)
    and (2) have tables of 4 and 3 entries, so there are 7 entries in all.
    """
    offsets, _, counts = cells
    lengths = cells.lengths
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, offsets[:-1][filled]).astype(np.int64)
    table_sizes = largest + 1  # entries of each cell's table
    if int(table_sizes.sum()) > min(_MAX_ENTRIES, _MAX_MEAN_ENTRIES * len(filled)):
        # the tables are too large: bin cell by cell
        by_cell = np.split(counts, offsets[1:-1])
        return np.concatenate([bin_counts(cell, bins) for cell in by_cell if len(cell)])

    # index of each nonzero's entry, `(nonzeros,)`. In the example, these are 1, 3 and 4 + 2
    n_nonzeros = lengths[filled]
    table_offsets = row_offsets(table_sizes)
    entry = np.repeat(table_offsets[:-1], n_nonzeros)
    # counts may be uint64, which `+=` refuses to add to int64
    np.add(entry, counts, out=entry, dtype=np.int64, casting="unsafe")

    # number of nonzeros up to and including each entry, over all cells, `(entries,)`. In the example, the
    # two tables have 0 1 1 2 and 2 2 3
    n_by_entry = np.bincount(entry, minlength=int(table_offsets[-1]))
    n_cumulative = np.cumsum(n_by_entry)
    quantiles = _compute_quantiles(n_cumulative, table_offsets[:-1, None], n_nonzeros, bins)
    return _count_reached(quantiles, table_offsets)[entry]


def _compute_quantiles(
    n_cumulative: np.ndarray, table_starts: np.ndarray, n_nonzeros: np.ndarray, bins: int
) -> np.ndarray:
    """Compute quantiles of the nonzero counts of each cell, `(cells, bins)` float64.

    `n_cumulative`, `(entries,)`, has the number of nonzeros up to and including each entry, over all cells.
    `table_starts`, `(cells, 1)`, has the first entry of each table. `n_nonzeros`, `(cells,)`, has the number
    of nonzeros of each cell.

    `_bin_cells` has an example: counts (1, 3) and (2) have the cumulative numbers 0 1 1 2 and 2 2 3. The
    second nonzero of the first cell has count 3, because entry 3 is the first with a number above 1.

    The operations are done in the same order as in numpy's linear quantiles. So the quantiles equal the
    quantiles of `bin_counts`, bit for bit.
    """
    # position of each quantile among the cell's sorted counts, and the integers around it
    last = (n_nonzeros - 1)[:, None]
    position = np.linspace(0, 1, bins) * last
    position_below = np.floor(position).astype(np.int64)
    position_above = np.minimum(position_below + 1, last)
    # counts at these two integers: the first entry with a cumulative number above the position
    n_before = (np.cumsum(n_nonzeros) - n_nonzeros)[:, None]  # nonzeros of earlier cells
    below = np.searchsorted(n_cumulative, n_before + position_below, side="right") - table_starts
    above = np.searchsorted(n_cumulative, n_before + position_above, side="right") - table_starts
    # interpolate linearly between the two counts
    frac = position - position_below
    gap = above - below
    return np.where(frac >= 0.5, above - gap * (1 - frac), below + gap * frac)


def _count_reached(quantiles: np.ndarray, table_offsets: np.ndarray) -> np.ndarray:
    """Count, for each entry of the tables, the quantiles of its cell that its count reaches.

    Returns `(entries,)` int32. `quantiles` is `(cells, bins)`, and `table_offsets` is `(cells + 1,)`.
    """
    n_cells, bins = quantiles.shape
    # the entry at which each quantile is reached. Counts are integers, so the smallest count that reaches a
    # quantile is the quantile rounded up
    reached_at = table_offsets[:-1, None] + np.ceil(quantiles).astype(np.int64)
    n_reached = np.cumsum(np.bincount(reached_at.ravel(), minlength=int(table_offsets[-1])))
    # subtract the quantiles of earlier cells
    n_reached -= np.repeat(np.arange(n_cells) * bins, np.diff(table_offsets))
    return n_reached.astype(np.int32)
