"""The HTML page (overview, training curves, scores of checkpoints), rendered from what stages
wrote.

It computes no result and loads nothing from elsewhere.
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
from cellmill.report import figures
from cellmill.report.advice import advice
from cellmill.report.collect import ReportedCorpus, ReportedRun, evaluated_datasets
from cellmill.report.ranking import Scores, rank, scores_of
from cellmill.report.tables import Point, TaskTable, against_best, compare_runs, flat, number, reach
from cellmill.runs.folder import COLLAPSED

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
    metric: str
    row: str
    value: float
    sd: float
    baseline: Point | None  # the best one of the task
    difference: Mapping[str, Any] | None  # verdict of the row against it; None if there is none
    verdicts: Sequence[tuple[str, Mapping[str, Any]]]  # (task, `tables.against_best`)
    gap: str | None  # in words, what the row closes of it, or that there is no scale
    best: bool = False  # of the dataset's runs (`ranking`), or tied for it
    n_runs: int = 1  # of the dataset
    ranked_by: Sequence[str] = ()  # tasks that all of them have
    ahead_of_best: Sequence[tuple[str, str, float]] = ()  # `Ranking.ahead`

    @property
    def compared(self) -> str:
        """The tasks that the dataset's runs are compared over, in words; empty for a single run."""
        tasks = ", ".join(task.replace("_", " ") for task in self.ranked_by)
        return (
            f" over the {'task' if len(self.ranked_by) == 1 else 'tasks'} that all have ({tasks})"
            if tasks
            else ""
        )

    @property
    def exceptions(self) -> str:
        """Where another run is better than the best one, in words; empty if nowhere."""
        parts = [
            f"{run} in {task.replace('_', ' ')} (+{by:.3f})" for run, task, by in self.ahead_of_best
        ]
        return (
            f" Better than it, beyond the interval between runs: {', '.join(parts)}."
            if parts
            else ""
        )

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of verdicts by outcome."""
        tally = Counter(verdict["outcome"] for _, verdict in self.verdicts)
        return {outcome: tally[outcome] for outcome in ("ahead", "level", "behind")}

    def where(self, outcome: str) -> str:
        """The tasks with verdicts of this outcome, each by its largest difference."""
        by_task: dict[str, list[Mapping[str, Any]]] = {}
        for task, verdict in self.verdicts:
            if verdict["outcome"] == outcome:
                by_task.setdefault(task, []).append(verdict)
        parts = []
        for task, verdicts in by_task.items():
            largest = max(verdicts, key=lambda verdict: abs(verdict["difference"]))
            more = f" and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
            parts.append(
                f"{task.replace('_', ' ')}: {largest['metric']} ({largest['difference']:+.3f}){more}"
            )
        return "; ".join(parts)


def standings(runs: list[ReportedRun]) -> list[Standing]:
    """Standings of all runs that were evaluated by a task with a metric; `ranking` says which are
    best.
    """
    scores: dict[str, dict[str, Scores]] = {}  # by dataset and run
    for run, dataset, entry in evaluated_datasets(runs):
        of_run = scores_of(entry["tasks"])
        if of_run:
            scores.setdefault(dataset, {})[run.name] = of_run
    rankings = {dataset: rank(of_runs) for dataset, of_runs in scores.items()}
    found: list[Standing] = []
    for run, dataset, entry in evaluated_datasets(runs):
        tables = {task: TaskTable(result) for task, result in entry["tasks"].items()}
        rows = {
            task: best
            for task, table in tables.items()
            if (best := table.best_of("model")) is not None
        }
        if not rows:
            continue
        ranking = rankings[dataset]
        n_runs = len(scores[dataset])
        shown = ranking.tasks or [*rows]
        task = "probe" if "probe" in shown else shown[0]
        table = tables[task]
        row = rows[task]
        baseline = tables[task].best_of("baseline")
        verdicts: dict[tuple[Any, ...], tuple[str, Mapping[str, Any]]] = {}
        for name, result in entry["tasks"].items():
            for one in against_best(result):  # the same one of two tasks, as of whole cells, is one
                verdicts.setdefault(
                    tuple(one[key] for key in ("compared", "against", "metric", "difference")),
                    (name, one),
                )
        difference = next(
            (one for name, one in verdicts.values()
             if (name, one["compared"]) == (task, row.name) and table.metric in (one["metric"], *one["columns"])),
            None,
        )  # fmt: skip
        if difference is not None:
            baseline = next(
                point for point in table.points() if point.name == difference["against"]
            )
        standing = Standing(
            run=run.name,
            dataset=dataset,
            task=task,
            metric=table.metric,
            row=row.name,
            value=row.value,
            sd=row.sd or 0.0,
            baseline=baseline,
            difference=difference,
            verdicts=[*verdicts.values()],
            gap=table.gap["words"] if table.gap else None,
            best=run.name in ranking.best,
            n_runs=n_runs,
            ranked_by=ranking.tasks if n_runs > 1 else (),
            ahead_of_best=ranking.ahead,
        )
        found.append(standing)
    return found


def unscored(runs: list[ReportedRun]) -> list[str]:
    """Sentences about evaluations in which every task was skipped."""
    found = []
    for run, dataset, entry in evaluated_datasets(runs):
        reasons = {
            task.replace("_", " "): result["skipped"] for task, result in entry["tasks"].items()
        }
        if None in reasons.values():
            continue
        words = (
            "; ".join(f"{task}: {reason}" for task, reason in reasons.items())
            or "none is configured"
        )
        found.append(
            f"{run.name} on {dataset}: nothing was scored, all {len(reasons)} tasks were skipped ({words})"
        )
    return found


def outcomes_of(dataset: Mapping[str, Any]) -> dict[str, str]:
    """Outcome of each comparison of a dataset by its sentence; the same one of two tasks, as of
    whole cells, is one.
    """
    return {
        sentence: verdict["outcome"]
        for result in dataset["tasks"].values()
        for verdict, sentence in zip(result["verdicts"], result["sentences"])
    }


def training_figures(runs: list[ReportedRun]) -> Iterator[figures.Figure]:
    """The loss of each objective, then each quantity that any run logged."""
    kinds = {"training": "loss", "validation": "val_loss"}
    loss = {
        run.name: {of: figures.points(run.lines, key) for of, key in kinds.items()} for run in runs
    }
    objectives = {
        run.name: ((run.record or {}).get("options", {}).get("objective") or {}).get("name")
        for run in runs
    }
    for one in dict.fromkeys(objectives.values()):
        of_it = {name: of if objectives[name] == one else {} for name, of in loss.items()}
        if any(points for of in of_it.values() for points in of.values()):
            yield figures.losses(
                f"Loss: {one}".replace("_", " ") if len({*objectives.values()}) > 1 else "Loss",
                of_it,
            )
    for key, name in CURVES.items():
        series = {run.name: points for run in runs if (points := figures.points(run.lines, key))}
        if series:
            # every run keeps its colour, also where some logged nothing
            everyone = {run.name: series.get(run.name, []) for run in runs}
            yield figures.curves(name[0].upper() + name[1:], everyone, name)


def planned_and_measured(run: ReportedRun) -> list[tuple[str, Any, Any]]:
    """(quantity, planned, measured) of a run, None where unknown; rows without either are left out.

    The plan counts tensors, and is compared with the tensors that a GPU held; a process with its
    libraries, which is what a CPU shows, has a row of its own. Fractions have two digits, as many
    as times, memory and ranks are known to.
    """
    plan = run.plan or {}
    status = run.status or {}
    last = {key: value for line in run.lines for key, value in line.items()}

    def peak(key: str) -> tuple[float | None, int | None]:
        """The largest memory, GB, and its rank."""
        values = [(gb, rank) for line in run.lines for rank, gb in enumerate(line.get(key, []))]
        return max(values, default=(None, None))

    tensors_gb, tensors_rank = peak("peak_allocated_gb")
    process_gb, process_rank = peak("peak_resident_gb")
    fastest = max(
        (line["cells_per_s"] for line in run.lines if "cells_per_s" in line), default=None
    )
    waits = [line["data_wait_frac"] for line in run.lines if "data_wait_frac" in line]
    wall_s = status.get("wall_s")
    planned_gb = plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None
    directions = last.get("effective_rank")
    collapsed = (
        ": collapsed to one direction" if directions is not None and directions < COLLAPSED else ""
    )
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", plan.get("hours"), None if wall_s is None else wall_s / 3600),
        ("largest memory of tensors of a rank, GB", planned_gb, tensors_gb),
        ("largest memory of a process with its libraries, GB", None, process_gb),
        (
            "rank with the largest memory",
            None,
            process_rank if tensors_rank is None else tensors_rank,
        ),
        ("steps skipped as not finite", None, status.get("skipped_steps")),
        ("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("highest cells/s", None, fastest),
        ("fraction of time waiting for data", None, sum(waits) / len(waits) if waits else None),
        (f"effective rank of the embedding, last validation{collapsed}", None, directions),
        ("R² of log depth from the embedding, last validation", None, last.get("depth_r2")),
        (
            "share of the embedding explained by the batch, last validation",
            None,
            last.get("batch_r2"),
        ),
    ]

    def rounded(value: Any) -> Any:
        return float(f"{value:.2g}") if isinstance(value, float) else value

    return [
        (what, rounded(one), rounded(other))
        for what, one, other in rows
        if one is not None or other is not None
    ]


def _energy_kwh(run: ReportedRun) -> float | None:
    """Mean power of all GPUs together times the time in training steps; None where power was not
    measured.
    """
    watts = [sum(line["gpu_power_w"]) for line in run.lines if line.get("gpu_power_w")]
    seconds = ((run.cost or {}).get("totals") or {}).get("training_s")
    return sum(watts) / len(watts) * seconds / 3.6e6 if watts and seconds else None


def _cost(run: ReportedRun) -> str | None:
    """GPU-hours of a run, or core-hours where it had no GPU; None before its training has ended."""
    totals = (run.cost or {}).get("totals") or {}
    for key, unit in (("gpu_hours", "GPU-hours"), ("cpu_core_hours", "core-hours")):
        hours = totals.get(key)
        if hours:
            return f"{float(f'{hours:.2g}'):g} {unit}"
    return None


def scores_over_steps(run: ReportedRun, dataset: str) -> Iterator[figures.Figure]:
    """A figure for each task whose rows a metric ranks; none for a run without evaluated
    checkpoints.

    The last point is the export's. The baseline, a line, is the best one in the export's table.
    """
    last = (run.evaluation or {}).get("model", {}).get("step")
    if not run.kept or run.evaluation is None or last is None:
        return
    evaluations = dict(sorted({**run.kept, last: run.evaluation}.items()))
    for task, result in run.evaluation["datasets"][dataset]["tasks"].items():
        final = TaskTable(result)
        series: dict[str, list[tuple[float, float]]] = {
            row.name: [] for row in final.points() if row.kind == "model"
        }
        for step, evaluation in evaluations.items():
            entry = evaluation["datasets"].get(dataset, {}).get("tasks", {}).get(task)
            if entry is not None and entry["metric"] == final.metric:
                for row in TaskTable(entry).points():
                    if row.kind == "model":
                        series.setdefault(row.name, []).append((step, row.value))
        baseline = final.best_of("baseline")
        if baseline:
            ends = min(evaluations), max(evaluations)
            series[f"{baseline.name} (best baseline)"] = [(step, baseline.value) for step in ends]
        if any(len(points) > 1 for points in series.values()):
            metric = final.metric.replace("_", " ")
            title = f"{run.name}, {dataset}, {task.replace('_', ' ')}: {metric} over steps"
            yield figures.curves(title, series, metric)


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    sweeps: Sequence[Mapping[str, Any]] = (),
    drawings: figures.Drawings | None = None,
) -> str:
    """The page as HTML; its figures are added to `drawings`. Raises DataError when two runs or
    corpora share a name.
    """
    for kind, names in (("runs", [r.name for r in runs]), ("corpora", [c.name for c in corpora])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"two {kind} are called {twice[0]!r}; rename one of their folders")
    environment = Environment(
        loader=PackageLoader("cellmill", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        number=number,
        flat=flat,
        task_table=TaskTable,
        reach=reach,
        short=lambda digest: str(digest)[:12],
        brief=lambda name: name.replace("logistic regression", "LR"),
        heading=lambda key: key.replace("_", " "),
        span=lambda seconds: "–" if seconds is None else span(seconds),
        percent=lambda fraction: "–" if fraction is None else f"{100 * fraction:.0f} %",
    )

    def sentences(run: ReportedRun, *wanted: str) -> list[str]:
        """Sentences of the comparisons with these outcomes, each after its dataset's name."""
        outcomes = [(name, outcomes_of(dataset)) for _, name, dataset in evaluated_datasets([run])]
        return [
            f"{name}: {text}"
            for one in wanted
            for name, of in outcomes
            for text in of
            if of[text] == one
        ]

    def labels(rows: list[dict[str, str]], by: str = "label") -> list[str]:
        """Labels, or batches, of a UMAP, the most frequent first."""
        return [
            label for label, _ in Counter(sorted(row[by] for row in rows if row[by])).most_common()
        ]

    standing = standings(runs)
    outcomes = {
        r.name: [of for one in standing if one.run == r.name for of, n in one.outcomes.items() if n]
        for r in runs
    }
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        sweeps=sweeps,
        standings=standing,
        unscored=unscored(runs),
        advice={r.name: next(advice(r, outcomes[r.name]), "") for r in runs},
        comparisons=compare_runs(runs),
        supervised={r.name: r.supervised_by for r in runs},
        costs={r.name: _cost(r) for r in runs},
        energy={r.name: _energy_kwh(r) for r in runs},
        behind={r.name: sentences(r, "behind") for r in runs},
        level={r.name: sentences(r, "level", "undecided") for r in runs},
        planned={r.name: planned_and_measured(r) for r in runs},
        training=training_figures(runs),
        measures=MEASURES,
        figures=figures,
        drawings=figures.Drawings() if drawings is None else drawings,
        labels_in=labels,
        over_steps=scores_over_steps,
        style=Markup(figures.text_of("page.css")),
        scripts=figures.scripts(),
        allowed=figures.allowed(),
    )
