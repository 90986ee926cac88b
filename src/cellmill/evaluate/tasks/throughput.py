"""Task `throughput`: the time and memory that stage `embed` took for all cells of the dataset.

The seconds cover reading, tokenizing and embedding. The peak memory is the device's, or without a
GPU the whole process's.
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
        """Time and memory of the embedding, in one row."""
        cost = context.embedding_cost
        n_cells = context.reader.n_obs
        numbers = {
            "cells": n_cells,
            "seconds": cost["seconds"],
            "cells per s": n_cells / cost["seconds"],
            "peak memory, GB": cost["peak_gb"],
        }
        return TaskResult([Row(ScoredMethod("embed", kind="model"), numbers=numbers)])
