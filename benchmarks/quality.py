"""Which model is worth having: datasets x models and objectives x seeds, trained and evaluated by
the workflow.

    python benchmarks/quality.py FOLDER [--datasets pbmc68k] [--models profile-thin] [--seeds 3] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `DATASETS`. A configuration with a run for every dataset,
model and seed is written to `--out` (default: a temporary folder) and given to Snakemake, so a
table that was interrupted goes on where it stopped. Above the table stand the minutes of this call,
and the CPU-minutes of all stages. Every figure is of held-out cells, from each run's metrics.json:
accuracy of logistic regression (on standardised features or on features as they are, the better
one) and of kNN on whole cells, with 5 training cells per class, at 10 % of the counts and with 75
genes (trained on whole cells, and on cells of all levels), and the correlation over cells of hidden
genes with their predictions (by ridge or the model's decoder, and by kNN), means over seeds.
Baselines are the same for every model of a dataset; the first model's are shown. A model called
supervised was trained with the labels of the training cells. CPU seconds are those of stage
`train`, start of Python included.

The second table has, for each model and column, the best classifier on the embedding minus the best
baseline under any classifier, with the 95 % interval over pretraining seeds, repetitions of folds
or draws, and cells: the sum of their variances, Student's quantile, Satterthwaite's degrees of
freedom. The part of the cells is that of a single run, an upper bound. With one seed the interval
says nothing of other seeds.

The third table is time to quality of `profile`: CPU-seconds of stage train until the mean over
seeds and three columns (whole, 5 per class, 75 genes) reaches that of a baseline, and is a point
(.01) above both. Shorter trainings leave the run of a seed before its learning rate decays.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from origin import commit
from scipy.stats import t as student
from workflow_runs import SECTIONS, cpu_seconds, metrics_file, seeded_runs, snakemake, write_config

from cellmill.runs import results
from cellmill.runs.results import ScoredMethod, TaskResult

DATASETS: dict[str, dict[str, Any]] = {
    "pbmc68k": {"label": "bulk_labels", "preprocess": {"min_genes": 50}},
    "merfish_mouse": {"label": "cell_type", "preprocess": {"organism": "mouse", "min_genes": 5}},
    # whole transcriptomes: with more tokens, models with attention would take more than half of the
    # table's time
    "cellbench": {"label": "cell_type", "preprocess": {}, "tokens": {"max_tokens": 256}},
    "kang_wide": {"label": "condition", "preprocess": {}, "tokens": {"max_tokens": 256}},
    # 20,720 cells of 26 perturbations: more to judge on, or more folds, would take most of the
    # table's time
    "papalexi": {
        "label": "perturbation",
        "preprocess": {"min_genes": 20},
        "shard": {"test_frac": 0.05},
        "evaluate": {"folds": 3},
    },
}
PROFILE = {"family": "profile", "hidden": 128, "layers": 1}
ALL_GENES = {"max_tokens": 2**15}  # of family profile, whose rows are cells
ENCODER = {"family": "encoder", "hidden": 64, "layers": 2, "heads": 4}
DECODING = {"name": "cell_decoding"}
# as good as Muon without attention, at half the time
ADAMW = {"optimizer": "adamw", "token_budget": 2**20}
LABEL = "<label>"  # stands for the label column of the dataset
# of the decoder: from the checkpoint that predicts hidden genes of validation cells best
CHOSEN = {
    "ema_decay": 0.998,
    "best_metric": "val_hidden_genes",
    "best_mode": "max",
    "early_stop_patience": 4,
    "val_every_steps": 50,
    "val_cells": 500,
}
SUPERVISED = {
    "name": "sum",
    "parts": {"cell_decoding": {}, "supervised_contrastive": {"label_column": LABEL}},
}
SUM = {
    "name": "sum",
    "parts": {"cell_decoding": {}, "masked_value": {"weight": 0.3, "renormalize": True}},
}
MODELS: dict[str, dict[str, Any]] = {
    "profile": {"model": PROFILE, "objective": DECODING, "tokens": ALL_GENES, "train": ADAMW},
    "profile-supervised": {
        "model": PROFILE,
        "objective": SUPERVISED,
        "tokens": ALL_GENES,
        "train": ADAMW,
    },
    "encoder0": {
        "model": ENCODER | {"layers": 0},
        "objective": DECODING,
        "train": ADAMW | {"lr": 1e-2},
    },
    "encoder2": {"model": ENCODER, "objective": DECODING},
}
OTHERS: dict[str, dict[str, Any]] = {
    "profile-chosen": {
        "model": PROFILE,
        "objective": DECODING,
        "tokens": ALL_GENES,
        "train": ADAMW | CHOSEN,
        "consolidate": {"checkpoint": "best"},
    },
    "profile-thin": {
        "model": PROFILE,
        "objective": DECODING | {"view": "thin"},
        "tokens": ALL_GENES,
        "train": ADAMW,
    },
    "profile-drop": {
        "model": PROFILE,
        "objective": DECODING | {"view": "drop"},
        "tokens": ALL_GENES,
        "train": ADAMW,
    },
    "encoder2-nb": {"model": ENCODER, "objective": DECODING | {"likelihood": "nb"}},
    "encoder2-sum": {"model": ENCODER, "objective": SUM},
    "encoder2-masked-value": {"model": ENCODER, "objective": {"name": "masked_value"}},
    "encoder2-masked-gene": {"model": ENCODER, "objective": {"name": "masked_gene"}},
    "autoencoder": {
        "model": ENCODER | {"family": "autoencoder"},
        "objective": {"name": "query_decoding"},
    },
    "autoregressive": {
        "model": ENCODER | {"family": "autoregressive"},
        "objective": {"name": "next_gene"},
    },
}
"""Models that only `--models` names: the last four alone would take two thirds of the time, and are
far behind.
"""
TEACHER = "<run of>"  # stands before the name of a model: its run of the dataset with seed 0
SMALL = PROFILE | {"hidden": 16}


def _student(model: dict[str, Any], teacher: str) -> dict[str, Any]:
    parts = {"cell_decoding": {}, "distill": {"teacher": f"{TEACHER}{teacher}"}}
    return {
        "model": model,
        "objective": {"name": "sum", "parts": parts},
        "tokens": ALL_GENES,
        "train": ADAMW,
    }


STUDENTS: dict[str, dict[str, Any]] = {
    "profile-16": {"model": SMALL, "objective": DECODING, "tokens": ALL_GENES, "train": ADAMW},
    "profile-16-by-profile": _student(SMALL, "profile"),
    "profile-16-by-encoder2": _student(SMALL, "encoder2"),
    "profile-by-encoder2": _student(PROFILE, "encoder2"),
}
"""Models that only `--models` names, for docs/quality.md, and with their teacher."""
NAMED = MODELS | OTHERS | STUDENTS
STEPS: dict[str, int | str] = {"profile": "auto", "encoder0": 400}
"""Optimizer steps by the first part of a model's name; 250 for models with attention, which take
about the time of `profile` on hundreds of genes and half of it on whole transcriptomes.
"""
TASKS: dict[str, dict[str, Any]] = {
    "probe": {"seeds": 5, "neighbors": 5},  # some classes have fewer than 15 cells
    "few_shot": {"shots": [5], "draws": 20},
    "low_depth": {"count_fracs": [0.1], "repeats": 8},
    "missing_genes": {"genes": [75], "repeats": 8},
    "imputation": {"seeds": 1},
}
COLUMNS = {
    "whole": ("probe", "accuracy"),
    "5 per class": ("few_shot", "5 per class"),
    "10 % of counts": ("low_depth", "10 % of counts, shifted"),
    "10 % of counts, all levels": ("low_depth", "10 % of counts, trained on all levels"),
    "75 genes": ("missing_genes", "75 genes, shifted"),
    "75 genes, all levels": ("missing_genes", "75 genes, trained on all levels"),
    "hidden genes": ("imputation", "Pearson by gene"),
}
CLASSIFIERS = {
    "LR": (
        "logistic regression",
        "logistic regression, unscaled",
        "ridge",
        "ridge, unscaled",
        "decoder",
        "decoder + ridge",
    ),
    "kNN": ("kNN", "kNN, unscaled"),
}
BASELINES = (
    "all genes",
    "all genes of the panel",
    "PCA50 of the training cells",
    "PCA50 of the training cells, CP1k",
    "PCA50 of thinned cells",
    "PCA50 of the panel",
    "PCA50",
    "PCA50 of visible genes",
    "PCA50 of all genes",
    "rank-z genes, ANOVA",
)
SCORED = ("whole", "5 per class", "75 genes")
"""The columns of time to quality."""
SCORED_TASKS = {task: TASKS[task] for task, _ in (COLUMNS[column] for column in SCORED)}
BARS = ("PCA50 of the training cells", "all genes")
TIMED = "profile"
LENGTHS = (200, 400, 800)
DECAY = 0.2
# no baseline finds Papalexi's perturbations
TIMED_DATASETS = ("pbmc68k", "merfish_mouse", "cellbench", "kang_wide")
OWN = ("embedding", "embedding of the panel")
"""Features of the model's rows."""
UNITS = {"imputation": "hidden_genes"}
"""What the intervals of a task are over, of the figures in metrics.json; cells of the others."""
Lengths = dict[int, list[str]]
"""Runs of all seeds by their steps; the shorter ones leave the longest."""
Tasks = dict[str, TaskResult]
"""Results of the tasks of one run on its dataset, from metrics.json."""


def write_runs(
    folder: Path, data: Path, datasets: list[str], models: list[str], seeds: int
) -> list[str]:
    """Write config/; returns the files that Snakemake has to make."""
    rows = [
        f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name]['label']}" for name in datasets
    ]
    corpora: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for dataset in datasets:
        sections = {name: DATASETS[dataset].get(name, {}) for name in ("preprocess", "shard")}
        corpora[dataset] = {"table": "config/datasets.tsv", "datasets": [dataset], **sections}
        for model in models:
            own = {name: DATASETS[dataset].get(name, {}) for name in ("tokens", "evaluate")}
            options = {"corpus": dataset, **own, **_of_dataset(NAMED[model], dataset)}
            steps = STEPS.get(model.partition("-")[0], 250)
            lengths = LENGTHS if model == TIMED and dataset in TIMED_DATASETS else ()
            for name, run in seeded_runs(f"{dataset}-{model}", options, seeds, steps=steps).items():
                runs |= with_shorter(name, run, lengths)
    train = {"optimizer": "muon", "schedule": "wsd", "decay_frac": DECAY}
    train |= {"checkpoint_every_steps": 10_000, "val_every_steps": 400}
    others = {
        "train": SECTIONS["train"] | train,
        "consolidate": {"checkpoint": "last"},
        "evaluate": {"tasks": TASKS},
    }
    table = ["dataset\tpath\tcounts\tlabel", *rows]
    write_config(folder, table, corpora=corpora, runs=runs, **others)
    return [metrics_file(run) for run in runs]


def shorter(runs: list[str], lengths: Sequence[int]) -> Lengths:
    return {steps: [f"{run}-{steps}" for run in runs] for steps in lengths}


def with_shorter(
    name: str, run: dict[str, Any], lengths: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """A run, and shorter trainings that leave it for their decay, `NAME-STEPS`, evaluated in
    `SCORED`.
    """
    leave = {steps: round((1 - DECAY) * steps) for steps in lengths}
    runs = {name: run | {"train": run["train"] | {"keep_steps": [*leave.values()]}}}
    for steps, at in leave.items():
        branch = {"trunk": name, "trunk_step": at, "train": run["train"] | {"steps": steps}}
        runs[f"{name}-{steps}"] = (
            run | branch | {"evaluate": run.get("evaluate", {}) | {"tasks": SCORED_TASKS}}
        )
    return runs


def _of_dataset(value: Any, dataset: str) -> Any:
    """The options with the dataset's label column where `LABEL` stands, and its runs where
    `TEACHER` does.
    """
    if isinstance(value, dict):
        return {key: _of_dataset(part, dataset) for key, part in value.items()}
    if isinstance(value, str) and value.startswith(TEACHER):
        return f"{dataset}-{value.removeprefix(TEACHER)}-0"
    return DATASETS[dataset]["label"] if value == LABEL else value


def tasks_of(folder: Path, run: str, dataset: str) -> Tasks:
    """Results of a run's tasks."""
    return results.read(folder / metrics_file(run)).datasets[dataset].tasks


def repetitions(runs: list[Tasks], column: str) -> dict[ScoredMethod, np.ndarray]:
    """Accuracies `(runs, repetitions)` of one column."""
    task, key = COLUMNS[column]
    tables = []
    for run in runs:
        rows = [row for row in run[task].rows if key in row.scores]
        tables.append({row.method: row.scores[key].repetitions for row in rows})
    return {method: np.array([table[method] for table in tables]) for method in tables[0]}


def steps_of(folder: Path, run: str) -> int:
    return int(json.loads((folder / f"results/runs/{run}/plan.json").read_text())["steps"])


def train_seconds(folder: Path, run: str) -> float:
    return cpu_seconds(folder, "train", f"results/runs/{run}/train")


def best(folder: Path, dataset: str, runs: list[str], features: str) -> list[float]:
    """Accuracy in each of `SCORED` of the best classifier on some features, mean over runs."""
    tasks = [tasks_of(folder, run, dataset) for run in runs]
    columns = [repetitions(tasks, column) for column in SCORED]
    return [
        max(v.mean() for method, v in values.items() if method.features == features)
        for values in columns
    ]


def time_to_quality(folder: Path, dataset: str, runs: Lengths) -> list[str]:
    """CPU-seconds until the mean of `SCORED` reaches each of `BARS`, and a point above both."""
    trunks = runs[max(runs)]
    longest = max(runs)
    own = {
        steps: statistics.fmean(train_seconds(folder, run) for run in names)
        for steps, names in runs.items()
    }
    shared = {
        steps: own[longest] * round((1 - DECAY) * steps) / longest
        for steps in runs
        if steps < longest
    }
    means = {
        steps: statistics.fmean(best(folder, dataset, names, "embedding"))
        for steps, names in runs.items()
    }
    bars = [statistics.fmean(best(folder, dataset, trunks, features)) for features in BARS]
    seconds = {steps: f"{own[steps] + shared.get(steps, 0):.0f}" for steps in sorted(runs)}
    goals = (*bars, max(bars) + 0.01)
    return [
        next((seconds[steps] for steps in seconds if means[steps] >= goal), "not reached")
        for goal in goals
    ]


def table(folder: Path, dataset: str, models: dict[str, list[Tasks]]) -> list[str]:
    """Rows of one dataset: baselines, then models."""
    lines = [row(dataset, name, next(iter(models.values())), name) for name in BASELINES]
    for model, runs in models.items():
        seconds = statistics.median(
            train_seconds(folder, f"{dataset}-{model}-{seed}") for seed in range(len(runs))
        )
        lines.append(row(dataset, f"{model}, untrained", runs, "untrained"))
        lines.append(row(dataset, f"**{model}**", runs, "embedding", f"{seconds:.0f}"))
        lines.append(row(dataset, f"**{model}**, of the panel", runs, "embedding of the panel"))
    return lines


def row(dataset: str, title: str, runs: list[Tasks], features: str, seconds: str = "") -> str:
    """One row: for each column, accuracy of both kinds of classifiers, mean over runs."""
    cells = []
    for values in (repetitions(runs, column) for column in COLUMNS):
        for names in CLASSIFIERS.values():
            means = [
                accuracies.mean()
                for method, accuracies in values.items()
                if method.features == features and method.classifier in names
            ]
            cells.append(f"{max(means):.3f}" if means else "")
    return f"| {dataset} | {title} | {' | '.join(cells)} | {seconds} |"


def difference(dataset: str, model: str, runs: list[Tasks], column: str) -> str:
    """Row of the second table: the embedding's best classifier minus the best baseline, with its
    interval.
    """
    values = repetitions(runs, column)
    if not values:
        return f"| {dataset} | {model} | {column} | | | | |"
    ranked = sorted(values, key=lambda name: -values[name].mean())
    own = next(method for method in ranked if method.features in OWN)
    other = next(method for method in ranked if method.kind == "baseline")
    mean, low, high = interval(
        values[own] - values[other], [cells_part(run, column, own, other) for run in runs]
    )
    outcome = "ahead" if low > 0 else "behind" if high < 0 else "level"
    named = replace(own, supervised="").name
    shown = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"| {dataset} | {model} | {column} | {named} | {other.name} | {shown} | {outcome} |"


def cells_part(
    run: Tasks, column: str, own: ScoredMethod, other: ScoredMethod
) -> tuple[float, int]:
    """Variance of the mean difference over cells, and the number of cells, in one run."""
    task, key = COLUMNS[column]
    entry = next(
        line
        for line in run[task].differences
        if (line.column, line.compared, line.against) == (key, own.name, other.name)
    )
    return entry.cells_se**2, run[task].figures[UNITS.get(task, "n_cells")]


def interval(differences: np.ndarray, cells: list[tuple[float, int]]) -> tuple[float, float, float]:
    """Mean of `(seeds, repetitions)` differences and its 95 % interval."""
    parts = [(statistics.mean(variance for variance, _ in cells), cells[0][1])]
    for axis in (0, 1):
        means = differences.mean(axis=1 - axis)
        if len(means) > 1:
            parts.append((means.var(ddof=1) / len(means), len(means)))
    variance = sum(part for part, _ in parts)
    mean = float(differences.mean())
    if not variance:
        return mean, mean, mean
    half = (
        student.ppf(0.975, variance**2 / sum(part**2 / (n - 1) for part, n in parts))
        * variance**0.5
    )
    return mean, mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--models", nargs="+", choices=NAMED, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="quality-"))
    targets = write_runs(
        folder, arguments.data, arguments.datasets, arguments.models, arguments.seeds
    )
    started = time.monotonic()
    snakemake(folder, targets, arguments.cores)
    minutes = (time.monotonic() - started) / 60
    cpu_minutes = cpu_seconds(folder) / 60
    print(
        f"`python benchmarks/quality.py {' '.join(sys.argv[1:])}`, commit {commit()}, {platform.machine()}"
    )
    print(f"{minutes:.0f} minutes; {cpu_minutes:.0f} CPU-minutes of all stages\n")
    titles = [f"{column}: {classifier}" for column in COLUMNS for classifier in CLASSIFIERS]
    print(f"| data | features | {' | '.join(titles)} | CPU-s |\n|{'---|' * (len(titles) + 3)}")
    by_dataset = {
        dataset: {
            model: [
                tasks_of(folder, f"{dataset}-{model}-{seed}", dataset)
                for seed in range(arguments.seeds)
            ]
            for model in arguments.models
        }
        for dataset in arguments.datasets
    }
    for dataset, models in by_dataset.items():
        print("\n".join(table(folder, dataset, models)), flush=True)
    print(
        f"\n| data | model | column | best on the embedding | best baseline | difference | |\n|{'---|' * 7}"
    )
    for dataset, models in by_dataset.items():
        for model, runs in models.items():
            print(
                "\n".join(difference(dataset, model, runs, column) for column in COLUMNS),
                flush=True,
            )
    print(f"\n| data | {' | '.join(BARS)} | one point above both |\n|{'---|' * 4}")
    for dataset in TIMED_DATASETS:
        if TIMED in by_dataset.get(dataset, {}):
            trunks = [f"{dataset}-{TIMED}-{seed}" for seed in range(arguments.seeds)]
            runs = shorter(trunks, LENGTHS) | {steps_of(folder, trunks[0]): trunks}
            print(
                f"| {dataset} | {' | '.join(time_to_quality(folder, dataset, runs))} |", flush=True
            )


if __name__ == "__main__":
    main()
