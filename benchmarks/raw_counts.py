"""Files of simulated raw counts, written fast: float32 CSR with gzip, as most published .h5ad files
are.
"""

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem

from cellmill.data.genes.tables import gene_table

GENES = 20_000
BLOCK = 1_024  # cells drawn at a time
STEPS = 1 << 20  # of the table that turns a number in [0, 1) into a gene
TYPES = 4
CHUNK = 1 << 16  # values
CATEGORIES = {"batch": 8, "donor": 20, "tissue": 12, "assay": 3, "sex": 2, "cluster": 200}  # levels


def write_raw(
    path: Path,
    cells: int,
    detected: int,
    seed: int,
    compressed: bool = True,
    all_columns: bool = False,
) -> None:
    """Write counts of `cells` cells of `TYPES` types; each cell has about `detected` genes,
    log-normal over cells. obs has the type, and with `all_columns` 19 more columns.
    """
    rng = np.random.default_rng(seed)
    # as in 10x
    genes = np.random.default_rng(0).permutation(list(gene_table("human").symbols)[:GENES])
    types = rng.integers(0, TYPES, cells)
    lengths = np.minimum(rng.lognormal(np.log(detected), 0.3, cells).astype(np.int64), GENES // 4)
    gene_of = gene_tables()
    count_of = count_table()
    with h5py.File(path, "w", rdcc_nbytes=1 << 24) as file:
        obs = pd.DataFrame(
            {"type": pd.Categorical.from_codes(types, list("abcd"))},
            index=[f"{seed}-{cell}" for cell in range(cells)],
        )
        if all_columns:
            obs = obs.assign(**draw_columns(cells, seed))
        for key, value in (("obs", obs), ("var", pd.DataFrame(index=genes)), ("uns", {})):
            write_elem(file, key, value)
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = file.create_group("X")
        matrix.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (cells, GENES)}
        )
        filters = (
            {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compressed else {}
        )
        data, indices = (
            matrix.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(CHUNK,), **filters)
            for name, dtype in (("data", np.float32), ("indices", np.int32))
        )
        ends = [np.zeros(1, np.int64)]
        for first in range(0, cells, BLOCK):
            rows = slice(first, first + BLOCK)
            columns, last = draw(rng, lengths[rows], types[rows], gene_of)
            start = int(ends[-1][-1])
            ends.append(start + last)
            for array in (data, indices):
                array.resize((start + len(columns),))
            data[start:] = count_of[rng.integers(0, len(count_of), len(columns), np.uint16)]
            indices[start:] = columns
        indptr = np.concatenate(ends)  # of the dtype of indices where it fits, as scipy has them
        matrix["indptr"] = indptr.astype(np.int32 if indptr[-1] < 2**31 else np.int64)


def draw_columns(cells: int, seed: int) -> dict[str, np.ndarray | pd.Categorical]:
    """Columns of obs: 5 unique texts, 6 of categories, 4 of whole numbers, 4 of fractions."""
    rng = np.random.default_rng((seed, 1))
    columns: dict[str, np.ndarray | pd.Categorical] = {}
    for name in ("barcode", "cell_id", "well", "file", "uuid"):
        numbers = rng.permutation(cells).tolist()
        columns[name] = np.array([f"{name}-{seed}-{n:016x}" for n in numbers], object)
    for name, levels in CATEGORIES.items():
        values = [f"{name} {level}" for level in range(levels)]
        columns[name] = pd.Categorical.from_codes(rng.integers(0, levels, cells), values)
    for number in range(4):
        columns[f"integer{number}"] = rng.integers(0, 10_000, cells)
        columns[f"fraction{number}"] = rng.random(cells)
    return columns


def gene_tables() -> np.ndarray:
    """Gene at each of `STEPS` equal steps of probability, ascending, `(TYPES, STEPS)` int32; equal
    for all files.
    """
    rng = np.random.default_rng(0)
    common = rng.lognormal(0, 1.5, GENES)  # popularity in all types
    shares = [np.cumsum(common * rng.lognormal(0, 0.7, GENES)) for _ in range(TYPES)]
    steps = (np.arange(STEPS) + 0.5) / STEPS
    return np.stack([np.searchsorted(share, steps * share[-1]) for share in shares]).astype(
        np.int32
    )


def count_table() -> np.ndarray:
    """Counts at 65,536 equal steps of the geometric distribution with p = 0.45, float32."""
    quantiles = (np.arange(1 << 16) + 0.5) / (1 << 16)
    return np.ceil(np.log1p(-quantiles) / np.log1p(-0.45)).astype(np.float32)


def draw(
    rng: np.random.Generator, lengths: np.ndarray, types: np.ndarray, gene_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ascending genes of each cell, at most `lengths` of them, and where each cell's end.

    Sums of exponential variables over their total are uniform variables in order: nothing is
    sorted.
    """
    stops = np.cumsum(lengths + 1)
    sums = np.cumsum(rng.standard_exponential(int(stops[-1])))
    before = np.concatenate([[0.0], sums[stops[:-1] - 1]])
    sums -= np.repeat(before, lengths + 1)
    sums *= np.repeat(STEPS / sums[stops - 1], lengths + 1)
    steps = sums.astype(np.int64)
    steps += np.repeat(types * STEPS, lengths + 1)
    inside = np.ones(len(steps), bool)
    inside[stops - 1] = False  # the total itself
    steps[stops - 1] -= 1
    genes = gene_of.ravel()[steps]
    inside[1:] &= genes[1:] != genes[:-1]
    starts = np.concatenate([[0], stops[:-1]])
    inside[starts] = lengths > 0  # whatever the last gene of the cell before was
    return genes[inside], np.cumsum(inside)[stops - 1]


def used(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    return path.stat().st_size if path.is_file() else sum(used(inner) for inner in path.iterdir())
