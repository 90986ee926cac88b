"""How often each cell is read in an epoch, by the level of an obs column.

An epoch with repeats has N cells, as any other, but reads some of them several times and others not
at all. A cell of a level with n cells has the weight `min(max_repeats, s * n ** -exponent)`, with s
such that all weights add up to N: exponent 0 reads every cell once, 1 every level equally often.

With `labelled_frac` the L cells with a level make up that fraction of the N reads: the weights
above, computed over the L cells alone, are multiplied by `labelled_frac * N / L`. Cells without a
level share the other reads equally.

A cell of weight w is read floor(w) times or once more. Which cells are read once more is drawn anew
each epoch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cellmill.config.corpus import MISSING
from cellmill.config.run import Stream
from cellmill.data.keys import REPEATS, random_words
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest


@dataclass(frozen=True, eq=False)
class Repeats:
    """Repeats of the cells of a split that a run reads, its first `len(levels)` cells."""

    # (cells,) int: number of each cell's level, from 1; 0 for cells without a level
    levels: np.ndarray
    stream: Stream

    def times_read(self, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """Draw how often each cell is read, `(cells,)` uint32, in an epoch that begins at optimizer step
        `first_step`.
        """
        times_read = np.zeros(len(self.levels), np.uint32)
        reads = self._reads(first_step).tolist()
        for level, (cells, n_reads) in enumerate(zip(self._cells, reads)):
            if not len(cells):
                continue
            whole, n_more = divmod(n_reads, len(cells))
            times_read[cells] = whole
            if n_more:
                words = random_words(len(cells), seed, REPEATS, epoch, level)
                drawn = np.argpartition(words, n_more - 1)[:n_more]
                times_read[cells[drawn]] += 1
        return times_read

    def _reads(self, first_step: int) -> np.ndarray:
        """(levels,) int64: reads of each level in an epoch from `first_step` on; they sum to N."""
        warmup_steps = self.stream.weight_warmup_steps
        warm = min(1.0, first_step / warmup_steps) if warmup_steps else 1.0
        before = self._weights(self.stream.weight_start_exponent)
        after = self._weights(self.stream.weight_exponent)
        exact = self._sizes * ((1 - warm) * before + warm * after)
        totals = np.floor(exact).astype(np.int64)
        # the largest remainders are rounded up, so that the sum stays N
        n_up = len(self.levels) - int(totals.sum())
        totals[np.argsort(totals - exact, kind="stable")[:n_up]] += 1
        return totals

    def _weights(self, exponent: float) -> np.ndarray:
        """(levels,) float64: weight of a cell of each level."""
        sizes = self._sizes
        max_weight = self.stream.max_repeats
        labelled_frac = self.stream.labelled_frac
        n_cells = len(self.levels)
        n_with_level = n_cells - int(sizes[0])
        if labelled_frac is None or not n_with_level:
            # exactly 1 for exponent 0, where a quotient of sums may not be
            return weigh_levels(sizes, exponent, max_weight) if exponent else np.ones(len(sizes))
        # reads of cells with a level; the other cells share the rest
        labelled_reads = labelled_frac * n_cells if n_with_level < n_cells else n_cells
        labelled = weigh_levels(np.append(0, sizes[1:]), exponent, max_weight)
        weights = labelled * labelled_reads / n_with_level
        weights[0] = (n_cells - labelled_reads) / max(n_cells - n_with_level, 1)
        return weights

    @cached_property
    def _sizes(self) -> np.ndarray:
        """(levels,) int64: number of cells of each level."""
        return np.bincount(self.levels)

    @cached_property
    def _cells(self) -> list[np.ndarray]:
        """Cells of each level."""
        return np.split(np.argsort(self.levels, kind="stable"), np.cumsum(self._sizes)[:-1])


def weigh_levels(sizes: np.ndarray, exponent: float, max_weight: float) -> np.ndarray:
    """Weight of a cell of each level, (levels,) float64: `min(max_weight, s * size ** -exponent)`.

    The mean over all cells is 1. `sizes`, (levels,), are numbers of cells, and may be 0;
    `max_weight` is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one more level
        left = sizes.sum() - max_weight * sizes[capped].sum()
        free = float((sizes * relative)[~capped].sum())
        scale = left / free if free else 0.0
        weights = np.where(capped, max_weight, relative * scale)
        above = ~capped & (sizes > 0) & (weights > max_weight)
        if not above.any():
            return weights
        capped |= above


def read_repeats(
    manifest: Manifest, split: str, stream: Stream, max_cells: int | None = None
) -> Repeats:
    """Repeats of the first `max_cells` cells of a split by `stream.weight_by`, a column of the
    shards.
    """
    columns = manifest.levels(stream.weights_column())
    levels = CellColumns(manifest, split, "levels", columns)[:max_cells][:, 0]
    [names] = columns.values()
    if stream.labelled_frac is not None and MISSING in names:
        levels = np.where(levels == names.index(MISSING) + 1, 0, levels)
    return Repeats(levels, stream)
