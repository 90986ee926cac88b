"""Runs of a benchmark by the workflow: their common options, the call of Snakemake, and tables of
the results.
"""

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from warm import CPU, warm_commands

from cellmill.runs import results
from cellmill.runs.results import TaskResult

ROOT = Path(__file__).resolve().parents[1]
SECTIONS: dict[str, dict[str, Any]] = {
    "shard": {"val_frac": 0.1, "test_frac": 0.3},
    "tokens": {"tokenizer": "continuous", "max_tokens": 512},
    "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
    "train": {"global_batch": 32, "token_budget": 32768, "warmup_steps": 20, "lr": 5e-3}
    | {"val_every_steps": 100, "val_cells": 100},
}
"""Options of small models on two cores."""


def write_config(folder: Path, table: Iterable[str], **sections: Any) -> None:
    """Write config/datasets.tsv, its lines given without their ends, and config/config.yaml beside
    it.
    """
    (folder / "config").mkdir(parents=True, exist_ok=True)
    write(folder / "config" / "datasets.tsv", "".join(f"{line}\n" for line in table))
    without_anchors = json.loads(json.dumps(SECTIONS | sections))
    write(folder / "config" / "config.yaml", yaml.safe_dump(without_anchors, sort_keys=False))


def write(path: Path, text: str) -> None:
    """Write, unless the file has this text: results made from a newer one would be made again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def seeded_runs(
    name: str, options: dict[str, Any], seeds: int, **train: Any
) -> dict[str, dict[str, Any]]:
    """Runs `name-0`, `name-1`, ...: a run's `options` with each seed of the training."""
    return {
        f"{name}-{seed}": options | {"train": options.get("train", {}) | train | {"seed": seed}}
        for seed in range(seeds)
    }


def snakemake(folder: Path, targets: Sequence[str], cores: int) -> None:
    """Make `targets` in `folder`, each stage on one core, as many at once as there are cores. Exits
    if it fails.

    Stages are forked from one process, so Snakemake's benchmark files have their seconds, but not
    their CPU time.
    """
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--quiet",
        "all",
    ]
    # the default one takes a third of a core
    command += ["--cores", str(cores), "--scheduler", "greedy"]
    command += [
        "--set-threads",
        "train=1",
        "plan=1",
        "embed=1",
        "evaluate=1",
        "predict=1",
        "--set-resources",
    ]
    command += ["train:nproc_per_node=1", "train:cpus_per_task=1", "--"]
    log = folder / "snakemake.log"
    with open(log, "w") as file, warm_commands() as environment:
        done = subprocess.run(
            [*command, *targets], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        sys.exit(f"the workflow failed; see {log}")


def metrics_file(run: str) -> str:
    return f"results/runs/{run}/evaluate/metrics.json"


def result(folder: Path, run: str, dataset: str, task: str) -> TaskResult:
    """Result of one task. Exits if it was skipped: a benchmark asks for no task that its data
    cannot have.
    """
    evaluation = results.read(folder / metrics_file(run))
    task_result = evaluation.datasets[dataset].tasks[task]
    if task_result.skipped:
        sys.exit(f"{run}: {task} was skipped: {task_result.skipped}")
    return task_result


def commands(folder: Path) -> list[tuple[str, str, float]]:
    """Stage, `--out` and CPU-seconds of each command in `folder`, without imports, except those of
    `train`.
    """
    with open(folder / CPU, newline="") as file:
        rows = [*csv.reader(file, delimiter="\t")]
    return [(stage, out, float(seconds)) for stage, out, seconds in rows]


def cpu_seconds(folder: Path, stage: str = "", out: str = "") -> float:
    """CPU-seconds of all commands in `folder`, or of those of a stage with this `--out`."""
    return sum(
        seconds
        for name, path, seconds in commands(folder)
        if (name, path) == (stage, out) or not stage
    )


def row_table(by_title: dict[str, list[TaskResult]]) -> list[str]:
    """All rows and columns of one task: means over the runs of each title, ± the standard deviation
    over them.
    """
    columns = list(
        dict.fromkeys(name for runs in by_title.values() for run in runs for name in _columns(run))
    )
    lines = [f"| data | row | {' | '.join(columns)} |", f"|---|---|{'---:|' * len(columns)}"]
    for title, runs in by_title.items():
        for name in dict.fromkeys(row.method.name for run in runs for row in run.rows):
            cells = " | ".join(_over_runs(runs, name, column) for column in columns)
            lines.append(f"| {title} | {name} | {cells} |")
    return lines


def tables(by_title: dict[str, list[TaskResult]]) -> list[str]:
    """`row_table`, then the figures of each title's first run and the verdicts of each seed."""
    lines = row_table(by_title)
    for title, runs in by_title.items():
        lines += ["", f"{title}: {runs[0].figures}", *verdicts(runs)]
    return lines


def _columns(run: TaskResult) -> list[str]:
    names = []
    for row in run.rows:
        names += [name for name, score in row.scores.items() if score.mean is not None]
        names += row.numbers
    return names


def _over_runs(runs: list[TaskResult], name: str, column: str) -> str:
    rows = [row for run in runs for row in run.rows if row.method.name == name]
    values = [value for row in rows if (value := row.value(column)) is not None]
    if not values:
        return ""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f}" + (f" ± {spread:.3f}" if spread >= 0.0005 else "")


def verdicts(runs: list[TaskResult]) -> list[str]:
    """Sentences of each seed."""
    return [
        f"- seed {seed}: {sentence}" for seed, run in enumerate(runs) for sentence in run.sentences
    ]
