"""Exact nearest neighbours of cells, the one graph that the metrics of a task are computed on."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.neighbors import NearestNeighbors


@dataclass(frozen=True)
class NeighborGraph:
    """The k nearest other cells of each cell by Euclidean distance, the nearest first."""

    indices: np.ndarray  # `(cells, k)` int32
    distances: np.ndarray  # `(cells, k)` float64

    @classmethod
    def of(cls, features: Any, k: int) -> Self:
        """Graph of `features` `(cells, width)`, dense or sparse; with fewer than k + 1 cells, of all other cells."""
        k = min(k, features.shape[0] - 1)
        distances, indices = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(features).kneighbors()
        return cls(indices.astype(np.int32), distances.astype(np.float64))

    def nearest(self, k: int) -> "NeighborGraph":
        """The same graph with the first `k` neighbours alone."""
        return NeighborGraph(self.indices[:, :k], self.distances[:, :k])

    def adjacency(self) -> sp.csr_matrix:
        """1 from each cell to its neighbours, `(cells, cells)` float64, not symmetric."""
        n, k = self.indices.shape
        return sp.csr_matrix((np.ones(n * k), self.indices.ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))


def jaccard_weights(graph: NeighborGraph) -> sp.coo_matrix:
    """Edges of the undirected graph, upper triangle: the share of neighbours, themselves included, of both cells.

    Weights of PhenoGraph (Levine et al. 2015, Cell 162:184).
    """
    n = len(graph.indices)
    adjacency = graph.adjacency()
    edges = sp.triu(adjacency.maximum(adjacency.T), k=1).tocoo()
    closed = adjacency + sp.identity(n, format="csr")
    k = graph.indices.shape[1] + 1
    shared = np.asarray(closed[edges.row].multiply(closed[edges.col]).sum(axis=1)).ravel()
    return sp.coo_matrix((shared / (2 * k - shared), (edges.row, edges.col)), shape=(n, n))
