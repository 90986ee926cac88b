"""Curves of training, all runs overlaid, and what was planned beside what was measured."""

from collections.abc import Iterator
from typing import Any

from cellmill.report import figures
from cellmill.report.collect import ReportedRun, largest_memory
from cellmill.runs.metrics import COLLAPSED

CURVES = {
    "effective_rank": "effective rank of the embedding",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "cells_per_s": "cells per second",
    "data_wait_frac": "fraction of time waiting for data",
    "mfu": "model FLOPs utilisation",
    "peak_allocated_gb": "largest memory of tensors of a rank, GB",
    "peak_resident_gb": "largest memory of a process, GB",
    "gpu_busy_frac": "use of the busiest GPU",
    "depth_r2": "R² of log depth from the embedding",
    "batch_r2": "share of the embedding explained by the batch",
}
"""Key of metrics.jsonl and its name, in the order of the page."""


def training_figures(runs: list[ReportedRun]) -> Iterator[figures.Figure]:
    """The loss, then each quantity that any run logged. A comparison of losses needs the same objective and corpus."""
    kinds = {"training": "loss", "validation": "val_loss"}
    loss = {run.name: {of: figures.points(run.lines, key) for of, key in kinds.items()} for run in runs}
    if any(points for of in loss.values() for points in of.values()):
        yield figures.losses("Loss", loss)
    for key, name in CURVES.items():
        series = {run.name: points for run in runs if (points := figures.points(run.lines, key))}
        if series:
            # every run keeps its colour, also where some logged nothing
            everyone = {run.name: series.get(run.name, []) for run in runs}
            yield figures.curves(name[0].upper() + name[1:], everyone, name)


def planned_and_measured(run: ReportedRun) -> list[tuple[str, Any, Any]]:
    """(quantity, planned, measured) of a run, None where unknown; rows without either are left out.

    The plan counts tensors, and is compared with the tensors that a GPU held; a process with its libraries, which is
    what a CPU shows, has a row of its own.
    """
    plan, status = run.plan or {}, run.status or {}
    fastest = max((line["cells_per_s"] for line in run.lines if "cells_per_s" in line), default=None)
    tensors, of_tensors = largest_memory(run.lines, "peak_allocated_gb") or (None, None)
    process, of_process = largest_memory(run.lines, "peak_resident_gb") or (None, None)
    waits = [line["data_wait_frac"] for line in run.lines if "data_wait_frac" in line]
    wall_s = status.get("wall_s")
    planned_gb = plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None
    directions = _last(run.lines, "effective_rank")
    collapsed = ": collapsed to one direction" if directions is not None and directions < COLLAPSED else ""
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", _rounded(plan.get("hours")), None if wall_s is None else _rounded(wall_s / 3600)),
        ("largest memory of tensors of a rank, GB", _rounded(planned_gb), _rounded(tensors)),
        ("largest memory of a process with its libraries, GB", None, _rounded(process)),
        ("rank with the largest memory", None, of_process if of_tensors is None else of_tensors),
        ("steps skipped as not finite", None, status.get("skipped_steps")),
        ("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("highest cells/s", None, _rounded(fastest)),
        ("fraction of time waiting for data", None, _rounded(sum(waits) / len(waits)) if waits else None),
        (f"effective rank of the embedding, last validation{collapsed}", None, _rounded(directions)),
        ("R² of log depth from the embedding, last validation", None, _rounded(_last(run.lines, "depth_r2"))),
        ("share of the embedding explained by the batch, last validation", None,
         _rounded(_last(run.lines, "batch_r2"))),
    ]  # fmt: skip
    return [row for row in rows if row[1] is not None or row[2] is not None]


def energy_kwh(run: ReportedRun) -> float | None:
    """Mean power of all GPUs together times the time in training steps; None where power was not measured."""
    watts = [sum(line["gpu_power_w"]) for line in run.lines if line.get("gpu_power_w")]
    seconds = ((run.cost or {}).get("totals") or {}).get("training_s")
    return sum(watts) / len(watts) * seconds / 3.6e6 if watts and seconds else None


def _rounded(value: Any) -> Any:
    """Two significant digits, as many as times, memory and ranks are known to."""
    return float(f"{value:.2g}") if isinstance(value, float) else value


def _last(lines: list[dict[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if key in line), None)
