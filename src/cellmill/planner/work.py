"""Steps, tokens and micro-batches of a run, from the row offsets of the shards, without reading a
cell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple

import numpy as np

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, min_microbatches, pipeline_tokens
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.micro_batches import cut_evenly, cut_greedily
from cellmill.data.stream.order import OrderRule

# Micro-batches are counted in the first steps only: shards are preshuffled, so any cells will do.
SAMPLED_BATCHES = 4096  # at most this many batches of single ranks
SAMPLED_STEPS = 64  # at most this many steps
# at most this many steps are cut evenly, and this many ranks of each: such cuts take longer
SAMPLED_EVENLY = 4


@dataclass(frozen=True, eq=False)
class CorpusSize:
    """Sizes of a corpus that a plan depends on."""

    # `(cells,)` int64: tokens of each training cell, in the order of the shards
    tokens_of_cells: np.ndarray
    n_genes: int  # genes of the vocabulary
    n_validation: int = 0  # validation cells
    n_training: int | None = None  # training cells, if `tokens_of_cells` has only a sample of them
    # levels of the obs columns that the run reads
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def n_cells(self) -> int:
        """Number of training cells."""
        return len(self.tokens_of_cells) if self.n_training is None else self.n_training

    @cached_property
    def tokens_per_cell(self) -> float:
        return float(self.tokens_of_cells.mean())

    @cached_property
    def pairs_per_cell(self) -> float:
        """Mean number of (query, key) pairs of attention in a cell: the mean square of its tokens."""
        return float(np.square(self.tokens_of_cells.astype(np.float64)).mean())


@dataclass(frozen=True)
class Work:
    """Steps of a run and what is computed in them."""

    steps: int
    steps_per_epoch: int
    cells_per_step: int  # of the largest step
    cells_seen: int  # cells over all steps
    validations: int
    val_cells: int  # cells per validation
    micro_batches_per_step: float  # mean over the sampled first steps; the same on every rank
    max_micro_batches_per_step: int  # over the sampled steps
    micro_tokens: int  # tokens of the largest micro-batch, with padding in a pipeline
    padding_frac: float  # padding tokens of a pipeline per token of the step's cells


def count_detected_genes(manifest: Manifest) -> np.ndarray:
    """Count the detected genes of each training cell in the order of the shards, `(cells,)` int64."""
    return np.concatenate(
        [np.diff(shard.indptr).astype(np.int64) for shard in open_shards(manifest, "train")]
    )


def measure_work(options: PlanOptions, corpus: CorpusSize, layout: Layout) -> Work:
    """Count the steps of a run, and the micro-batches of the first of them."""
    train = options.train
    parallel = options.parallel
    n_cells = corpus.n_cells
    order_rule = OrderRule.of_run(options, n_cells)
    steps = train.total_steps(order_rule.steps_per_epoch)
    epochs, rest = divmod(steps, order_rule.steps_per_epoch)
    multiple = parallel.tp if parallel.sequence_parallel else 1
    micro_batches = count_micro_batches(
        corpus,
        global_batch=order_rule.max_step_cells,
        token_budget=train.token_budget,
        dp=layout.dp,
        min_microbatches=min_microbatches(parallel),
        microbatch_multiple=parallel.pp,
        token_multiple=multiple,
    )
    micro_tokens = micro_batches.max_tokens
    if parallel.pp > 1:
        micro_tokens = pipeline_tokens(micro_tokens, multiple)
    val_cells = corpus.n_validation
    if train.val_cells is not None:
        val_cells = min(train.val_cells, corpus.n_validation)
    return Work(
        steps=steps,
        steps_per_epoch=order_rule.steps_per_epoch,
        cells_per_step=order_rule.max_step_cells,
        cells_seen=epochs * n_cells + int(order_rule.cells_before(rest).sum()),
        validations=-(-steps // train.val_every_steps) if corpus.n_validation else 0,
        val_cells=val_cells,
        micro_batches_per_step=float(np.mean(micro_batches.counts)),
        max_micro_batches_per_step=max(micro_batches.counts),
        micro_tokens=micro_tokens,
        padding_frac=micro_batches.padding_frac,
    )


class MicroBatches(NamedTuple):
    """Micro-batches of the first steps of a run."""

    counts: list[int]  # micro-batches of each step, as many as the neediest rank has to run
    max_tokens: int  # of the largest micro-batch; without a pipeline an upper bound
    padding_frac: float  # padding tokens of a pipeline per token of the step's cells


@cache  # many layouts have the same micro-batches
def count_micro_batches(
    corpus: CorpusSize,
    global_batch: int,
    token_budget: int,
    dp: int,
    min_microbatches: int,
    microbatch_multiple: int,
    token_multiple: int,
) -> MicroBatches:
    """Count the micro-batches of the first steps on `dp` data-parallel ranks.

    Steps take cells in the order of the shards. A pipeline (`microbatch_multiple` > 1) cuts batches
    evenly and pads all micro-batches of a rank's step to the longest, in one of few lengths
    (`pipeline_tokens`).
    """
    lengths = corpus.tokens_of_cells
    cells_per_rank = -(-min(global_batch, len(lengths)) // dp)
    n_steps = max(1, min(SAMPLED_STEPS, SAMPLED_BATCHES // dp))
    counts = []
    max_tokens = 0
    n_tokens = 0
    n_padded_tokens = 0
    for step_start in range(0, len(lengths), global_batch)[:n_steps]:
        batch = lengths[step_start : step_start + global_batch]
        # lengths of the cells of each rank
        starts = range(0, len(batch), cells_per_rank)
        ranks = [batch[start : start + cells_per_rank] for start in starts]
        needed = [len(cut_greedily(rank, token_budget)) - 1 for rank in ranks]
        count = ceil(max(min_microbatches, *needed) / microbatch_multiple) * microbatch_multiple
        counts.append(count)
        if microbatch_multiple > 1 and len(counts) <= SAMPLED_EVENLY:
            for rank in ranks[:SAMPLED_EVENLY]:
                longest, padded_tokens = _pad_evenly(rank, count, token_multiple)
                max_tokens = max(max_tokens, longest)
                n_tokens += int(rank.sum())
                n_padded_tokens += padded_tokens
    if microbatch_multiple == 1:
        max_tokens = min(token_budget, cells_per_rank * int(lengths.max()))
        return MicroBatches(counts, max_tokens, padding_frac=0.0)
    return MicroBatches(counts, max_tokens, n_padded_tokens / max(n_tokens, 1) - 1)


def _pad_evenly(lengths: np.ndarray, count: int, token_multiple: int) -> tuple[int, int]:
    """Cut the cells of a rank's step evenly into `count` micro-batches and pad them to the longest.

    `lengths` are the cells' tokens, `(cells,)`. Return the tokens of the longest micro-batch before
    padding, and those of all micro-batches after it.
    """
    tokens_by_micro_batch = np.add.reduceat(lengths, cut_evenly(lengths, count)[:-1])
    longest = int(tokens_by_micro_batch.max())
    return longest, count * pipeline_tokens(longest, token_multiple)
