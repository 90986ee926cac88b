"""A corpus that does not fit in memory, from raw files to the first training steps.

Writes files of simulated raw counts, gzipped float32 CSR, and runs `preprocess`, `vocabulary`,
`shard` and 50 steps of `train` on them as the workflow would. Prints, stage by stage, CPU time,
wall time, the peak memory of the largest process and the bytes on disk. With a million cells of
1,000 genes it takes 15 GB of disk, which are freed at the end.

    python benchmarks/million.py --cells 1000000
"""

import argparse
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from origin import commit, machine
from raw_counts import GENES, used, write_raw

CONFIG = """
corpora: {million: {table: datasets.tsv}}
tokens: {max_tokens: 1024}
stream: {lanes: 8}
model: {family: profile, hidden: 128}
train: {steps: 50, global_batch: 256, token_budget: 65536, val_cells: 512, log_every_steps: 10}
runs: {million: {corpus: million}}
"""
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
    """Cost of a stage; memory is that of its largest process."""

    stage: str
    wall_s: float
    cpu_s: float
    peak_mb: float
    written_gb: float = 0.0

    def print(self, cells: int) -> None:
        """Print a line of the table."""
        numbers = (cells / self.cpu_s, self.wall_s / 60, self.peak_mb)
        speed, minutes, peak = (
            f"{number:,.{digits}f}" for number, digits in zip(numbers, (0, 1, 0))
        )
        fields = self.stage, f"{self.cpu_s:,.0f}", speed, minutes, peak, f"{self.written_gb:.2f}"
        print("|", " | ".join(fields), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--files", type=int, default=8, help="raw files (default: %(default)s)")
    parser.add_argument(
        "--detected", type=int, default=1_000, help="genes of a cell, about (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on a large disk (default: that of temporary files)"
    )
    arguments = parser.parse_args()
    print(f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`")
    print(f"{arguments.cells:,} cells x {GENES:,} genes in {arguments.files} files\n")
    print(
        "| stage | CPU-seconds | cells per CPU-second | minutes | peak MB of a process | GB written |"
    )
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="cellmill-million-", dir=arguments.folder) as name:
        folder = Path(name)
        raw = [folder / f"raw{number}.h5ad" for number in range(arguments.files)]
        began = time.monotonic()
        cpu_s = time.process_time()
        for number, path in enumerate(raw):
            write_raw(path, arguments.cells // arguments.files, arguments.detected, number)
        spent = time.monotonic() - began, time.process_time() - cpu_s
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / UNIT
        Cost("(raw files made for this)", *spent, peak_mb, sum(map(used, raw)) / 1e9).print(
            arguments.cells
        )
        costs = []
        for cost in run_stages(folder, raw):
            cost.print(arguments.cells)
            costs.append(cost)
    cpu_min, wall_min = (
        sum(getattr(cost, what) for cost in costs) / 60 for what in ("cpu_s", "wall_s")
    )
    print(
        f"\nfrom raw files to step 50, one stage after another: {wall_min:.1f} minutes, {cpu_min:.1f} CPU-minutes"
    )


def run_stages(folder: Path, raw: list[Path]) -> Iterator[Cost]:
    """Run every stage; of several files the costs are summed."""
    (folder / "config.yaml").write_text(CONFIG)
    rows = "".join(f"{path.stem}\t{path.name}\n" for path in raw)
    (folder / "datasets.tsv").write_text(f"dataset\tpath\n{rows}")
    shared = ["--config", "config.yaml", "--corpus", "million"]
    cells = [f"cells/{path.name}" for path in raw]
    made = [
        measured(
            "preprocess", folder, [*shared, "--input", path.name, "--dataset", path.stem, *files]
        )
        for path, out in zip(raw, cells)
        for files in [["--out", out, "--report", f"cells/{path.stem}.json"]]
    ]
    total = Cost(
        f"preprocess, {len(raw)} files",
        sum(cost.wall_s for cost in made),
        sum(cost.cpu_s for cost in made),
        max(cost.peak_mb for cost in made),
    )
    yield replace(total, written_gb=used(folder / "cells") / 1e9)
    yield measured("vocabulary", folder, [*shared, "--cells", *cells, "--out", "vocabulary.tsv"])
    files = ["--cells", *cells, "--vocabulary", "vocabulary.tsv", "--out", "shards/manifest.json"]
    yield replace(
        measured("shard", folder, [*shared, *files]), written_gb=used(folder / "shards") / 1e9
    )
    files = [
        "--manifest",
        "shards/manifest.json",
        "--vocabulary",
        "vocabulary.tsv",
        "--out",
        "train",
    ]
    run = ["--config", "config.yaml", "--run", "million"]
    cost = measured("train", folder, [*run, *files, "--nproc-per-node", "2"])
    yield replace(
        cost, stage="train, 50 steps, 2 processes", written_gb=used(folder / "train") / 1e9
    )


def measured(stage: str, folder: Path, words: list[str]) -> Cost:
    """Run a stage to its end; exits with what it said if it fails."""
    began = time.monotonic()
    with open(folder / f"{stage}.log", "w+") as log:
        command = [sys.executable, "-m", "cellmill.cli", stage, *words]
        measure = [sys.executable, "-S", "-c", MEASURE, *command]
        subprocess.run(measure, cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=True)
    *said, last = Path(log.name).read_text().splitlines()
    status, cpu_s, peak = map(float, last.split())
    if status:
        sys.exit("\n".join([f"{stage} failed:", *said[-20:]]))
    return Cost(stage, time.monotonic() - began, cpu_s, peak / UNIT)


if __name__ == "__main__":
    main()
