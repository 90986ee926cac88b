"""Seconds to make the report of many runs, and the size of its page.

    python benchmarks/report.py [RESULTS] [--runs 10] [--cells 20000]

The first run of RESULTS (default: results, after `make demo`) is copied with small changes of its
numbers, so that no two curves are the same. With --cells, each UMAP has that many cells in ten
batches.
"""

import argparse
import csv
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def copy_run(run: Path, out: Path, seed: int) -> None:
    """The run without weights and cells, its losses changed by some per cent."""
    shutil.copytree(
        run, out, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors", "*.h5ad")
    )
    draw = random.Random(seed)
    metrics = out / "train" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line |= {
            key: value * draw.uniform(0.97, 1.03)
            for key, value in line.items()
            if key.endswith("loss")
        }
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def enlarge_umap(path: Path, n_cells: int, seed: int) -> None:
    """Make umap.tsv one of `n_cells`: its cells again and again, moved a little, in ten batches."""
    draw = random.Random(seed)
    with open(path, encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file, delimiter="\t"))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for number in range(n_cells):
            cell = cells[number % len(cells)]
            moved = {axis: f"{float(cell[axis]) + draw.gauss(0, 1.5):.4f}" for axis in ("x", "y")}
            names = {"obs_name": f"cell{number}", "batch": f"batch {number % 10}"}
            writer.writerow(cell | moved | names)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--cells", type=int, help="cells of each UMAP (default: as they are)")
    given = parser.parse_args()
    first = min(
        (path.parent.parent for path in given.results.glob("runs/*/evaluate/metrics.json")),
        default=None,
    )
    if first is None:
        parser.error(f"{given.results} holds no evaluated run; `make demo` makes one in results")
    with tempfile.TemporaryDirectory(prefix="report-") as name:
        folder = Path(name)
        runs = [folder / "runs" / f"{first.name}{number}" for number in range(given.runs)]
        for number, run in enumerate(runs):
            copy_run(first, run, number)
            if given.cells is not None:
                enlarge_umap(run / "evaluate" / "umap.tsv", given.cells, number)
        corpora = sorted(
            path.parent.parent for path in given.results.glob("corpora/*/shards/manifest.json")
        )
        out = folder / "report" / "index.html"
        command = [sys.executable, "-m", "cellmill.cli", "report", "--options", '{"report": {}}']
        command += ["--runs", *map(str, runs), "--corpora", *map(str, corpora), "--out", str(out)]
        begin = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size = out.stat().st_size / 1e6
        cpu_s = used.ru_utime + used.ru_stime
    print(
        "| runs | page | seconds | CPU-seconds | peak MB |", "|---:|---:|---:|---:|---:|", sep="\n"
    )
    print(
        f"| {given.runs} | {size:.2f} MB | {wall_s:.1f} | {cpu_s:.1f} | {used.ru_maxrss / 1024:.0f} |"
    )


if __name__ == "__main__":
    main()
