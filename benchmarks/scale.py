"""A corpus from gzipped counts to the report at several sizes: what each stage takes, and how it
grows.

Writes simulated raw counts with 20 obs columns, of which 5 are unique texts, in one file or in
several. Runs every stage on them as the workflow would, for a `profile` and an `encoder` of few
steps: `preprocess` to `shard`, `train`, `consolidate`, `embed`, `evaluate` and `report`. The first
table has a row for each stage; its memory is that of the largest process. The second table compares
the largest size with the smallest: the exponent is the logarithm of the ratio of CPU-seconds over
that of the ratio of cells, and 1 is linear. Memory is extrapolated to a million cells on a straight
line, which is too high if the smallest size does not fill a shard. What misses a goal (1.0, and 2
GB) is in bold.

A million cells take 20 GB of disk. Files of a size are removed before the next size.

    python benchmarks/scale.py --cells 10000 100000 --files 1 8
"""

import argparse
import math
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from origin import commit, machine
from raw_counts import GENES, used, write_raw

MAX_EXPONENT = 1.0
MAX_MB = 2_000
CONFIG = """
corpora: {scale: {table: datasets.tsv}}
stream: {lanes: 8}
train: {steps: 20, global_batch: 256, token_budget: 65536, val_cells: 512, log_every_steps: 10}
evaluate: {tasks: {probe: {seeds: 1}, reconstruct: {}}}
runs:
  profile:
    corpus: scale
    tokens: {max_tokens: 4096}
    model: {family: profile, hidden: 64, layers: 1}
  encoder:
    corpus: scale
    tokens: {max_tokens: 64}
    model: {family: encoder, hidden: 32, layers: 1, heads: 2}
"""
INPUTS = "(writing the raw files)"
FAMILIES = ("profile", "encoder")  # the runs
COLUMNS = "dataset\tpath\tlabel\tbatch\tdonor"
UNIT = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss is in bytes there, in KB elsewhere
# a process starts with the peak memory of the one that forked it, so a small one has to
MEASURE = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


@dataclass(frozen=True)
class Cost:
    """Cost of the commands of a stage."""

    cpu_s: float
    wall_s: float
    peak_mb: float  # of the largest process
    written_gb: float = 0.0


@dataclass
class Project:
    """A folder in which stages run as in the workflow, and their costs."""

    folder: Path
    costs: dict[str, Cost] = field(default_factory=dict)  # by stage

    def run(self, name: str, written: str, commands: Iterable[list[str]]) -> None:
        """Run the commands of a stage one after another, print a row, and keep their cost.

        `written` is what they write, of which the bytes are counted.
        """
        parts = [measured(self.folder, command) for command in commands]
        self.add(
            name,
            Cost(
                cpu_s=sum(part.cpu_s for part in parts),
                wall_s=sum(part.wall_s for part in parts),
                peak_mb=max(part.peak_mb for part in parts),
                written_gb=used(self.folder / written) / 1e9,
            ),
        )

    def add(self, name: str, cost: Cost) -> None:
        """Print a row of the table, and keep the cost."""
        self.costs[name] = cost
        peak = bold(f"{cost.peak_mb:,.0f}", cost.peak_mb > MAX_MB)
        numbers = f"{cost.cpu_s:,.1f} | {cost.wall_s:,.0f} | {peak} | {cost.written_gb:.3f}"
        print(f"| {name} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--cells", type=int, nargs="+", default=[100_000, 1_000_000], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--files", type=int, nargs="+", default=[1, 8], help="raw files (default: %(default)s)"
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="(default: both)"
    )
    parser.add_argument(
        "--detected",
        type=int,
        default=3_000,
        help="genes drawn for a cell, of which two thirds differ (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on a large disk (default: that of temporary files)"
    )
    arguments = parser.parse_args()
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}; commit {commit()}; `{command}`")
    for n_files in arguments.files:
        by_size = {}
        for cells in sorted(arguments.cells):
            with tempfile.TemporaryDirectory(prefix="scale-", dir=arguments.folder) as folder:
                print(f"\n{cells:,} cells x {GENES:,} genes, files: {n_files}\n")
                print("| stage | CPU-s | wall s | peak MB of a process | GB written |")
                print("|---|---:|---:|---:|---:|", flush=True)
                project = Project(Path(folder))
                run_stages(project, cells, n_files, arguments.detected, arguments.families)
                by_size[cells] = project.costs
            print(f"\nload {os.getloadavg()[0]:.1f}")
        print_growth(by_size, n_files)


def run_stages(
    project: Project, cells: int, n_files: int, detected: int, families: Iterable[str]
) -> None:
    """Run all stages of a corpus of `cells` in `n_files`."""
    folder = project.folder
    names = [f"part{number}" for number in range(n_files)]
    write_inputs(project, names, cells, detected)
    shared = ["--config", "config.yaml", "--corpus", "scale"]
    corpus = "results/corpora/scale"
    prepared = [f"{corpus}/cells/{name}.h5ad" for name in names]
    commands = []
    for name, out in zip(names, prepared):
        columns = ["--label=type", "--batch=batch", "--donor=donor"]
        files = ["--out", out, "--report", f"{corpus}/cells/{name}.json"]
        raw = ["--input", f"{name}.h5ad", "--dataset", name]
        commands.append(["preprocess", *shared, *raw, *columns, *files])
    project.run("preprocess", f"{corpus}/cells", commands)
    vocabulary = f"{corpus}/vocabulary.tsv"
    command = ["vocabulary", *shared, "--cells", *prepared, "--out", vocabulary]
    project.run("vocabulary", vocabulary, [command])
    manifest = f"{corpus}/shards/manifest.json"
    command = ["shard", *shared, "--cells", *prepared, "--vocabulary", vocabulary]
    project.run("shard", f"{corpus}/shards", [[*command, "--out", manifest]])
    for family in families:
        run_family(project, family, names, prepared)
    page = "results/report/index.html"
    runs = [f"results/runs/{family}" for family in families]
    command = ["report", "--config", "config.yaml", "--runs", *runs, "--corpora", corpus]
    project.run("report", page, [[*command, "--out", page]])
    assert (folder / page).exists()


def run_family(project: Project, family: str, names: list[str], prepared: list[str]) -> None:
    """Run the stages of a run, from its plan to its evaluation."""
    shared = ["--config", "config.yaml", "--run", family]
    corpus = "results/corpora/scale"
    run = f"results/runs/{family}"
    vocabulary = f"{corpus}/vocabulary.tsv"
    manifest = f"{corpus}/shards/manifest.json"
    command = ["plan", *shared, "--manifest", manifest, "--out", f"{run}/plan.json"]
    project.run(f"plan, {family}", f"{run}/plan.json", [command])
    command = ["train", *shared, "--manifest", manifest, "--vocabulary", vocabulary]
    command += ["--out", f"{run}/train", "--nproc-per-node", "2"]
    project.run(f"train, {family}", f"{run}/train", [command])
    command = ["consolidate", *shared, "--train", f"{run}/train", "--vocabulary", vocabulary]
    project.run(f"consolidate, {family}", f"{run}/model", [[*command, "--out", f"{run}/model"]])
    model = ["--model", f"{run}/model"]
    embeddings = [f"{run}/embeddings/{name}.h5ad" for name in names]
    commands = []
    for path, out in zip(prepared, embeddings):
        commands.append(["embed", *shared, *model, "--input", path, "--out", out])
    project.run(f"embed, {family}", f"{run}/embeddings", commands)
    command = ["evaluate", *shared, *model, "--manifest", manifest, "--cells", *prepared]
    command += ["--embeddings", *embeddings, "--labels", *["type"] * len(names)]
    command += ["--baselines", f"{corpus}/baselines", "--out", f"{run}/evaluate/metrics.json"]
    project.run(f"evaluate, {family}", f"{run}/evaluate", [command])


def write_inputs(project: Project, names: list[str], cells: int, detected: int) -> None:
    """Write the raw files, the table of datasets and the configuration."""
    folder = project.folder
    began = time.monotonic()
    cpu_s = time.process_time()
    for number, name in enumerate(names):
        first = number * cells // len(names)
        last = (number + 1) * cells // len(names)
        write_raw(folder / f"{name}.h5ad", last - first, detected, number, all_columns=True)
    project.add(
        INPUTS,
        Cost(
            cpu_s=time.process_time() - cpu_s,
            wall_s=time.monotonic() - began,
            peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / UNIT,
            written_gb=used(folder) / 1e9,
        ),
    )
    rows = [f"{name}\t{name}.h5ad\ttype\tbatch\tdonor" for name in names]
    (folder / "datasets.tsv").write_text("\n".join([COLUMNS, *rows, ""]))
    (folder / "config.yaml").write_text(CONFIG)


def measured(folder: Path, words: list[str]) -> Cost:
    """Run a sub-command to its end; exits with its last lines if it fails."""
    began = time.monotonic()
    command = [sys.executable, "-m", "cellmill.cli", *words]
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURE, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    status, cpu_s, peak = map(float, last.split())
    if status:
        sys.exit("\n".join([f"{words[0]} failed:", *lines[-20:]]))
    return Cost(cpu_s, time.monotonic() - began, peak / UNIT)


def print_growth(by_size: dict[int, dict[str, Cost]], n_files: int) -> None:
    """Print how each stage grows from the smallest size to the largest."""
    smallest = min(by_size)
    largest = max(by_size)
    if smallest == largest:
        return
    print(f"\nfrom {smallest:,} to {largest:,} cells, files: {n_files}\n")
    print("| stage | exponent | MB at a million cells |")
    print("|---|---:|---:|")
    for stage, small in by_size[smallest].items():
        if stage == INPUTS:
            continue
        large = by_size[largest][stage]
        exponent = math.log(large.cpu_s / small.cpu_s) / math.log(largest / smallest)
        per_cell = (large.peak_mb - small.peak_mb) / (largest - smallest)
        peak_mb = large.peak_mb + per_cell * (1_000_000 - largest)
        power = bold(f"{exponent:.2f}", exponent > MAX_EXPONENT)
        print(f"| {stage} | {power} | {bold(f'{peak_mb:,.0f}', peak_mb > MAX_MB)} |")
    for size, costs in by_size.items():
        cpu_min = sum(cost.cpu_s for cost in costs.values()) / 60
        wall_min = sum(cost.wall_s for cost in costs.values()) / 60
        print(f"\n{size:,} cells: {cpu_min:.1f} CPU-minutes, {wall_min:.1f} minutes")


def bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


if __name__ == "__main__":
    main()
