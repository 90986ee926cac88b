"""Task `throughput`: time and memory of stage `embed` on the dataset, as that stage measured them.

The seconds are those of reading, tokenizing and embedding all cells, without the start of Python. Memory is the peak of
the device, or without a GPU that of the whole process, libraries included. Another load of the machine gives other
numbers.
"""

from cellmill.config.structure_tasks import ThroughputConfig
from cellmill.evaluate.task import Context, TaskResult


class Throughput:
    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """One row; skipped for an embedding of an earlier version."""
        cost = context.embedding_cost
        if cost is None:
            return TaskResult(skipped="the embedding has no measured seconds; run embed again")
        row = {"name": "embed", "kind": "model", "cells": context.reader.n_obs, "seconds": cost["seconds"]}
        row |= {"cells per s": context.reader.n_obs / cost["seconds"], "peak memory, GB": cost["peak_gb"]}
        return TaskResult([row])
