"""What the steps of a run consist of, from where rows of the shards begin: no cell is read. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, min_microbatches
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.shuffle import EpochLayout
from cellmill.data.tokens import cut_batch, cut_evenly

SAMPLED_BATCHES = 4096  # of single processes, over which micro-batches are counted: shards are preshuffled,
SAMPLED_STEPS = 64  # so any stretch is like another
SAMPLED_EVENLY = 4  # steps and processes of each: cutting evenly takes many tries


@dataclass(frozen=True, eq=False)
class Cells:
    """The training cells."""

    lengths: np.ndarray
    """(cells,) int64: tokens of each, in the order of the shards."""
    n_genes: int
    """Of the vocabulary."""
    validation: int = 0
    """Cells for validation."""
    number: int | None = None
    """How many there are, where `lengths` are those of some."""
    counted: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    """Micro-batches that were counted already, by what they depend on."""

    @property
    def n(self) -> int:
        """Cells of an epoch."""
        return len(self.lengths) if self.number is None else self.number

    @cached_property
    def tokens_per_cell(self) -> float:
        return float(self.lengths.mean())

    @cached_property
    def pairs_per_cell(self) -> float:
        """(query, key) pairs of attention."""
        return float(np.square(self.lengths.astype(np.float64)).mean())


@dataclass(frozen=True)
class Work:
    """What an epoch and a step of it consist of."""

    n_genes: int
    cells: int
    """Of an epoch."""
    tokens_per_cell: float
    pairs_per_cell: float
    """(query, key) pairs of attention."""
    steps: int
    steps_per_epoch: int
    cells_per_step: int
    cells_seen: int
    """Over all steps."""
    validations: int
    val_cells: int
    """Of each validation."""
    micro_batches_per_step: float
    """On average; the same on every rank."""
    most_micro_batches: int
    micro_tokens: int
    """Of the largest micro-batch."""


def detected_genes(manifest: Manifest) -> np.ndarray:
    """(cells,) int64: genes of the vocabulary detected in each training cell, in the order of the shards."""
    lengths = []
    for shard in open_shards(manifest, "train"):
        lengths.append(np.diff(shard.indptr).astype(np.int64))
        shard.close()
    return np.concatenate(lengths)


def measure_work(options: PlanOptions, cells: Cells, sizes: Layout) -> Work:
    """Steps, tokens and micro-batches of a run in the layout `sizes`."""
    train, stream, n_cells = options.train, options.stream, cells.n
    epoch = EpochLayout(
        (n_cells,), stream.lanes, stream.block_cells, stream.window_blocks, train.global_batch, train.seed, True
    )
    steps = train.total_steps(epoch.steps_per_epoch)
    epochs, rest = divmod(steps, epoch.steps_per_epoch)
    micro_batches, micro_tokens = _counted(options, cells, sizes)
    return Work(
        n_genes=cells.n_genes,
        cells=n_cells,
        tokens_per_cell=cells.tokens_per_cell,
        pairs_per_cell=cells.pairs_per_cell,
        steps=steps,
        steps_per_epoch=epoch.steps_per_epoch,
        cells_per_step=min(train.global_batch, n_cells),
        cells_seen=epochs * n_cells + min(rest * train.global_batch, n_cells),
        validations=-(-steps // train.val_every_steps) if cells.validation else 0,
        val_cells=cells.validation if train.val_cells is None else min(train.val_cells, cells.validation),
        micro_batches_per_step=float(np.mean(micro_batches)),
        most_micro_batches=max(micro_batches),
        micro_tokens=micro_tokens,
    )


def _counted(options: PlanOptions, cells: Cells, sizes: Layout) -> tuple[list[int], int]:
    parallel, train = options.parallel, options.train
    key = (train.global_batch, train.token_budget, sizes.dp, min_microbatches(parallel), parallel.pp)
    if key not in cells.counted:
        cells.counted[key] = count_micro_batches(cells.lengths, *key)
    return cells.counted[key]


def count_micro_batches(
    lengths: np.ndarray,
    global_batch: int,
    token_budget: int,
    world: int,
    min_microbatches: int = 1,
    microbatch_multiple: int = 1,
) -> tuple[list[int], int]:
    """Micro-batches of each of the first steps, were cells taken as they lie, the most that any rank needs; and the
    tokens of the largest: what any batch of cells may come to, but in a pipeline, which cuts a batch evenly."""
    share = -(-min(global_batch, len(lengths)) // world)
    sampled = max(1, min(SAMPLED_STEPS, SAMPLED_BATCHES // world))
    counts, largest = [], 0
    for first in range(0, len(lengths), global_batch)[:sampled]:
        batch = lengths[first : first + global_batch]
        ranks = [batch[at : at + share] for at in range(0, len(batch), share)]
        number = max(min_microbatches, *(len(cut_batch(rank, token_budget)) - 1 for rank in ranks))
        number = -(-number // microbatch_multiple) * microbatch_multiple
        counts.append(number)
        if microbatch_multiple > 1 and len(counts) <= SAMPLED_EVENLY:
            largest = max(largest, *(_largest(rank, cut_evenly(rank, number)) for rank in ranks[:SAMPLED_EVENLY]))
    return counts, largest if microbatch_multiple > 1 else min(token_budget, share * int(lengths.max()))


def _largest(lengths: np.ndarray, borders: list[int]) -> int:
    return int(np.add.reduceat(lengths, borders[:-1]).max())
