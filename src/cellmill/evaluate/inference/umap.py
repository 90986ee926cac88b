"""Seeded, single-threaded UMAP of embeddings (the same cells give the same picture), and umap.tsv
of drawn cells.

umap-learn takes a second to import, so only the process that draws imports it; reading and writing
the file do without.
"""

import csv
import io
import sys
import warnings
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cellmill.errors import DataError
from cellmill.files import require_file, write_text

APPROXIMATE_SEARCH: dict[str, dict[str, Any]] = {  # the names that umap-learn imports
    "pynndescent": {"NNDescent": type("NNDescent", (), {})},
    "pynndescent.distances": {"named_distances": {}},
    "pynndescent.sparse": {"sparse_named_distances": {}},
}


class UmapColumns(NamedTuple):
    """Columns of umap.tsv, a value for each drawn cell. Unknown labels and batches are empty."""

    dataset: Sequence[str]
    obs_name: Sequence[str]
    label: Sequence[str]
    x: Sequence[float]
    y: Sequence[float]
    heldout: Sequence[str]  # 1 for a held-out cell, else 0
    batch: Sequence[str]


COLUMNS = tuple(UmapColumns.__annotations__)


@cache
def import_umap() -> Any:
    """Import umap-learn, and keep its machine code in numba's cache if that is writable.

    Without the cache every process compiles for 5 CPU-seconds; the picture of 300 cells takes 0.4.
    Stand-ins replace the approximate search of neighbours, which is not used here and would compile
    for 14 CPU-seconds on import.
    """
    stand_ins = {} if "pynndescent" in sys.modules else APPROXIMATE_SEARCH
    for name, content in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        umap = import_module("umap")
    finally:
        for name in stand_ins:
            del sys.modules[name]
    dispatcher = import_module("numba.core.dispatcher").Dispatcher
    with suppress(RuntimeError):  # no writable folder
        for module in (umap.umap_, umap.layouts, umap.utils, umap.distances, umap.sparse):
            for function in vars(module).values():
                if isinstance(function, dispatcher):
                    function.enable_caching()
    return umap


def project(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Coordinates `(cells, 2)` float32 of `vectors` `(cells, hidden)`; below 4 cells, the first two
    columns.
    """
    if len(vectors) < 4:  # too few for a neighbour graph
        return np.pad(vectors, ((0, 0), (0, 2)))[:, :2].astype(np.float32)
    neighbors = min(15, len(vectors) - 1)
    # find exact neighbours, in 4 CPU-seconds for 20,000 cells of width 128; each cell comes first
    # among its own neighbours, also if another cell has the same vector
    search = import_module("sklearn.neighbors").NearestNeighbors(
        n_neighbors=neighbors, algorithm="brute"
    )
    distances, indices = search.fit(vectors).kneighbors()
    cells = np.arange(len(vectors))[:, None]
    indices = np.hstack([cells, indices[:, :-1]])
    distances = np.hstack([np.zeros_like(distances[:, :1]), distances[:, :-1]])
    # spectral initialisation needs more cells than dimensions and neighbours
    init = "spectral" if len(vectors) > 16 else "random"
    umap = import_umap()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about small or disconnected graphs and continues
        model = umap.UMAP(
            n_neighbors=neighbors,
            init=init,
            random_state=seed,
            n_jobs=1,
            precomputed_knn=(indices, distances),
        )
        return model.fit_transform(vectors)


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, one value per column, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> UmapColumns:
    """The file's columns, empty if it is absent. Raises DataError if it is damaged."""
    x = array("d")
    y = array("d")
    if not path.exists():
        return UmapColumns([], [], [], x, y, [], [])
    require_file(path)
    expected = f"expected the columns {', '.join(COLUMNS)}"
    # all rows, one after the other: a list for each row would take twice the time
    texts: list[str] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file, delimiter="\t")
            if tuple(next(lines, ())) != COLUMNS:
                raise ValueError(expected)
            for row in lines:
                if len(row) != len(COLUMNS):
                    raise ValueError(expected)
                x.append(float(row[3]))
                y.append(float(row[4]))
                if not isfinite(x[-1] + y[-1]):
                    raise ValueError("expected finite x and y")
                texts += row
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}, row {lines.line_num}: damaged ({error}); run evaluate again"
        ) from None
    dataset, obs_name, label, _, _, heldout, batch = (
        texts[column :: len(COLUMNS)] for column in range(len(COLUMNS))
    )
    return UmapColumns(dataset, obs_name, label, x, y, heldout, batch)
