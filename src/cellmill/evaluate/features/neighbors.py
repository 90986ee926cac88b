"""Nearest neighbours of cells, and the graph that links cells with their neighbours."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.neighbors import NearestNeighbors

from cellmill.evaluate.features.products import SharedCells

BLOCK = 512  # distances of at most this many cells to all other cells are in memory at once


@dataclass(frozen=True)
class NeighborGraph:
    """The k nearest other cells of each cell by Euclidean distance, the nearest first."""

    indices: np.ndarray  # `(cells, k)` int32
    distances: np.ndarray  # `(cells, k)` float64

    @classmethod
    def build(cls, features: Any, k: int) -> Self:
        """Find the nearest neighbours by `features`, `(cells, width)`, dense, sparse or `SharedCells`.

        If there are fewer than k other cells, all other cells are neighbours.
        """
        k = min(k, features.shape[0] - 1)
        if isinstance(features, SharedCells):
            return cls(*_search_products(features, k))
        nearest = NearestNeighbors(n_neighbors=k, algorithm="brute")
        distances, indices = nearest.fit(features).kneighbors()
        return cls(indices.astype(np.int32), distances.astype(np.float64))


def _search_products(features: SharedCells, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest other cells of each cell by dot products, in blocks of cells.

    Returns the indices and the distances of `NeighborGraph`.
    """
    n_cells = features.shape[0]
    indices = np.empty((n_cells, k), np.int32)
    distances = np.empty((n_cells, k))
    squares = features.squares()
    for start in range(0, n_cells, BLOCK):
        block = features[start : start + BLOCK]
        rows = np.arange(block.shape[0])
        # The squared distance of cells x and y is x·x - 2 x·y + y·y. Here x·x is left out, because it
        # does not change the order of the neighbours of x. A cell is not a neighbour of itself.
        products = block.products(features)
        relative = squares - 2 * products
        relative[rows, start + rows] = np.inf
        # find the k smallest values in each row, then order them
        unordered = relative.argpartition(k - 1, axis=1)[:, :k]
        values = np.take_along_axis(relative, unordered, axis=1)
        order = values.argsort(axis=1, kind="stable")
        nearest = np.take_along_axis(unordered, order, axis=1)
        values = np.take_along_axis(values, order, axis=1)
        # add x·x
        stop = start + len(rows)
        squared = values + squares[start:stop, None]
        indices[start:stop] = nearest
        distances[start:stop] = np.sqrt(np.maximum(squared, 0))
    return indices, distances


def link_neighbors(indices: np.ndarray) -> sp.csr_matrix:
    """Make the adjacency matrix of a graph of neighbours, `(cells, cells)` float64.

    `indices`, `(cells, k)`, are the neighbours of each cell. An entry is 1 if the cell of the column is a
    neighbour of the cell of the row. The matrix is not symmetric.
    """
    n_cells, k = indices.shape
    ones = np.ones(n_cells * k)
    row_starts = np.arange(0, n_cells * k + 1, k)
    return sp.csr_matrix((ones, indices.ravel(), row_starts), shape=(n_cells, n_cells))


def jaccard_weights(graph: NeighborGraph) -> sp.coo_matrix:
    """Weight each pair of neighbouring cells by the share of neighbours that both have.

    The weight is the Jaccard index of the two sets of neighbours, where each cell is in its own set
    (Levine et al. 2015, Cell 162). Returns the upper triangle of a symmetric matrix, `(cells, cells)`.
    """
    n_cells, k = graph.indices.shape
    adjacency = link_neighbors(graph.indices)
    undirected = adjacency.maximum(adjacency.T)
    edges = sp.triu(undirected, k=1).tocoo()
    # each cell counts as its own neighbour, so a neighbourhood has k + 1 cells
    with_self = adjacency + sp.identity(n_cells, format="csr")
    common = with_self[edges.row].multiply(with_self[edges.col])
    n_common = np.asarray(common.sum(axis=1)).ravel()
    n_either = 2 * (k + 1) - n_common
    weights = n_common / n_either
    return sp.coo_matrix((weights, (edges.row, edges.col)), shape=(n_cells, n_cells))
