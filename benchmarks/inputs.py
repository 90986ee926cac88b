"""Rates of reading inputs, side by side with scanpy's read_10x_mtx, or with an earlier version of
cellmill.

    python benchmarks/inputs.py --scanpy PYTHON                     # an interpreter with scanpy
    python benchmarks/inputs.py --before PYTHON                     # one with the earlier cellmill

Each number is the median of three runs, values per CPU-second of a process of its own after its
imports; the two sides take turns on the same files. Matrix Market has 16,000 cells of 2,000 genes,
plain and gzip, as Cell Ranger sorts it.
"""

import argparse
import gzip
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp

CELLS = 16_000
GENES = 30_000
PER_CELL = 2_000
RUNS = 3
PEAK = """
    def peak():
        return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
OURS = """
    import sys, time
    from cellmill.data.inputs.formats import open_counts
    started, n_values = time.process_time(), 0
    with open_counts(sys.argv[1]) as reader:
        for block in reader.rows():
            n_values += block.nnz
    print(n_values / (time.process_time() - started), peak())
"""
SCANPY = """
    import sys, time
    import scanpy
    started = time.process_time()
    n_values = scanpy.read_10x_mtx(sys.argv[1]).X.nnz
    print(n_values / (time.process_time() - started), peak())
"""


def write_market(folder: Path, cells: int) -> Path:
    """A folder as Cell Ranger 2 writes it."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    with open(folder / "matrix.mtx", "w") as file:
        file.write("%%MatrixMarket matrix coordinate integer general\n%\n")
        file.write(f"{GENES} {cells} {cells * PER_CELL}\n")
        for cell in range(1, cells + 1):
            genes = np.sort(draw.choice(GENES, PER_CELL, replace=False)) + 1
            counts = draw.geometric(0.5, PER_CELL)
            file.writelines(
                f"{gene} {cell} {count}\n" for gene, count in zip(genes.tolist(), counts.tolist())
            )
    (folder / "genes.tsv").write_text(
        "".join(f"ENSG{gene:011d}\tS{gene}\n" for gene in range(GENES))
    )
    (folder / "barcodes.tsv").write_text("".join(f"CELL{cell}-1\n" for cell in range(cells)))
    return folder


def pack(folder: Path, packed: Path) -> Path:
    """The folder as Cell Ranger 3 and later write it."""
    packed.mkdir()
    names = {
        "matrix.mtx": "matrix.mtx",
        "genes.tsv": "features.tsv",
        "barcodes.tsv": "barcodes.tsv",
    }
    for name, new in names.items():
        with (
            open(folder / name, "rb") as plain,
            gzip.open(packed / f"{new}.gz", "wb", compresslevel=6) as file,
        ):
            if new != "features.tsv":
                shutil.copyfileobj(plain, file)
            for line in plain if new == "features.tsv" else ():
                file.write(line.rstrip(b"\n") + b"\tGene Expression\n")
    return packed


def write_others(folder: Path) -> dict[str, Path]:
    """The formats whose rate must not fall: .h5ad by cell and by gene, Zarr, 10x."""
    import h5py

    draw = np.random.default_rng(1)
    counts = sp.random(8_000, GENES, 0.05, "csr", dtype=np.float32, random_state=2)
    counts.data = draw.geometric(0.5, counts.nnz).astype(np.float32)
    paths = {name: folder / name for name in ("csr.h5ad", "csc.h5ad", "cells.zarr", "tenx.h5")}
    ad.AnnData(counts).write_h5ad(paths["csr.h5ad"], compression="gzip")
    ad.AnnData(counts.tocsc()).write_h5ad(paths["csc.h5ad"], compression="gzip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the version of Zarr
        ad.AnnData(counts).write_zarr(paths["cells.zarr"])
    with h5py.File(paths["tenx.h5"], "w") as file:
        for name in ("data", "indices", "indptr"):
            array = getattr(counts, name)
            array = array.astype(np.int32) if name == "data" else array
            file.create_dataset(
                f"matrix/{name}", data=array, chunks=(min(len(array), 80_000),), compression="gzip"
            )
        file["matrix/shape"] = np.array(counts.shape[::-1])
        file["matrix/barcodes"] = np.array(
            [f"CELL{cell}-1" for cell in range(counts.shape[0])], "S"
        )
        columns = {
            "id": "ENSG{:011d}",
            "name": "S{}",
            "feature_type": "Gene Expression",
            "genome": "GRCh38",
        }
        for name, text in columns.items():
            file[f"matrix/features/{name}"] = np.array(
                [text.format(gene) for gene in range(GENES)], "S"
            )
    return paths


def rate(python: str, script: str, path: Path) -> tuple[float, int]:
    """Values per CPU-second, and MB at the peak."""
    words = [
        python,
        "-W",
        "ignore",
        "-c",
        textwrap.dedent(PEAK) + textwrap.dedent(script),
        str(path),
    ]
    values, peak = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return float(values), int(peak)


def compare(name: str, path: Path, sides: dict[str, tuple[str, str]]) -> None:
    """Print medians of both sides and their ratio."""
    runs: dict[str, list[tuple[float, int]]] = {side: [] for side in sides}
    for _ in range(RUNS):
        for side, (python, script) in sides.items():
            runs[side].append(rate(python, script, path))
    medians = {side: statistics.median(value for value, _ in found) for side, found in runs.items()}
    peaks = {side: max(peak for _, peak in found) for side, found in runs.items()}
    first, second = sides
    shown = ", ".join(
        f"{side} {medians[side] / 1e6:.2f} M values/CPU-s at {peaks[side]:,} MB" for side in sides
    )
    print(
        f"{name}: {shown}; {first} / {second} = {medians[first] / medians[second]:.2f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of reading inputs, side by side.")
    parser.add_argument("--scanpy", help="interpreter with scanpy")
    parser.add_argument("--before", help="interpreter with another version of cellmill")
    parser.add_argument("--cells", type=int, default=CELLS, help="cells of the Matrix Market files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.scanpy:
            plain = write_market(folder / "plain", given.cells)
            sides = {"cellmill": (sys.executable, OURS), "scanpy": (given.scanpy, SCANPY)}
            compare("Matrix Market", plain, sides)
            compare("Matrix Market, gzip", pack(plain, folder / "packed"), sides)
        if given.before:
            sides = {"now": (sys.executable, OURS), "before": (given.before, OURS)}
            for name, path in write_others(folder).items():
                compare(name, path, sides)


if __name__ == "__main__":
    main()
