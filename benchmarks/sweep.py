"""A sweep over corpora: CPU time of each stage, of the report, and of a dry run when all is made.

    python benchmarks/sweep.py [--corpora 4] [--runs 25] [--cells 5000] [--steps 40] [--cores 2]
        [--folder F]

Simulates a file per corpus and sweeps every corpus over `--runs` pairs of a width and a seed, from
the raw file to the report, by the workflow. Each run is trained for a few steps and evaluated by
`probe`. The table has the stages in the order of the workflow; imports are left out, except those
of `train`, whose processes start anew. Exits if a file of a run is missing, or if a dry run after
it would make anything again.
"""

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from origin import commit, machine
from raw_counts import used
from warm import CPU
from workflow_runs import ROOT, commands, metrics_file, snakemake, write_config

WIDTHS = (16, 24, 32, 48, 64)
STAGES = (
    "preprocess",
    "vocabulary",
    "shard",
    "plan",
    "train",
    "consolidate",
    "embed",
    "evaluate",
    "sweep",
    "report",
)
PAGE = "results/report/index.html"


def main() -> None:
    """Run the sweep and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpora", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=25, help="runs of each corpus, of 5 widths")
    parser.add_argument("--cells", type=int, default=5_000, help="of each corpus")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--cores", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keep the project here (default: temporary)")
    arguments = parser.parse_args()
    if arguments.runs % len(WIDTHS):
        parser.error(f"--runs: expected a multiple of {len(WIDTHS)}, got {arguments.runs}")
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}; commit {commit()}; `{command}`")
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        run_sweep(arguments.folder, arguments)
        return
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        run_sweep(Path(folder), arguments)


def run_sweep(folder: Path, arguments: argparse.Namespace) -> None:
    """Make the project in `folder`, every stage of it, and print the table."""
    (folder / CPU).unlink(missing_ok=True)  # costs of an earlier call
    corpora = [f"corpus{number}" for number in range(arguments.corpora)]
    for number, corpus in enumerate(corpora):
        simulate(folder / f"{corpus}.h5ad", arguments.cells, seed=number)
    write_project(folder, corpora, arguments.runs, arguments.steps)

    began = time.monotonic()
    snakemake(folder, ["all"], arguments.cores)
    wall_min = (time.monotonic() - began) / 60
    n_runs = arguments.corpora * arguments.runs
    check_results(folder, n_runs)
    dry_run_s = dry_run(folder)

    print(f"\n{n_runs} runs, {arguments.cells:,} cells a corpus: {wall_min:.1f} minutes\n")
    print("| stage | commands | CPU-s | CPU-s a command | most |")
    print("|---|---:|---:|---:|---:|")
    rows = commands(folder)
    total = 0.0
    for stage in sorted({name for name, _, _ in rows}, key=place):
        seconds = [cpu_s for name, _, cpu_s in rows if name == stage]
        total += sum(seconds)
        mean = sum(seconds) / len(seconds)
        print(
            f"| {stage} | {len(seconds)} | {sum(seconds):.1f} | {mean:.2f} | {max(seconds):.2f} |"
        )
    print(f"| all | {len(rows)} | {total:.1f} | | |")
    page_mb = (folder / PAGE).stat().st_size / 1e6
    print(f"\nreport: {page_mb:.2f} MB; results: {used(folder / 'results') / 1e9:.2f} GB")
    print(f"dry run with nothing to do: {dry_run_s:.1f} CPU-s; load {os.getloadavg()[0]:.1f}")


def place(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def simulate(path: Path, n_cells: int, seed: int) -> None:
    """Write simulated counts, unless they are there."""
    if path.exists():
        return
    command = [sys.executable, "-m", "cellmill.cli", "simulate", "--out", str(path)]
    command += ["--cells", str(n_cells), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_project(folder: Path, corpora: list[str], runs_per_corpus: int, steps: int) -> None:
    """Write the table of datasets and a configuration with one sweep per corpus."""
    seeds = list(range(runs_per_corpus // len(WIDTHS)))
    rows = ["dataset\tpath\tlabel\tbatch"]
    rows += [f"{corpus}\t{folder.resolve() / corpus}.h5ad\tcell_type\tbatch" for corpus in corpora]
    over: dict[str, Any] = {"model.hidden": list(WIDTHS), "train.seed": seeds}
    sweeps = {corpus: {"run": {"corpus": corpus}, "over": over} for corpus in corpora}
    write_config(
        folder,
        rows,
        corpora={
            corpus: {"table": "config/datasets.tsv", "datasets": [corpus]} for corpus in corpora
        },
        model={"family": "profile", "layers": 1},
        train={
            "steps": steps,
            "global_batch": 64,
            "token_budget": 131_072,
            "warmup_steps": 5,
            "lr": 5e-3,
            "val_every_steps": steps,
            "val_cells": 200,
        },
        evaluate={"tasks": {"probe": {"seeds": 1}}},
        runs={},
        sweep=sweeps,
    )


def check_results(folder: Path, n_runs: int) -> None:
    """Exit if a run has no metrics, or the report does not name it."""
    names = [path.name for path in (folder / "results" / "runs").iterdir()]
    if len(names) != n_runs:
        sys.exit(f"{len(names)} runs were made, {n_runs} expected")
    page = (folder / PAGE).read_text(encoding="utf-8")
    for name in names:
        if not (folder / metrics_file(name)).exists() or name not in page:
            sys.exit(f"{name} was not evaluated, or is not in the report")


def dry_run(folder: Path) -> float:
    """CPU-seconds of `snakemake -n`. Exits if anything would be made again."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    done = subprocess.run(
        [*command, "--cores", "1", "--dry-run", "all"], cwd=folder, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or not re.search("Nothing to be done", done.stdout + done.stderr):
        sys.exit(f"the dry run would make something again:\n{(done.stdout + done.stderr)[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
