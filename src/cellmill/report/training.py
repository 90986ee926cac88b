"""Training of the runs: curves, planned and measured quantities, and cost."""

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

TENSOR_MEMORY = "peak tensor memory on any rank, GB"
PROCESS_MEMORY = "peak memory of any process, libraries included, GB"
CURVES = {
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
"""Keys of metrics.jsonl and their names, in the order of the page."""
J_PER_KWH = 3.6e6


class ComparedQuantity(NamedTuple):
    """A quantity of a run's training, planned and measured; None if unknown."""

    name: str
    planned: Any
    measured: Any


def make_loss_charts(runs: Sequence[ReportedRun]) -> Iterator[Chart]:
    """A chart for each objective with a logged loss.

    It has runs with other objectives too, without points, so that every run keeps its colour.
    """
    objectives = list(dict.fromkeys(run.options.objective.name for run in runs))
    for objective in objectives:
        losses: dict[str, Mapping[str, StepValues]] = {run.name: {} for run in runs}
        for run in runs:
            if run.options.objective.name == objective:
                losses[run.name] = {
                    "training": list_step_values(run.logged, "loss"),
                    "validation": list_step_values(run.logged, "val_loss"),
                }
        if any(any(by_series.values()) for by_series in losses.values()):
            name = to_words(objective or "unknown objective")
            title = f"Loss: {name}" if len(objectives) > 1 else "Loss"
            yield make_loss_chart(title, losses)


def make_log_charts(runs: Sequence[ReportedRun]) -> Iterator[Chart]:
    """A chart for each of CURVES that any run logged."""
    for key, name in CURVES.items():
        curves = {run.name: list_step_values(run.logged, key) for run in runs}
        if any(curves.values()):
            yield make_curves_chart(name[0].upper() + name[1:], curves, name)


def list_step_values(lines: Sequence[LoggedLineSchema], key: str) -> StepValues:
    """(step, value) of each line in which `key` has a finite number.

    The value of a list over ranks is its largest one.
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
    """Quantities of a run that were planned or measured.

    The plan counts tensors, so its memory is compared with the tensors that a GPU held. The memory
    of a process includes its libraries, so it has a row of its own; on a CPU only this memory is
    measured. Floats are rounded to two significant digits, because times, memory and effective
    ranks are no more precise.
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
    """Quantities measured over all lines of metrics.jsonl, or in the last validation, by name."""
    waits = _list_values(run, "data_wait_frac")
    mean_wait = sum(waits) / len(waits) if waits else None
    quantities = {
        "highest cells/s": max(_list_values(run, "cells_per_s"), default=None),
        CURVES["data_wait_frac"]: mean_wait,
    }
    for key in ("effective_rank", "depth_r2", "batch_r2"):
        name = f"{CURVES[key]}, last validation"
        values = _list_values(run, key)
        if key == "effective_rank" and run.has_collapsed and values[-1] < COLLAPSED:
            name += ": collapsed to one direction"
        quantities[name] = values[-1] if values else None
    return quantities


def _list_values(run: ReportedRun, key: str) -> list[float]:
    return [value for _, value in list_step_values(run.logged, key)]


def _find_peak(run: ReportedRun, key: str) -> tuple[float | None, int | None]:
    """Largest value over ranks and lines of metrics.jsonl, and its rank; None without values.

    `key` has a list over ranks in each line.
    """
    peaks: list[tuple[float, int]] = []
    for line in run.logged:
        peaks += [(value, rank) for rank, value in enumerate(getattr(line, key))]
    return max(peaks, default=(None, None))


def _round_to_two_digits(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def estimate_energy(run: ReportedRun) -> float | None:
    """Energy of a run's training in kWh; None if power or the time in training steps is unknown.

    It is the power of all GPUs together, as the mean over logged lines, multiplied by the time spent
    in training steps. If the number of GPUs changed between starts, lines still count equally.
    """
    watts = [sum(line.gpu_power_w) for line in run.logged if line.gpu_power_w]
    seconds = run.totals.get("training_s")
    if not watts or not seconds:
        return None
    return sum(watts) / len(watts) * seconds / J_PER_KWH


def describe_cost(run: ReportedRun) -> str | None:
    """GPU-hours of a run, or core-hours if it had no GPU; None if its cost is unknown."""
    if run.cost is None:
        return None
    has_gpu_hours = had_gpus(run.cost.starts)
    hours = run.totals.get("gpu_hours" if has_gpu_hours else "cpu_core_hours")
    unit = "GPU-hours" if has_gpu_hours else "core-hours"
    amount = "an unknown number of" if hours is None else to_text(hours)
    return f"{amount} {unit}"
