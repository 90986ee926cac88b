"""Number of times that each cell is read in an epoch, if cells are weighted by the levels of an obs column.

An epoch over N cells has N reads. With weights, some cells are read several times and others not at all. The
weight of a cell is its expected number of reads.

Suppose that n cells have a certain level. Each of them has weight `min(max_repeats, s * n ** -exponent)`. The
factor s is chosen so that all weights sum to N. With exponent 0 all weights are 1. With exponent 1 every
level is read equally often, except levels that reach the cap `max_repeats`.

Weights change linearly over the first `weight_warmup_steps` optimizer steps: from the weights of
`weight_start_exponent` to the weights of `weight_exponent`. Each epoch has the weights of its first step.

With `labelled_frac`, a cell is labelled if it has a level. A fraction `labelled_frac` of the N reads are of
labelled cells. If there are L labelled cells, the weights above are computed over these cells only, then
multiplied by `labelled_frac * N / L`. The unlabelled cells share the other reads equally. If all cells are
labelled, or none is, `labelled_frac` has no effect. If `labelled_frac` is null, a missing value is a level
like any other.

A level of n cells with weight w is read floor(n * w) times, or once more. Each of its cells is read floor(w)
times, or once more. Each epoch draws anew which levels and which cells are read once more. So the mean number
of reads over many epochs is the weight.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cellmill.config.corpus import MISSING
from cellmill.config.run import Stream
from cellmill.data.keys import READS_OF_LEVELS, REPEATS, random_words
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest

# states of streams have this name of the method that turns expected reads into whole numbers
ROUNDING = "systematic"


@dataclass(frozen=True, eq=False)
class LevelSampler:
    """Draws how often each of the first `len(level_codes)` cells of a split is read in an epoch."""

    # level code of each cell, `(cells,)` integers. Code 0 is an unlabelled cell; only with `labelled_frac`
    level_codes: np.ndarray
    options: Stream  # section `stream` of the configuration

    def draw_times_read(self, seed: int, epoch: int, first_global_step: int) -> np.ndarray:
        """Draw how often each cell is read in an epoch, `(cells,)` uint32.

        `first_global_step` is the global step at which the epoch begins.
        """
        times_read = np.zeros(len(self.level_codes), np.uint32)
        reads_by_level = self._draw_reads_by_level(seed, epoch, first_global_step).tolist()
        for level_code, cells in enumerate(self._cells_by_level):
            if not len(cells):
                continue
            # divide the reads of the level evenly among its cells, and the remainder at random
            n_times, n_once_more = divmod(reads_by_level[level_code], len(cells))
            times_read[cells] = n_times
            if n_once_more:
                words = random_words(len(cells), seed, REPEATS, epoch, level_code)
                drawn = np.argpartition(words, n_once_more - 1)[:n_once_more]
                times_read[cells[drawn]] += 1
        return times_read

    def find_readable_cells(self) -> np.ndarray:
        """Return True for each cell with a weight above 0, `(cells,)` bool. Other cells are never read."""
        weights = self._compute_weights(self.options.weight_exponent)
        return np.asarray((weights > 0)[self.level_codes])

    def _draw_reads_by_level(self, seed: int, epoch: int, first_global_step: int) -> np.ndarray:
        """Draw the number of reads of each level in an epoch, `(levels,)` int64.

        The numbers sum to the number of cells. They are drawn by systematic sampling: the expected reads of
        the levels are laid end to end on a line. Points are set on the line at distance 1, from a random
        start. A level is read once for each point on its piece of the line.
        """
        n_cells = len(self.level_codes)
        [word] = random_words(1, seed, READS_OF_LEVELS, epoch).tolist()
        # uniform in (0, 1), at least 2**-25 from either end. A sum that should be whole, but has a small
        # rounding error, is then still rounded to that whole number
        offset = ((word >> 40) + 0.5) / (1 << 24)
        ends = np.cumsum(self._compute_expected_reads(first_global_step))
        reads_up_to = np.minimum(np.floor(ends + offset), n_cells).astype(np.int64)
        reads_up_to[-1] = n_cells  # also if rounding errors of `ends` add up
        return np.diff(reads_up_to, prepend=0)

    def _compute_expected_reads(self, first_global_step: int) -> np.ndarray:
        """Compute the expected reads of each level in an epoch, `(levels,)` float64.

        The epoch begins at global step `first_global_step`.
        """
        warmup_steps = self.options.weight_warmup_steps
        warmup_frac = min(1.0, first_global_step / warmup_steps) if warmup_steps else 1.0
        start_weights = self._compute_weights(self.options.weight_start_exponent)
        end_weights = self._compute_weights(self.options.weight_exponent)
        weights = (1 - warmup_frac) * start_weights + warmup_frac * end_weights
        return np.asarray(self._level_sizes * weights)

    def _compute_weights(self, exponent: float) -> np.ndarray:
        """Compute the weight of a cell of each level, `(levels,)` float64. Index 0 is unlabelled cells."""
        sizes = self._level_sizes
        max_weight = self.options.max_repeats
        labelled_frac = self.options.labelled_frac
        n_cells = len(self.level_codes)
        n_unlabelled = int(sizes[0])
        n_labelled = n_cells - n_unlabelled
        if labelled_frac is None or not n_labelled:
            return compute_capped_weights(sizes, exponent, max_weight)
        # number of reads of labelled cells; unlabelled cells share the other reads
        labelled_reads = labelled_frac * n_cells if n_unlabelled else n_cells
        # weights as if there were only labelled cells, with mean 1
        relative_weights = compute_capped_weights(np.append(0, sizes[1:]), exponent, max_weight)
        weights = relative_weights * labelled_reads / n_labelled
        weights[0] = (n_cells - labelled_reads) / max(n_unlabelled, 1)
        return weights

    @cached_property
    def _level_sizes(self) -> np.ndarray:
        """Number of cells of each level, `(levels,)` int64. Index 0 is unlabelled cells."""
        return np.bincount(self.level_codes)

    @cached_property
    def _cells_by_level(self) -> list[np.ndarray]:
        """Indices of the cells of each level, `(cells of the level,)` int64. Index 0 is unlabelled cells."""
        sorted_cells = np.argsort(self.level_codes, kind="stable")
        return np.split(sorted_cells, np.cumsum(self._level_sizes)[:-1])


def compute_capped_weights(sizes: np.ndarray, exponent: float, max_weight: float) -> np.ndarray:
    """Compute the weight of a cell of each level, without `labelled_frac`, `(levels,)` float64.

    The weight is `min(max_weight, s * size ** -exponent)`. The factor s is chosen so that the mean weight of
    all cells is 1. `sizes`, `(levels,)`, has the number of cells of each level, which may be 0. `max_weight`
    is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    is_capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one further level
        # number of reads that capped levels leave to the other levels
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
    """Read the levels of `stream.weight_by` for the first cells of a split, and make their sampler.

    `max_cells` is the number of cells. None reads the levels of all cells.
    """
    levels_by_column = manifest.levels(stream.weights_column())  # of one column
    level_codes = CellColumns(manifest, split, "levels", levels_by_column)[:max_cells][:, 0]
    [levels] = levels_by_column.values()
    if stream.labelled_frac is not None and MISSING in levels:
        level_codes = np.where(level_codes == levels.index(MISSING) + 1, 0, level_codes)
    return LevelSampler(level_codes, stream)
