"""Seeded, single-threaded UMAP of embeddings (the same cells give the same picture), and umap.tsv of drawn cells."""

import csv
import io
import warnings
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import umap
from numba.core.dispatcher import Dispatcher
from sklearn.neighbors import NearestNeighbors

from cellmill.errors import DataError
from cellmill.files import require_file, write_text

COMPILED = (umap.umap_, umap.layouts, umap.utils, umap.distances, umap.sparse)
APPROXIMATE_FROM = 4096  # cells from which umap-learn does not compute all distances
MAX_CELLS = 20_000  # cells drawn at most; more overlap on a page


@cache
def cache_compiled() -> None:
    """Keep the machine code of umap's functions on disk, in numba's cache, where that is writable.

    umap-learn compiles them in every process: 13 CPU-seconds, where the picture of 300 cells takes 0.4.
    """
    with suppress(RuntimeError):  # no writable place
        for module in COMPILED:
            for function in vars(module).values():
                if isinstance(function, Dispatcher):
                    function.enable_caching()


def project(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Coordinates `(cells, 2)` float32 of `vectors` `(cells, hidden)`; below 4 cells, the first two columns."""
    if len(vectors) < 4:  # too few for a neighbour graph
        return np.pad(vectors, ((0, 0), (0, 2)))[:, :2].astype(np.float32)
    cache_compiled()
    neighbors = min(15, len(vectors) - 1)
    # spectral initialisation needs more cells than dimensions and neighbours
    init = "spectral" if len(vectors) > 16 else "random"
    known = exact_neighbors(vectors, neighbors) if len(vectors) >= APPROXIMATE_FROM else (None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about small or disconnected graphs and continues
        model = umap.UMAP(n_neighbors=neighbors, init=init, random_state=seed, n_jobs=1, precomputed_knn=known)
        return model.fit_transform(vectors)


def exact_neighbors(vectors: np.ndarray, neighbors: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and distances `(cells, neighbors)` of the nearest cells, each cell its own first neighbour.

    umap-learn's approximate search is compiled in every process: 35 CPU-seconds, where the exact one takes 4 for
    20,000 cells of width 128.
    """
    distances, indices = NearestNeighbors(n_neighbors=neighbors, algorithm="brute").fit(vectors).kneighbors()
    own = np.arange(len(vectors))[:, None]  # even where another cell is at the same place
    return np.hstack([own, indices[:, :-1]]), np.hstack([np.zeros_like(distances[:, :1]), distances[:, :-1]])


def sample_cells(n_cells: int, seed: int) -> np.ndarray:
    """Indices of the cells to draw, ascending: all, or a seeded sample of MAX_CELLS."""
    if n_cells <= MAX_CELLS:
        return np.arange(n_cells)
    return np.sort(np.random.Generator(np.random.Philox(key=[seed, 1])).permutation(n_cells)[:MAX_CELLS])


def umap_rows(
    dataset: str,
    obs_names: pd.Index,
    vectors: np.ndarray,
    label: pd.Series | None,
    batch: pd.Series | None,
    unseen: np.ndarray,
    seed: int,
) -> list[tuple[Any, ...]]:
    """Rows of umap.tsv for the cells of one dataset that have an embedding."""
    embedded = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    cells = embedded[sample_cells(len(embedded), seed)]
    coordinates = project(vectors[cells], seed)
    labels, batches = (
        np.full(len(obs_names), "")
        if column is None
        else column.astype(object).where(column.notna(), "").astype(str).to_numpy(object)
        for column in (label, batch)
    )
    return [
        (dataset, obs_names[cell], labels[cell], f"{x:.5g}", f"{y:.5g}", int(unseen[cell]), batches[cell])
        for cell, (x, y) in zip(cells, coordinates)
    ]


COLUMNS = ("dataset", "obs_name", "label", "x", "y", "heldout", "batch")


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, one value per column, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> list[dict[str, str]]:
    """Rows as text by column; none when the file is absent. Raises DataError for anything that `write_umap` does not
    write."""
    if not path.exists():
        return []
    require_file(path)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file, delimiter="\t")
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a table ({error}); run evaluate again") from None
    if tuple(head) != COLUMNS:
        raise DataError(f"{path}: expected the columns {', '.join(COLUMNS)}; run evaluate again")
    if wrong := [number for number, row in enumerate(rows, start=2) if not _is_point(row)]:
        raise DataError(f"{path}, row {wrong[0]}: expected {', '.join(COLUMNS)}; run evaluate again")
    return [dict(zip(head, row)) for row in rows]


def _is_point(row: list[str]) -> bool:
    try:
        return len(row) == len(COLUMNS) and isfinite(float(row[3])) and isfinite(float(row[4]))
    except ValueError:
        return False
