"""Splitting the cells of a step into micro-batches, by the number of tokens of each cell."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.stream.batch import Batch


class StepSplits(NamedTuple):
    """The micro-batches into which a data rank splits its cells of some consecutive steps.

    The rank's cells of these steps are numbered from 0. Among the micro-batches that are not empty, number i has
    cells `offsets[i]:offsets[i + 1]`.
    """

    offsets: list[int]  # the last offset is the number of cells
    n_filled: list[int]  # for each step, the number of micro-batches that are not empty
    # for each step, the number of all micro-batches; every rank has the same number
    n_batches: list[int]


@dataclass(frozen=True)
class MicroBatchRule:
    """The rule by which a step is split into micro-batches.

    A micro-batch has at most `token_budget` tokens. The model adds tokens of covariates later, so they do
    not count. A step has at least `min_per_step` micro-batches, and the number of micro-batches is a
    multiple of `multiple_of`.

    For pipelines, `min_per_step` or `multiple_of` is above 1. The step is then split so that the largest
    micro-batch is as small as possible. Otherwise micro-batches are filled one after the other.
    """

    token_budget: int
    min_per_step: int = 1
    multiple_of: int = 1

    def split_steps(
        self, n_tokens: np.ndarray, cells_by_rank: np.ndarray, data_rank: int
    ) -> StepSplits:
        """Split the cells that a data rank has in each of some consecutive steps.

        `n_tokens`, `(cells,)`, has the number of tokens of each cell of all ranks. The cells are sorted by
        step, then by rank. `cells_by_rank`, `(steps, ranks)`, has the number of cells of each rank in each
        step.

        Every rank computes the number of micro-batches of all ranks from these two arrays. So the ranks
        agree on a common number without communication.
        """
        # number of micro-batches if each rank fills them one after the other, (steps, ranks)
        n_greedy_by_rank = count_greedy_batches(
            n_tokens, cells_by_rank.ravel(), self.token_budget
        ).reshape(cells_by_rank.shape)

        # number of micro-batches that all ranks have in a step, (steps,)
        n_needed = np.maximum(n_greedy_by_rank.max(1), self.min_per_step)
        n_batches: list[int] = (-(-n_needed // self.multiple_of) * self.multiple_of).tolist()

        # cells starts:stops of `n_tokens` are this rank's cells of each step
        stops = cells_by_rank.cumsum().reshape(cells_by_rank.shape)[:, data_rank]
        starts = stops - cells_by_rank[:, data_rank]

        # split each step, and number the offsets over this rank's cells of all steps
        offsets = [0]
        n_filled = []
        n_greedy_batches = n_greedy_by_rank[:, data_rank].tolist()
        steps = zip(starts.tolist(), stops.tolist(), n_greedy_batches, n_batches)
        for start, stop, n_greedy, max_batches in steps:
            step_offsets = self._split_step(n_tokens[start:stop], n_greedy, max_batches)
            first_cell = offsets[-1]
            offsets += [first_cell + offset for offset in step_offsets[1:]]
            n_filled.append(len(step_offsets) - 1)
        return StepSplits(offsets, n_filled, n_batches)

    def _split_step(self, n_tokens: np.ndarray, n_greedy: int, max_batches: int) -> list[int]:
        """Split the cells of one step into micro-batches, and return the offsets of the micro-batches.

        `n_tokens`, `(cells,)`, has the number of tokens of each cell. `n_greedy` is the number of
        micro-batches that `split_greedily` makes. For pipelines, the cells are split evenly into at most
        `max_batches` micro-batches.
        """
        if self.multiple_of > 1 or self.min_per_step > 1:
            return split_evenly(n_tokens, max_batches)
        if n_greedy == 1:  # all cells fit into one micro-batch
            return [0, len(n_tokens)]
        return split_greedily(n_tokens, self.token_budget)


def split_greedily(sizes: np.ndarray, budget: int) -> list[int]:
    """Split items into groups of consecutive items. Each group is filled before the next one begins.

    `sizes`, `(items,)`, has the size of each item. The sizes in a group sum to at most `budget`. An item
    that is larger than the budget is a group by itself.

    Returns the offsets of the groups: group i has items `offsets[i]:offsets[i + 1]`. With a budget of 10,
    sizes 5, 5, 1, 9 and 4 give `[0, 2, 4, 5]`.
    """
    total = sizes.cumsum()
    offsets = [0]
    start = 0
    while start < len(sizes):
        used = int(total[start - 1]) if start else 0  # total size of earlier groups
        start = max(int(total.searchsorted(used + budget, side="right")), start + 1)
        offsets.append(start)
    return offsets


def count_greedy_batches(
    n_tokens: np.ndarray, n_cells: np.ndarray, token_budget: int
) -> np.ndarray:
    """Count the micro-batches that `split_greedily` makes of each row of cells, `(rows,)`.

    A row is the cells of one step and rank. `n_tokens`, `(cells,)`, has the number of tokens of each cell,
    row after row. `n_cells`, `(rows,)`, has the number of cells in each row.
    """
    total_before = np.zeros(len(n_tokens) + 1, np.int64)  # tokens of all cells before each cell
    n_tokens.cumsum(out=total_before[1:])
    stops = n_cells.cumsum()
    starts = stops - n_cells  # for each row, the first cell of the micro-batch that is being filled
    n_batches = np.minimum(n_cells, 1)
    # rows whose cells do not fit into one micro-batch. Each round fills one micro-batch in each of these
    # rows, and begins another micro-batch where cells are left
    unfinished = np.flatnonzero(total_before[stops] - total_before[starts] > token_budget)
    while len(unfinished):
        start = starts[unfinished]
        max_total = total_before[start] + token_budget
        stop = np.searchsorted(total_before, max_total, side="right") - 1
        # a micro-batch ends at the end of its row, and has at least one cell
        starts[unfinished] = np.maximum(np.minimum(stop, stops[unfinished]), start + 1)
        unfinished = unfinished[starts[unfinished] < stops[unfinished]]
        n_batches[unfinished] += 1
    return n_batches


def split_evenly(n_tokens: np.ndarray, max_batches: int) -> list[int]:
    """Split cells into at most `max_batches` micro-batches so that the largest is as small as possible.

    `n_tokens`, `(cells,)`, has the number of tokens of each cell. Returns the offsets of the micro-batches:
    micro-batch i has cells `offsets[i]:offsets[i + 1]`.
    """
    min_budget = int(n_tokens.max(initial=1))
    max_budget = int(n_tokens.sum())

    def is_enough(budget: int) -> bool:
        return len(split_greedily(n_tokens, budget)) - 1 <= max_batches

    # search the smallest budget that is enough
    budgets = range(min_budget, max_budget)
    return split_greedily(n_tokens, min_budget + bisect_left(budgets, True, key=is_enough))


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Split `batch` into smaller batches of consecutive cells, and yield them in order.

    Each has at most `token_budget` tokens. A cell with more tokens is a batch by itself.
    """
    for start, stop in pairwise(split_greedily(np.diff(batch.cu_seqlens), token_budget)):
        yield batch.slice_cells(start, stop)
