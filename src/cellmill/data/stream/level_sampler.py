"""How often each cell is read in an epoch, by the level of an obs column.

An epoch over N cells has N reads. With weights, some cells are read several times and others not at
all. The weight of a cell is its expected number of reads. If n cells have its level, its weight is
`min(max_repeats, s * n ** -exponent)`, with s such that all weights sum to N. With exponent 0 all
weights are 1. With exponent 1 every level is read equally often, except levels that reach the cap
`max_repeats`. Over the first `weight_warmup_steps` optimizer steps, weights change from those of
`weight_start_exponent` to those of `weight_exponent`. Each epoch has the weights of its first step.

With `labelled_frac`, the L cells that have a level get that fraction of the N reads: the weights
above are computed over these L cells only, then multiplied by `labelled_frac * N / L`. Cells without
a level share the other reads equally. `labelled_frac` has no effect if all cells have a level, or none
has. If `labelled_frac` is null, a missing value is a level like any other.

A level of n cells of weight w is read floor(n * w) times or once more, and each of its cells floor(w)
times or once more. Which levels and which cells are read once more is drawn anew in each epoch, so that
the mean over epochs is the weight.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cellmill.config.corpus import MISSING
from cellmill.config.run import Stream
from cellmill.data.keys import READS_OF_LEVELS, REPEATS, random_words
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest

ROUNDING = "systematic"  # how expected reads become whole numbers, as states of streams name it


@dataclass(frozen=True, eq=False)
class LevelSampler:
    """Draws how often each of the first `len(level_codes)` cells of a split is read in an epoch."""

    # `(cells,)` integers: level code of each cell. 0: the cell has no value, only with `labelled_frac`
    level_codes: np.ndarray
    options: Stream  # section `stream` of the configuration

    def draw_times_read(self, seed: int, epoch: int, first_global_step: int) -> np.ndarray:
        """Draw how often each cell is read in an epoch, `(cells,)` uint32.

        `first_global_step` is the global step at which the epoch begins.
        """
        times_read = np.zeros(len(self.level_codes), np.uint32)
        n_reads = self._draw_reads(seed, epoch, first_global_step).tolist()
        for level_code, cells in enumerate(self._cells_by_level):
            if not len(cells):
                continue
            n_times, n_once_more = divmod(n_reads[level_code], len(cells))
            times_read[cells] = n_times
            if n_once_more:
                words = random_words(len(cells), seed, REPEATS, epoch, level_code)
                drawn = np.argpartition(words, n_once_more - 1)[:n_once_more]
                times_read[cells[drawn]] += 1
        return times_read

    def _draw_reads(self, seed: int, epoch: int, first_global_step: int) -> np.ndarray:
        """Draw the reads of each level in an epoch, `(levels,)` int64; they sum to the number of cells.

        Systematic sampling: the expected reads of the levels are laid end to end on a line, and a level
        is read once for each k - offset on its piece, for whole numbers k.
        """
        n_cells = len(self.level_codes)
        [word] = random_words(1, seed, READS_OF_LEVELS, epoch).tolist()
        # uniform between 0 and 1, of 24 bits: far enough from both that sums near a whole number have
        # the floor of that number
        offset = ((word >> 40) + 0.5) / (1 << 24)
        ends = np.cumsum(self._compute_expected_reads(first_global_step))
        reads_up_to = np.minimum(np.floor(ends + offset), n_cells).astype(np.int64)
        reads_up_to[-1] = n_cells  # also if rounding errors of `ends` add up
        return np.diff(reads_up_to, prepend=0)

    def _compute_expected_reads(self, first_global_step: int) -> np.ndarray:
        """Compute the mean reads of each level in epochs that begin at a global step, `(levels,)` float64."""
        warmup_steps = self.options.weight_warmup_steps
        warmup_frac = min(1.0, first_global_step / warmup_steps) if warmup_steps else 1.0
        start_weights = self._compute_weights(self.options.weight_start_exponent)
        end_weights = self._compute_weights(self.options.weight_exponent)
        weights = (1 - warmup_frac) * start_weights + warmup_frac * end_weights
        return np.asarray(self._level_sizes * weights)

    def _compute_weights(self, exponent: float) -> np.ndarray:
        """Compute the weight of a cell of each level, `(levels,)` float64."""
        sizes = self._level_sizes
        max_weight = self.options.max_repeats
        labelled_frac = self.options.labelled_frac
        n_cells = len(self.level_codes)
        n_without_level = int(sizes[0])
        n_with_level = n_cells - n_without_level
        if labelled_frac is None or not n_with_level:
            return compute_capped_weights(sizes, exponent, max_weight)
        # reads of cells with a level; cells without a level share the other reads
        labelled_reads = labelled_frac * n_cells if n_without_level else n_cells
        labelled_weights = compute_capped_weights(np.append(0, sizes[1:]), exponent, max_weight)
        weights = labelled_weights * labelled_reads / n_with_level
        weights[0] = (n_cells - labelled_reads) / max(n_without_level, 1)
        return weights

    @cached_property
    def _level_sizes(self) -> np.ndarray:
        """Number of cells of each level, `(levels,)` int64; index 0 for cells without a level."""
        return np.bincount(self.level_codes)

    @cached_property
    def _cells_by_level(self) -> list[np.ndarray]:
        """Indices of the cells of each level, `(cells of the level,)` int64."""
        by_level = np.argsort(self.level_codes, kind="stable")
        return np.split(by_level, np.cumsum(self._level_sizes)[:-1])


def compute_capped_weights(sizes: np.ndarray, exponent: float, max_weight: float) -> np.ndarray:
    """Compute the weight of a cell of each level without `labelled_frac`, `(levels,)` float64.

    It is `min(max_weight, s * size ** -exponent)`, with s such that the mean over all cells is 1.
    `sizes`, `(levels,)`, are numbers of cells, and may be 0. `max_weight` is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    is_capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one more level
        # scale the other levels to the reads that capped levels leave
        n_left = sizes.sum() - max_weight * sizes[is_capped].sum()
        relative_sum = float((sizes * relative)[~is_capped].sum())
        scale = n_left / relative_sum if relative_sum else 0.0
        weights = np.where(is_capped, max_weight, relative * scale)
        is_above = ~is_capped & (sizes > 0) & (weights > max_weight)
        if not is_above.any():
            return weights
        is_capped |= is_above


def read_level_sampler(
    manifest: Manifest, split: str, stream: Stream, max_cells: int | None = None
) -> LevelSampler:
    """Read the sampler of a split's first `max_cells` cells, by the levels of `stream.weight_by`."""
    levels_by_column = manifest.levels(stream.weights_column())  # of one column
    codes = CellColumns(manifest, split, "levels", levels_by_column)[:max_cells][:, 0]
    [levels] = levels_by_column.values()
    if stream.labelled_frac is not None and MISSING in levels:
        codes = np.where(codes == levels.index(MISSING) + 1, 0, codes)
    return LevelSampler(codes, stream)
