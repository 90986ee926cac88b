"""How often each cell is read in an epoch, by the level of an obs column.

An epoch over N cells has N reads, with repeats too, but then some cells are read several times and
others not at all. The weight of a cell is its expected number of reads. With n cells of its level it
is `min(max_repeats, s * n ** -exponent)`, where s is such that all weights sum to N. With exponent 0
every cell is read once, with 1 every level equally often, except levels that reach the cap. Over the
first `weight_warmup_steps` optimizer steps, weights go from those of `weight_start_exponent` to those
of `weight_exponent`; each epoch has the weights of its first step.

With `labelled_frac` the L cells that have a level make up that fraction of the N reads: the weights
above are computed over these L cells only, then multiplied by `labelled_frac * N / L`. Cells without
a level share the other reads equally. It has no effect if all cells have a level, or none has. Without
it a missing value is a level like any other.

A cell of weight w is read floor(w) times or once more. Which cells are read once more is drawn anew
in each epoch.
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
    """How often a run reads each of the first `len(level_codes)` cells of a split."""

    # `(cells,)` integers: level code of each cell, 0 without a level (`labelled_frac`)
    level_codes: np.ndarray
    stream: Stream

    def times_read(self, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """Draw how often each cell is read, `(cells,)` uint32, in an epoch that begins at optimizer step
        `first_step`.
        """
        times_read = np.zeros(len(self.level_codes), np.uint32)
        n_reads = self._count_reads(first_step).tolist()
        for level, cells in enumerate(self._cells_by_level):
            if not len(cells):
                continue
            n_times, n_once_more = divmod(n_reads[level], len(cells))
            times_read[cells] = n_times
            if n_once_more:
                words = random_words(len(cells), seed, REPEATS, epoch, level)
                drawn = np.argpartition(words, n_once_more - 1)[:n_once_more]
                times_read[cells[drawn]] += 1
        return times_read

    def _count_reads(self, first_step: int) -> np.ndarray:
        """Count the reads of each level in an epoch from `first_step` on, `(levels,)` int64; they sum to N."""
        warmup_steps = self.stream.weight_warmup_steps
        warmup_frac = min(1.0, first_step / warmup_steps) if warmup_steps else 1.0
        before = self._weigh(self.stream.weight_start_exponent)
        after = self._weigh(self.stream.weight_exponent)
        exact = self._level_sizes * ((1 - warmup_frac) * before + warmup_frac * after)
        totals = np.floor(exact).astype(np.int64)
        # the largest remainders are rounded up, so that the sum stays N
        n_up = len(self.level_codes) - int(totals.sum())
        totals[np.argsort(totals - exact, kind="stable")[:n_up]] += 1
        return totals

    def _weigh(self, exponent: float) -> np.ndarray:
        """Compute the weight of a cell of each level, `(levels,)` float64."""
        sizes = self._level_sizes
        max_weight = self.stream.max_repeats
        labelled_frac = self.stream.labelled_frac
        n_cells = len(self.level_codes)
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
    def _level_sizes(self) -> np.ndarray:
        """Number of cells of each level, `(levels,)` int64."""
        return np.bincount(self.level_codes)

    @cached_property
    def _cells_by_level(self) -> list[np.ndarray]:
        """Indices of the cells of each level, `(cells of the level,)` int64."""
        return np.split(
            np.argsort(self.level_codes, kind="stable"), np.cumsum(self._level_sizes)[:-1]
        )


def weigh_levels(sizes: np.ndarray, exponent: float, max_weight: float) -> np.ndarray:
    """Compute the weight of a cell of each level, `(levels,)` float64.

    It is `min(max_weight, s * size ** -exponent)`, and the mean over all cells is 1. `sizes`,
    `(levels,)`, are numbers of cells, and may be 0; `max_weight` is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one more level
        # scale the other levels to the reads that capped levels leave
        n_left = sizes.sum() - max_weight * sizes[capped].sum()
        relative_sum = float((sizes * relative)[~capped].sum())
        scale = n_left / relative_sum if relative_sum else 0.0
        weights = np.where(capped, max_weight, relative * scale)
        is_above = ~capped & (sizes > 0) & (weights > max_weight)
        if not is_above.any():
            return weights
        capped |= is_above


def read_repeats(
    manifest: Manifest, split: str, stream: Stream, max_cells: int | None = None
) -> Repeats:
    """Read the level codes of the first `max_cells` cells of a split in the obs column that weights cells."""
    columns = manifest.levels(stream.weights_column())
    codes = CellColumns(manifest, split, "levels", columns)[:max_cells][:, 0]
    [levels] = columns.values()
    if stream.labelled_frac is not None and MISSING in levels:
        codes = np.where(codes == levels.index(MISSING) + 1, 0, codes)
    return Repeats(codes, stream)
