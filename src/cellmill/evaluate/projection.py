"""UMAP of embeddings, for the eye: seeded, in one thread, so the same cells give the same picture."""

from __future__ import annotations

import warnings

import numpy as np
import umap

UMAP_COLUMNS = ("dataset", "obs_name", "label", "x", "y", "heldout")
"""Of umap.tsv."""
MAX_CELLS = 20_000
"""Cells drawn at most: more cannot be told apart on a page."""


def project(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Coordinates `(cells, 2)` float32 of `vectors` `(cells, hidden)`; the first two columns of fewer than 4 cells."""
    if len(vectors) < 4:  # too few for a graph of neighbours
        return np.pad(vectors, ((0, 0), (0, 2)))[:, :2].astype(np.float32)
    near = min(15, len(vectors) - 1)
    # the spectral start needs more cells than dimensions and neighbours; tiny sets begin at random
    start = "spectral" if len(vectors) > 16 else "random"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on small or disconnected graphs it warns and goes on
        return umap.UMAP(n_neighbors=near, init=start, random_state=seed, n_jobs=1).fit_transform(vectors)


def drawn(n_cells: int, seed: int) -> np.ndarray:
    """Places of the cells to draw, ascending: all, or MAX_CELLS by a seeded draw."""
    if n_cells <= MAX_CELLS:
        return np.arange(n_cells)
    return np.sort(np.random.Generator(np.random.Philox(key=[seed, 1])).permutation(n_cells)[:MAX_CELLS])
