"""Charts of a run's evaluated checkpoints. They show the scores in each task over training steps."""

from collections.abc import Iterator, Mapping

from cellmill.report.collect import ReportedRun
from cellmill.report.drawing.chart import Chart
from cellmill.report.drawing.curves import StepValues, make_curves_chart
from cellmill.report.text import to_words
from cellmill.runs.results import Evaluation


def make_checkpoint_charts(run: ReportedRun, dataset_name: str) -> Iterator[tuple[str, Chart]]:
    """Make (heading, chart) for each task on a dataset, over the evaluated steps of a run.

    The evaluated steps are the steps of the evaluated checkpoints and of the exported model. A
    chart has a curve for each row of the model. A horizontal line shows the best baseline in the
    evaluation of the exported model. A task has no chart if no metric ranks its rows, or if all its
    curves have fewer than two points.
    """
    exported_evaluation = run.evaluation
    exported_step = run.evaluated_model.step
    if exported_evaluation is None or exported_step is None or not run.evaluation_by_step:
        return
    by_step = {**run.evaluation_by_step, exported_step: exported_evaluation}
    evaluation_by_step = dict(sorted(by_step.items()))
    for task, exported_result in exported_evaluation.datasets[dataset_name].tasks.items():
        metric = exported_result.metric
        if metric is None:
            continue
        points_by_name = _list_points_by_method(evaluation_by_step, dataset_name, task, metric)
        if all(len(points) < 2 for points in points_by_name.values()):
            continue
        # the best baseline is a horizontal line from the first step to the last
        baseline = exported_result.best_baseline(metric)
        if baseline is not None:
            value = exported_result.rank_value(baseline)
            name = f"{baseline.method.name} (best baseline)"
            ends = min(evaluation_by_step), max(evaluation_by_step)
            points_by_name[name] = [(step, value) for step in ends]
        metric_words = to_words(metric)
        heading = f"{to_words(task)}: {metric_words} over steps"
        title = f"{run.name}, {dataset_name}, {heading}"
        yield heading, make_curves_chart(title, points_by_name, metric_words)


def _list_points_by_method(
    evaluation_by_step: Mapping[int, Evaluation], dataset_name: str, task: str, metric: str
) -> dict[str, StepValues]:
    """List the points (step, score) of each row of the model, by name of the row.

    `evaluation_by_step` is in ascending order of steps. Steps at which the task was not scored in
    this metric are left out.
    """
    points_by_method: dict[str, StepValues] = {}
    for step, evaluation in evaluation_by_step.items():
        dataset_result = evaluation.datasets.get(dataset_name)
        result = dataset_result.tasks.get(task) if dataset_result else None
        if result is None or result.metric != metric:
            continue
        for row in result.ranked_rows:
            if row.method.kind == "model":
                point = (step, result.rank_value(row))
                points_by_method.setdefault(row.method.name, []).append(point)
    return points_by_method
