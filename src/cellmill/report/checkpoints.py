"""Charts of a run's evaluated checkpoints: scores of each task over steps."""

from collections.abc import Iterator, Mapping

from cellmill.report.collect import ReportedRun
from cellmill.report.drawing.chart import Chart
from cellmill.report.drawing.curves import StepValues, make_curves_chart
from cellmill.report.text import to_words
from cellmill.runs.results import Evaluation


def make_checkpoint_charts(run: ReportedRun, dataset_name: str) -> Iterator[tuple[str, Chart]]:
    """(heading, chart) of each task on a dataset that ranks its rows by a metric.

    A chart has a curve for each row of the model, over the steps of the evaluated checkpoints and
    of the exported model. A horizontal line is the exported model's best baseline. Tasks with fewer
    than two evaluated steps have no chart.
    """
    exported = run.evaluation
    exported_step = run.evaluated_model.step
    if exported is None or exported_step is None or not run.checkpoint_evaluations:
        return
    by_step = {**run.checkpoint_evaluations, exported_step: exported}
    evaluations = dict(sorted(by_step.items()))
    for task, exported_result in exported.datasets[dataset_name].tasks.items():
        metric = exported_result.metric
        if metric is None:
            continue
        curves = _list_scores_by_method(evaluations, dataset_name, task, metric)
        if all(len(points) < 2 for points in curves.values()):
            continue
        baseline = exported_result.best_baseline(metric)
        if baseline is not None:
            value = exported_result.rank_value(baseline)
            name = f"{baseline.method.name} (best baseline)"
            curves[name] = [(min(evaluations), value), (max(evaluations), value)]
        metric_words = to_words(metric)
        heading = f"{to_words(task)}: {metric_words} over steps"
        title = f"{run.name}, {dataset_name}, {heading}"
        yield heading, make_curves_chart(title, curves, metric_words)


def _list_scores_by_method(
    evaluations: Mapping[int, Evaluation], dataset_name: str, task: str, metric: str
) -> dict[str, StepValues]:
    """Curve of each row of the model, by name of the row. `evaluations` are in order of steps."""
    curves: dict[str, StepValues] = {}
    for step, evaluation in evaluations.items():
        dataset_result = evaluation.datasets.get(dataset_name)
        result = dataset_result.tasks.get(task) if dataset_result else None
        if result is None or result.metric != metric:
            continue
        for row in result.ranked_rows:
            if row.method.kind == "model":
                point = (step, result.rank_value(row))
                curves.setdefault(row.method.name, []).append(point)
    return curves
