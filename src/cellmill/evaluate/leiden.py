"""Leiden clusters of cells by igraph, of the extra `cluster`.

Modularity with a resolution (Traag, Waltman & van Eck 2019, Sci. Rep. 9:5233), until nothing improves. The same graph
and seed give the same clusters.
"""

import importlib
import random
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.errors import ConfigError


def import_igraph() -> Any:
    """igraph. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module("igraph")
    except ImportError:
        raise ConfigError(
            "task clustering requires igraph, which is missing: pip install 'cellmill[cluster]'"
        ) from None


class LeidenGraph:
    """An undirected weighted graph to cluster: `edges` are an upper triangle, of weights above 0."""

    def __init__(self, edges: sp.coo_matrix) -> None:
        self._igraph = import_igraph()
        pairs = np.stack([edges.row, edges.col], axis=1)
        self._graph = self._igraph.Graph(n=edges.shape[0], edges=pairs, edge_attrs={"weight": edges.data})

    def clusters(self, resolution: float, seed: int) -> np.ndarray:
        """Cluster of each cell, int64 `(cells,)`."""
        self._igraph.set_random_number_generator(random.Random(seed))
        try:
            found = self._graph.community_leiden(
                objective_function="modularity", weights="weight", resolution=resolution, n_iterations=-1
            )
        finally:
            self._igraph.set_random_number_generator(random)  # igraph's own default
        return np.asarray(found.membership, np.int64)
