"""log(1 + counts per 10,000) as values of tokens, by numpy or by compiled loops.

numpy, and loops that numba compiles, give the same bits; the loops look up small counts in a table
of each cell. They are compiled in the background, by a process that has made many tokens. Until
then, for small batches, and where numba is not installed, numpy computes the values.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import scale_of_totals
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import row_sums
from cellmill.data.stream.batch import Prefixes

TABLE = 64  # counts below this are looked up
LARGE_BATCH = 1 << 15  # tokens of a batch from which loops are faster
# tokens in large batches; a process that makes fewer is not worth numba's second and 100 MB
WORTH_COMPILING = 1 << 22
_FIRST_ID = np.int32(len(SPECIAL))

Tokenized = tuple[np.ndarray, np.ndarray]
"""Token ids, int32, and values, (tokens,) each."""
Loops = tuple[Callable[..., None], Callable[..., int]]
"""`_sum_cells` and `_fill_tokens`, compiled."""


def log_tokens(
    kept: Prefixes, genes: np.ndarray, counts: np.ndarray, starts: np.ndarray
) -> Tokenized:
    """Token ids and float32 values of the kept `genes` and `counts` of cells that begin at
    `starts`.
    """
    if COMPILED.worth_it(int(kept.cu_seqlens[-1])) and _fit_loops(genes, counts, starts):
        loops = COMPILED.get()
        if loops is not None:
            return _tokens_by_loops(loops, kept, genes, counts, starts)
    values = kept.copy(counts, np.float32)
    values *= np.repeat(scale_of_totals(row_sums(counts, starts), np.float32), kept.lengths)
    return kept.token_ids(genes), np.log1p(values, out=values)


def _fit_loops(genes: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> bool:
    """True if the arrays have the types and layout that the loops are compiled for."""
    for array in (genes, counts, starts):
        if not (array.flags.c_contiguous and array.flags.writeable):
            return False
    has_known_counts = counts.dtype in (np.uint16, np.uint32)
    return has_known_counts and genes.dtype == np.int32 and starts.dtype == np.int64


def _tokens_by_loops(
    loops: Loops, kept: Prefixes, genes: np.ndarray, counts: np.ndarray, starts: np.ndarray
) -> Tokenized:
    """`log_tokens` by the compiled loops, in memory that is allocated here."""
    sum_cells, fill_tokens = loops
    n_tokens = int(kept.cu_seqlens[-1])
    totals = np.empty(len(starts) - 1, np.int64)
    sum_cells(counts, starts, totals)
    scale = scale_of_totals(totals, np.float32)
    # value of each small count of each cell, (cells, TABLE)
    table = np.multiply.outer(scale, np.arange(TABLE, dtype=np.float32))
    np.log1p(table, out=table)
    ids = recycled_empty(n_tokens, np.int32)
    values = recycled_empty(n_tokens, np.float32)
    large = recycled_empty(n_tokens, np.int32)  # tokens whose count is not in the table
    ends = kept.cu_seqlens
    n_large = fill_tokens(genes, counts, starts, ends, table, scale, ids, values, large)
    # these still have their count times the scale
    large = large[:n_large]
    values[large] = np.log1p(values[large])
    return ids, values


class CompiledLoops:
    """The loops of this process, compiled once they are worth it."""

    def __init__(self) -> None:
        self.n_tokens = 0  # tokens in large batches so far
        self._compiling: Future[Loops | None] | None = None

    def worth_it(self, n_tokens: int) -> bool:
        """Count the tokens of a batch; True if loops should make them."""
        if n_tokens < LARGE_BATCH:
            return False
        self.n_tokens += n_tokens
        return self.n_tokens >= WORTH_COMPILING

    def get(self, wait: bool = False) -> Loops | None:
        """Return the loops. None without numba, and while they compile unless `wait`."""
        if self._compiling is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-compile")
            self._compiling = pool.submit(_compile)
            pool.shutdown(wait=False)
        return self._compiling.result() if wait or self._compiling.done() else None


def _compile() -> Loops | None:
    """Compile the loops, which takes about a second; None without numba."""
    try:
        njit = importlib.import_module("numba").njit
    except ImportError:
        return None
    count_types = ("uint16[::1]", "uint32[::1]")
    sums = [f"void({counts}, int64[::1], int64[::1])" for counts in count_types]
    others = "int64[::1], int32[::1], float32[:, ::1], float32[::1], int32[::1], float32[::1], int32[::1]"
    fills = [f"int64(int32[::1], {counts}, {others})" for counts in count_types]
    return njit(sums, nogil=True)(_sum_cells), njit(fills, nogil=True)(_fill_tokens)


def _sum_cells(counts: Any, starts: Any, totals: Any) -> None:
    """Fill `totals` with the sum of each cell's counts."""
    for cell in range(len(totals)):
        cell_counts = counts[starts[cell] : starts[cell + 1]]
        total = np.uint64(0)
        for i in range(len(cell_counts)):
            total += np.uint64(cell_counts[i])
        totals[cell] = total


def _fill_tokens(
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
    """Fill `ids` and `values`; return how many counts are not in `table`.

    Those get their product with the scale instead, and their tokens are listed in `large`.
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


COMPILED = CompiledLoops()
