"""The built-in tokenizers, and the choice among the genes of a cell that does not fit.

By default the tokens of a cell are its first genes in rank order; `truncation: random` draws them,
`variable` takes the genes that vary most over the corpus, and `zero_frac` adds genes without
counts. Values are always computed from the whole cell. Draws are keyed by seed, epoch, the cell's
counts and the gene: the same in every layout and file.

log(1 + counts per 10,000) is computed by numpy, or with the same bits by loops that numba compiles,
which look up small counts in a table of each cell. They are compiled in the background, by a
process that has made many tokens; until then, for small batches, and where numba is not installed,
numpy computes the values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from cellmill.config.parts.tokens import SPECIAL, BinnedTokens, Tokens
from cellmill.data.arrays import positions_in_rows, row_sums, scale_of_totals
from cellmill.data.keys import splitmix64
from cellmill.data.stream.batch import Batch, Prefixes, Tokenizer, recycled_empty, tokenized
from cellmill.errors import ConfigError, DataError

_ZEROS = np.uint64(0x5A45524F)  # part of the keys of genes without counts
Tokenized = tuple[np.ndarray, np.ndarray]  # token ids, int32, and values, (tokens,) each
_FIRST_ID = np.int32(len(SPECIAL))
TABLE = 64  # counts that are looked up: those below
_MANY = 1 << 15  # tokens of a batch from which loops are faster
# tokens in such batches; a process that makes fewer is not worth numba's second and 100 MB
_WORTH = 1 << 22
_made = 0
# entries of a table over counts; cells with larger counts are binned one by one
_MAX_TABLE = 1 << 24
Loops = tuple[Callable[..., None], Callable[..., int]]  # `_sum_cells` and `_fill`, compiled


def token_numbers(
    tokens: Tokens, detected: np.ndarray, n_genes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens, (cells,) int64 each, of cells with `detected` genes of `n_genes`: with
    counts and without.

    `zero_frac` of them have none.
    """
    share = tokens.zero_frac
    most = max(1, int(tokens.max_tokens * (1 - share))) if share else tokens.max_tokens
    kept = np.minimum(detected, most)
    if not share:
        return kept, np.zeros_like(kept)
    zeros = np.floor(kept * share / (1 - share)).astype(kept.dtype)
    return kept, np.minimum(zeros, np.minimum(n_genes - detected, tokens.max_tokens - kept))


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
        given = tokens.model_copy(update={"max_tokens": 2**31 - 1}) if self._chooses else tokens
        self._tokenizer: Tokenizer = given.load()(given)
        self.dtype = self._tokenizer.dtype

    def max_genes(self, counted: bool) -> int | None:
        """Genes of each cell that have to be read; None for all of them and their counts."""
        reads_all = counted or self._chooses or self._tokenizer.needs_counts
        return None if reads_all else self._tokens.max_tokens

    def numbers(self, detected: np.ndarray) -> np.ndarray:
        """(cells,) int64: tokens of cells with `detected` genes."""
        kept, zeros = token_numbers(self._tokens, detected, self._n_genes)
        return kept + zeros

    def batch(
        self,
        genes: np.ndarray,
        counts: Any,
        starts: np.ndarray,
        cells: np.ndarray,
        counted: bool = False,
        epoch: int = 0,
    ) -> Batch:
        """Batch of cells whose genes, (nonzeros,), are in rank order; with the counts of its tokens
        if `counted`.
        """
        if not self._chooses:
            max_counted = self._tokens.max_tokens if counted else None
            return tokenized(self._tokenizer, genes, counts, starts, cells, max_counted)
        ids, values, _ = self._tokenizer.tokenize(genes, counts, starts)
        pairs = splitmix64(genes.astype(np.uint64) ^ splitmix64(counts.astype(np.uint64)))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(pairs, dtype=np.uint64)])
        run = splitmix64(splitmix64(np.array([self._seed], np.uint64)) ^ np.uint64(epoch))
        # keys of the draws of each cell, by its genes and counts in any order
        keys = splitmix64((total[starts[1:]] - total[starts[:-1]]) ^ run)
        n_kept, n_zeros = token_numbers(self._tokens, np.diff(starts), self._n_genes)
        kept = self._kept(genes, starts, n_kept, keys)
        zeros = _absent(genes, starts, n_zeros, keys, self._n_genes)
        ends = np.concatenate([[0], np.cumsum(n_kept + n_zeros)])
        # of each cell the tokens with counts stand first, then those without
        is_zero = positions_in_rows(ends) >= np.repeat(n_kept, n_kept + n_zeros)

        def joined(detected: np.ndarray, absent: Any, dtype: Any) -> np.ndarray:
            both = np.empty(len(is_zero), dtype)
            both[~is_zero], both[is_zero] = detected[kept], absent
            return both

        token_ids = joined(ids, zeros + len(SPECIAL), np.int32)
        if self._tokens.value_kind == "place":
            token_values = positions_in_rows(ends).astype(self.dtype)
        else:
            token_values = joined(values, 0, self.dtype)
        token_counts = joined(counts, 0, np.int64) if counted else None
        return Batch(token_ids, token_values, ends.astype(np.int32), cells, token_counts)

    def _kept(
        self, genes: np.ndarray, starts: np.ndarray, n_kept: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Indices of the kept ones of `genes`, in their order: the first of each cell, random or
        variable ones.
        """
        lengths = np.diff(starts)
        if self._tokens.truncation == "top":
            return np.flatnonzero(positions_in_rows(starts) < np.repeat(n_kept, lengths))
        keep = np.ones(len(genes), bool)
        for cell in np.flatnonzero(lengths > n_kept).tolist():
            start = int(starts[cell])
            stop = int(starts[cell + 1])
            cell_genes = genes[start:stop]
            if self._tokens.truncation == "variable":
                assert self._variability is not None
                first = self._variability[cell_genes]
            else:
                first = splitmix64(keys[cell] ^ cell_genes.astype(np.uint64))
            keep[start:stop] = False
            keep[start + np.argpartition(first, n_kept[cell] - 1)[: n_kept[cell]]] = True
        return np.flatnonzero(keep)


def _absent(
    genes: np.ndarray, starts: np.ndarray, n: np.ndarray, keys: np.ndarray, n_genes: int
) -> np.ndarray:
    """Rows of genes that have no counts, `n` of each cell, ascending in a cell and drawn by the
    cell's key.
    """
    every = np.arange(n_genes, dtype=np.uint64)
    drawn = [np.empty(0, np.int64)]
    for cell, (start, stop) in enumerate(pairwise(starts.tolist())):
        if n[cell]:
            draws = splitmix64(splitmix64(keys[cell : cell + 1] ^ _ZEROS) ^ every)
            draws[genes[start:stop]] = np.iinfo(np.uint64).max
            drawn.append(np.sort(np.argpartition(draws, n[cell] - 1)[: n[cell]]))
    return np.concatenate(drawn)


class FirstGenes:
    """Tokens of the first `max_tokens` genes of each cell."""

    dtype: np.dtype
    needs_counts: bool

    def __init__(self, options: Any) -> None:
        self._options = options

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert counts is not None or not self.needs_counts
        kept = Prefixes(starts, self._options.max_tokens)
        ids, values = self._tokens(kept, genes, counts, starts)
        return ids, values, kept.cu_seqlens

    def _tokens(
        self, kept: Prefixes, genes: np.ndarray, counts: Any, starts: np.ndarray
    ) -> Tokenized:
        raise NotImplementedError


def log_tokens(
    kept: Prefixes, genes: np.ndarray, counts: np.ndarray, starts: np.ndarray
) -> Tokenized:
    """Token ids and float32 values of the kept ones of `genes` and `counts`, whose cells begin at
    `starts`.
    """
    global _made
    _made += n if (n := int(kept.cu_seqlens[-1])) >= _MANY else 0
    plain = all(
        array.flags.c_contiguous and array.flags.writeable for array in (genes, counts, starts)
    )
    known = (
        counts.dtype in (np.uint16, np.uint32)
        and genes.dtype == np.int32
        and starts.dtype == np.int64
    )
    compiling = _compiling() if n >= _MANY and _made >= _WORTH and plain and known else None
    loops = compiling.result() if compiling is not None and compiling.done() else None
    if loops is None:
        values = kept.copy(counts, np.float32)
        values *= np.repeat(scale_of_totals(row_sums(counts, starts), np.float32), kept.lengths)
        return kept.token_ids(genes), np.log1p(values, out=values)
    sum_cells, fill = loops
    totals = np.empty(len(starts) - 1, np.int64)
    sum_cells(counts, starts, totals)
    scale = scale_of_totals(totals, np.float32)
    table = np.multiply.outer(scale, np.arange(TABLE, dtype=np.float32))
    np.log1p(table, out=table)
    ids, values, large = (recycled_empty(n, dtype) for dtype in (np.int32, np.float32, np.int32))
    large = large[: fill(genes, counts, starts, kept.cu_seqlens, table, scale, ids, values, large)]
    values[large] = np.log1p(values[large])
    return ids, values


def compile_loops() -> Loops | None:
    """Compile the loops; None without numba. Takes about a second."""
    try:
        njit = importlib.import_module("numba").njit
    except ImportError:
        return None
    types = ("uint16[::1]", "uint32[::1]")
    sums = [f"void({counts}, int64[::1], int64[::1])" for counts in types]
    arrays = "int64[::1], int32[::1], float32[:, ::1], float32[::1], int32[::1], float32[::1], int32[::1]"
    fills = [f"int64(int32[::1], {counts}, {arrays})" for counts in types]
    return njit(sums, nogil=True)(_sum_cells), njit(fills, nogil=True)(_fill)


@cache
def _compiling() -> Future[Loops | None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-compile")
    compiling = pool.submit(compile_loops)
    pool.shutdown(wait=False)
    return compiling


def _sum_cells(counts: Any, starts: Any, totals: Any) -> None:
    for cell in range(len(totals)):
        cell_counts = counts[starts[cell] : starts[cell + 1]]
        total = np.uint64(0)
        for i in range(len(cell_counts)):
            total += np.uint64(cell_counts[i])
        totals[cell] = total


def _fill(
    genes: Any,
    counts: Any,
    starts: Any,
    ends: Any,
    table: Any,
    scale: Any,
    ids: Any,
    values: Any,
    large: Any,
) -> int:
    """Fill `ids` and `values`; counts not in `table` get their products instead, and are listed in
    `large`.
    """
    n_large = 0
    for cell in range(len(scale)):
        first = ends[cell]
        start = starts[cell]
        n = np.uint64(ends[cell + 1] - ends[cell])
        cell_counts = counts[start : start + n]
        value_of_count = table[cell]
        cell_values = values[first : first + n]
        cell_genes = genes[start : start + n]
        cell_ids = ids[first : first + n]
        for i in range(n):
            cell_ids[i] = cell_genes[i] + _FIRST_ID
        for i in range(n):
            count = np.uint64(cell_counts[i])
            if count < np.uint64(TABLE):
                cell_values[i] = value_of_count[count]
            else:
                cell_values[i] = np.float32(cell_counts[i]) * scale[cell]
                large[n_large] = first + i
                n_large += 1
    return n_large


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

    def _tokens(
        self, kept: Prefixes, genes: np.ndarray, counts: Any, starts: np.ndarray
    ) -> Tokenized:
        if self._edges is None:
            return kept.token_ids(genes), kept.copy(
                _bins(counts, starts, self._options.bins), np.int32
            )
        ids, values = log_tokens(kept, genes, counts, starts)
        # a value at an edge is in the bin above it
        return ids, (1 + np.searchsorted(self._edges, values, side="right")).astype(np.int32)


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """Quantile bin, 1 to `bins`, of each nonzero count of one cell: the number of `bins` quantiles
    that it reaches.

    scGPT's binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment
    of ties.
    """
    return np.digitize(counts, np.quantile(counts, np.linspace(0, 1, bins))).astype(np.int32)


def _bins(counts: np.ndarray, starts: np.ndarray, bins: int) -> np.ndarray:
    """`bin_counts` of every cell, by lookup tables over the values of counts: no sort, no search
    per token.
    """
    lengths = np.diff(starts)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, starts[:-1][filled]).astype(np.int64)
    if int((largest + 2).sum()) > _MAX_TABLE:
        edges = starts.tolist()
        return np.concatenate([bin_counts(counts[a:b], bins) for a, b in pairwise(edges) if b > a])
    n = lengths[filled]
    # tables of all cells in one array: how often each count occurs, then how many counts are no
    # larger
    first = np.concatenate([[0], np.cumsum(largest + 2)])
    entry = np.repeat(first[:-1], n)
    entry += counts
    up_to = np.cumsum(np.bincount(entry, minlength=first[-1]))
    ends = np.cumsum(n)
    # numpy's linear quantiles, operation by operation: between the values at floor and ceil of q *
    # (n - 1)
    virtual = np.linspace(0, 1, bins) * (n - 1)[:, None]
    low = np.floor(virtual).astype(np.int64)
    high = np.minimum(low + 1, (n - 1)[:, None])
    before = (ends - n)[:, None]
    a = np.searchsorted(up_to, before + low, side="right") - first[:-1, None]
    b = np.searchsorted(up_to, before + high, side="right") - first[:-1, None]
    part = virtual - low
    quantiles = np.where(part >= 0.5, b - (b - a) * (1 - part), a + (b - a) * part)
    # an integer reaches a quantile when it reaches the quantile rounded up
    reached = np.bincount(
        (first[:-1, None] + np.ceil(quantiles).astype(np.int64)).ravel(), minlength=first[-1]
    )
    table = np.cumsum(reached)
    table -= np.repeat(np.arange(len(n)) * bins, largest + 2)
    return table.astype(np.int32)[entry]


class ContinuousTokenizer(FirstGenes):
    """Values are log(1 + counts per 10,000), float32."""

    dtype = np.dtype(np.float32)
    needs_counts = True

    def _tokens(
        self, kept: Prefixes, genes: np.ndarray, counts: Any, starts: np.ndarray
    ) -> Tokenized:
        return log_tokens(kept, genes, counts, starts)


class RankTokenizer(FirstGenes):
    """Values are places in the cell from 0, int32."""

    dtype = np.dtype(np.int32)
    needs_counts = False

    def _tokens(
        self, kept: Prefixes, genes: np.ndarray, counts: Any, starts: np.ndarray
    ) -> Tokenized:
        # in cache: half the time of arange - repeat
        longest = np.arange(kept.lengths.max(initial=0), dtype=np.int32)
        values = recycled_empty(kept.cu_seqlens[-1], self.dtype)
        np.concatenate([longest[:n] for n in kept.lengths.tolist()] or [longest], out=values)
        return kept.token_ids(genes), values
