"""CPU-seconds of tasks, planned before the tasks start.

- The estimate of a task is `Task.estimate_s` for the sizes of the dataset, multiplied by the slowness of
  this machine. The slowness is the speed of the reference core divided by the speed of a core here.
- The ratio of a task comes from its last run without stored predictions. It is the CPU-seconds of that
  run, divided by the estimate of that run.
- The plan is the estimate multiplied by the ratio.

Results, and the names of their files, do not depend on the plan.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from threadpoolctl import threadpool_limits

from cellmill.errors import DataError
from cellmill.evaluate.features.cell_features import embed_counts
from cellmill.evaluate.seconds.sizes import REFERENCE_FLOPS_PER_S, DatasetSizes
from cellmill.evaluate.task import Context, Task
from cellmill.files import read_json, span, write_json
from cellmill.planner.devices import find_device
from cellmill.planner.measure.cpu_speed import measure_cpu

MEASURED_CELLS = 512  # at most this many cells are embedded to measure the speed of the model
MEASURED_S = 0.1  # the measurement ends with the first pass that takes longer, in seconds
MAX_LEARNED = 4.0  # an estimate is multiplied or divided by at most this ratio
LEAST_LEARNED_S = 1.0  # a task that is shorter, in seconds, has no ratio
_ratios_adapter = TypeAdapter(dict[str, float])


class LearnedRatios:
    """The learned ratio of each task, in a file next to the finished results."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, float]:
        """Read the ratios by task. The result is empty if the file is missing or damaged."""
        if not self._path.exists():
            return {}
        try:
            ratios = _ratios_adapter.validate_python(read_json(self._path))
        except (DataError, ValidationError):
            return {}
        return {
            task: min(max(ratio, 1 / MAX_LEARNED), MAX_LEARNED)
            for task, ratio in ratios.items()
            if isfinite(ratio)
        }

    def learn(self, task: str, estimated_s: float | None, cpu_s: float) -> None:
        """Keep the ratio of a task that took `cpu_s` CPU-seconds.

        The ratio is not kept if the estimate is not known. Nor is it kept if the estimate or the measured
        time is below LEAST_LEARNED_S, because a ratio of short times is not exact.
        """
        if estimated_s is not None and min(estimated_s, cpu_s) >= LEAST_LEARNED_S:
            write_json(self._path, self.read() | {task: cpu_s / estimated_s})


class Planner:
    """Estimates the CPU-seconds of tasks on one dataset."""

    def __init__(self, context: Context) -> None:
        # the result of _measure_cells; None if the cells cannot be read
        self._measured: tuple[float, float] | None = None
        # one thread, because processes that fork later must not inherit other threads
        with threadpool_limits(1):
            speed = measure_cpu(find_device("cpu"), 1, clock=time.thread_time).fp32_flops_per_s
            assert speed is not None, "the rate was measured"
            self._slowness = REFERENCE_FLOPS_PER_S / speed
            # if the cells cannot be read, the tasks that read them will say why
            with suppress(Exception):
                self._measured = _measure_cells(context)

    def estimate(self, name: str, task: Task, context: Context) -> float | None:
        """Estimate the CPU-seconds of `task`, which `evaluate.tasks` calls `name`; None if not known."""
        roles = {*context.roles} | ({"control"} if "is_control" in context.roles else set())
        if context.options.tasks[name].missing_role(roles) is not None:
            return 0.0  # the task will be skipped
        estimate_s = getattr(task, "estimate_s", None)
        if estimate_s is None or self._measured is None:
            return None
        genes_per_cell, forward_s = self._measured
        sizes = DatasetSizes(
            dataset=context.dataset,
            n_cells=int(context.scored.sum()),
            n_obs=context.reader.n_obs,
            n_genes=context.reader.n_vars,
            genes_per_cell=genes_per_cell,
            n_training=context.model.manifest.splits["train"].n_obs,
            n_values={role: column.nunique() for role, column in context.roles.items()},
            n_external=len(context.external),
            folds=context.options.folds,
            forward_s=forward_s / self._slowness,
        )
        try:
            seconds = float(estimate_s(sizes)) * self._slowness
        except (
            Exception
        ):  # a failing estimate, as of another package's task, must not end an evaluation
            return None
        return seconds if isfinite(seconds) else None


def _measure_cells(context: Context) -> tuple[float, float]:
    """Measure the first cells of a dataset.

    Returns the mean number of genes with counts in a cell, and the mean seconds to embed a cell.
    """
    on_gpu = next(context.model.network.parameters()).is_cuda
    clock = time.perf_counter if on_gpu else time.thread_time
    counts = next(context.reader.rows(MEASURED_CELLS))
    n_cells = counts.shape[0]
    # the first pass also loads compiled loops, so it is not measured
    embed_counts(context, np.arange(1), counts[:1], context.model.network)
    n = 1
    while True:
        start = clock()
        embed_counts(context, np.arange(n), counts[:n], context.model.network)
        seconds = clock() - start
        if n == n_cells or seconds > MEASURED_S:
            return counts.nnz / n_cells, seconds / n
        n = min(8 * n, n_cells)


def describe_plan(planned_s: Mapping[str, float | None], n_processes: int) -> str:
    """Describe the planned CPU-seconds in one line: of each task, and of all tasks together.

    The seconds of a task are None if they are not known.
    """
    tasks = [
        f"{name} not known" if seconds is None else f"{name} {_about(seconds)}"
        for name, seconds in planned_s.items()
    ]
    plan = f"planned CPU time: {', '.join(tasks)}"
    known = [seconds for seconds in planned_s.values() if seconds is not None]
    if not known:
        return plan
    total = f"in all {_about(sum(known))}"
    if len(known) < len(planned_s):
        total += " without those not known"
    if n_processes > 1:
        longest_s = max(sum(known) / n_processes, *known)
        total += f", {_about(longest_s)} on {n_processes} free cores"
    return f"{plan}; {total}"


def _about(seconds: float) -> str:
    return f"about {span(seconds)}" if seconds >= 1 else "under 1 s"
