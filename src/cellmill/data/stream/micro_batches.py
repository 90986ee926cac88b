"""Cells of a step cut into micro-batches by their numbers of tokens."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cellmill.data.stream.batch import Batch


def greedy_borders(lengths: np.ndarray, token_budget: int) -> list[int]:
    """Borders `[0, ..., cells]` of micro-batches of at most `token_budget` tokens, filled greedily
    in order.

    `lengths`, `(cells,)`, are tokens of each cell. A cell above the budget is a micro-batch of its
    own.
    """
    total = lengths.cumsum()
    borders = [0]
    first = 0
    while first < len(lengths):
        used = int(total[first - 1]) if first else 0
        first = max(int(total.searchsorted(used + token_budget, side="right")), first + 1)
        borders.append(first)
    return borders


def count_greedy(lengths: np.ndarray, n_cells: np.ndarray, token_budget: int) -> np.ndarray:
    """Number of micro-batches that `greedy_borders` makes of each rank's cells, `(ranks,)`.

    `lengths`, `(cells,)`, are tokens of all ranks' cells, rank by rank, `n_cells` of them on each.
    """
    total = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=total[1:])
    ends = n_cells.cumsum()
    first = ends - n_cells
    numbers = np.minimum(n_cells, 1)
    # ranks with cells for a further micro-batch: at first, those whose cells do not fit in one
    ranks = np.flatnonzero(total[ends] - total[first] > token_budget)
    while len(ranks):
        fitting = np.searchsorted(total, total[first[ranks]] + token_budget, side="right") - 1
        first[ranks] = np.maximum(np.minimum(fitting, ends[ranks]), first[ranks] + 1)
        ranks = ranks[first[ranks] < ends[ranks]]
        numbers[ranks] += 1
    return numbers


def even_borders(lengths: np.ndarray, max_batches: int) -> list[int]:
    """Borders of at most `max_batches` micro-batches that minimise the largest one."""
    low = int(lengths.max(initial=1))
    high = int(lengths.sum())

    def fits(budget: int) -> bool:
        return len(greedy_borders(lengths, budget)) - 1 <= max_batches

    # the smallest budget in low:high that fits, else high
    return greedy_borders(lengths, low + bisect_left(range(low, high), True, key=fits))


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Parts of `batch` in order, of at most `token_budget` tokens if they have several cells."""
    for first, last in pairwise(greedy_borders(np.diff(batch.cu_seqlens), token_budget)):
        yield batch.cut(first, last)
