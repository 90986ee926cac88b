"""The built-in tokenizers, and the choice among the genes of a cell that does not fit.

By default the tokens of a cell are its first genes in rank order; `truncation: random` draws them,
`variable` takes the genes that vary most over the corpus, and `zero_frac` adds genes without
counts. Values are always computed from the whole cell. Draws are keyed by seed, epoch, the cell's
counts and the gene: the same in every layout and file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cellmill.config.parts.tokens import SPECIAL, BinnedTokens, Tokens
from cellmill.data.keys import splitmix64
from cellmill.data.rows import SparseCounts, positions_in_rows, row_offsets
from cellmill.data.stream.batch import Batch, Prefixes, Tokenized, Tokenizer, make_batch
from cellmill.data.stream.token_values import log_tokens, rank_tokens
from cellmill.errors import ConfigError, DataError

_ZEROS = np.uint64(0x5A45524F)  # part of the keys of genes without counts
# entries of a table over counts; cells with larger counts are binned one by one
_MAX_TABLE = 1 << 24


def count_kept_and_zeros(
    tokens: Tokens, detected: np.ndarray, n_genes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens with counts and without, zeros, in each cell, `(cells,)` int64 each.

    `detected`, `(cells,)`, is the number of genes that each cell has, out of `n_genes`. A fraction
    `zero_frac` of the tokens have no counts.
    """
    zero_frac = tokens.zero_frac
    kept = np.minimum(detected, _max_kept(tokens))
    if not zero_frac:
        return kept, np.zeros_like(kept)
    zeros = np.floor(kept * zero_frac / (1 - zero_frac)).astype(kept.dtype)
    absent = n_genes - detected
    max_zeros = np.minimum(absent, tokens.max_tokens - kept)
    return kept, np.minimum(zeros, max_zeros)


def _max_kept(tokens: Tokens) -> int:
    """Most tokens of a cell that have counts."""
    return max(1, int(tokens.max_tokens * (1 - tokens.zero_frac)))


class CellTokenizer:
    """A run's tokenizer and its choice of genes, over a vocabulary of `n_genes`.

    `variability` is the vocabulary's. Raises DataError if it has none and the options need it.
    """

    def __init__(
        self, tokens: Tokens, n_genes: int, seed: int = 0, variability: np.ndarray | None = None
    ) -> None:
        if tokens.truncation == "variable" and variability is None:
            raise DataError(
                "tokens.truncation variable: the vocabulary has no order of genes by variability; set "
                "vocabulary.variability to yes and make vocabulary and shards again"
            )
        self._variability = variability
        self._tokens = tokens
        self._n_genes = n_genes
        self._seed = seed
        self._chooses = tokens.truncation != "top" or tokens.zero_frac > 0
        uncut = tokens.model_copy(update={"max_tokens": 2**31 - 1}) if self._chooses else tokens
        self._tokenizer: Tokenizer = uncut.load()(uncut)
        self.dtype = self._tokenizer.dtype

    def max_genes(self, with_counts: bool) -> int | None:
        """Genes of each cell that have to be read; None for all of them and their counts."""
        reads_all = with_counts or self._chooses or self._tokenizer.needs_counts
        return None if reads_all else self._tokens.max_tokens

    def sorts_cells_above(self) -> int | None:
        """Cells with more genes than this are put into rank order, because it decides their tokens;
        None if it never does.
        """
        if self._tokens.value_kind == "place":
            return 0
        return _max_kept(self._tokens) if self._tokens.truncation == "top" else None

    def count_tokens(self, detected: np.ndarray) -> np.ndarray:
        """(cells,) int64: tokens of cells with `detected` genes."""
        kept, zeros = count_kept_and_zeros(self._tokens, detected, self._n_genes)
        return kept + zeros

    def batch(
        self, cells: SparseCounts, ids: np.ndarray, with_counts: bool = False, epoch: int = 0
    ) -> Batch:
        """Batch of cells whose genes are in rank order, and whose ids are `ids`, (cells,); with the
        counts of its tokens if `with_counts`.
        """
        if self._chooses:
            return self._chosen_batch(cells, ids, with_counts, epoch)
        return make_batch(self._tokenizer, cells, ids, with_counts)

    def _chosen_batch(
        self, cells: SparseCounts, cell_ids: np.ndarray, with_counts: bool, epoch: int
    ) -> Batch:
        """`batch` of chosen genes. In each cell, genes with counts come first."""
        all_ids, all_values, _ = self._tokenizer.tokenize(cells)
        keys = self._cell_keys(cells, epoch)
        n_kept, n_zeros = count_kept_and_zeros(self._tokens, cells.lengths, self._n_genes)
        kept = self._choose(cells, n_kept, keys)
        zeros = _draw_absent(cells, n_zeros, keys, self._n_genes)
        n_tokens = n_kept + n_zeros
        token_offsets = row_offsets(n_tokens)
        is_zero = positions_in_rows(token_offsets) >= np.repeat(n_kept, n_tokens)
        ids = np.empty(len(is_zero), np.int32)
        ids[~is_zero] = all_ids[kept]
        ids[is_zero] = zeros + len(SPECIAL)
        values = np.zeros(len(is_zero), self.dtype)
        if self._tokens.value_kind == "place":
            values[:] = positions_in_rows(token_offsets)
        else:
            values[~is_zero] = all_values[kept]
        token_counts = None
        if with_counts:
            token_counts = np.zeros(len(is_zero), np.int64)
            token_counts[~is_zero] = cells.counts[kept]
        return Batch(ids, values, token_offsets.astype(np.int32), cell_ids, token_counts)

    def _cell_keys(self, cells: SparseCounts, epoch: int) -> np.ndarray:
        """Key of each cell's draws, (cells,) uint64, by its genes and counts in any order."""
        offsets, genes, counts = cells
        pairs = splitmix64(genes.astype(np.uint64) ^ splitmix64(counts.astype(np.uint64)))
        # sums modulo 2**64
        total = np.zeros(len(pairs) + 1, np.uint64)
        pairs.cumsum(out=total[1:])
        sums = total[offsets[1:]] - total[offsets[:-1]]
        seed = np.array([self._seed], np.uint64)
        return splitmix64(sums ^ splitmix64(splitmix64(seed) ^ np.uint64(epoch)))

    def _choose(self, cells: SparseCounts, n_kept: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Indices of the `n_kept` genes of each cell that become tokens, ascending."""
        offsets, genes, _ = cells
        lengths = cells.lengths
        if self._tokens.truncation == "top":
            return np.flatnonzero(positions_in_rows(offsets) < np.repeat(n_kept, lengths))
        keep = np.ones(len(genes), bool)
        for cell in np.flatnonzero(lengths > n_kept).tolist():
            start = int(offsets[cell])
            stop = int(offsets[cell + 1])
            cell_genes = genes[start:stop]
            if self._tokens.truncation == "variable":
                assert self._variability is not None
                order = self._variability[cell_genes]
            else:
                order = splitmix64(keys[cell] ^ cell_genes.astype(np.uint64))
            keep[start:stop] = False
            keep[start + _smallest(order, n_kept[cell])] = True
        return np.flatnonzero(keep)


def _draw_absent(cells: SparseCounts, n: np.ndarray, keys: np.ndarray, n_genes: int) -> np.ndarray:
    """Draw `n`, (cells,), genes without counts for each cell by its key; return their rows.

    Rows ascend within a cell.
    """
    offsets, genes, _ = cells
    all_genes = np.arange(n_genes, dtype=np.uint64)
    drawn = [np.empty(0, np.int64)]
    for cell in np.flatnonzero(n).tolist():
        draws = splitmix64(splitmix64(keys[cell : cell + 1] ^ _ZEROS) ^ all_genes)
        # sorted last: genes with counts are not drawn
        draws[genes[offsets[cell] : offsets[cell + 1]]] = np.iinfo(np.uint64).max
        drawn.append(np.sort(_smallest(draws, n[cell])))
    return np.concatenate(drawn)


def _smallest(values: np.ndarray, n: int) -> np.ndarray:
    """Indices of the `n` smallest values, in any order."""
    return np.argpartition(values, n - 1)[:n]


class FirstGenes:
    """Tokens of the first `max_tokens` genes of each cell."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def _prefixes(self, cells: SparseCounts) -> Prefixes:
        return Prefixes(cells, self._options.max_tokens)


class ContinuousTokenizer(FirstGenes):
    """Values are log(1 + counts per 10,000), float32."""

    dtype = np.dtype(np.float32)
    needs_counts = True

    def tokenize(self, cells: SparseCounts) -> Tokenized:
        return log_tokens(self._prefixes(cells))


class RankTokenizer(FirstGenes):
    """Values are positions in the cell from 0, int32."""

    dtype = np.dtype(np.int32)
    needs_counts = False

    def tokenize(self, cells: SparseCounts) -> Tokenized:
        return rank_tokens(self._prefixes(cells))


class BinnedTokenizer(FirstGenes):
    """Values are bins from 1, int32, of counts in a cell or of log(1 + counts per 10,000)."""

    dtype = np.dtype(np.int32)
    needs_counts = True

    def __init__(self, options: BinnedTokens) -> None:
        super().__init__(options)
        # inner edges, `(bins - 1,)`, unless each cell has its own
        self._edges: np.ndarray | None = None
        if options.binning == "uniform":
            self._edges = np.linspace(0, options.max_value, options.bins + 1)[1:-1]
        elif options.binning == "quantile_corpus":
            if options.edges is None:
                raise ConfigError(
                    "tokens.binning quantile_corpus: no edges are fitted; give them as tokens.edges"
                )
            self._edges = np.array(options.edges)

    def tokenize(self, cells: SparseCounts) -> Tokenized:
        kept = self._prefixes(cells)
        if self._edges is None:
            bins = _bin_cells(cells, self._options.bins)
            return Tokenized(kept.token_ids(), kept.copy(bins, np.int32), kept.cu_seqlens)
        ids, values, cu_seqlens = log_tokens(kept)
        # a value at an edge is in the bin above it
        bins = 1 + np.searchsorted(self._edges, values, side="right")
        return Tokenized(ids, bins.astype(np.int32), cu_seqlens)


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """Quantile bin, 1 to `bins`, of each nonzero count of one cell: the number of `bins` quantiles
    that it reaches.

    scGPT's binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment
    of ties.
    """
    quantiles = np.quantile(counts, np.linspace(0, 1, bins))
    return np.digitize(counts, quantiles).astype(np.int32)


def _bin_cells(cells: SparseCounts, bins: int) -> np.ndarray:
    """`bin_counts` of every cell, by lookup tables over the values of counts: no sort, no search
    per token.
    """
    offsets, _, counts = cells
    lengths = cells.lengths
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, offsets[:-1][filled]).astype(np.int64)
    sizes = largest + 2  # entries of each cell's table: a count is its index
    if int(sizes.sum()) > _MAX_TABLE:
        by_cell = np.split(counts, offsets[1:-1])
        return np.concatenate([bin_counts(cell, bins) for cell in by_cell if len(cell)])
    # tables of all cells, one after another, with an entry for each token
    n = lengths[filled]
    table_offsets = row_offsets(sizes)
    entry = np.repeat(table_offsets[:-1], n)
    entry += counts
    # `(entries,)`: number of tokens whose entry is this one or an earlier one, earlier cells included
    n_up_to = np.cumsum(np.bincount(entry, minlength=int(table_offsets[-1])))
    quantiles = _cell_quantiles(n_up_to, table_offsets[:-1, None], n, bins)
    return _bins_reached(quantiles, table_offsets)[entry]


def _cell_quantiles(
    n_up_to: np.ndarray, table_start: np.ndarray, n: np.ndarray, bins: int
) -> np.ndarray:
    """`(cells, bins)`: numpy's linear quantiles, operation by operation, so that bins equal those of
    `bin_counts`.

    Cells have `n` counts each, `(cells,)`; their tables in `n_up_to` begin at `table_start`,
    `(cells, 1)`.
    """
    # rank of each quantile among the cell's sorted counts, and the whole ranks below and above it
    last_rank = (n - 1)[:, None]
    rank = np.linspace(0, 1, bins) * last_rank
    rank_below = np.floor(rank).astype(np.int64)
    rank_above = np.minimum(rank_below + 1, last_rank)
    # the counts at these ranks
    n_before = (np.cumsum(n) - n)[:, None]  # counts of earlier cells
    below = np.searchsorted(n_up_to, n_before + rank_below, side="right") - table_start
    above = np.searchsorted(n_up_to, n_before + rank_above, side="right") - table_start
    frac = rank - rank_below
    gap = above - below
    return np.where(frac >= 0.5, above - gap * (1 - frac), below + gap * frac)


def _bins_reached(quantiles: np.ndarray, table_offsets: np.ndarray) -> np.ndarray:
    """`(entries,)` int32: number of its cell's `quantiles`, `(cells, bins)`, that each count in the
    tables reaches.
    """
    n_cells, bins = quantiles.shape
    # an integer reaches a quantile when it reaches the quantile rounded up
    reached_at = table_offsets[:-1, None] + np.ceil(quantiles).astype(np.int64)
    reached = np.cumsum(np.bincount(reached_at.ravel(), minlength=int(table_offsets[-1])))
    # without the quantiles of earlier cells
    reached -= np.repeat(np.arange(n_cells) * bins, np.diff(table_offsets))
    return reached.astype(np.int32)
