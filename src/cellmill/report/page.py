"""The HTML page (overview, training curves, scores of checkpoints), rendered from the files of
stages. It loads nothing from elsewhere.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.files import span
from cellmill.report import drawing, figures
from cellmill.report.advice import advice
from cellmill.report.collect import ReportedCorpus, ReportedRun, evaluated_datasets
from cellmill.report.ranking import Ranking, Scores, rank, score_tasks
from cellmill.report.tables import (
    best_baselines,
    compare_runs,
    flat,
    gap_of_metric,
    make_grid,
    number,
    reach,
    table_columns,
)
from cellmill.runs.folder import COLLAPSED
from cellmill.runs.results import DatasetResult, Row, TaskResult, Verdict

OUTCOMES = ("ahead", "level", "behind")

CURVES = {  # key of metrics.jsonl and its name, in the order of the page
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
MEASURES = {"n_genes": "genes per cell", "n_counts": "counts per cell", "mito_frac": "mitochondrial fraction",
            "n_residues": "residues per sequence"}  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """A run on one dataset: its best row of the first task that all runs have, and verdicts against
    baselines.
    """

    run: str
    dataset: str
    task: str
    result: TaskResult
    row: Row
    baseline: Row | None  # the best baseline of the task
    difference: Verdict | None  # verdict of the row against it; None if there is none
    verdicts: Sequence[tuple[str, Verdict]]  # (task, verdict against the best baseline)
    ranking: Ranking  # runs of the dataset
    n_runs: int  # runs of the dataset

    @property
    def gap(self) -> str | None:
        """Share of the gap that the row closes, in words, or that there is no scale."""
        gap = gap_of_metric(self.result)
        return None if gap is None else gap.words

    @property
    def best(self) -> bool:
        """True if the run is the best on the dataset, or tied with it."""
        return self.run in self.ranking.best

    @property
    def compared(self) -> str:
        """The tasks that the dataset's runs are compared over, in words; empty for a single run."""
        if self.n_runs == 1 or not self.ranking.tasks:
            return ""
        tasks = ", ".join(map(spaced, self.ranking.tasks))
        noun = "task" if len(self.ranking.tasks) == 1 else "tasks"
        return f" over the {noun} that all have ({tasks})"

    @property
    def exceptions(self) -> str:
        """Tasks in which another run is better than the best run, in words; empty without any."""
        parts = [f"{run} in {spaced(task)} (+{by:.3f})" for run, task, by in self.ranking.ahead]
        if not parts:
            return ""
        return f" Better than it, beyond the interval between runs: {', '.join(parts)}."

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of verdicts by outcome."""
        tally: Counter[str] = Counter(verdict.outcome for _, verdict in self.verdicts)
        return {outcome: tally[outcome] for outcome in OUTCOMES}

    def where(self, outcome: str) -> str:
        """The tasks with verdicts of this outcome, each by its largest difference."""
        by_task: dict[str, list[Verdict]] = {}
        for task, verdict in self.verdicts:
            if verdict.outcome == outcome:
                by_task.setdefault(task, []).append(verdict)
        parts = []
        for task, verdicts in by_task.items():
            largest = max(verdicts, key=lambda verdict: abs(verdict.difference))
            more = f" and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
            parts.append(f"{spaced(task)}: {largest.metric} ({largest.difference:+.3f}){more}")
        return "; ".join(parts)


def spaced(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")


def standings(runs: list[ReportedRun]) -> list[Standing]:
    """Standings of all runs that were evaluated by a task with a metric; `ranking` says which are
    best.
    """
    scores: dict[str, dict[str, Scores]] = {}  # keys are the dataset and the run
    for run, name, dataset in evaluated_datasets(runs):
        task_scores = score_tasks(dataset.tasks)
        if task_scores:
            scores.setdefault(name, {})[run.name] = task_scores
    rankings = {name: rank(by_run) for name, by_run in scores.items()}
    ranked = []
    for run, name, dataset in evaluated_datasets(runs):
        if run.name in scores.get(name, {}):
            ranked.append(_standing(run, name, dataset, rankings[name], len(scores[name])))
    return ranked


def _standing(
    run: ReportedRun, name: str, dataset: DatasetResult, ranking: Ranking, n_runs: int
) -> Standing:
    tasks = dataset.tasks
    rows = {task: result.best_row("model") for task, result in tasks.items()}
    shown = ranking.tasks or [task for task, row in rows.items() if row is not None]
    task = "probe" if "probe" in shown else shown[0]
    result = tasks[task]
    row = rows[task]
    assert row is not None
    # each verdict once, with its first task; the row's own one in the ranking metric is `difference`
    verdicts: dict[tuple[str, str, str, float], tuple[str, Verdict]] = {}
    difference = None
    for task_name, task_result in tasks.items():
        for verdict, columns in task_result.best_verdicts().items():
            key = (verdict.compared, verdict.against, verdict.metric, verdict.difference)
            if key in verdicts:  # two tasks may have the same verdict, as on whole cells
                continue
            verdicts[key] = (task_name, verdict)
            is_of_row = (task_name, verdict.compared) == (task, row.method.name)
            if difference is None and is_of_row and result.metric in {verdict.metric, *columns}:
                difference = verdict
    baseline = result.best_row("baseline")
    if difference is not None:
        rows_by_name = {row.method.name: row for row in result.ranked_rows}
        baseline = rows_by_name[difference.against]
    return Standing(
        run=run.name,
        dataset=name,
        task=task,
        result=result,
        row=row,
        baseline=baseline,
        difference=difference,
        verdicts=[*verdicts.values()],
        ranking=ranking,
        n_runs=n_runs,
    )


def unscored(runs: list[ReportedRun]) -> list[str]:
    """Sentences about evaluations in which every task was skipped."""
    sentences = []
    for run, name, dataset in evaluated_datasets(runs):
        reasons = {spaced(task): result.skipped for task, result in dataset.tasks.items()}
        if None in reasons.values():
            continue
        words = "; ".join(f"{task}: {reason}" for task, reason in reasons.items())
        sentences.append(
            f"{run.name} on {name}: nothing was scored, all {len(reasons)} tasks were skipped "
            f"({words or 'none is configured'})"
        )
    return sentences


def compared_sentences(run: ReportedRun, *outcomes: str) -> list[str]:
    """Sentences of the comparisons with these outcomes, each after its dataset's name."""
    sentences = []
    for outcome in outcomes:
        for _, name, dataset in evaluated_datasets([run]):
            # two tasks may have the same sentence, as on whole cells
            by_sentence: dict[str, str] = {}
            for task in dataset.tasks.values():
                by_sentence |= {verdict.sentence: verdict.outcome for verdict in task.verdicts}
            sentences += [f"{name}: {text}" for text in by_sentence if by_sentence[text] == outcome]
    return sentences


def training_figures(runs: list[ReportedRun]) -> Iterator[drawing.Figure]:
    """The loss of each objective, then each quantity that any run logged."""
    losses = {}
    objectives = {}
    for run in runs:
        losses[run.name] = {
            "training": figures.points(run.lines, "loss"),
            "validation": figures.points(run.lines, "val_loss"),
        }
        options = (run.record or {}).get("options", {})
        objectives[run.name] = (options.get("objective") or {}).get("name")
    different = list(dict.fromkeys(objectives.values()))
    for objective in different:
        # runs of other objectives stay, without points, so that every run keeps its colour
        shown = {
            name: by_kind if objectives[name] == objective else {}
            for name, by_kind in losses.items()
        }
        if any(any(by_kind.values()) for by_kind in shown.values()):
            title = spaced(f"Loss: {objective}") if len(different) > 1 else "Loss"
            yield figures.losses(title, shown)
    for key, name in CURVES.items():
        series = {run.name: figures.points(run.lines, key) for run in runs}
        if any(series.values()):
            yield figures.curves(name[0].upper() + name[1:], series, name)


def planned_and_measured(run: ReportedRun) -> list[tuple[str, Any, Any]]:
    """(quantity, planned, measured) of a run, None if unknown; rows without either are left out.

    The plan counts tensors, so it is compared with the tensors that a GPU held. The memory of a
    process with its libraries, all that a CPU shows, has a row of its own. Fractions are rounded to
    two digits: times, memory and ranks are not known better.
    """
    plan = run.plan or {}
    status = run.status or {}
    latest: dict[str, Any] = {}  # last value of each metric
    for line in run.lines:
        latest |= line
    tensors_gb, tensors_rank = _peak(run, "peak_allocated_gb")
    process_gb, process_rank = _peak(run, "peak_resident_gb")
    fullest_rank = process_rank if tensors_rank is None else tensors_rank
    rates = [line["cells_per_s"] for line in run.lines if "cells_per_s" in line]
    waits = [line["data_wait_frac"] for line in run.lines if "data_wait_frac" in line]
    wall_s = status.get("wall_s")
    hours = None if wall_s is None else wall_s / 3600
    planned_gb = plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None
    effective_rank = latest.get("effective_rank")
    has_collapsed = effective_rank is not None and effective_rank < COLLAPSED
    collapsed = ": collapsed to one direction" if has_collapsed else ""
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", plan.get("hours"), hours),
        ("largest memory of tensors of a rank, GB", planned_gb, tensors_gb),
        ("largest memory of a process with its libraries, GB", None, process_gb),
        ("rank with the largest memory", None, fullest_rank),
        ("steps skipped as not finite", None, status.get("skipped_steps")),
        ("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("highest cells/s", None, max(rates, default=None)),
        ("fraction of time waiting for data", None, sum(waits) / len(waits) if waits else None),
        (f"effective rank of the embedding, last validation{collapsed}", None, effective_rank),
        ("R² of log depth from the embedding, last validation", None, latest.get("depth_r2")),
        (
            "share of the embedding explained by the batch, last validation",
            None,
            latest.get("batch_r2"),
        ),
    ]
    return [
        (quantity, _two_digits(planned), _two_digits(measured))
        for quantity, planned, measured in rows
        if planned is not None or measured is not None
    ]


def _peak(run: ReportedRun, key: str) -> tuple[float | None, int | None]:
    """The largest memory, GB, and its rank."""
    peaks: list[tuple[float, int]] = []
    for line in run.lines:
        peaks += [(gb, rank) for rank, gb in enumerate(line.get(key, []))]
    return max(peaks, default=(None, None))


def _two_digits(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def _energy_kwh(run: ReportedRun) -> float | None:
    """Mean power of all GPUs together times the time in training steps; None if power was not
    measured.
    """
    watts = [sum(line["gpu_power_w"]) for line in run.lines if line.get("gpu_power_w")]
    seconds = ((run.cost or {}).get("totals") or {}).get("training_s")
    if not watts or not seconds:
        return None
    return sum(watts) / len(watts) * seconds / 3.6e6  # joules in a kWh


def _cost(run: ReportedRun) -> str | None:
    """GPU-hours of a run, or core-hours if it had no GPU; None before its training has ended."""
    totals = (run.cost or {}).get("totals") or {}
    for key, unit in (("gpu_hours", "GPU-hours"), ("cpu_core_hours", "core-hours")):
        hours = totals.get(key)
        if hours:
            return f"{_two_digits(float(hours)):g} {unit}"
    return None


def scores_over_steps(run: ReportedRun, dataset: str) -> Iterator[drawing.Figure]:
    """A figure for each task whose rows a metric ranks; none for a run without evaluated
    checkpoints.

    The last point is the export's. The baseline, a line, is the best one in the export's table.
    """
    if not run.kept or run.evaluation is None or run.evaluation.model.get("step") is None:
        return
    by_step = {**run.kept, run.evaluation.model["step"]: run.evaluation}
    evaluations = dict(sorted(by_step.items()))
    for task, final in run.evaluation.datasets[dataset].tasks.items():
        if final.metric is None:
            continue
        series: dict[str, list[tuple[float, float]]] = {
            row.method.name: [] for row in final.ranked_rows if row.method.kind == "model"
        }
        for step, evaluation in evaluations.items():
            evaluated = evaluation.datasets.get(dataset)
            result = evaluated and evaluated.tasks.get(task)
            if not result or result.metric != final.metric:
                continue
            for row in result.ranked_rows:
                if row.method.kind == "model":
                    point = (step, result.rank_value(row))
                    series.setdefault(row.method.name, []).append(point)
        baseline = final.best_row("baseline")
        if baseline is not None:
            value = final.rank_value(baseline)
            ends = (min(evaluations), max(evaluations))
            name = f"{baseline.method.name} (best baseline)"
            series[name] = [(step, value) for step in ends]
        if any(len(points) > 1 for points in series.values()):
            metric = spaced(final.metric)
            title = f"{run.name}, {dataset}, {spaced(task)}: {metric} over steps"
            yield figures.curves(title, series, metric)


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    sweeps: Sequence[Mapping[str, Any]] = (),
    drawings: drawing.Drawings | None = None,
) -> str:
    """The page as HTML; its figures are added to `drawings`. Raises DataError when two runs or
    corpora share a name.
    """
    _refuse_twice("runs", [run.name for run in runs])
    _refuse_twice("corpora", [corpus.name for corpus in corpora])
    environment = Environment(
        loader=PackageLoader("cellmill", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        number=number,
        flat=flat,
        table_columns=table_columns,
        best_baselines=best_baselines,
        grid=make_grid,
        gap=gap_of_metric,
        highest=lambda rows, result: max(rows, key=result.rank_value),
        reach=reach,
        short=lambda digest: str(digest)[:12],
        brief=lambda name: name.replace("logistic regression", "LR"),
        heading=spaced,
        span=lambda seconds: "–" if seconds is None else span(seconds),
        percent=lambda fraction: "–" if fraction is None else f"{100 * fraction:.0f} %",
    )
    ranked = standings(runs)
    outcomes: dict[str, list[str]] = {run.name: [] for run in runs}
    for standing in ranked:
        outcomes[standing.run] += [name for name, n in standing.outcomes.items() if n]
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        sweeps=sweeps,
        standings=ranked,
        unscored=unscored(runs),
        advice={run.name: next(advice(run, outcomes[run.name]), "") for run in runs},
        comparisons=compare_runs(runs),
        supervised={run.name: run.supervised_by for run in runs},
        costs={run.name: _cost(run) for run in runs},
        energy={run.name: _energy_kwh(run) for run in runs},
        behind={run.name: compared_sentences(run, "behind") for run in runs},
        level={run.name: compared_sentences(run, "level", "undecided") for run in runs},
        planned={run.name: planned_and_measured(run) for run in runs},
        training=training_figures(runs),
        measures=MEASURES,
        figures=figures,
        drawings=drawing.Drawings() if drawings is None else drawings,
        labels_in=_frequent_labels,
        over_steps=scores_over_steps,
        style=Markup(drawing.text_of("page.css")),
        scripts=drawing.scripts(),
        allowed=drawing.allowed(),
    )


def _refuse_twice(kind: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"two {kind} are called {twice[0]!r}; rename one of their folders")


def _frequent_labels(cells: list[dict[str, str]], column: str = "label") -> list[str]:
    """Labels, or batches, of a UMAP, the most frequent first."""
    counts = Counter(sorted(cell[column] for cell in cells if cell[column]))
    return [label for label, _ in counts.most_common()]
