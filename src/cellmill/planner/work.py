"""Steps, tokens and micro-batches of a run, from the row offsets of the shards: no cell is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, min_microbatches, pipeline_tokens
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.shuffle import epoch_of
from cellmill.data.tokens import cut_batch, cut_evenly

# micro-batches are counted in a few steps: shards are preshuffled, so any stretch of cells is like another
SAMPLED_BATCHES = 4096  # batches of single ranks
SAMPLED_STEPS = 64
SAMPLED_EVENLY = 4  # steps, and ranks of each: even cuts are searched for and take longer


@dataclass(frozen=True, eq=False)
class Cells:
    """Training cells of a corpus."""

    lengths: np.ndarray  # (cells,) int64: tokens of each cell, in the order of the shards
    n_genes: int  # genes of the vocabulary
    validation: int = 0  # number of validation cells
    number: int | None = None  # number of cells if `lengths` has only some of them
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the obs columns that the run reads

    @property
    def n(self) -> int:
        """Cells per epoch."""
        return len(self.lengths) if self.number is None else self.number

    @cached_property
    def tokens_per_cell(self) -> float:
        return float(self.lengths.mean())

    @cached_property
    def pairs_per_cell(self) -> float:
        """Mean number of (query, key) pairs of attention."""
        return float(np.square(self.lengths.astype(np.float64)).mean())


@dataclass(frozen=True)
class Work:
    """Amount of work in a run and in its steps."""

    steps: int
    steps_per_epoch: int
    cells_per_step: int
    cells_seen: int  # cells over all steps
    validations: int
    val_cells: int  # cells per validation
    micro_batches_per_step: float  # mean over the steps; the same on every rank
    most_micro_batches: int
    micro_tokens: int  # tokens of the largest micro-batch, with padding in a pipeline
    padding: float = 0.0  # tokens that a pipeline pads a step with, per token of its cells


def detected_genes(manifest: Manifest) -> np.ndarray:
    """Return (cells,) int64: detected genes of each training cell, in the order of the shards."""
    lengths = []
    for shard in open_shards(manifest, "train"):
        lengths.append(np.diff(shard.indptr).astype(np.int64))
    return np.concatenate(lengths)


def measure_work(options: PlanOptions, cells: Cells, sizes: Layout) -> Work:
    """Return the work of a run in the layout `sizes`."""
    train, parallel, n_cells = options.train, options.parallel, cells.n
    epoch = epoch_of(options, n_cells)
    steps = train.total_steps(epoch.steps_per_epoch)
    epochs, rest = divmod(steps, epoch.steps_per_epoch)
    multiple = parallel.tp if parallel.sequence_parallel else 1
    micro_batches, micro_tokens, padding = _counted(
        cells, epoch.most_cells, train.token_budget, sizes.dp, min_microbatches(parallel), parallel.pp, multiple
    )
    if parallel.pp > 1:
        micro_tokens = pipeline_tokens(micro_tokens, multiple)
    return Work(
        steps=steps,
        steps_per_epoch=epoch.steps_per_epoch,
        cells_per_step=epoch.most_cells,
        cells_seen=epochs * n_cells + epoch.before(rest),
        validations=-(-steps // train.val_every_steps) if cells.validation else 0,
        val_cells=cells.validation if train.val_cells is None else min(train.val_cells, cells.validation),
        micro_batches_per_step=float(np.mean(micro_batches)),
        most_micro_batches=max(micro_batches),
        micro_tokens=micro_tokens,
        padding=padding,
    )


@cache  # many layouts have the same micro-batches
def _counted(cells: Cells, *arguments: int) -> tuple[list[int], int, float]:
    return count_micro_batches(cells.lengths, *arguments)


def count_micro_batches(
    lengths: np.ndarray,
    global_batch: int,
    token_budget: int,
    world: int,
    min_microbatches: int = 1,
    microbatch_multiple: int = 1,
    token_multiple: int = 1,
) -> tuple[list[int], int, float]:
    """Count the micro-batches of the first steps, the most that any rank needs, with cells in the order of the shards.

    Returns the counts; the tokens of the largest micro-batch: an upper bound for any batch of cells, except in a
    pipeline (`microbatch_multiple` > 1), which cuts batches evenly; and the tokens that a pipeline adds, per token:
    all micro-batches of a rank's step become as long as its longest, in one of few lengths (`pipeline_tokens`).
    """
    share = -(-min(global_batch, len(lengths)) // world)
    sampled = max(1, min(SAMPLED_STEPS, SAMPLED_BATCHES // world))
    counts, largest, tokens, padded = [], 0, 0, 0
    for first in range(0, len(lengths), global_batch)[:sampled]:
        batch = lengths[first : first + global_batch]
        ranks = [batch[at : at + share] for at in range(0, len(batch), share)]
        number = max(min_microbatches, *(len(cut_batch(rank, token_budget)) - 1 for rank in ranks))
        number = -(-number // microbatch_multiple) * microbatch_multiple
        counts.append(number)
        if microbatch_multiple > 1 and len(counts) <= SAMPLED_EVENLY:
            for rank in ranks[:SAMPLED_EVENLY]:
                longest = int(np.add.reduceat(rank, cut_evenly(rank, number)[:-1]).max())
                largest, tokens = max(largest, longest), tokens + int(rank.sum())
                padded += number * pipeline_tokens(longest, token_multiple)
    if microbatch_multiple == 1:
        return counts, min(token_budget, share * int(lengths.max())), 0.0
    return counts, largest, padded / max(tokens, 1) - 1
