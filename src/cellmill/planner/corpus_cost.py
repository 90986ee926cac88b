"""Cost of the stages that make a corpus.

A value is a stored count with its gene. Costs grow with the number of values. They differ between
machines, file systems and input formats, and do not include reading from the disk.

The constants were measured on 12,000 simulated cells of 2,060 genes, in shards of 1,024 cells. Input files
were uncompressed, and output cells were packed. The machine was an AMD EPYC with 2 busy cores
(benchmarks/README.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from cellmill.config.corpus import Shard

NS_PER_HOUR = 3.6e12  # nanoseconds

# CPU time of one process, in nanoseconds per value, by stage, with uncompressed input files
NS_PER_VALUE = {"preprocess": 68, "vocabulary": 40, "divide": 40, "shard_part": 69}
INDEX_HOURS = 0.01  # hours to write the manifest and the index of parts

# sizes of files
CELL_BYTES_PER_VALUE = 1.2  # in files of preprocessed cells
SHARD_BYTES_PER_VALUE = {"rank": 2.2, "genes": 1.2}  # in files of shards, by option shard.order
VAR_BYTES_PER_SHARD = 2.0e6  # table var of 20,000 genes, 100 bytes per gene, in every shard
OBS_BYTES_PER_CELL = 70  # table obs: name, dataset and row, without further columns
INDEX_BYTES_PER_CELL = 28  # offsets, borders and hashes, for each cell of the corpus
N_INDEX_FILES = 10  # manifest.json, and offsets, borders and hashes of each of three splits
VOCABULARY_GB = 0.002  # file of the vocabulary

# Memory of a job without data, in MB. Job `shard` only writes the manifest and the index of parts.
RSS_MB = {"preprocess": 530, "vocabulary": 440, "divide": 310, "shard_part": 250, "shard": 250}
# Memory for each value of the shard that a job writes: its gene and count, and both again when sorted.
RSS_BYTES_PER_VALUE = 16
# Estimated memory for each cell in table obs. Stages that open an input file hold the cells of this file;
# `divide` also holds all cells of the corpus.
OBS_RSS_BYTES_PER_CELL = 150
# Memory for each cell of the corpus in `shard_part`: indptr and offsets of parts.
OFFSET_BYTES_PER_CELL = 16


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage. All its jobs do the same kind of work."""

    stage: str
    hours: float  # of the longest job, on one core
    cpu_hours: float  # of all jobs together
    rss_mb: float  # peak memory of a job
    jobs: int = 1  # number of jobs
    files: int = 0  # number of files that the jobs write and keep
    disk_gb: float = 0.0  # size of these files


def estimate_stage_costs(
    cells_per_dataset: list[int], genes_per_cell: float, shard: Shard
) -> list[StageCost]:
    """Estimate the costs of the stages that make a corpus, in the order in which they run.

    `cells_per_dataset` has the number of cells of each dataset.
    """
    n_values = sum(cells_per_dataset) * genes_per_cell
    cpu_hours = {stage: n_values * ns / NS_PER_HOUR for stage, ns in NS_PER_VALUE.items()}
    max_cells = max(cells_per_dataset)
    obs_mb = OBS_RSS_BYTES_PER_CELL * max_cells / 1e6
    return [
        StageCost(
            stage="preprocess",
            jobs=len(cells_per_dataset),
            hours=max_cells * genes_per_cell * NS_PER_VALUE["preprocess"] / NS_PER_HOUR,
            cpu_hours=cpu_hours["preprocess"],
            rss_mb=RSS_MB["preprocess"] + obs_mb,
            files=2 * len(cells_per_dataset),
            disk_gb=n_values * CELL_BYTES_PER_VALUE / 1e9,
        ),
        StageCost(
            stage="vocabulary",
            hours=cpu_hours["vocabulary"],
            cpu_hours=cpu_hours["vocabulary"],
            rss_mb=RSS_MB["vocabulary"] + obs_mb,
            files=1,
            disk_gb=VOCABULARY_GB,
        ),
        *_estimate_shard_costs(cells_per_dataset, genes_per_cell, shard, cpu_hours),
    ]


def _estimate_shard_costs(
    cells_per_dataset: list[int],
    genes_per_cell: float,
    shard: Shard,
    cpu_hours: Mapping[str, float],
) -> list[StageCost]:
    """Estimate the costs of the stages that write the shards.

    With option `shard.jobs` 1, one job of stage `shard` does all. With several jobs, `divide` and
    `shard_part` come before `shard`. `cpu_hours` has the CPU time by stage.
    """
    n_cells = sum(cells_per_dataset)
    n_by_split = _count_cells_by_split(n_cells, shard)
    # a shard has cells of one split only
    n_shards = max(1, sum(ceil(n / shard.cells_per_shard) for n in n_by_split))
    max_shard_cells = min(shard.cells_per_shard, max(n_by_split))

    # size of all shards
    disk_bytes_per_cell = genes_per_cell * SHARD_BYTES_PER_VALUE[shard.order]
    disk_bytes_per_cell += OBS_BYTES_PER_CELL + INDEX_BYTES_PER_CELL
    disk_bytes = n_cells * disk_bytes_per_cell + n_shards * VAR_BYTES_PER_SHARD

    # memory to divide the cells, and memory to write a shard
    obs_mb = OBS_RSS_BYTES_PER_CELL * (n_cells + max(cells_per_dataset)) / 1e6
    divide_rss_mb = RSS_MB["divide"] + obs_mb
    shard_data_mb = RSS_BYTES_PER_VALUE * max_shard_cells * genes_per_cell / 1e6
    shard_data_mb += OFFSET_BYTES_PER_CELL * n_cells / 1e6

    divide_hours = cpu_hours["divide"]
    write_hours = cpu_hours["shard_part"]
    if shard.jobs == 1:
        hours = divide_hours + write_hours + INDEX_HOURS
        return [
            StageCost(
                stage="shard",
                hours=hours,
                cpu_hours=hours,
                rss_mb=divide_rss_mb + shard_data_mb,
                files=n_shards + N_INDEX_FILES,
                disk_gb=disk_bytes / 1e9,
            )
        ]

    # the job with the most shards takes the longest
    max_job_cells = min(n_cells, ceil(n_shards / shard.jobs) * max_shard_cells)
    return [
        StageCost(
            stage="divide",
            hours=divide_hours,
            cpu_hours=divide_hours,
            rss_mb=divide_rss_mb,
        ),
        StageCost(
            stage="shard_part",
            jobs=shard.jobs,
            hours=write_hours * max_job_cells / max(1, n_cells),
            cpu_hours=write_hours,
            rss_mb=RSS_MB["shard_part"] + shard_data_mb,
            files=n_shards,
            disk_gb=disk_bytes / 1e9,
        ),
        StageCost(
            stage="shard",
            hours=INDEX_HOURS,
            cpu_hours=INDEX_HOURS,
            rss_mb=RSS_MB["shard"],
            files=N_INDEX_FILES,
        ),
    ]


def _count_cells_by_split(n_cells: int, shard: Shard) -> list[int]:
    """Count the cells of splits train, val and test, as if their fractions applied to all cells."""
    n_held_out = [round(n_cells * frac) for frac in (shard.val_frac, shard.test_frac)]
    return [n_cells - sum(n_held_out), *n_held_out]
