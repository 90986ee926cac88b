"""Which model is worth having: datasets x models and objectives x seeds, trained and evaluated by the workflow.

    python benchmarks/quality.py FOLDER [--datasets pbmc68k] [--models profile-thin] [--seeds 3] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `DATASETS`. A configuration with a run for every dataset, model and seed is
written to `--out` (default: a temporary folder) and given to Snakemake, so a table that was interrupted goes on where
it stopped. Every figure is of held-out cells, from each run's metrics.json: accuracy of logistic regression and of kNN
on whole cells, with 5 training cells per class, at 10 % of the counts and with 75 genes (trained on whole cells), means
over seeds. Baselines are the same for every model of a dataset but for their folds; the first model's are shown. CPU
seconds are those of stage `train`, start of Python included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DATASETS: dict[str, dict[str, Any]] = {
    "pbmc68k": {"label": "bulk_labels", "preprocess": {"min_genes": 50}},
    "merfish_mouse": {"label": "cell_type", "preprocess": {"organism": "mouse", "min_genes": 5}},
    "cellbench": {"label": "cell_type", "preprocess": {}},
    "papalexi": {"label": "perturbation", "preprocess": {"min_genes": 20}},
}
ENCODER = {"family": "encoder", "hidden": 64, "heads": 4}
PROFILE = {"family": "profile", "hidden": 128, "layers": 1}
DROP, THIN = {"name": "cell_decoding", "view": "drop"}, {"name": "cell_decoding", "view": "thin"}
MODELS: dict[str, dict[str, Any]] = {
    "profile-thin": {"model": PROFILE, "objective": THIN, "train": {"lr": 5e-3}},
    "profile-drop": {"model": PROFILE, "objective": DROP, "train": {"lr": 5e-3}},
    "profile-drop-all": {"model": PROFILE, "objective": DROP | {"target": "all"}, "train": {"lr": 5e-3}},
    "encoder0-thin": {"model": ENCODER | {"layers": 0}, "objective": THIN, "train": {"lr": 1e-2}},
    "encoder2-thin": {"model": ENCODER | {"layers": 2}, "objective": THIN, "train": {"lr": 3e-3}},
    "encoder2-drop": {"model": ENCODER | {"layers": 2}, "objective": DROP, "train": {"lr": 3e-3}},
    "encoder2-masked-value": {"model": ENCODER | {"layers": 2}, "objective": {"name": "masked_value"}},
    "encoder2-masked-gene": {"model": ENCODER | {"layers": 2}, "objective": {"name": "masked_gene"}},
}
COLUMNS = {
    "whole": ("probe", "accuracy"),
    "5 per class": ("few_shot", "5 per class"),
    "10 % of counts": ("low_depth", "10 % of counts, shifted"),
    "75 genes": ("missing_genes", "75 genes, shifted"),
}
CLASSIFIERS = ("logistic regression", "kNN")


def write_config(folder: Path, data: Path, datasets: list[str], models: list[str], seeds: int) -> list[str]:
    """Write config/; returns the files that Snakemake has to make."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    rows = [f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name]['label']}\n" for name in datasets]
    (folder / "config" / "datasets.tsv").write_text("dataset\tpath\tcounts\tlabel\n" + "".join(rows))
    corpora, runs = {}, {}
    for dataset in datasets:
        preprocess = DATASETS[dataset]["preprocess"]
        corpora[dataset] = {"table": "config/datasets.tsv", "datasets": [dataset], "preprocess": preprocess}
        for model in models:
            for seed in range(seeds):
                options = MODELS[model]
                train = options.get("train", {}) | {"seed": seed}
                runs[f"{dataset}-{model}-{seed}"] = {"corpus": dataset, **options, "train": train}
    tree = {
        "corpora": corpora,
        "shard": {"val_frac": 0.1, "test_frac": 0.3},
        "tokens": {"tokenizer": "continuous", "max_tokens": 1024},
        "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
        "train": {"steps": 400, "global_batch": 32, "token_budget": 32768, "warmup_steps": 20, "lr": 3e-3}
        | {"val_every_steps": 100, "val_cells": 200, "checkpoint_every_steps": 400},
        "evaluate": {"tasks": {"probe": {}, "few_shot": {}, "low_depth": {}, "missing_genes": {}}},
        "runs": runs,
    }
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return [f"results/runs/{run}/evaluate/metrics.json" for run in runs]


def accuracies(folder: Path, run: str, dataset: str) -> dict[tuple[str, str, str], float]:
    """Accuracy by column, features and classifier of one run."""
    metrics = json.loads((folder / "results" / "runs" / run / "evaluate" / "metrics.json").read_text())
    tasks = metrics["datasets"][dataset]["tasks"]
    found = {}
    for column, (task, key) in COLUMNS.items():
        for row in tasks[task]["rows"]:
            features, _, classifier = row["name"].partition(" + ")
            if classifier in CLASSIFIERS and row.get(f"{key}_mean") is not None:
                found[column, features.split(" of the")[0], classifier] = row[f"{key}_mean"]
    return found


def cpu_seconds(folder: Path, run: str) -> float:
    """CPU time of stage `train`, from Snakemake's benchmark file."""
    with open(folder / "results" / "benchmarks" / "train" / f"{run}.tsv", newline="") as file:
        return float(next(csv.DictReader(file, delimiter="\t"))["cpu_time"])


def table(folder: Path, dataset: str, models: list[str], seeds: int) -> list[str]:
    """Rows of one dataset: baselines, then models."""
    of_model = {
        model: [accuracies(folder, f"{dataset}-{model}-{seed}", dataset) for seed in range(seeds)] for model in models
    }
    baselines = ("all genes", "all genes, trained on all levels", "PCA50")
    lines = [row(dataset, name, of_features(of_model[models[0]], name)) for name in baselines]
    for model, runs in of_model.items():
        seconds = statistics.median(cpu_seconds(folder, f"{dataset}-{model}-{seed}") for seed in range(seeds))
        lines.append(row(dataset, f"{model}, untrained", of_features(runs, "untrained")))
        lines.append(row(dataset, f"**{model}**", of_features(runs, "embedding"), f"{seconds:.0f}"))
    return lines


def of_features(runs: list[dict[tuple[str, str, str], float]], name: str) -> list[dict[tuple[str, str, str], float]]:
    """Accuracies of one kind of features in each run."""
    return [{key: value for key, value in run.items() if key[1] == name} for run in runs]


def row(dataset: str, name: str, runs: list[dict[tuple[str, str, str], float]], seconds: str = "") -> str:
    """One row: for each column, accuracy of both classifiers, mean over runs."""
    cells = []
    for column in COLUMNS:
        for classifier in CLASSIFIERS:
            values = [v for run in runs for (c, _, k), v in run.items() if (c, k) == (column, classifier)]
            cells.append(f"{statistics.mean(values):.3f}" if values else "")
    return f"| {dataset} | {name} | {' | '.join(cells)} | {seconds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="quality-"))
    targets = write_config(folder, arguments.data, arguments.datasets, arguments.models, arguments.seeds)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--quiet", "all"]
    command += ["--cores", str(arguments.cores), "--set-threads", "train=1", "plan=1", "--set-resources"]
    command += ["train:nproc_per_node=1", "train:cpus_per_task=1", "plan:nproc_per_node=1", "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = folder / "snakemake.log"
    with open(log, "w") as file:
        done = subprocess.run([*command, *targets], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"the workflow failed; see {log}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    print(f"`python benchmarks/quality.py {' '.join(sys.argv[1:])}`, commit {commit.strip()}, {platform.machine()}\n")
    titles = [f"{column}: {'LR' if k == 'logistic regression' else k}" for column in COLUMNS for k in CLASSIFIERS]
    print(f"| data | features | {' | '.join(titles)} | CPU-s |\n|{'---|' * (len(titles) + 3)}")
    for dataset in arguments.datasets:
        print("\n".join(table(folder, dataset, arguments.models, arguments.seeds)), flush=True)


if __name__ == "__main__":
    main()
