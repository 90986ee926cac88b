"""Scores of kept checkpoints over the steps of a training, beside the best baseline."""

from collections.abc import Iterator
from typing import Any

from cellmill.report import figures
from cellmill.report.collect import ReportedRun
from cellmill.report.tables import TaskTable

Points = list[tuple[float, float]]


def scores_over_steps(run: ReportedRun, dataset: str) -> Iterator[figures.Figure]:
    """A figure for each task whose rows a metric ranks; none for a run without evaluated checkpoints.

    The last point is that of the export. The baseline is the best row of the export's table: a line.
    """
    last = (run.evaluation or {}).get("model", {}).get("step")
    if not run.kept or run.evaluation is None or last is None:
        return
    evaluations = dict(sorted({**run.kept, last: run.evaluation}.items()))
    for task, result in run.evaluation["datasets"][dataset]["tasks"].items():
        final = TaskTable(result)
        series: dict[str, Points] = {name: [] for name, _, _, kind in final.points() if kind == "model"}
        for step, evaluation in evaluations.items():
            for name, value in _values(evaluation, dataset, task, final.metric).items():
                series.setdefault(name, []).append((step, value))
        baselines = [(value, name) for name, value, _, kind in final.points() if kind == "baseline"]
        if baselines:
            value, name = max(baselines)
            series[f"{name} (best baseline)"] = [(min(evaluations), value), (max(evaluations), value)]
        if any(len(points) > 1 for points in series.values()):
            metric = final.metric.replace("_", " ")
            yield figures.curves(
                f"{run.name}, {dataset}, {task.replace('_', ' ')}: {metric} over steps", series, metric
            )


def _values(evaluation: dict[str, Any], dataset: str, task: str, metric: str) -> dict[str, float]:
    """The metric of each row of the model; empty if the evaluation lacks the task, or ranks by another metric."""
    result = evaluation["datasets"].get(dataset, {}).get("tasks", {}).get(task)
    if result is None or result["metric"] != metric:
        return {}
    return {name: value for name, value, _, kind in TaskTable(result).points() if kind == "model"}
