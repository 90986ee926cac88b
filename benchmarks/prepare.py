"""CPU-seconds, peak memory and bytes of preparing a file: cellmill, scanpy, and SCDL's conversion,
side by side.

All read the same simulated `.h5ad` in the same run, taking turns, each in a process of its own.
CPU-seconds are counted after the imports, and the peak memory is that of the whole process; both
are medians over the turns, of which the first is not counted (scanpy and cellmill compile functions
in it). Bytes are all that is left on disk, over those of the input. SCDL is left out where
bionemo-scdl cannot be imported. With `--beside FOLDER` another checkout with a .venv of its own
takes its turns too.

    python benchmarks/prepare.py --cells 100000
"""

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from origin import commit, machine
from raw_counts import GENES, used, write_raw
from scale import MEASURE, UNIT

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
        "--inputs",
        nargs="+",
        choices=["gzip", "plain"],
        default=["gzip", "plain"],
        help="filters of the raw files (default: both)",
    )
    parser.add_argument(
        "--beside", type=Path, metavar="FOLDER", help="a checkout that takes turns too"
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
        stages = TOOLS[name](Path(raw), Path(out))
        spent = {stage: cpu_seconds(work) for stage, work in stages.items()}
        print(json.dumps([spent, used(Path(out)) / used(Path(raw))]))
        return
    load = f"load {os.getloadavg()[0]:.1f}"
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    print(f"{machine()}, {load}; commit {commit()}; `{command}`")
    pythons = dict.fromkeys(TOOLS, sys.executable)
    if arguments.beside:
        beside = str(arguments.beside.resolve() / ".venv" / "bin" / "python")
        pythons |= {f"{name}, beside": beside for name in (PREPROCESS, STAGES)}
    for kind in arguments.inputs:
        with tempfile.TemporaryDirectory(
            prefix="cellmill-prepare-", dir=arguments.folder
        ) as folder:
            raw = Path(folder) / "raw.h5ad"
            write_raw(raw, arguments.cells, arguments.detected, 0, kind == "gzip")
            print(
                f"\n{arguments.cells:,} cells x {GENES:,} genes, {used(raw) / 1e6:,.0f} MB, {kind}\n"
            )
            print_table(raw, pythons, arguments.repeats)


class Turn(NamedTuple):
    """What a process took."""

    cpu_s: dict[str, float]  # by stage, and of all
    peak_mb: float
    of_input: float  # bytes written over those read


def print_table(raw: Path, pythons: dict[str, str], repeats: int) -> None:
    """Measure all tools that can be imported, taking turns; a line for each stage of each."""
    turns: dict[str, list[Turn]] = {name: [] for name in pythons}
    for turn in range(repeats + 1):
        for name, made in turns.items():
            if len(made) == turn:
                made += in_process(name, pythons[name], raw)
    print("| | CPU-seconds (range) | preprocess is faster by | peak MB | bytes of the input's |")
    print("|---|---:|---:|---:|---:|")
    of_preprocess = statistics.median(turn.cpu_s["all"] for turn in turns[PREPROCESS][1:])
    for name, made in turns.items():
        counted = made[1:]
        for stage in counted[0].cpu_s if counted else ():
            spent = [turn.cpu_s[stage] for turn in counted]
            cpu_s = statistics.median(spent)
            cells = [
                f"{name}: {stage}" if len(counted[0].cpu_s) > 2 else name,
                f"{cpu_s:.2f} ({min(spent):.2f} to {max(spent):.2f})",
                f"{cpu_s / of_preprocess:.2f}",
                f"{statistics.median(turn.peak_mb for turn in counted):,.0f}",
                f"{counted[0].of_input:.2f}",
            ]
            if stage == "all":
                print(f"| {' | '.join(cells)} |", flush=True)
            elif len(counted[0].cpu_s) > 2:
                print(f"| {' | '.join(cells[:3])} | | |", flush=True)


def in_process(name: str, python: str, raw: Path) -> list[Turn]:
    """One turn; nothing, and why on stderr, if the tool fails."""
    tool = name.removesuffix(", beside")
    with tempfile.TemporaryDirectory(dir=raw.parent) as out:
        command = [python, __file__, "--only", tool, str(raw), out]
        made = subprocess.run(
            [sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, text=True
        )
    *_, last = lines = made.stdout.splitlines()
    if last.split()[0] != "0":
        print(f"{name} is left out:", *made.stderr.splitlines()[-1:], file=sys.stderr)
        return []
    spent, of_input = json.loads(lines[-2])
    peak_mb = float(last.split()[2]) / UNIT
    return [Turn(spent | {"all": sum(spent.values())}, peak_mb, of_input)]


def cpu_seconds(work: Work) -> float:
    """CPU time of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def preprocess(raw: Path, out: Path) -> Work:
    """Quality control, gene names, cells written."""
    options = PreprocessOptions.model_validate({"preprocess": {}})
    files = {"out": out / "cells.h5ad", "report": out / "qc.json"}
    return lambda: data.preprocess(options=options, input=raw, counts="X", dataset="raw", **files)


def cellmill_stages(raw: Path, out: Path) -> dict[str, Work]:
    """From raw counts to what a training reads."""
    cells = [out / "cells.h5ad"]
    words = out / "vocabulary.tsv"
    of_words = VocabularyOptions.model_validate({"vocabulary": {}})
    of_shards = ShardOptions.model_validate({"shard": {}})
    shards = {"cells": cells, "vocabulary": words, "out": out / "shards" / "manifest.json"}
    return {
        "preprocess": preprocess(raw, out),
        "vocabulary": lambda: data.vocabulary(options=of_words, cells=cells, out=words),
        "shard": lambda: data.shard(options=of_shards, **shards),
    }


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


PREPROCESS = "cellmill preprocess"
STAGES = "cellmill"
TOOLS: dict[str, Callable[[Path, Path], dict[str, Work]]] = {
    PREPROCESS: lambda raw, out: {"preprocess": preprocess(raw, out)},
    STAGES: cellmill_stages,
    named("scanpy", "read, filter, normalise"): lambda raw, out: {"scanpy": scanpy(raw, None)},
    named("scanpy", "the same, and write"): lambda raw, out: {"scanpy": scanpy(raw, out)},
    named("bionemo-scdl", "conversion"): lambda raw, out: {"scdl": scdl(raw, out)},
}


if __name__ == "__main__":
    main()
