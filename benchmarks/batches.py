"""What the batch is worth: `batch_column` and strengths of `batch_adversary`, by the workflow.

    python benchmarks/batches.py FOLDER [--datasets cellbench] [--settings none term] [--seeds 3]
        [--steps auto] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `BATCHES`. Family `profile` is trained as in quality.py
without batches (`none`), with a decoder term of each batch (`term`), and with an adversary of a
weight besides. CellBench and Papalexi have technical batches. Those of pbmc68k are its libraries,
the last part of a barcode. Regions of MERFISH and the condition of the stimulated cells are
biology: they show what a wrong column costs. A call with the same `--out` goes on.

The first table has means over seeds, ± their standard deviation: mixing of batches, accuracy of
labels, and the effective rank of the embedding of validation cells. The second has the difference
of each setting from `none`, with the 95 % interval over seeds and repetitions; the third that from
the best baseline, as in quality.py. Verdicts of `integration` and `leave_out` by seed stand below.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import anndata
import numpy as np
from origin import commit, machine
from quality import COLUMNS as ALL_COLUMNS
from quality import DATASETS, MODELS, OWN, TASKS, difference, interval, tasks_of
from workflow_runs import metrics_file, seeded_runs, snakemake, verdicts, write_config

from cellmill.runs.results import TaskResult

BATCHES = {
    "cellbench": "batch",
    "papalexi": "batch",
    "pbmc68k": "library",
    "merfish_mouse": "major_brain_region",
    "kang_wide": "condition",
}
MAX_SEEDS = 3
NONE = "none"
TERM = "term"
SETTINGS = (NONE, TERM, "0.02", "0.05", "0.1", "0.2")
MIXING = ("batch: iLISI", "batch: kBET", "batch: BRAS", "batch: PCR", "bio: label ASW")
COLUMNS = {name: ALL_COLUMNS[name] for name in ("whole", "5 per class")}
NEW_BATCH = "accuracy, new batch"
Tasks = dict[str, TaskResult]


def objective(setting: str) -> dict[str, Any]:
    """Section of a setting."""
    options: dict[str, Any] = {"name": "cell_decoding", "batch_column": None}
    if setting != NONE:
        options["batch_column"] = "batch"
    if setting not in (NONE, TERM):
        options["batch_adversary"] = float(setting)
    return options


def prepare(folder: Path, data: Path, name: str) -> Path:
    """File of a dataset; pbmc68k gets its column `library`."""
    path = (data / f"{name}.h5ad").resolve()
    if name != "pbmc68k":
        return path
    copied = folder / "pbmc68k.h5ad"
    if not copied.exists():
        cells = anndata.read_h5ad(path)
        cells.obs["library"] = [f"library {barcode.split('-')[-1]}" for barcode in cells.obs_names]
        cells.write_h5ad(copied)
    return copied


def write_runs(folder: Path, data: Path, datasets: list[str], steps: int | str) -> None:
    """Write config/ with every setting, so that a later call with others goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["dataset\tpath\tcounts\tlabel\tbatch"]
    corpora: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for name in datasets:
        path = prepare(folder, data, name)
        rows.append(f"{name}\t{path}\tX\t{DATASETS[name]['label']}\t{BATCHES[name]}")
        sections = {key: DATASETS[name].get(key, {}) for key in ("preprocess", "shard")}
        corpora[name] = {"table": "config/datasets.tsv", "datasets": [name], **sections}
        tasks = {task: TASKS[task] for task in ("probe", "few_shot")}
        if name != "kang_wide":  # its label is the batch
            tasks |= {"leave_out": {}, "integration": {"harmony": True}}
        evaluate = DATASETS[name].get("evaluate", {}) | {"tasks": tasks}
        for setting in SETTINGS:
            options = {"corpus": name, "evaluate": evaluate} | MODELS["profile"]
            options["objective"] = objective(setting)
            runs |= seeded_runs(f"{name}-{setting}", options, MAX_SEEDS, steps=steps)
    train = {"schedule": "wsd", "decay_frac": 0.2, "checkpoint_every_steps": 10_000}
    train |= {"global_batch": 32, "warmup_steps": 20, "lr": 5e-3, "val_every_steps": 400}
    write_config(
        folder,
        rows,
        corpora=corpora,
        runs=runs,
        train=train,
        consolidate={"checkpoint": "last"},
    )


def effective_rank(folder: Path, run: str) -> float:
    """Effective rank of the last validation."""
    lines = (folder / f"results/runs/{run}/train/metrics.jsonl").read_text().splitlines()
    ranks = [json.loads(line).get("effective_rank") for line in lines]
    return float([rank for rank in ranks if rank is not None][-1])


def shown(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def mixing(runs: list[Tasks], features: str) -> list[str]:
    """Columns of integration and leave_out of one row."""
    cells = []
    for task, columns in (("integration", MIXING), ("leave_out", (NEW_BATCH,))):
        for column in columns:
            values = []
            for run in runs:
                rows = [] if task not in run or run[task].skipped else run[task].rows
                found = [row.value(column) for row in rows if row.method.features == features]
                known = [value for value in found if value is not None]
                values += [max(known)] if known else []
            cells.append(shown(values) if values else "")
    return cells


def scores(runs: list[Tasks], column: str) -> Any:
    """Repetitions `(seeds, repetitions)` of the best classifier on the embedding."""
    task, key = COLUMNS[column]
    by_method: dict[Any, list[Any]] = {}
    for run in runs:
        if task not in run or run[task].skipped:
            return None
        for row in run[task].rows:
            if key in row.scores and row.method.features in OWN:
                by_method.setdefault(row.method, []).append(row.scores[key].repetitions)
    tables = [np.array(values) for values in by_method.values() if len(values) == len(runs)]
    return max(tables, key=lambda table: float(table.mean())) if tables else None


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, choices=range(1, MAX_SEEDS + 1))
    parser.add_argument(
        "--steps", default="auto", type=lambda text: int(text) if text.isdigit() else text
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="batches-"))
    write_runs(folder, arguments.data, arguments.datasets, arguments.steps)
    names = {
        (dataset, setting): [f"{dataset}-{setting}-{seed}" for seed in range(arguments.seeds)]
        for dataset in arguments.datasets
        for setting in arguments.settings
    }
    targets = [metrics_file(run) for runs in names.values() for run in runs]
    snakemake(folder, targets, arguments.cores)
    print(f"commit {commit()}, {machine()}, {arguments.seeds} seeds\n")
    results = {key: [tasks_of(folder, run, key[0]) for run in runs] for key, runs in names.items()}
    heads = [*MIXING, NEW_BATCH, *COLUMNS]
    print(f"| data | setting | {' | '.join(heads)} | effective rank |")
    print(f"|{'---|' * (len(heads) + 3)}")
    for dataset in arguments.datasets:
        first = results[dataset, arguments.settings[0]]
        for features in ("PCA50", "PCA50 of the training cells", "PCA50, Harmony"):
            print(f"| {dataset} | {features} | {' | '.join(mixing(first, features))} |")
        for setting in arguments.settings:
            runs = results[dataset, setting]
            tables = [scores(runs, column) for column in COLUMNS]
            cells = ["" if t is None else shown([float(v) for v in t.mean(1)]) for t in tables]
            rank = shown([effective_rank(folder, run) for run in names[dataset, setting]])
            row = [*mixing(runs, "embedding"), *cells, rank]
            print(f"| {dataset} | {setting} | {' | '.join(row)} |", flush=True)
    print(
        f"\n| data | setting minus none | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}"
    )
    for dataset in arguments.datasets:
        if NONE not in arguments.settings:
            break
        for setting in arguments.settings:
            if setting == NONE:
                continue
            cells = []
            for column in COLUMNS:
                with_batch = scores(results[dataset, setting], column)
                without = scores(results[dataset, NONE], column)
                if with_batch is None or without is None:
                    cells.append("")
                    continue
                gain = with_batch - without
                mean = float(gain.mean())
                low, high = mean, mean
                if gain.shape[0] > 1:
                    mean, low, high = interval(gain, [(0.0, 10**6)])
                cells.append(f"{mean:+.3f} ({low:+.3f} to {high:+.3f})")
            print(f"| {dataset} | {setting} | {' | '.join(cells)} |", flush=True)
    print(f"\n| data | setting | column | embedding | baseline | difference | |\n|{'---|' * 7}")
    for (dataset, setting), runs in results.items():
        for column in COLUMNS:
            print(difference(dataset, setting, runs, column))
    for (dataset, setting), runs in results.items():
        for task in ("integration", "leave_out"):
            if task in runs[0]:
                print(f"\n{dataset}, {setting}, {task}: {runs[0][task].figures}")
                print("\n".join(verdicts([run[task] for run in runs])))


if __name__ == "__main__":
    main()
