"""Clusters and batches of embeddings, and the seconds of every task: four labelled datasets x
seeds, by the workflow.

    python benchmarks/structure.py FOLDER [--datasets cellbench] [--seeds 3] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `quality.DATASETS`. Family `profile` is trained as in
quality.py; its held-out cells are clustered, and where there is a batch column their mixing is
measured, beside Harmony (extras `cluster` and `integrate`). The first seed has all tasks of
labelled cells with their default options, for the seconds and for the cells per second of `embed`.
Figures are means over pretraining seeds, ± their standard deviation; below each table stand the
verdicts of each seed.
"""

import argparse
import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from origin import commit, machine
from quality import DATASETS, MODELS
from workflow_runs import (
    cpu_seconds,
    metrics_file,
    result,
    seeded_runs,
    snakemake,
    tables,
    write_config,
)

from cellmill.runs.results import TaskResult

BATCHES = {"cellbench": "batch", "papalexi": "batch"}
TASKS: dict[str, dict[str, Any]] = {"clustering": {}, "integration": {"harmony": True}}
ALL_TASKS: dict[str, dict[str, Any]] = TASKS | {
    name: {}
    for name in (
        "probe",
        "few_shot",
        "leave_out",
        "low_depth",
        "missing_genes",
        "reconstruct",
        "throughput",
    )
}


def write_runs(folder: Path, data: Path, datasets: list[str], seeds: int) -> dict[str, list[str]]:
    """Write config/; returns the runs of each dataset."""
    rows = ["dataset\tpath\tcounts\tlabel\tbatch"]
    corpora = {}
    made = {}
    for name in datasets:
        of = DATASETS[name]
        rows.append(
            f"{name}\t{(data / name).resolve()}.h5ad\tX\t{of['label']}\t{BATCHES.get(name, '')}"
        )
        sections = {section: of.get(section, {}) for section in ("preprocess", "shard")}
        corpora[name] = {"table": "config/datasets.tsv", "datasets": [name], **sections}
        options = {"corpus": name, "evaluate": {"tasks": TASKS}} | MODELS["profile"]
        made[name] = seeded_runs(name, options, seeds, steps=400, checkpoint_every_steps=400)
        made[name][f"{name}-0"]["evaluate"] = {"tasks": ALL_TASKS}
    runs = {run: options for of in made.values() for run, options in of.items()}
    write_config(folder, rows, corpora=corpora, runs=runs)
    return {name: [*of] for name, of in made.items()}


def seconds(folder: Path, run: str, dataset: str) -> str:
    """Row of the table of seconds: of each task, and of the whole stage."""
    found = {
        task: result(folder, run, dataset, task) for task in ALL_TASKS if task in _tasks(dataset)
    }
    tasks = [f"{found[task].figures['seconds']:.1f}" if task in found else "" for task in ALL_TASKS]
    with open(folder / "results" / "benchmarks" / "evaluate" / f"{run}.tsv", newline="") as file:
        whole = next(csv.DictReader(file, delimiter="\t"))
    embed = found["throughput"].rows[0].numbers
    cells = found["probe"].figures["n_cells"]
    stage = f"{float(whole['s']):.0f} | {cpu_seconds(folder, 'evaluate', metrics_file(run)):.0f}"
    speed = f"{embed['cells per s']:,.0f} | {embed['peak memory, GB']:.2f}"
    return f"| {dataset} | {cells:,} | {speed} | {' | '.join(tasks)} | {stage} |"


def _tasks(dataset: str) -> list[str]:
    return [
        task for task in ALL_TASKS if dataset in BATCHES or task not in ("integration", "leave_out")
    ]


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="structure-"))
    made = write_runs(folder, given.data, given.datasets, given.seeds)
    snakemake(folder, [metrics_file(run) for runs in made.values() for run in runs], given.cores)
    print(
        f"`python benchmarks/structure.py {' '.join(sys.argv[1:])}`, commit {commit()}, {machine()}"
    )
    for task in TASKS:
        results: dict[str, list[TaskResult]] = {
            name: [result(folder, run, name, task) for run in runs]
            for name, runs in made.items()
            if task in _tasks(name)
        }
        print(f"\n## {task}\n")
        print("\n".join(tables(results)))
    heads = ["data", "cells", "embed, cells/s", "peak GB", *ALL_TASKS, "stage, s", "stage, CPU-s"]
    print(f"\n## Seconds\n\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    print("\n".join(seconds(folder, runs[0], name) for name, runs in made.items()))


if __name__ == "__main__":
    main()
