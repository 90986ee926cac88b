"""Steps, tokens and micro-batches of a run, counted from the row offsets of the shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, min_microbatches, pipeline_tokens
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.micro_batches import MicroBatchRule, cut_evenly, cut_greedily
from cellmill.data.stream.order import OrderRule

# Micro-batches are counted in the first steps only: shards are preshuffled, so any cells will do.
SAMPLED_STEPS = 64  # at most this many steps
SAMPLED_RANK_STEPS = 4096  # at most this many steps times data-parallel ranks
# a pipeline's even cuts are slower to count: at most this many steps, and this many ranks of each
SAMPLED_EVENLY = 4


@dataclass(frozen=True, eq=False)
class CorpusSize:
    """Sizes of a corpus that a plan depends on."""

    # `(reads,)` int64: gene tokens of a training cell, one entry per read of an epoch, in the shards' order
    gene_tokens_by_read: np.ndarray
    n_genes: int  # genes of the vocabulary
    n_validation: int = 0  # validation cells
    # training cells, if `gene_tokens_by_read` has only a sample of them
    n_training: int | None = None
    # levels of the obs columns that the run reads
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    n_covariates: int = 0  # tokens that the model adds to each cell, after micro-batches are cut

    @property
    def n_cells(self) -> int:
        """Number of training cells."""
        return len(self.gene_tokens_by_read) if self.n_training is None else self.n_training

    @cached_property
    def tokens_per_cell(self) -> float:
        return float(self.gene_tokens_by_read.mean()) + self.n_covariates

    @cached_property
    def pairs_per_cell(self) -> float:
        """Mean number of (query, key) pairs of attention in a cell: the mean square of its tokens."""
        n_tokens = self.gene_tokens_by_read.astype(np.float64) + self.n_covariates
        return float(np.square(n_tokens).mean())


def count_detected_genes(manifest: Manifest) -> np.ndarray:
    """Count the detected genes of each training cell in the order of the shards, `(cells,)` int64."""
    return np.concatenate(
        [np.diff(shard.indptr).astype(np.int64) for shard in open_shards(manifest, "train")]
    )


@dataclass(frozen=True)
class Work:
    """Steps of a run, and the cells and micro-batches in them."""

    steps: int
    steps_per_epoch: int
    max_cells_per_step: int  # cells of the largest step
    cells_seen: int  # cells over all steps
    validations: int
    val_cells: int  # cells per validation
    mean_micro_batches_per_step: float  # over the sampled first steps; the same on every rank
    max_micro_batches_per_step: int  # over the sampled steps
    max_micro_batch_tokens: int  # `MicroBatches.max_tokens`
    padding_frac: float  # padding tokens of a pipeline per token of the step's cells


def count_work(options: PlanOptions, corpus: CorpusSize, layout: Layout) -> Work:
    """Count the steps of a run, and the micro-batches of its first steps."""
    train = options.train
    parallel = options.parallel
    order_rule = OrderRule.for_counting(options, corpus.n_cells)
    steps = train.total_steps(order_rule.steps_per_epoch)
    epochs, steps_of_last_epoch = divmod(steps, order_rule.steps_per_epoch)
    cells_of_last_epoch = int(order_rule.cells_before(steps_of_last_epoch).sum())
    micro_batches = count_micro_batches(
        corpus,
        order_rule.max_step_cells,
        layout.dp,
        MicroBatchRule(train.token_budget, min_microbatches(parallel), parallel.pp),
        token_multiple=parallel.tp if parallel.sequence_parallel else 1,
    )
    val_cells = corpus.n_validation
    if train.val_cells is not None:
        val_cells = min(train.val_cells, corpus.n_validation)
    return Work(
        steps=steps,
        steps_per_epoch=order_rule.steps_per_epoch,
        max_cells_per_step=order_rule.max_step_cells,
        cells_seen=epochs * corpus.n_cells + cells_of_last_epoch,
        validations=-(-steps // train.val_every_steps) if corpus.n_validation else 0,
        val_cells=val_cells,
        mean_micro_batches_per_step=float(np.mean(micro_batches.counts)),
        max_micro_batches_per_step=max(micro_batches.counts),
        max_micro_batch_tokens=micro_batches.max_tokens,
        padding_frac=micro_batches.padding_frac,
    )


class MicroBatches(NamedTuple):
    """Micro-batches of the sampled first steps of a run."""

    counts: list[int]  # micro-batches of each step, the same on every rank
    # Tokens of the largest micro-batch, including covariates. With a pipeline also its padding;
    # without one, an upper bound.
    max_tokens: int
    padding_frac: float  # padding tokens of a pipeline per token of the step's cells


@cache  # many layouts have the same micro-batches
def count_micro_batches(
    corpus: CorpusSize, step_cells: int, dp: int, rule: MicroBatchRule, token_multiple: int
) -> MicroBatches:
    """Count the micro-batches of the first steps, of `step_cells` cells on `dp` data-parallel ranks.

    A pipeline (`rule.multiple_of` > 1) cuts the cells of a rank evenly and pads all micro-batches of
    its step to the longest (`pipeline_tokens`, a multiple of `token_multiple`).
    """
    lengths = corpus.gene_tokens_by_read
    steps = _deal_first_steps(lengths, step_cells, dp)
    counts = [_count_needed(lengths_by_rank, rule) for lengths_by_rank in steps]
    if rule.multiple_of == 1:
        max_cells = len(steps[0][0])  # cells of a rank in the largest step
        max_tokens = min(rule.token_budget, max_cells * int(lengths.max()))
        if corpus.n_covariates:
            max_tokens += corpus.n_covariates * _count_shortest(
                lengths, max_cells, rule.token_budget
            )
        return MicroBatches(counts, max_tokens, padding_frac=0.0)
    max_tokens = 0
    n_tokens = 0
    n_tokens_with_padding = 0
    for lengths_by_rank, count in zip(steps[:SAMPLED_EVENLY], counts):
        for rank_lengths in lengths_by_rank[:SAMPLED_EVENLY]:
            starts = cut_evenly(rank_lengths, count)[:-1]
            tokens = np.add.reduceat(rank_lengths + corpus.n_covariates, starts)
            padded_to = pipeline_tokens(int(tokens.max()), token_multiple)
            max_tokens = max(max_tokens, padded_to)
            n_tokens += int(tokens.sum())
            n_tokens_with_padding += count * padded_to
    return MicroBatches(counts, max_tokens, n_tokens_with_padding / max(n_tokens, 1) - 1)


def _deal_first_steps(lengths: np.ndarray, step_cells: int, dp: int) -> list[list[np.ndarray]]:
    """Deal cells in order to the first steps, and the cells of a step to its `dp` ranks.

    `lengths`, `(cells,)`, are the tokens of all cells. Return the tokens of each rank's cells, by step
    and rank.
    """
    n_steps = max(1, min(SAMPLED_STEPS, SAMPLED_RANK_STEPS // dp))
    rank_cells = -(-min(step_cells, len(lengths)) // dp)
    steps = []
    for step_start in range(0, len(lengths), step_cells)[:n_steps]:
        step = lengths[step_start : step_start + step_cells]
        steps.append(
            [step[start : start + rank_cells] for start in range(0, len(step), rank_cells)]
        )
    return steps


def _count_shortest(lengths: np.ndarray, max_cells: int, token_budget: int) -> int:
    """Count how many of the shortest cells fit in `token_budget`, at most `max_cells`."""
    shortest = np.sort(np.partition(lengths, max_cells - 1)[:max_cells])
    return max(1, int(np.searchsorted(shortest.cumsum(), token_budget, side="right")))


def _count_needed(lengths_by_rank: list[np.ndarray], rule: MicroBatchRule) -> int:
    """Count the micro-batches of a step: as many as the rank with the most needs."""
    needed = rule.min_per_step
    for lengths in lengths_by_rank:
        needed = max(needed, len(cut_greedily(lengths, rule.token_budget)) - 1)
    return -(-needed // rule.multiple_of) * rule.multiple_of
