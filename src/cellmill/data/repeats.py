"""Number of times that each cell is read in an epoch, by the level of an obs column.

An epoch keeps its number of cells, N, and so its steps. A cell of a level with n cells has the weight
`min(max_repeats, s * n ** -exponent)`, with s such that the weights of all cells add up to N: exponent 0 reads every
cell once, 1 reads every level equally often, as far as `max_repeats` allows. Weights are no probabilities: a level is
read N times its share, rounded to whole cells, and of its cells each is read the whole part of its weight or once more.
Those that are read once more are drawn anew each epoch. All is a function of (seed, epoch): a run resumes by integers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from cellmill.config.run import Stream
from cellmill.data.random_words import random_words

REPEATS = 4  # purpose of the words that choose cells


@dataclass(frozen=True, eq=False)
class Repeats:
    """Repeats of the cells of a split."""

    levels: np.ndarray  # (cells,) int, from 0: number of each cell's level; unknown levels are one level
    exponent: float
    max_repeats: float
    warmup_steps: int  # steps over which weights go from those of `start_exponent`, by the first step of each epoch
    start_exponent: float = 0.0

    @classmethod
    def of(cls, levels: np.ndarray, stream: Stream) -> Self:
        """Return the repeats that the options ask for."""
        return cls(
            levels,
            stream.weight_exponent,
            stream.max_repeats,
            stream.weight_warmup_steps,
            stream.weight_start_exponent,
        )

    def counts(self, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """(cells,) uint16: how often each cell is read in an epoch that begins at optimizer step `first_step`."""
        counts = np.zeros(len(self.levels), np.uint16)
        for level, total in enumerate(self.totals(first_step)):
            cells = self._cells_of(level)
            if not len(cells):
                continue
            each, more = divmod(total, len(cells))
            counts[cells] = each
            if more:
                drawn = random_words(len(cells), seed, REPEATS, epoch, level)
                counts[cells[np.argpartition(drawn, more - 1)[:more]]] += 1
        return counts

    def totals(self, first_step: int) -> list[int]:
        """Cells that are read of each level in an epoch that begins at `first_step`; their sum is the split's cells."""
        part = 1.0 if not self.warmup_steps else min(1.0, first_step / self.warmup_steps)
        exact = self._sizes * ((1 - part) * self._weights(self.start_exponent) + part * self._weights(self.exponent))
        totals = np.floor(exact).astype(np.int64)
        # whole cells: the largest remainders are rounded up
        left = len(self.levels) - int(totals.sum())
        totals[np.argsort(totals - exact, kind="stable")[:left]] += 1
        return [int(total) for total in totals]

    def _weights(self, exponent: float) -> np.ndarray:
        # exactly 1 for exponent 0, where a quotient of sums may not be
        return weights(self._sizes, exponent, self.max_repeats) if exponent else np.ones(len(self._sizes))

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.bincount(self.levels)

    @cached_property
    def _by_level(self) -> np.ndarray:
        return np.argsort(self.levels, kind="stable")

    def _cells_of(self, level: int) -> np.ndarray:
        end = int(self._sizes[: level + 1].sum())
        return self._by_level[end - int(self._sizes[level]) : end]


def weights(sizes: np.ndarray, exponent: float, most: float) -> np.ndarray:
    """Weight of a cell of each level, (levels,) float64: `min(most, s * size ** -exponent)`, 1 on the mean of cells.

    `sizes`, (levels,), are numbers of cells, and may be 0; `most` is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one level more
        left = sizes.sum() - most * sizes[capped].sum()
        free = float((sizes * relative)[~capped].sum())
        result = np.where(capped, most, relative * (left / free if free else 0.0))
        above = ~capped & (sizes > 0) & (result > most)
        if not above.any():
            return result
        capped |= above
