"""Task `throughput`: the time and memory that stage `embed` took for all cells of the dataset.

The time covers reading, tokenizing and embedding. The peak memory is memory of the GPU. Without a GPU
it is memory of the whole process.
"""

from cellmill.config.parts.tasks import ThroughputConfig
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Task
from cellmill.runs.results import Row, ScoredMethod, TaskResult


class Throughput(Task):
    config: ThroughputConfig

    def estimate_s(self, sizes: DatasetSizes) -> float:
        return 0.0

    def run(self, context: Context) -> TaskResult:
        """One row with the time and the peak memory of the embedding."""
        cost = context.embedding_cost
        n_cells = context.reader.n_obs
        numbers = {
            "cells": n_cells,
            "seconds": cost["seconds"],
            "cells per s": n_cells / cost["seconds"],
            "peak memory, GB": cost["peak_gb"],
        }
        return TaskResult([Row(ScoredMethod("embed", kind="model"), numbers=numbers)])
