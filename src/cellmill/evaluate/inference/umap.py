"""UMAP of embeddings, and umap.tsv, the file with the coordinates of drawn cells.

UMAP is seeded and runs in one thread, so the same cells give the same picture. umap-learn takes a second to
import. So only a process that computes a UMAP imports umap-learn, and not one that reads or writes the file.
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

# modules of the approximate search of neighbours, with the names that umap-learn imports from them
APPROXIMATE_SEARCH: dict[str, dict[str, Any]] = {
    "pynndescent": {"NNDescent": type("NNDescent", (), {})},
    "pynndescent.distances": {"named_distances": {}},
    "pynndescent.sparse": {"sparse_named_distances": {}},
}


class UmapColumns(NamedTuple):
    """Columns of umap.tsv, with a value for each drawn cell. Unknown labels and batches are empty."""

    dataset: Sequence[str]
    obs_name: Sequence[str]
    label: Sequence[str]
    x: Sequence[float]
    y: Sequence[float]
    heldout: Sequence[str]  # 1 for a held-out cell, else 0
    batch: Sequence[str]


COLUMNS = tuple(UmapColumns.__annotations__)
NEIGHBORS = 15  # neighbours of a cell, itself included, at most
MIN_CELLS = 4  # UMAP needs at least this many cells
MAX_RANDOM_CELLS = 16  # at most this many cells are initialised at random


@cache
def import_umap() -> Any:
    """Import umap-learn, and keep its machine code in numba's cache if the cache is writable.

    Without the cache, every process would compile for 5 CPU-seconds, where the picture of 300 cells takes
    0.4. The approximate search of neighbours is not used here, but would compile for 14 CPU-seconds on
    import. So empty modules are imported in its place.
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
    with suppress(RuntimeError):  # raised if no folder for the cache is writable
        for module in (umap.umap_, umap.layouts, umap.utils, umap.distances, umap.sparse):
            for function in vars(module).values():
                if isinstance(function, dispatcher):
                    function.enable_caching()
    return umap


def project(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Compute the UMAP coordinates of `vectors`, `(cells, hidden)`: `(cells, 2)` float32.

    Fewer than 4 cells have no graph of neighbours. Their coordinates are the first two columns of the
    vectors.
    """
    if len(vectors) < MIN_CELLS:
        return np.pad(vectors, ((0, 0), (0, 2)))[:, :2].astype(np.float32)
    neighbors = min(NEIGHBORS, len(vectors) - 1)
    # Find exact neighbours, which takes 4 CPU-seconds for 20,000 cells of width 128. Each cell is put
    # first among its own neighbours, even if another cell has the same vector.
    search = import_module("sklearn.neighbors").NearestNeighbors(
        n_neighbors=neighbors, algorithm="brute"
    )
    distances, indices = search.fit(vectors).kneighbors()
    cells = np.arange(len(vectors))[:, None]
    indices = np.hstack([cells, indices[:, :-1]])
    distances = np.hstack([np.zeros_like(distances[:, :1]), distances[:, :-1]])
    # the spectral initialisation needs more cells than there are neighbours and dimensions
    init = "spectral" if len(vectors) > MAX_RANDOM_CELLS else "random"
    umap = import_umap()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # umap-learn warns of small or disconnected graphs
        model = umap.UMAP(
            n_neighbors=neighbors,
            init=init,
            random_state=seed,
            n_jobs=1,
            precomputed_knn=(indices, distances),
        )
        return model.fit_transform(vectors)


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, which have a value for each of COLUMNS, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> UmapColumns:
    """Read the columns of umap.tsv. They are empty if the file is absent.

    Raises DataError if the file is damaged.
    """
    x = array("d")
    y = array("d")
    if not path.exists():
        return UmapColumns([], [], [], x, y, [], [])
    require_file(path)
    expected = f"expected the columns {', '.join(COLUMNS)}"
    # the values of all rows, one row after the other; a list for each row would take twice the time
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
