"""Values and charts of the section on training.

These are curves over training steps, planned and measured quantities, and the cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cellmill.report.collect import ReportedRun
from cellmill.report.drawing.chart import Chart
from cellmill.report.drawing.curves import StepValues, make_curves_chart, make_loss_chart
from cellmill.report.schemas import LoggedLineSchema, PlanSchema, StatusSchema
from cellmill.report.text import to_text, to_words
from cellmill.runs.collapse import COLLAPSED
from cellmill.runs.cost import had_gpus

# Names of the two peaks of memory, in charts and in the comparison with the plan.
TENSOR_MEMORY = "peak tensor memory on any rank, GB"
PROCESS_MEMORY = "peak memory of any process, libraries included, GB"
CURVE_NAMES = {
    "effective_rank": "effective rank of the embedding",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "cells_per_s": "cells per second",
    "data_wait_frac": "fraction of time waiting for data",
    "mfu": "model FLOPs utilisation",
    "peak_allocated_gb": TENSOR_MEMORY,
    "peak_resident_gb": PROCESS_MEMORY,
    "gpu_busy_frac": "use of the busiest GPU",
    "depth_r2": "R² of log depth, predicted from the embedding",
    "batch_r2": "share of the embedding's variance explained by the batch",
}
"""Names of the quantities in metrics.jsonl that have a chart, by key, in the order of the page."""
J_PER_KWH = 3.6e6  # joules in a kilowatt-hour


class ComparedQuantity(NamedTuple):
    """A quantity of a run's training, with its planned and its measured value."""

    name: str
    planned: Any  # None if the quantity is not planned
    measured: Any  # None if the quantity was not measured


def make_loss_charts(runs: Sequence[ReportedRun]) -> Iterator[Chart]:
    """Make a chart of losses for each objective with a logged loss.

    Losses of different objectives cannot be compared. A chart also gets the runs with other
    objectives, but without points, so that every run has the same colour in all charts.
    """
    objectives = list(dict.fromkeys(run.options.objective.name for run in runs))
    for objective in objectives:
        losses_by_run: dict[str, Mapping[str, StepValues]] = {run.name: {} for run in runs}
        for run in runs:
            if run.options.objective.name == objective:
                losses_by_run[run.name] = {
                    "training": list_step_values(run.logged_lines, "loss"),
                    "validation": list_step_values(run.logged_lines, "val_loss"),
                }
        has_points = any(any(series.values()) for series in losses_by_run.values())
        if has_points:
            name = to_words(objective or "unknown objective")
            title = f"Loss: {name}" if len(objectives) > 1 else "Loss"
            yield make_loss_chart(title, losses_by_run)


def make_log_charts(runs: Sequence[ReportedRun]) -> Iterator[Chart]:
    """Make a chart for each quantity of CURVE_NAMES that at least one run logged."""
    for key, name in CURVE_NAMES.items():
        points_by_run = {run.name: list_step_values(run.logged_lines, key) for run in runs}
        if any(points_by_run.values()):
            yield make_curves_chart(name[0].upper() + name[1:], points_by_run, name)


def list_step_values(lines: Sequence[LoggedLineSchema], key: str) -> StepValues:
    """List (step, value) of each line in which `key` has a finite number.

    If the line has a list with a value per rank, the value is the largest of the list.
    """
    points: StepValues = []
    for line in lines:
        value = getattr(line, key)
        if isinstance(value, list):
            value = max(value, default=None)
        if value is not None and np.isfinite(value):
            points.append((line.step, value))
    return points


def compare_with_plan(run: ReportedRun) -> list[ComparedQuantity]:
    """List the quantities of a run that were planned or measured.

    Memory has two rows. The plan counts only tensors, so the planned memory is compared with the
    tensors that a GPU held. The memory of a process includes its libraries, so it has its own row.
    On a CPU, only the memory of processes is measured.

    Floats are rounded to two significant digits, because times, memory and effective ranks are not
    more precise than that.
    """
    plan = run.plan or PlanSchema()
    status = run.status or StatusSchema()
    hours = None if status.wall_s is None else status.wall_s / 3600
    planned_gb = None if plan.memory is None else plan.memory.total_bytes / 1e9
    tensors_gb, tensors_rank = _find_peak(run, "peak_allocated_gb")
    process_gb, process_rank = _find_peak(run, "peak_resident_gb")
    peak_rank = process_rank if tensors_rank is None else tensors_rank
    peak_kind = "process" if tensors_rank is None else "tensor"
    quantities = [
        ("steps", plan.steps, status.step),
        ("hours", plan.hours, hours),
        (TENSOR_MEMORY, planned_gb, tensors_gb),
        (PROCESS_MEMORY, None, process_gb),
        (f"rank with the peak {peak_kind} memory", None, peak_rank),
        ("steps skipped as not finite", None, status.skipped_steps),
        ("cells, all epochs", plan.cells_seen, status.cells_seen),
        ("processes", plan.world_size, status.world_size),
        *[(name, None, value) for name, value in _summarise_log(run).items()],
    ]
    return [
        ComparedQuantity(name, _round_to_two_digits(planned), _round_to_two_digits(measured))
        for name, planned, measured in quantities
        if planned is not None or measured is not None
    ]


def _summarise_log(run: ReportedRun) -> dict[str, float | None]:
    """Summarise metrics.jsonl. Return a value for each quantity, by the name of the quantity.

    The speed is the highest of all lines, and the time of waiting is the mean of all lines. All
    other quantities are from the last validation. A value is None if no line has the quantity.
    """
    waits = _list_logged_values(run, "data_wait_frac")
    mean_wait = sum(waits) / len(waits) if waits else None
    quantities = {
        "highest cells/s": max(_list_logged_values(run, "cells_per_s"), default=None),
        CURVE_NAMES["data_wait_frac"]: mean_wait,
    }
    for key in ("effective_rank", "depth_r2", "batch_r2"):
        name = f"{CURVE_NAMES[key]}, last validation"
        values = _list_logged_values(run, key)
        if key == "effective_rank" and run.has_collapsed and values[-1] < COLLAPSED:
            name += ": collapsed to one direction"
        quantities[name] = values[-1] if values else None
    return quantities


def _list_logged_values(run: ReportedRun, key: str) -> list[float]:
    """List the finite values of `key` in the lines of metrics.jsonl, in the order of steps."""
    return [value for _, value in list_step_values(run.logged_lines, key)]


def _find_peak(run: ReportedRun, key: str) -> tuple[float | None, int | None]:
    """Find the largest value of `key` over all ranks and lines of metrics.jsonl. Return (value, rank).

    In each line, `key` has a list with a value per rank. If all lists are empty, return (None, None).
    """
    values_and_ranks: list[tuple[float, int]] = []
    for line in run.logged_lines:
        values_and_ranks += [(value, rank) for rank, value in enumerate(getattr(line, key))]
    return max(values_and_ranks, default=(None, None))


def _round_to_two_digits(value: Any) -> Any:
    """Round a float to two significant digits. Return any other value as it is."""
    return float(f"{value:.2g}") if isinstance(value, float) else value


def estimate_energy(run: ReportedRun) -> float | None:
    """Estimate the energy of a run's training in kWh. Return None if it is unknown.

    The energy is the power of all GPUs together, multiplied by the time spent in training steps. It
    is unknown if the power or this time is unknown. The power is the mean over logged lines. All
    lines count equally, even if the number of GPUs changed between starts of the training.
    """
    watts = [sum(line.gpu_power_w) for line in run.logged_lines if line.gpu_power_w]
    seconds = run.totals.get("training_s")
    if not watts or not seconds:
        return None
    return sum(watts) / len(watts) * seconds / J_PER_KWH


def describe_cost(run: ReportedRun) -> str | None:
    """Describe the cost of a run in GPU-hours, or in core-hours if the run had no GPU.

    Return None if the run has no file of its cost.
    """
    if run.cost is None:
        return None
    has_gpu_hours = had_gpus(run.cost.starts)
    hours = run.totals.get("gpu_hours" if has_gpu_hours else "cpu_core_hours")
    unit = "GPU-hours" if has_gpu_hours else "core-hours"
    amount = "an unknown number of" if hours is None else to_text(hours)
    return f"{amount} {unit}"
