"""Splitting the cells of a step into micro-batches, by the cells' numbers of tokens."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.stream.batch import Batch


class StepSplits(NamedTuple):
    """Where a data rank splits its cells of some steps into micro-batches."""

    offsets: list[int]  # first cell of each micro-batch that is not empty, and the number of cells
    n_filled: list[int]  # for each step: micro-batches that are not empty
    n_batches: list[int]  # for each step: all micro-batches, as many as on every other rank


@dataclass(frozen=True)
class MicroBatchRule:
    """The rule by which a step is split into micro-batches.

    A micro-batch has at most `token_budget` tokens. Tokens of covariates, which the model adds, do not
    count. A step has at least `min_per_step` micro-batches, and their number is a multiple of
    `multiple_of`. If either is above 1 (pipelines), the step is split so that the largest micro-batch
    is as small as possible.
    """

    token_budget: int
    min_per_step: int = 1
    multiple_of: int = 1

    def split_steps(
        self, n_tokens: np.ndarray, cells_by_rank: np.ndarray, data_rank: int
    ) -> StepSplits:
        """Split the cells of a data rank in some steps.

        `n_tokens`, `(cells,)`, has the number of tokens of each cell of all ranks, by step and rank,
        and `cells_by_rank`, `(steps, ranks)`, the numbers of cells. Every rank counts the micro-batches
        of all ranks from them, so ranks agree on their number without communication.
        """
        # numbers of micro-batches that each rank fills greedily, (steps, ranks)
        n_greedy_by_rank = count_greedy_batches(
            n_tokens, cells_by_rank.ravel(), self.token_budget
        ).reshape(cells_by_rank.shape)
        # numbers of micro-batches on every rank, (steps,)
        n_needed = np.maximum(n_greedy_by_rank.max(1), self.min_per_step)
        n_batches: list[int] = (-(-n_needed // self.multiple_of) * self.multiple_of).tolist()
        # in `n_tokens`, this rank's cells of each step are starts:stops
        stops = cells_by_rank.cumsum().reshape(cells_by_rank.shape)[:, data_rank]
        starts = stops - cells_by_rank[:, data_rank]
        offsets = [0]  # these number only this rank's cells
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
        """Split the cells of one step greedily, or evenly into at most `max_batches` micro-batches.

        `n_greedy` is the number of micro-batches that splitting greedily makes. Returns their offsets.
        """
        if self.multiple_of > 1 or self.min_per_step > 1:
            return split_evenly(n_tokens, max_batches)
        if n_greedy == 1:  # all cells fit into one
            return [0, len(n_tokens)]
        return split_greedily(n_tokens, self.token_budget)


def split_greedily(sizes: np.ndarray, budget: int) -> list[int]:
    """Split items in order into groups of a total size of at most `budget`, filled greedily.

    `sizes` is `(items,)`. An item above the budget is a group by itself. Returns the offsets of the
    groups, `[0, ..., items]`: with a budget of 10, sizes 5, 5, 1, 9 and 4 give `[0, 2, 4, 5]`.
    """
    total = sizes.cumsum()
    offsets = [0]
    start = 0
    while start < len(sizes):
        used = int(total[start - 1]) if start else 0
        start = max(int(total.searchsorted(used + budget, side="right")), start + 1)
        offsets.append(start)
    return offsets


def count_greedy_batches(
    n_tokens: np.ndarray, n_cells: np.ndarray, token_budget: int
) -> np.ndarray:
    """Count the micro-batches that `split_greedily` makes of each row of cells, `(rows,)`.

    `n_tokens`, `(cells,)`, has the number of tokens of each cell, row after row, and `n_cells`,
    `(rows,)`, the number of cells in each.
    """
    total = np.zeros(len(n_tokens) + 1, np.int64)
    n_tokens.cumsum(out=total[1:])
    stops = n_cells.cumsum()
    starts = stops - n_cells  # for each row, the first cell of the micro-batch being filled
    n_batches = np.minimum(n_cells, 1)
    # rows whose cells do not fit into one micro-batch. Each round fills one micro-batch of each, and
    # begins another if cells are left
    unfinished = np.flatnonzero(total[stops] - total[starts] > token_budget)
    while len(unfinished):
        start = starts[unfinished]
        stop = np.searchsorted(total, total[start] + token_budget, side="right") - 1
        starts[unfinished] = np.maximum(np.minimum(stop, stops[unfinished]), start + 1)
        unfinished = unfinished[starts[unfinished] < stops[unfinished]]
        n_batches[unfinished] += 1
    return n_batches


def split_evenly(n_tokens: np.ndarray, max_batches: int) -> list[int]:
    """Split cells into at most `max_batches` micro-batches, the largest of which is as small as possible.

    Returns the offsets, like `split_greedily`.
    """
    low = int(n_tokens.max(initial=1))
    high = int(n_tokens.sum())

    def fits(budget: int) -> bool:
        return len(split_greedily(n_tokens, budget)) - 1 <= max_batches

    # the smallest budget in low:high that fits, else high
    return split_greedily(n_tokens, low + bisect_left(range(low, high), True, key=fits))


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Split `batch`, in order, into batches of at most `token_budget` tokens or of a single cell."""
    for start, stop in pairwise(split_greedily(np.diff(batch.cu_seqlens), token_budget)):
        yield batch.slice_cells(start, stop)
