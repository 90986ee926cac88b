"""Cells per CPU-second and peak memory of preparing a file: cellmill, scanpy, and SCDL's
conversion, side by side.

All read the same simulated `.h5ad` in the same run, taking turns, each in a process of its own.
CPU-seconds are counted after the imports, and the peak memory is that of the whole process; both
are medians over the turns, of which the first is not counted (scanpy compiles functions in it).
Ratios are to cellmill's `preprocess`. SCDL is left out where bionemo-scdl cannot be imported.

    python benchmarks/prepare.py --cells 100000
"""

import argparse
import importlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from million import MEASURE, UNIT
from origin import commit, machine
from raw_counts import GENES, used, write_raw

from cellmill.config.options import PreprocessOptions, ShardOptions, VocabularyOptions
from cellmill.data.genes.tables import gene_table
from cellmill.stages import data

Work = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument(
        "--detected", type=int, default=1_000, help="genes of a cell, about (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of each that count (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on a large disk (default: that of temporary files)"
    )
    parser.add_argument(
        "--only",
        nargs=3,
        metavar=("TOOL", "FILE", "FOLDER"),
        help="one tool on a file of raw counts",
    )
    arguments = parser.parse_args()
    if arguments.only:
        name, raw, out = arguments.only
        print(cpu_seconds(TOOLS[name](Path(raw), Path(out))))
        return
    print(f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`")
    for compressed in (True, False):
        with tempfile.TemporaryDirectory(
            prefix="cellmill-prepare-", dir=arguments.folder
        ) as folder:
            raw = Path(folder) / "raw.h5ad"
            write_raw(raw, arguments.cells, arguments.detected, 0, compressed)
            kind = "gzip" if compressed else "not compressed"
            print(
                f"\n{arguments.cells:,} cells x {GENES:,} genes, {used(raw) / 1e6:,.0f} MB, {kind}\n"
            )
            print_table(raw, arguments.cells, arguments.repeats)


def print_table(raw: Path, cells: int, repeats: int) -> None:
    """Measure all tools that can be imported, taking turns."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in TOOLS}
    for _ in range(repeats + 1):
        for name, made in turns.items():
            if len(made) or _ == 0:
                made += in_process(name, raw)
    medians = {
        name: [statistics.median(numbers) for numbers in zip(*made[1:])]
        for name, made in turns.items()
        if made
    }
    print(
        "| | CPU-seconds (range) | cells per CPU-second | preprocess is faster by | peak MB | of its memory |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    own_s, own_mb = next(iter(medians.values()))
    for name, (cpu_s, peak_mb) in medians.items():
        spent = [seconds for seconds, _ in turns[name][1:]]
        speed = f"{cpu_s:.2f} ({min(spent):.2f} to {max(spent):.2f}) | {cells / cpu_s:,.0f} | {cpu_s / own_s:.2f}"
        print(f"| {name} | {speed} | {peak_mb:,.0f} | {own_mb / peak_mb:.2f} |", flush=True)


def in_process(name: str, raw: Path) -> list[tuple[float, float]]:
    """CPU-seconds and peak MB of one turn; nothing, and why on stderr, if the tool fails."""
    with tempfile.TemporaryDirectory(dir=raw.parent) as out:
        command = [sys.executable, __file__, "--only", name, str(raw), out]
        made = subprocess.run(
            [sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, text=True
        )
    *_, last = lines = made.stdout.splitlines()
    if last.split()[0] != "0":
        print(f"{name} is left out:", *made.stderr.splitlines()[-1:], file=sys.stderr)
        return []
    return [(float(lines[-2]), float(last.split()[2]) / UNIT)]


def cpu_seconds(work: Work) -> float:
    """CPU time of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def cellmill(raw: Path, out: Path, compression: str | None = None) -> Work:
    """Quality control, gene names, cells written."""
    options = PreprocessOptions.model_validate({"preprocess": {"compression": compression}})
    files = {"out": out / "cells.h5ad", "report": out / "qc.json"}
    return lambda: data.preprocess(options=options, input=raw, counts="X", dataset="raw", **files)


def cellmill_shards(raw: Path, out: Path, compression: str | None = None) -> Work:
    """From raw counts to what a training reads."""

    def work() -> None:
        cellmill(raw, out, compression)()
        cells = [out / "cells.h5ad"]
        words = out / "vocabulary.tsv"
        data.vocabulary(
            options=VocabularyOptions.model_validate({"vocabulary": {}}), cells=cells, out=words
        )
        options = ShardOptions.model_validate({"shard": {}})
        data.shard(options=options, cells=cells, vocabulary=words, out=out / "manifest.json")

    return work


def scanpy(raw: Path, out: Path | None) -> Work:
    """Read, quality control, filters, counts per 10,000 and their logarithm, as in its tutorial;
    written if `out`.
    """
    sc = importlib.import_module("scanpy")
    mito = [
        gene for gene, symbol in gene_table("human").symbols.items() if symbol.startswith("MT-")
    ]

    def work() -> None:
        cells = sc.read_h5ad(raw)
        cells.var["mt"] = cells.var_names.isin(mito)
        sc.pp.calculate_qc_metrics(
            cells, qc_vars=["mt"], percent_top=None, log1p=False, inplace=True
        )
        cells = cells[
            (cells.obs["n_genes_by_counts"] >= 200) & (cells.obs["pct_counts_mt"] <= 20)
        ].copy()
        sc.pp.filter_genes(cells, min_cells=1)
        sc.pp.normalize_total(cells, target_sum=1e4)
        sc.pp.log1p(cells)
        if out is not None:
            cells.write_h5ad(out / "cells.h5ad")

    return work


def scdl(raw: Path, out: Path) -> Work:
    """Conversion to a memory map; no filter, no gene names."""
    package = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    return lambda: package.SingleCellMemMapDataset(
        str(out / "scdl"), h5ad_path=str(raw), use_X_not_raw=True
    )


def named(package: str, what: str) -> str:
    try:
        return f"{package} {version(package)}: {what}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}: {what}"


TOOLS: dict[str, Callable[[Path, Path], Work]] = {
    "cellmill preprocess": cellmill,
    "cellmill preprocess, vocabulary, shard": cellmill_shards,
    "the same, preprocess.compression gzip": lambda raw, out: cellmill_shards(raw, out, "gzip"),
    named("scanpy", "read, filter, normalise"): lambda raw, out: scanpy(raw, None),
    named("scanpy", "the same, and write"): scanpy,
    named("bionemo-scdl", "conversion"): scdl,
}


if __name__ == "__main__":
    main()
