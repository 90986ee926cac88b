"""log(1 + counts per 10,000) of the tokens of cells, by numpy or by loops that numba compiles: the same bits.

numpy needs five passes over the tokens. Most counts are small: the loops look their values up in a table of each cell,
which numpy makes. They are compiled beside the work, from the first batch of many tokens on, in about a second; until
then, for small batches, and where numba is not installed, numpy makes the values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cellmill.data.count_matrix import scale_of_totals, scale_per_10k
from cellmill.data.recycled import recycled_empty
from cellmill.data.tokens import Prefixes

TABLE = 64  # counts that are looked up: those below
_MANY = 1 << 15  # tokens; with fewer a batch is not worth numba's second and 100 MB


def log_values(kept: Prefixes, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Values, `(tokens,)` float32, of the kept ones of `counts`, `(nonzeros,)`, whose cells begin at `starts`."""
    loops = _compiled() if kept.cu_seqlens[-1] >= _MANY and _of_known_types(counts, starts) else None
    return by_numpy(kept, counts, starts) if loops is None else by_loops(loops, kept, counts, starts)


def by_numpy(kept: Prefixes, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """As `log_values`, for `counts` of any integer type."""
    values = kept.copy(counts, np.float32)
    values *= np.repeat(scale_per_10k(counts, starts, np.float32), kept.lengths)
    return np.log1p(values, out=values)


def by_loops(loops: Loops, kept: Prefixes, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """As `log_values`, for uint16 or uint32 `counts` and int64 `starts`."""
    totals = np.empty(len(starts) - 1, np.int64)
    loops.sum_cells(counts, starts, totals)
    scale = scale_of_totals(totals, np.float32)
    table = np.multiply.outer(scale, np.arange(TABLE, dtype=np.float32))
    np.log1p(table, out=table)
    values = recycled_empty(kept.cu_seqlens[-1], np.float32)
    large = recycled_empty(len(values), np.int64)
    large = large[: loops.look_up(counts, starts, kept.cu_seqlens, table, scale, values, large)]
    values[large] = np.log1p(values[large])
    return values


@dataclass(frozen=True)
class Loops:
    """Loops over the counts of cells."""

    sum_cells: Callable[..., None]
    look_up: Callable[..., int]


def compile_loops() -> Loops | None:
    """Compile the loops; None without numba. Takes about a second."""
    try:
        njit = importlib.import_module("numba").njit
    except ImportError:
        return None
    types = ("uint16[::1]", "uint32[::1]")
    sums = [f"void({counts}, int64[::1], int64[::1])" for counts in types]
    arrays = "int64[::1], int32[::1], float32[:, ::1], float32[::1], float32[::1], int64[::1]"
    look_ups = [f"int64({counts}, {arrays})" for counts in types]
    return Loops(njit(sums, nogil=True)(_sum_cells), njit(look_ups, nogil=True)(_look_up))


def _compiled() -> Loops | None:
    compiling = _compiling()
    return compiling.result() if compiling.done() else None


@cache
def _compiling() -> Future[Loops | None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-compile")
    compiling = pool.submit(compile_loops)
    pool.shutdown(wait=False)
    return compiling


def _of_known_types(counts: np.ndarray, starts: np.ndarray) -> bool:
    plain = counts.flags.c_contiguous and counts.flags.writeable
    return plain and counts.dtype in (np.uint16, np.uint32) and starts.dtype == np.int64


def _sum_cells(counts: Any, starts: Any, totals: Any) -> None:
    for cell in range(len(totals)):
        own, total = counts[starts[cell] : starts[cell + 1]], np.uint64(0)
        for i in range(len(own)):
            total += np.uint64(own[i])
        totals[cell] = total


def _look_up(counts: Any, starts: Any, ends: Any, table: Any, scale: Any, values: Any, large: Any) -> int:
    """Fill `values`, but for counts that are not in `table` with their products; these are listed in `large`."""
    n_large = 0
    for cell in range(len(scale)):
        at, n = ends[cell], np.uint64(ends[cell + 1] - ends[cell])
        own, of_count, made = counts[starts[cell] : starts[cell] + n], table[cell], values[at : at + n]
        for i in range(n):
            count = np.uint64(own[i])
            if count < np.uint64(TABLE):
                made[i] = of_count[count]
            else:
                made[i] = np.float32(own[i]) * scale[cell]
                large[n_large] = at + i
                n_large += 1
    return n_large
