"""A corpus that does not fit in memory, from raw files to the first training steps.

Writes files of simulated raw counts, float32 CSR as most tools do, and runs `preprocess`, `vocabulary`, `shard` and 50
steps of `train` on them as the workflow would. Prints wall time, CPU time and the peak memory of each stage's largest
process. With a million cells of 1,000 genes it takes 25 GB of disk, which are freed at the end.

    python benchmarks/million.py --cells 1000000
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem
from loader import commit, machine

from cellmill.data.gene_tables import gene_symbols

GENES = 20_000
BLOCK = 8_192
CONFIG = """
corpora: {million: {table: datasets.tsv}}
tokens: {max_tokens: 1024}
stream: {lanes: 8}
model: {family: profile, hidden: 128}
train: {steps: 50, global_batch: 256, token_budget: 65536, val_cells: 512, log_every_steps: 10}
runs: {million: {corpus: million}}
"""
# a process starts with the peak memory of the one that forked it, so a small one has to
MEASURE = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


@dataclass(frozen=True)
class Cost:
    """What a stage took; memory is that of its largest process."""

    stage: str
    wall_s: float
    cpu_s: float
    peak_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--files", type=int, default=4, help="raw files (default: %(default)s)")
    parser.add_argument("--detected", type=int, default=1_000, help="mean genes of a cell (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder on a large disk (default: that of temporary files)")
    arguments = parser.parse_args()
    print(f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`\n")
    with tempfile.TemporaryDirectory(prefix="cellmill-million-", dir=arguments.folder) as name:
        folder = Path(name)
        raw = [folder / f"raw{number}.h5ad" for number in range(arguments.files)]
        for number, path in enumerate(raw):
            write_raw(path, arguments.cells // arguments.files, arguments.detected, number)
        costs = list(run_stages(folder, raw))
        sizes = {what: used(folder / what) / 1e9 for what in ("cells", "shards")}
        sizes = {"raw files": sum(map(used, raw)) / 1e9} | sizes
    print("| stage | wall s | CPU s | cells per CPU-second | peak MB of a process |\n|---|---:|---:|---:|---:|")
    for cost in costs:
        speed = arguments.cells / cost.cpu_s
        print(f"| {cost.stage} | {cost.wall_s:,.0f} | {cost.cpu_s:,.0f} | {speed:,.0f} | {cost.peak_mb:,.0f} |")
    print(
        f"\nfrom raw files to step 50: {sum(cost.wall_s for cost in costs) / 60:.1f} minutes, one stage after another"
    )
    print("on disk: " + ", ".join(f"{what} {gb:.1f} GB" for what, gb in sizes.items()))


def run_stages(folder: Path, raw: list[Path]) -> Iterator[Cost]:
    """Run every stage; of several files the costs are summed."""
    (folder / "config.yaml").write_text(CONFIG)
    rows = "".join(f"{path.stem}\t{path.name}\n" for path in raw)
    (folder / "datasets.tsv").write_text(f"dataset\tpath\n{rows}")
    shared = ["--config", "config.yaml", "--corpus", "million"]
    cells = [f"cells/{path.name}" for path in raw]
    made = [
        measured("preprocess", folder, [*shared, "--input", path.name, "--dataset", path.stem, *files])
        for path, out in zip(raw, cells)
        for files in [["--out", out, "--report", f"cells/{path.stem}.json"]]
    ]
    yield Cost(
        f"preprocess, {len(raw)} files",
        sum(cost.wall_s for cost in made),
        sum(cost.cpu_s for cost in made),
        max(cost.peak_mb for cost in made),
    )
    yield measured("vocabulary", folder, [*shared, "--cells", *cells, "--out", "vocabulary.tsv"])
    files = ["--cells", *cells, "--vocabulary", "vocabulary.tsv", "--out", "shards/manifest.json"]
    yield measured("shard", folder, [*shared, *files])
    files = ["--manifest", "shards/manifest.json", "--vocabulary", "vocabulary.tsv", "--out", "train"]
    run = ["--config", "config.yaml", "--run", "million"]
    yield measured("train", folder, [*run, *files, "--nproc-per-node", "2"])


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
    unit = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss is in bytes there, in KB elsewhere
    return Cost(stage, time.monotonic() - began, cpu_s, peak / unit)


def write_raw(path: Path, cells: int, detected: int, seed: int) -> None:
    """Write counts of `cells` cells a block at a time: genes by popularity, lengths log-normal."""
    rng = np.random.default_rng(seed)
    genes = list(gene_symbols("human"))[:GENES]
    lengths = np.minimum(rng.lognormal(np.log(detected), 0.3, cells).astype(np.int64), GENES // 4)
    with h5py.File(path, "w") as file:
        obs = pd.DataFrame({"type": pd.Categorical(rng.choice(list("abcd"), cells))}, index=names(seed, cells))
        for key, value in (("obs", obs), ("var", pd.DataFrame(index=genes)), ("uns", {})):
            write_elem(file, key, value)
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (cells, GENES)})
        rows = {
            name: matrix.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(1 << 18,))
            for name, dtype in (("data", np.float32), ("indices", np.int32))
        }
        indptr = [np.zeros(1, np.int64)]
        for first in range(0, cells, BLOCK):
            columns, borders = draw(rng, lengths[first : first + BLOCK])
            indptr.append(indptr[-1][-1] + borders[1:])
            for name, values in (("data", rng.geometric(0.45, len(columns))), ("indices", columns)):
                rows[name].resize((int(indptr[-1][-1]),))
                rows[name][len(rows[name]) - len(columns) :] = values
        matrix["indptr"] = np.concatenate(indptr)


def draw(rng: np.random.Generator, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ascending genes of each cell, about `lengths` of them, and where each cell's begin."""
    drawn = (GENES * rng.random(int(lengths.sum())) ** 2.5).astype(np.int64)  # the first genes are in most cells
    keys = np.unique(np.repeat(np.arange(len(lengths)) * GENES, lengths) + drawn)
    return keys % GENES, np.searchsorted(keys, np.arange(len(lengths) + 1) * GENES)


def names(seed: int, cells: int) -> list[str]:
    """Names of the cells of a file."""
    return [f"{seed}-{cell}" for cell in range(cells)]


def used(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    return path.stat().st_size if path.is_file() else sum(used(inner) for inner in path.iterdir())


if __name__ == "__main__":
    main()
