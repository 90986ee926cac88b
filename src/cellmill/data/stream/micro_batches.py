"""Cells of a step cut into micro-batches by their numbers of tokens."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.stream.batch import Batch


class StepCuts(NamedTuple):
    """Micro-batches into which a data rank cuts its cells of some steps."""

    # first cell of each micro-batch that is not empty, and the number of cells
    offsets: list[int]
    n_filled: list[int]  # micro-batches of each step that are not empty
    n_batches: list[int]  # all micro-batches of each step, as many on every rank


@dataclass(frozen=True)
class MicroBatchRule:
    """How the cells of a step are cut into micro-batches.

    A micro-batch has at most `token_budget` tokens. A step has at least `min_per_step` of them and
    a multiple of `multiple_of`; if either is above 1 (pipelines), cells are spread evenly.
    """

    token_budget: int
    min_per_step: int = 1
    multiple_of: int = 1

    def cut_steps(self, lengths: np.ndarray, n_cells: np.ndarray, rank: int) -> StepCuts:
        """Cut the cells of data rank `rank` in some steps.

        `lengths`, `(cells,)`, are tokens of all ranks' cells, by step and rank, and `n_cells`,
        `(steps, ranks)`, are their numbers. Every rank computes the cuts of all ranks from them, so
        they agree without communication.
        """
        budget = self.token_budget
        # numbers of micro-batches, (steps, ranks) and (steps,)
        n_greedy = count_greedy(lengths, n_cells.ravel(), budget).reshape(n_cells.shape)
        n_needed = np.maximum(n_greedy.max(1), self.min_per_step)
        n_batches: list[int] = (-(-n_needed // self.multiple_of) * self.multiple_of).tolist()
        is_even = self.multiple_of > 1 or self.min_per_step > 1
        offsets = [0]
        n_filled = []
        # cells of this rank in each step, and their end among those of all steps and ranks
        n_local = n_cells[:, rank].tolist()
        ends = n_cells.cumsum().reshape(n_cells.shape)[:, rank].tolist()
        n_greedy_local = n_greedy[:, rank].tolist()
        for n, end, n_greedy_step, n_in_step in zip(n_local, ends, n_greedy_local, n_batches):
            if is_even:
                offsets_in_step = cut_evenly(lengths[end - n : end], n_in_step)
            elif n_greedy_step == 1:
                offsets_in_step = [0, n]
            else:
                offsets_in_step = cut_greedily(lengths[end - n : end], budget)
            start = offsets[-1]
            offsets += [start + offset for offset in offsets_in_step[1:]]
            n_filled.append(len(offsets_in_step) - 1)
        return StepCuts(offsets, n_filled, n_batches)


def cut_greedily(lengths: np.ndarray, token_budget: int) -> list[int]:
    """Offsets `[0, ..., cells]` of micro-batches of at most `token_budget` tokens, filled greedily
    in order.

    `lengths`, `(cells,)`, are tokens of each cell. A cell above the budget is a micro-batch of its
    own.
    """
    total = lengths.cumsum()
    offsets = [0]
    first = 0
    while first < len(lengths):
        used = int(total[first - 1]) if first else 0
        first = max(int(total.searchsorted(used + token_budget, side="right")), first + 1)
        offsets.append(first)
    return offsets


def count_greedy(lengths: np.ndarray, n_cells: np.ndarray, token_budget: int) -> np.ndarray:
    """Number of micro-batches that `cut_greedily` makes of each rank's cells, `(ranks,)`.

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


def cut_evenly(lengths: np.ndarray, max_batches: int) -> list[int]:
    """Offsets of at most `max_batches` micro-batches that minimise the largest one."""
    low = int(lengths.max(initial=1))
    high = int(lengths.sum())

    def fits(budget: int) -> bool:
        return len(cut_greedily(lengths, budget)) - 1 <= max_batches

    # the smallest budget in low:high that fits, else high
    return cut_greedily(lengths, low + bisect_left(range(low, high), True, key=fits))


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Parts of `batch` in order, of at most `token_budget` tokens if they have several cells."""
    for first, last in pairwise(cut_greedily(np.diff(batch.cu_seqlens), token_budget)):
        yield batch.cut(first, last)
