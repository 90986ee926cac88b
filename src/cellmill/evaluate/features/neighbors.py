"""Nearest neighbours of cells, and the graph that they make."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.neighbors import NearestNeighbors

from cellmill.evaluate.features.products import SharedCells

BLOCK = 512  # cells whose distances to all others are known at once


@dataclass(frozen=True)
class NeighborGraph:
    """The k nearest other cells of each cell by Euclidean distance, the nearest first."""

    indices: np.ndarray  # `(cells, k)` int32
    distances: np.ndarray  # `(cells, k)` float64

    @classmethod
    def build(cls, features: Any, k: int) -> Self:
        """Graph of `features` `(cells, width)`, dense, sparse or shared; all other cells are
        neighbours if there are fewer than k.
        """
        k = min(k, features.shape[0] - 1)
        if isinstance(features, SharedCells):
            return cls(*_search_products(features, k))
        nearest = NearestNeighbors(n_neighbors=k, algorithm="brute")
        distances, indices = nearest.fit(features).kneighbors()
        return cls(indices.astype(np.int32), distances.astype(np.float64))


def _search_products(features: SharedCells, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and distances of the k nearest other cells, in blocks of cells."""
    n = features.shape[0]
    indices = np.empty((n, k), np.int32)
    distances = np.empty((n, k))
    squares = features.squares()
    for start in range(0, n, BLOCK):
        block = features[start : start + BLOCK]
        rows = np.arange(block.shape[0])
        # squared distances without the square of the cell itself, which is the same for all
        products = block.products(features)
        relative = squares - 2 * products
        relative[rows, start + rows] = np.inf
        unordered = relative.argpartition(k - 1, axis=1)[:, :k]
        values = np.take_along_axis(relative, unordered, axis=1)
        order = values.argsort(axis=1, kind="stable")
        nearest = np.take_along_axis(unordered, order, axis=1)
        values = np.take_along_axis(values, order, axis=1)
        stop = start + len(rows)
        squared = values + squares[start:stop, None]
        indices[start:stop] = nearest
        distances[start:stop] = np.sqrt(np.maximum(squared, 0))
    return indices, distances


def link_neighbors(indices: np.ndarray) -> sp.csr_matrix:
    """1 from each cell to its neighbours `(cells, k)`; `(cells, cells)` float64, not symmetric."""
    n, k = indices.shape
    ones = np.ones(n * k)
    row_starts = np.arange(0, n * k + 1, k)
    return sp.csr_matrix((ones, indices.ravel(), row_starts), shape=(n, n))


def jaccard_weights(graph: NeighborGraph) -> sp.coo_matrix:
    """Undirected edges, upper triangle: share of common neighbours, cells included (Levine et al.
    2015, Cell 162).
    """
    n, k = graph.indices.shape
    adjacency = link_neighbors(graph.indices)
    undirected = adjacency.maximum(adjacency.T)
    edges = sp.triu(undirected, k=1).tocoo()
    # each cell counts as its own neighbour, so a neighbourhood has k + 1 cells
    with_self = adjacency + sp.identity(n, format="csr")
    common = with_self[edges.row].multiply(with_self[edges.col])
    n_common = np.asarray(common.sum(axis=1)).ravel()
    n_either = 2 * (k + 1) - n_common
    weights = n_common / n_either
    return sp.coo_matrix((weights, (edges.row, edges.col)), shape=(n, n))
