"""Seeded, single-threaded UMAP of embeddings: the same cells give the same picture."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import umap
from numba.core.dispatcher import Dispatcher
from sklearn.neighbors import NearestNeighbors

from cellmill.data.arrays import text_values
from cellmill.evaluate.scores import draw_cells
from cellmill.evaluate.umap_file import write_umap as write_umap

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


def umap_rows(
    name: str, obs_names: pd.Index, vectors: np.ndarray, roles: Mapping[str, pd.Series], unseen: np.ndarray, seed: int
) -> list[tuple[Any, ...]]:
    """Rows of umap.tsv for the cells of one dataset that have an embedding, with their role label and batch."""
    cells = draw_cells(np.flatnonzero(np.isfinite(vectors).all(axis=1)), MAX_CELLS, seed, 1)
    none = np.full(len(obs_names), "")
    labels, batches = (text_values(roles[role]) if role in roles else none for role in ("label", "batch"))
    return [
        (name, obs_names[cell], labels[cell], f"{x:.5g}", f"{y:.5g}", int(unseen[cell]), batches[cell])
        for cell, (x, y) in zip(cells, project(vectors[cells], seed))
    ]
