"""The built-in tokenizers.

Their values are log counts (`continuous`), positions (`rank`, `sequence`) or bins (`binned`).
"""

from typing import Any

import numpy as np

from cellmill.config.parts.tokens import BinnedTokens
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.data.stream.token_values import make_log_tokens, make_position_tokens
from cellmill.data.stream.tokenizer import CellTokens, KeptGenes
from cellmill.errors import ConfigError

# most entries in the tables of `_bin_cells`, over all cells; with more, cells are binned one by one
_MAX_ENTRIES = 1 << 24


class FirstGenesTokenizer:
    """Base of the built-in tokenizers: they keep the first `max_tokens` genes of each cell."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def _keep(self, cells: SparseCounts) -> KeptGenes:
        return KeptGenes(cells, self._options.max_tokens)


class ContinuousTokenizer(FirstGenesTokenizer):
    """Values are log(1 + counts per 10,000), float32."""

    dtype = np.dtype(np.float32)
    needs_counts = True

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        return make_log_tokens(self._keep(cells))


class RankTokenizer(FirstGenesTokenizer):
    """Values are positions in the cell or sequence from 0, int32."""

    dtype = np.dtype(np.int32)
    needs_counts = False

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        return make_position_tokens(self._keep(cells))


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """Find the quantile bin, 1 to `bins`, of each nonzero count of one cell, `(nonzeros,)` int32.

    The bin of a count is the number of quantiles, out of `bins`, that it reaches. This is scGPT's
    binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment of ties.
    """
    quantiles = np.quantile(counts, np.linspace(0, 1, bins))
    return np.digitize(counts, quantiles).astype(np.int32)


def _compute_quantiles(
    n_cumulative: np.ndarray, table_starts: np.ndarray, n_nonzeros: np.ndarray, bins: int
) -> np.ndarray:
    """Compute quantiles of the nonzero counts of each cell, `(cells, bins)` float64.

    Entry i of a cell's table stands for count i. `n_cumulative`, `(entries,)`, is the number of
    nonzeros up to and including each entry, over all cells. Tables begin at entries `table_starts`,
    `(cells, 1)`. `n_nonzeros`, `(cells,)`, is the number of nonzeros of each cell. Operations are those
    of numpy's linear quantiles, in the same order, so that bins equal those of `bin_counts`.
    """
    # position of each quantile among the cell's sorted counts, and the integers around it
    last = (n_nonzeros - 1)[:, None]
    position = np.linspace(0, 1, bins) * last
    position_below = np.floor(position).astype(np.int64)
    position_above = np.minimum(position_below + 1, last)
    # the count at a position is the first entry up to which there are more nonzeros than the position
    n_before = (np.cumsum(n_nonzeros) - n_nonzeros)[:, None]  # nonzeros of earlier cells
    below = np.searchsorted(n_cumulative, n_before + position_below, side="right") - table_starts
    above = np.searchsorted(n_cumulative, n_before + position_above, side="right") - table_starts
    frac = position - position_below
    gap = above - below
    return np.where(frac >= 0.5, above - gap * (1 - frac), below + gap * frac)


def _count_reached(quantiles: np.ndarray, table_offsets: np.ndarray) -> np.ndarray:
    """Count how many quantiles of its cell each entry's count reaches, `(entries,)` int32.

    `quantiles` is `(cells, bins)`, and `table_offsets` is `(cells + 1,)`.
    """
    n_cells, bins = quantiles.shape
    # the entry at which each quantile is reached: a count reaches it if it reaches it rounded up
    reached_at = table_offsets[:-1, None] + np.ceil(quantiles).astype(np.int64)
    reached = np.cumsum(np.bincount(reached_at.ravel(), minlength=int(table_offsets[-1])))
    # subtract the quantiles of earlier cells
    reached -= np.repeat(np.arange(n_cells) * bins, np.diff(table_offsets))
    return reached.astype(np.int32)


def _bin_cells(cells: SparseCounts, bins: int) -> np.ndarray:
    """Do the same as `bin_counts` for every cell, without a sort or a search per nonzero.

    Each cell has a table, whose entry i stands for count i, from 0 to the cell's largest count. The
    tables of all cells are one array, `(entries,)`. Returns `(nonzeros,)` int32.
    """
    offsets, _, counts = cells
    lengths = cells.lengths
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, offsets[:-1][filled]).astype(np.int64)
    sizes = largest + 1  # entries of each cell's table
    if int(sizes.sum()) > _MAX_ENTRIES:
        by_cell = np.split(counts, offsets[1:-1])
        return np.concatenate([bin_counts(cell, bins) for cell in by_cell if len(cell)])
    # entry of each nonzero in the tables of all cells, `(nonzeros,)`. Cells with counts (1, 3) and (2)
    # have tables of 4 and 3 entries; their nonzeros are entries 1, 3 and 4 + 2
    n_nonzeros = lengths[filled]
    table_offsets = row_offsets(sizes)
    entry = np.repeat(table_offsets[:-1], n_nonzeros)
    # counts may be uint64, which `+=` refuses to add to int64
    np.add(entry, counts, out=entry, dtype=np.int64, casting="unsafe")
    # number of nonzeros up to and including each entry, over all cells, `(entries,)`
    n_by_entry = np.bincount(entry, minlength=int(table_offsets[-1]))
    n_cumulative = np.cumsum(n_by_entry)
    quantiles = _compute_quantiles(n_cumulative, table_offsets[:-1, None], n_nonzeros, bins)
    return _count_reached(quantiles, table_offsets)[entry]


class BinnedTokenizer(FirstGenesTokenizer):
    """Values are bins from 1, int32, of counts in a cell or of log(1 + counts per 10,000)."""

    dtype = np.dtype(np.int32)
    needs_counts = True

    def __init__(self, options: BinnedTokens) -> None:
        super().__init__(options)
        # inner edges, `(bins - 1,)`; None if each cell has its own
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
