"""Cutting cells into micro-batches by their number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cellmill.data.tokens import Batch


def cut_batch(lengths: np.ndarray, token_budget: int) -> list[int]:
    """Borders `[0, ..., cells]` of micro-batches of at most `token_budget` tokens, filled greedily in order.

    `lengths` are tokens of each cell; a cell above the budget is a micro-batch of its own.
    """
    total = np.cumsum(lengths)
    borders = [0]
    while (first := borders[-1]) < len(lengths):
        used = int(total[first - 1]) if first else 0
        borders.append(max(int(np.searchsorted(total, used + token_budget, side="right")), first + 1))
    return borders


def cut_evenly(lengths: np.ndarray, most: int) -> list[int]:
    """Borders of at most `most` micro-batches, the largest of which is as small as possible."""
    low, high = int(lengths.max(initial=1)), max(int(lengths.sum()), 1)
    while low < high:  # bisect for the smallest budget that needs at most `most` micro-batches
        budget = (low + high) // 2
        if len(cut_batch(lengths, budget)) - 1 <= most:
            high = budget
        else:
            low = budget + 1
    return cut_batch(lengths, low)


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Parts of `batch` in order, cut by `cut_batch`."""
    cu = batch.cu_seqlens
    for first, last in pairwise(cut_batch(np.diff(cu), token_budget)):
        tokens = slice(cu[first], cu[last])
        part = (cu[first : last + 1] - cu[first]).astype(np.int32)
        yield Batch(batch.genes[tokens], batch.values[tokens], part, batch.cells[first:last])
