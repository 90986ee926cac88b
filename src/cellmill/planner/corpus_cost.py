"""Work, memory and disk of the stages that make a corpus, from costs measured once.

Measured at commit 92ae630 and the change that compressed cells, on an AMD EPYC with 2 busy cores, Python 3.11.7, h5py
3.16.0: 12,000 simulated cells of 2,060 genes, shards of 1,024 (benchmarks/README.md). Figures scale with the number of
values; another machine, file system or format of the input has others. Reading from the disk is not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cellmill.config.corpus import Preprocess, Shard

NS_PER_VALUE = {  # CPU time of one process, by preprocess.compression; inputs without compression
    "gzip": {"preprocess": 113, "vocabulary": 65, "divide": 80, "shard_part": 139},
    None: {"preprocess": 68, "vocabulary": 40, "divide": 40, "shard_part": 69},
}
CELL_BYTES_PER_VALUE = {"gzip": 1.6, None: 6.0}  # of preprocessed cells
SHARD_BYTES_PER_VALUE = 6.0
SHARD_BYTES = 1.9e6  # of each file beside its cells: obs of 1,024 cells, var of 20,000 genes
INDEX_BYTES_PER_CELL = 24  # offsets and hashes, beside the manifest
RSS_MB = {"preprocess": 530, "vocabulary": 440, "divide": 310, "shard_part": 250, "shard": 250}
RSS_BYTES_PER_VALUE = 16  # of the cells of one shard: genes, counts, and both again in their order
RSS_BYTES_PER_CELL = (
    150  # of the corpus in `divide`; estimated, not measured, of obs of one file in stages that open it
)
OFFSET_BYTES_PER_CELL = 16  # of the corpus in `shard_part`: offsets of rows, and of their chunks


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage, all jobs of it alike."""

    stage: str
    jobs: int
    hours: float
    """Of the longest job, one core."""
    cpu_hours: float
    """Of all jobs."""
    rss_gb: float
    """Of a job."""
    files: int
    gigabytes: float
    """Written, and kept after the corpus is made."""


def corpus_cost(cells: list[int], genes_per_cell: float, preprocess: Preprocess, shard: Shard) -> list[StageCost]:
    """Costs of the stages of a corpus of datasets with these numbers of cells."""
    total = sum(cells)
    values, largest = total * genes_per_cell, max(cells) * genes_per_cell
    ns, n_shards = NS_PER_VALUE[preprocess.compression], max(1, ceil(total / shard.cells_per_shard))
    hours = {stage: values * own / 3.6e12 for stage, own in ns.items()}
    shard_mb = RSS_BYTES_PER_VALUE * min(shard.cells_per_shard, total) * genes_per_cell / 1e6
    shard_mb += OFFSET_BYTES_PER_CELL * total / 1e6
    obs_mb, plan_mb = (RSS_BYTES_PER_CELL * n / 1e6 for n in (max(cells), total + max(cells)))
    written = values * SHARD_BYTES_PER_VALUE + n_shards * SHARD_BYTES + total * INDEX_BYTES_PER_CELL

    def cost(stage: str, jobs: int, longest: float, cpu: float, mb: float, files: int, n_bytes: float) -> StageCost:
        return StageCost(stage, jobs, longest, cpu, (RSS_MB[stage] + mb) / 1e3, files, n_bytes / 1e9)

    cells_bytes = values * CELL_BYTES_PER_VALUE[preprocess.compression]
    longest = largest * ns["preprocess"] / 3.6e12
    first = [
        cost("preprocess", len(cells), longest, hours["preprocess"], obs_mb, 2 * len(cells), cells_bytes),
        cost("vocabulary", 1, hours["vocabulary"], hours["vocabulary"], obs_mb, 1, 2e6),
    ]
    files = n_shards + 7  # manifest.json, and offsets and hashes of each split
    if shard.jobs == 1:
        both = hours["divide"] + hours["shard_part"]
        return [*first, cost("shard", 1, both, both, shard_mb + plan_mb, files, written)]
    jobs = min(shard.jobs, n_shards)
    part = hours["shard_part"] * ceil(n_shards / jobs) / n_shards
    return [
        *first,
        cost("divide", 1, hours["divide"], hours["divide"], plan_mb, 0, 0),
        cost("shard_part", shard.jobs, part, hours["shard_part"], shard_mb, n_shards, written),
        cost("shard", 1, 0.01, 0.01, 0, 7, 0),
    ]
