"""What a training did, for the page: its curves, its plan next to what was measured, and its cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cellmill.report import figures
from cellmill.report.collect import ReportedRun
from cellmill.report.drawing import Figure
from cellmill.report.tables import to_words
from cellmill.runs.folder import COLLAPSED
from cellmill.runs.results import Evaluation, TaskResult

TENSOR_MEMORY = "peak tensor memory per rank, GB"
PROCESS_MEMORY = "peak process memory, libraries included, GB"
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
    "depth_r2": "R² of log depth from the embedding",
    "batch_r2": "share of the embedding explained by the batch",
}
"""Keys of metrics.jsonl and their names, in the order of the page."""
J_PER_KWH = 3.6e6


class Quantity(NamedTuple):
    """Planned and measured value of a quantity; None if unknown."""

    name: str
    planned: Any
    measured: Any


def draw_training(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Figure of the loss of each objective, then of each quantity that any run logged."""
    objectives = {}
    for run in runs:
        options = (run.run_record or {}).get("options", {})
        objectives[run.name] = (options.get("objective") or {}).get("name")
    for objective in dict.fromkeys(objectives.values()):
        # runs of other objectives stay, without points, so that every run keeps its colour
        losses: dict[str, dict[str, figures.Points]] = {run.name: {} for run in runs}
        for run in runs:
            if objectives[run.name] == objective:
                losses[run.name] = {
                    "training": figures.points(run.metric_lines, "loss"),
                    "validation": figures.points(run.metric_lines, "val_loss"),
                }
        if any(any(points_by_kind.values()) for points_by_kind in losses.values()):
            has_several = len({*objectives.values()}) > 1
            title = to_words(f"Loss: {objective}") if has_several else "Loss"
            yield figures.losses(title, losses)
    for key, name in CURVES.items():
        series = {run.name: figures.points(run.metric_lines, key) for run in runs}
        if any(series.values()):
            yield figures.curves(name[0].upper() + name[1:], series, name)


def compare_with_plan(run: ReportedRun) -> list[Quantity]:
    """Quantities of a run that were planned or measured.

    The plan counts tensors, so it is compared with the tensors that a GPU held. The memory of a
    process with its libraries, all that a CPU shows, has a row of its own. Fractions are rounded to
    two digits: times, memory and ranks are not known better.
    """
    plan = run.plan or {}
    status = run.status or {}
    wall_s = status.get("wall_s")
    planned_gb = plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None
    tensors_gb, tensors_rank = _find_peak(run, "peak_allocated_gb")
    process_gb, process_rank = _find_peak(run, "peak_resident_gb")
    fullest_rank = process_rank if tensors_rank is None else tensors_rank
    quantities = [
        Quantity("steps", plan.get("steps"), status.get("step")),
        Quantity("hours", plan.get("hours"), None if wall_s is None else wall_s / 3600),
        Quantity(TENSOR_MEMORY, planned_gb, tensors_gb),
        Quantity(PROCESS_MEMORY, None, process_gb),
        Quantity("rank with the peak memory", None, fullest_rank),
        Quantity("steps skipped as not finite", None, status.get("skipped_steps")),
        Quantity("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        Quantity("processes", plan.get("world_size"), status.get("world_size")),
        *_logged_quantities(run.metric_lines),
    ]
    rounded = []
    for name, planned, measured in quantities:
        if planned is not None or measured is not None:
            rounded.append(Quantity(name, _two_digits(planned), _two_digits(measured)))
    return rounded


def _logged_quantities(lines: Sequence[Mapping[str, Any]]) -> list[Quantity]:
    """Measured quantities over all lines of metrics.jsonl, or from the last one that has them."""
    latest: dict[str, Any] = {}
    for line in lines:
        latest |= line
    rates = [line["cells_per_s"] for line in lines if "cells_per_s" in line]
    waits = [line["data_wait_frac"] for line in lines if "data_wait_frac" in line]
    mean_wait = sum(waits) / len(waits) if waits else None
    effective_rank = latest.get("effective_rank")
    rank_name = "effective rank of the embedding, last validation"
    if effective_rank is not None and effective_rank < COLLAPSED:
        rank_name += ": collapsed to one direction"
    depth_name = "R² of log depth from the embedding, last validation"
    batch_name = "share of the embedding explained by the batch, last validation"
    return [
        Quantity("highest cells/s", None, max(rates, default=None)),
        Quantity("fraction of time waiting for data", None, mean_wait),
        Quantity(rank_name, None, effective_rank),
        Quantity(depth_name, None, latest.get("depth_r2")),
        Quantity(batch_name, None, latest.get("batch_r2")),
    ]


def _find_peak(run: ReportedRun, key: str) -> tuple[float | None, int | None]:
    """Largest value of a list over ranks, in all lines of metrics.jsonl, and its rank."""
    peaks: list[tuple[float, int]] = []
    for line in run.metric_lines:
        peaks += [(gb, rank) for rank, gb in enumerate(line.get(key, []))]
    return max(peaks, default=(None, None))


def _two_digits(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def measure_energy(run: ReportedRun) -> float | None:
    """Energy of a run's training in kWh; None if power was not measured.

    It is the mean power of all GPUs together, times the time spent in training steps.
    """
    watts = [sum(line["gpu_power_w"]) for line in run.metric_lines if line.get("gpu_power_w")]
    seconds = ((run.cost or {}).get("totals") or {}).get("training_s")
    if not watts or not seconds:
        return None
    return sum(watts) / len(watts) * seconds / J_PER_KWH


def describe_cost(run: ReportedRun) -> str | None:
    """GPU-hours of a run, or core-hours if it had no GPU; None before its training has ended."""
    totals = (run.cost or {}).get("totals") or {}
    for key, unit in (("gpu_hours", "GPU-hours"), ("cpu_core_hours", "core-hours")):
        hours = totals.get(key)
        if hours:
            return f"{_two_digits(float(hours)):g} {unit}"
    return None


def draw_checkpoints(run: ReportedRun, dataset: str) -> Iterator[Figure]:
    """Scores of a run's evaluated checkpoints over steps, a figure for each task whose rows a
    metric ranks.

    The last point is the export's. The baseline, a line, is the best one in the export's table.
    """
    exported = run.evaluation
    if exported is None or not run.checkpoint_evaluations:
        return
    exported_step = exported.model.get("step")
    if exported_step is None:
        return
    by_step = {**run.checkpoint_evaluations, exported_step: exported}
    evaluations = dict(sorted(by_step.items()))
    for task, final in exported.datasets[dataset].tasks.items():
        if final.metric is None:
            continue
        series = _scores_by_method(evaluations, dataset, task, final)
        baseline = final.best_row("baseline")
        if baseline is not None:
            value = final.rank_value(baseline)
            ends = (min(evaluations), max(evaluations))
            name = f"{baseline.method.name} (best baseline)"
            series[name] = [(step, value) for step in ends]
        if any(len(points) > 1 for points in series.values()):
            metric = to_words(final.metric)
            title = f"{run.name}, {dataset}, {to_words(task)}: {metric} over steps"
            yield figures.curves(title, series, metric)


def _scores_by_method(
    evaluations: Mapping[int, Evaluation], dataset: str, task: str, final: TaskResult
) -> dict[str, figures.Points]:
    """(step, value) of each of the model's rows; those of the final result come first."""
    series: dict[str, figures.Points] = {}
    for row in final.ranked_rows:
        if row.method.kind == "model":
            series[row.method.name] = []
    for step, evaluation in evaluations.items():
        evaluated = evaluation.datasets.get(dataset)
        result = evaluated and evaluated.tasks.get(task)
        if not result or result.metric != final.metric:
            continue
        for row in result.ranked_rows:
            if row.method.kind == "model":
                point = (step, result.rank_value(row))
                series.setdefault(row.method.name, []).append(point)
    return series
