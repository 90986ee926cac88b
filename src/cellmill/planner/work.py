"""Steps, tokens and micro-batches of a run, and the cost of the stages that make a corpus.

Steps come from the row offsets of the shards, without reading a cell. Costs were measured once, at
commit 92ae630 and the change that compressed cells, on an AMD EPYC with 2 busy cores, Python
3.11.7, h5py 3.16.0: 12,000 simulated cells of 2,060 genes, shards of 1,024 (benchmarks/README.md).
They scale with the number of values and differ between machines, file systems and input formats.
Reading from the disk is not included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil

import numpy as np

from cellmill.config.corpus import Preprocess, Shard
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, min_microbatches, pipeline_tokens
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.batch import cut_batch, cut_evenly
from cellmill.data.stream.order import EpochLayout

# micro-batches are counted in a few steps: shards are preshuffled, so any cells will do
SAMPLED_BATCHES = 4096  # batches of single ranks
SAMPLED_STEPS = 64
SAMPLED_EVENLY = 4  # steps, and ranks of each: even cuts are searched for and take longer
NS_PER_VALUE = {  # CPU time of one process, by preprocess.compression; inputs without compression
    "gzip": {"preprocess": 113, "vocabulary": 65, "divide": 80, "shard_part": 139},
    None: {"preprocess": 68, "vocabulary": 40, "divide": 40, "shard_part": 69},
}
CELL_BYTES_PER_VALUE = {"gzip": 1.6, None: 6.0}  # bytes per stored value of preprocessed cells
SHARD_BYTES_PER_VALUE = 6.0
SHARD_BYTES = 1.9e6  # further bytes of each file: obs of 1,024 cells, var of 20,000 genes
INDEX_BYTES_PER_CELL = 24  # offsets and hashes, next to the manifest
RSS_MB = {"preprocess": 530, "vocabulary": 440, "divide": 310, "shard_part": 250, "shard": 250}
RSS_BYTES_PER_VALUE = 16  # cells of one shard: genes, counts, and both again in their order
# cells of the corpus in `divide`; estimated for obs of one file in stages that open it
RSS_BYTES_PER_CELL = 150
OFFSET_BYTES_PER_CELL = 16  # cells of the corpus in `shard_part`: offsets of rows and chunks


@dataclass(frozen=True, eq=False)
class Cells:
    """Training cells as far as a plan needs them."""

    lengths: np.ndarray  # (cells,) int64: tokens of each cell, in the order of the shards
    n_genes: int  # genes of the vocabulary
    validation: int = 0  # number of validation cells
    number: int | None = None  # number of cells if `lengths` has only some of them
    # levels of the obs columns that the run reads
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def n(self) -> int:
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
    """Steps of a run and what is computed in them."""

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
    """(cells,) int64: detected genes of each training cell, in the order of the shards."""
    return np.concatenate(
        [np.diff(shard.indptr).astype(np.int64) for shard in open_shards(manifest, "train")]
    )


def measure_work(options: PlanOptions, cells: Cells, sizes: Layout) -> Work:
    train = options.train
    parallel = options.parallel
    n_cells = cells.n
    epoch = EpochLayout.of_run(options, n_cells)
    steps = train.total_steps(epoch.steps_per_epoch)
    epochs, rest = divmod(steps, epoch.steps_per_epoch)
    multiple = parallel.tp if parallel.sequence_parallel else 1
    micro_batches, micro_tokens, padding = count_micro_batches(
        cells,
        epoch.most_cells,
        train.token_budget,
        sizes.dp,
        min_microbatches(parallel),
        parallel.pp,
        multiple,
    )
    if parallel.pp > 1:
        micro_tokens = pipeline_tokens(micro_tokens, multiple)
    val_cells = cells.validation
    if train.val_cells is not None:
        val_cells = min(train.val_cells, cells.validation)
    return Work(
        steps=steps,
        steps_per_epoch=epoch.steps_per_epoch,
        cells_per_step=epoch.most_cells,
        cells_seen=epochs * n_cells + int(epoch.lanes_before(rest).sum()),
        validations=-(-steps // train.val_every_steps) if cells.validation else 0,
        val_cells=val_cells,
        micro_batches_per_step=float(np.mean(micro_batches)),
        most_micro_batches=max(micro_batches),
        micro_tokens=micro_tokens,
        padding=padding,
    )


@cache  # many layouts have the same micro-batches
def count_micro_batches(
    cells: Cells,
    global_batch: int,
    token_budget: int,
    world: int,
    min_microbatches: int = 1,
    microbatch_multiple: int = 1,
    token_multiple: int = 1,
) -> tuple[list[int], int, float]:
    """Count the micro-batches of the first steps, the most that any rank needs in each.

    Steps take cells in the order of the shards. Return the counts, the tokens of the largest
    micro-batch, and the tokens that padding adds, per token.

    Without a pipeline the largest micro-batch is an upper bound for any cells, and there is no
    padding. A pipeline (`microbatch_multiple` > 1) cuts batches evenly and pads all micro-batches of
    a rank's step to the longest, in one of few lengths (`pipeline_tokens`).
    """
    lengths = cells.lengths
    cells_per_rank = -(-min(global_batch, len(lengths)) // world)
    sampled_steps = max(1, min(SAMPLED_STEPS, SAMPLED_BATCHES // world))
    counts = []
    largest = 0
    tokens = 0
    padded = 0
    for step_start in range(0, len(lengths), global_batch)[:sampled_steps]:
        batch = lengths[step_start : step_start + global_batch]
        # lengths of the cells of each rank
        starts = range(0, len(batch), cells_per_rank)
        ranks = [batch[start : start + cells_per_rank] for start in starts]
        most = max(min_microbatches, *(len(cut_batch(rank, token_budget)) - 1 for rank in ranks))
        count = -(-most // microbatch_multiple) * microbatch_multiple
        counts.append(count)
        if microbatch_multiple > 1 and len(counts) <= SAMPLED_EVENLY:
            for rank in ranks[:SAMPLED_EVENLY]:
                # tokens of each micro-batch
                sums = np.add.reduceat(rank, cut_evenly(rank, count)[:-1])
                longest = int(sums.max())
                largest = max(largest, longest)
                tokens = tokens + int(rank.sum())
                padded += count * pipeline_tokens(longest, token_multiple)
    if microbatch_multiple == 1:
        return counts, min(token_budget, cells_per_rank * int(lengths.max())), 0.0
    return counts, largest, padded / max(tokens, 1) - 1


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage, whose jobs are alike."""

    stage: str
    jobs: int
    hours: float  # longest job, on one core
    cpu_hours: float  # all jobs
    rss_gb: float  # peak memory of a job
    files: int
    gigabytes: float  # written and kept


def corpus_cost(
    cells: list[int], genes_per_cell: float, preprocess: Preprocess, shard: Shard
) -> list[StageCost]:
    """Costs of the stages of a corpus of datasets with these numbers of cells."""
    total = sum(cells)
    values = total * genes_per_cell
    ns = NS_PER_VALUE[preprocess.compression]
    # an hour has 3.6e12 ns
    hours = {stage: values * ns_per_value / 3.6e12 for stage, ns_per_value in ns.items()}
    n_shards = max(1, ceil(total / shard.cells_per_shard))
    shard_mb = RSS_BYTES_PER_VALUE * min(shard.cells_per_shard, total) * genes_per_cell / 1e6
    shard_mb += OFFSET_BYTES_PER_CELL * total / 1e6
    obs_mb = RSS_BYTES_PER_CELL * max(cells) / 1e6
    plan_mb = RSS_BYTES_PER_CELL * (total + max(cells)) / 1e6
    cells_bytes = values * CELL_BYTES_PER_VALUE[preprocess.compression]
    shards_bytes = values * SHARD_BYTES_PER_VALUE + n_shards * SHARD_BYTES
    shards_bytes += total * INDEX_BYTES_PER_CELL

    def cost(
        stage: str, jobs: int, longest: float, cpu: float, mb: float, files: int, n_bytes: float
    ) -> StageCost:
        rss_gb = (RSS_MB[stage] + mb) / 1e3
        return StageCost(stage, jobs, longest, cpu, rss_gb, files, n_bytes / 1e9)

    jobs = len(cells)
    longest = max(cells) * genes_per_cell * ns["preprocess"] / 3.6e12
    vocabulary_hours = hours["vocabulary"]
    costs = [
        cost("preprocess", jobs, longest, hours["preprocess"], obs_mb, 2 * jobs, cells_bytes),
        cost("vocabulary", 1, vocabulary_hours, vocabulary_hours, obs_mb, 1, 2e6),
    ]
    n_files = n_shards + 7  # manifest.json, and offsets and hashes of each split
    divide_hours = hours["divide"]
    write_hours = hours["shard_part"]
    if shard.jobs == 1:
        total_hours = divide_hours + write_hours
        return [
            *costs,
            cost("shard", 1, total_hours, total_hours, shard_mb + plan_mb, n_files, shards_bytes),
        ]
    jobs = min(shard.jobs, n_shards)
    longest = write_hours * ceil(n_shards / jobs) / n_shards
    return [
        *costs,
        cost("divide", 1, divide_hours, divide_hours, plan_mb, 0, 0),
        cost("shard_part", shard.jobs, longest, write_hours, shard_mb, n_shards, shards_bytes),
        cost("shard", 1, 0.01, 0.01, 0, 7, 0),
    ]
