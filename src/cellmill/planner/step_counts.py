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
from cellmill.data.stream.micro_batches import MicroBatchRule, split_evenly, split_greedily
from cellmill.data.stream.order import OrderRule
from cellmill.planner.measure.load import Load

# Micro-batches are counted in at most this many of the first steps. Shards are preshuffled, so the cells of
# any steps are a sample.
MAX_SAMPLED_STEPS = 64
# At most this many steps times data-parallel ranks are counted, but always one step.
MAX_SAMPLED_CUTS = 4096
# A pipeline cuts the cells of a rank evenly. Even cuts take longer to count, so they are counted in at most
# this many steps and ranks.
MAX_EVENLY_CUT_STEPS = 4
MAX_EVENLY_CUT_RANKS = 4

# tokens of the cells of one step: an array of shape (cells,) for each data-parallel rank
TokensByRank = list[np.ndarray]


@dataclass(frozen=True, eq=False)
class CorpusSize:
    """Sizes of a corpus that a plan depends on."""

    # (cells,) int64: gene tokens of each cell that an epoch reads. A cell that an epoch reads twice is in
    # the array twice. Cells are in random order, as in training, so any consecutive cells are a sample.
    gene_tokens: np.ndarray
    n_genes: int  # genes of the vocabulary
    n_validation: int = 0  # number of validation cells
    # number of training cells; None if `gene_tokens` has all that an epoch reads, and not only a sample
    n_training: int | None = None
    # levels of the obs columns that the run reads, by name of the column
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    n_covariates: int = 0  # tokens that the model adds to each cell, after micro-batches are cut

    @property
    def n_cells(self) -> int:
        """Number of training cells. An epoch also reads this number, even if it reads some cells twice."""
        return len(self.gene_tokens) if self.n_training is None else self.n_training

    @cached_property
    def tokens_per_cell(self) -> float:
        """Mean number of tokens of a cell, with covariates."""
        return float(self.gene_tokens.mean()) + self.n_covariates

    @cached_property
    def pairs_per_cell(self) -> float:
        """Mean number of (query, key) pairs of attention in a cell: of n tokens it has n**2."""
        n_tokens = self.gene_tokens.astype(np.float64) + self.n_covariates
        return float(np.square(n_tokens).mean())

    @cached_property
    def _cumulative_tokens(self) -> np.ndarray:
        """Gene tokens of the 1, 2, 3, … shortest cells together, (cells,) int64."""
        return np.sort(self.gene_tokens).cumsum()

    def count_max_covariate_tokens(self, token_budget: int, max_cells: int) -> int:
        """Count the covariate tokens that a micro-batch of at most `max_cells` cells has at most.

        A micro-batch has the most covariate tokens if it has the most cells. It has the most cells if they
        are the shortest of the corpus, and together still fit `token_budget`.
        """
        if self.n_covariates == 0:
            return 0
        n_shortest = int(self._cumulative_tokens.searchsorted(token_budget, side="right"))
        return self.n_covariates * min(max_cells, n_shortest)


def count_detected_genes(manifest: Manifest) -> np.ndarray:
    """Count the detected genes of each training cell, (cells,) int64, in the order of the shards."""
    return np.concatenate(
        [np.diff(shard.indptr).astype(np.int64) for shard in open_shards(manifest, "train")]
    )


@dataclass(frozen=True)
class StepCounts:
    """Numbers of steps, cells and micro-batches of a run."""

    steps: int
    steps_per_epoch: int
    max_cells_per_step: int  # cells of the largest step
    cells_seen: int  # cells over all steps
    validations: int
    val_cells: int  # cells per validation
    # Micro-batches were counted in a sample of full steps. In a step every rank has equally many.
    mean_micro_batches_per_step: float
    max_micro_batches_per_step: int
    max_micro_batch_tokens: int  # tokens of the largest micro-batch, with covariates and padding
    max_micro_batch_cells: int  # cells of the sampled micro-batch that has the most
    padding_frac: float  # padding tokens of a pipeline, divided by the tokens of the step's cells

    @property
    def max_micro_batch(self) -> Load:
        """Load that the memory of a step is planned for. Memory does not depend on the pairs."""
        return Load(self.max_micro_batch_tokens, pairs=0.0, cells=self.max_micro_batch_cells)


def count_steps(options: PlanOptions, corpus: CorpusSize, layout: Layout) -> StepCounts:
    """Count the steps and validations of a run, and the micro-batches of its first steps."""
    train = options.train
    parallel = options.parallel

    order_rule = OrderRule.for_counting(options, corpus.n_cells)
    steps = train.total_steps(order_rule.steps_per_epoch)
    epochs, steps_of_last_epoch = divmod(steps, order_rule.steps_per_epoch)
    cells_of_last_epoch = int(order_rule.count_cells_before(steps_of_last_epoch).sum())

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

    return StepCounts(
        steps=steps,
        steps_per_epoch=order_rule.steps_per_epoch,
        max_cells_per_step=order_rule.max_step_cells,
        cells_seen=epochs * corpus.n_cells + cells_of_last_epoch,
        validations=-(-steps // train.val_every_steps) if corpus.n_validation else 0,
        val_cells=val_cells,
        mean_micro_batches_per_step=float(np.mean(micro_batches.counts)),
        max_micro_batches_per_step=max(micro_batches.counts),
        max_micro_batch_tokens=micro_batches.max_tokens,
        max_micro_batch_cells=micro_batches.max_cells,
        padding_frac=micro_batches.padding_frac,
    )


class MicroBatches(NamedTuple):
    """Micro-batches of the sampled first steps of a run."""

    counts: Sequence[int]  # micro-batches of each step; every rank has equally many
    # Tokens of the largest micro-batch, with covariates and padding. Without a pipeline it is an upper
    # bound over all steps. With a pipeline it is the largest of the sampled micro-batches.
    max_tokens: int
    max_cells: int  # cells of the sampled micro-batch that has the most
    padding_frac: float  # padding tokens of a pipeline, divided by the tokens of the step's cells


@cache  # many layouts have equal micro-batches
def count_micro_batches(
    corpus: CorpusSize, step_cells: int, dp: int, rule: MicroBatchRule, token_multiple: int
) -> MicroBatches:
    """Count the micro-batches of the first steps, of `step_cells` cells on `dp` data-parallel ranks.

    Every micro-batch is padded to a multiple of `token_multiple` tokens. A pipeline cuts the cells of a
    rank evenly, and pads all micro-batches of the rank's step to one length: the smallest that
    `pipeline_tokens` allows for the longest of them.
    """
    steps = _deal_first_steps(corpus.gene_tokens, step_cells, dp)
    counts, max_cells_by_step = zip(
        *(_count_batches_and_max_cells(tokens_by_rank, rule) for tokens_by_rank in steps)
    )
    is_pipeline = rule.multiple_of > 1
    if is_pipeline:
        return _count_pipeline_micro_batches(steps, counts, corpus, token_multiple)

    # an upper bound of the tokens: the token budget, or all cells of a rank if they were the longest
    rank_cells = len(steps[0][0])  # no rank has more cells than the first one, in any step
    max_tokens = min(rule.token_budget, rank_cells * int(corpus.gene_tokens.max()))
    max_tokens += corpus.count_max_covariate_tokens(rule.token_budget, rank_cells)
    max_tokens = -(-max_tokens // token_multiple) * token_multiple
    return MicroBatches(counts, max_tokens, max(max_cells_by_step), padding_frac=0.0)


def _count_pipeline_micro_batches(
    steps: list[TokensByRank], counts: Sequence[int], corpus: CorpusSize, token_multiple: int
) -> MicroBatches:
    """Find the tokens, cells and padding of a pipeline's micro-batches, in some steps and ranks.

    `counts` has the number of micro-batches of each step.
    """
    max_tokens = 0
    max_cells = 0
    n_tokens = 0
    n_tokens_with_padding = 0
    for tokens_by_rank, count in zip(steps[:MAX_EVENLY_CUT_STEPS], counts):
        for cell_tokens in tokens_by_rank[:MAX_EVENLY_CUT_RANKS]:
            # offsets[i] is the first cell of micro-batch i
            offsets = split_evenly(cell_tokens, count)
            max_cells = max(max_cells, int(np.diff(offsets).max()))
            micro_batch_tokens = np.add.reduceat(cell_tokens + corpus.n_covariates, offsets[:-1])
            padded_to = pipeline_tokens(int(micro_batch_tokens.max()), token_multiple)
            max_tokens = max(max_tokens, padded_to)
            n_tokens += int(micro_batch_tokens.sum())
            n_tokens_with_padding += count * padded_to
    padding_frac = n_tokens_with_padding / max(n_tokens, 1) - 1
    return MicroBatches(counts, max_tokens, max_cells, padding_frac)


def _deal_first_steps(cell_tokens: np.ndarray, step_cells: int, dp: int) -> list[TokensByRank]:
    """Deal cells in order to the first full steps, and the cells of each step evenly to `dp` ranks.

    `cell_tokens` has the tokens of each cell, (cells,). The last step of an epoch may have fewer cells. It
    is only dealt if it is also the first. Ranks without cells are left out.
    """
    n_steps = max(1, min(MAX_SAMPLED_STEPS, MAX_SAMPLED_CUTS // dp))
    n_full_cells = max(step_cells, len(cell_tokens) // step_cells * step_cells)
    steps = []
    for start in range(0, n_full_cells, step_cells)[:n_steps]:
        shares = np.array_split(cell_tokens[start : start + step_cells], dp)
        steps.append([share for share in shares if len(share)])
    return steps


def _count_batches_and_max_cells(
    tokens_by_rank: TokensByRank, rule: MicroBatchRule
) -> tuple[int, int]:
    """Count the micro-batches of a step, and the cells of the micro-batch that has the most.

    The cells of each rank are split greedily, as without a pipeline. Every rank then has as many
    micro-batches as the rank that needs the most.
    """
    needed = rule.min_per_step
    max_cells = 0
    for cell_tokens in tokens_by_rank:
        offsets = split_greedily(cell_tokens, rule.token_budget)
        needed = max(needed, len(offsets) - 1)
        max_cells = max(max_cells, int(np.diff(offsets).max()))
    return -(-needed // rule.multiple_of) * rule.multiple_of, max_cells
