"""Search for the nearest points of an atlas by Euclidean distance.

The search is exact, in blocks of points, or it uses a graph of the library faiss (HNSW: Malkov & Yashunin
2018, arXiv:1603.09320). In both cases the distances are computed again from the stored vectors. Points at
equal distances are in the order of their indices.

A point is a vector that no other point equals, because many equal vectors cut a graph into parts
(`findings/hnsw_equal_vectors.sh`). Vectors are float16, and are stored once: the file of the graph has
only links. One thread adds the points in their order, so the same points give the same bytes.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.plugin import in_one_line
from cellmill.errors import DataError
from cellmill.files import atomic_path

# At most this many points have no graph. To compare a cell with all of them takes less than a
# millisecond.
MAX_EXACT = 50_000

# parameters of the graph, with their names in the paper and in faiss
LINKS = 16  # links of a point (M)
BUILD_WIDTH = 64  # candidates while the graph is built (efConstruction)
SEARCH_WIDTH = 64  # candidates of a search, at least (efSearch)

QUERIES = 1024  # at most this many queries are compared at once
POINTS = 16_384  # with at most this many points at once
# This many more candidates than neighbours are found, because the distances of all candidates are
# computed again and may change their order.
SPARE = 8
NOWHERE = -1  # index in place of a point if there are too few points


class Points:
    """The points of an atlas: distinct vectors, `(points, width)` float16, with a graph if there is one."""

    def __init__(self, vectors: np.ndarray, graph: Any = None) -> None:
        self.vectors = vectors
        self.graph = graph

    def nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest points of each query, by the graph if there is one.

        `queries` are `(queries, width)` float32. Returns indices of points, `(queries, k)` int64, and
        distances, `(queries, k)` float32. If there are fewer than k points, the last indices are NOWHERE,
        at an infinite distance.
        """
        if self.graph is None:
            return self.nearest_exact(queries, k)
        n_candidates = min(k + SPARE, len(self.vectors))
        parameters = _faiss().SearchParametersHNSW(efSearch=max(SEARCH_WIDTH, 2 * n_candidates))
        _, candidates = self.graph.search(queries, n_candidates, params=parameters)
        points, distances = self._rank(queries, candidates, k)
        missed = np.flatnonzero(points[:, min(k, n_candidates) - 1] == NOWHERE)
        if len(missed):  # the search has ended in a small part of the graph that lacks k points
            points[missed], distances[missed] = self.nearest_exact(queries[missed], k)
        return points, distances

    def nearest_exact(
        self,
        queries: np.ndarray,
        k: int,
        groups: np.ndarray | None = None,
        left_out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest points of each query by an exact search.

        Returns indices and distances, in the form that `nearest` returns. `groups`, `(points,)`, has the
        group of each point. `left_out`, `(queries,)`, has the group that is left out for each query. If
        both are None, no point is left out.
        """
        parts = []
        for first in range(0, len(queries), QUERIES):
            block = queries[first : first + QUERIES]
            excluded = None if left_out is None else left_out[first : first + QUERIES]
            candidates = self._compare_all(block, k + SPARE, groups, excluded)
            parts.append(self._rank(block, candidates, k))
        if not parts:
            return np.zeros((0, k), np.int64), np.zeros((0, k), np.float32)
        points, distances = zip(*parts)
        return np.concatenate(points), np.concatenate(distances)

    def _compare_all(
        self,
        queries: np.ndarray,
        k: int,
        groups: np.ndarray | None,
        left_out: np.ndarray | None,
    ) -> np.ndarray:
        """Compare each query with all points, and return the k nearest points in any order.

        The result is `(queries, k)`, or `(queries, points)` if there are fewer than k points.
        """
        best = np.zeros((len(queries), 0), np.int64)
        best_scores = np.zeros((len(queries), 0), np.float32)
        for first in range(0, len(self.vectors), POINTS):
            block = self.vectors[first : first + POINTS].astype(np.float32)
            # The squared distance of query x and point y is x·x - 2 x·y + y·y. Here x·x is left out,
            # because it does not change which points are nearest.
            squares = np.einsum("ij,ij->i", block, block)
            scores = squares - 2 * (queries @ block.T)
            if groups is not None and left_out is not None:
                scores[groups[first : first + POINTS] == left_out[:, None]] = np.inf
            # add the k nearest points of this block, and keep the k nearest of all
            smallest = _find_smallest(scores, k)
            best = np.hstack([best, first + smallest])
            best_scores = np.hstack([best_scores, np.take_along_axis(scores, smallest, axis=1)])
            kept = _find_smallest(best_scores, k)
            best = np.take_along_axis(best, kept, axis=1)
            best_scores = np.take_along_axis(best_scores, kept, axis=1)
        return np.where(np.isinf(best_scores), NOWHERE, best)

    def _rank(
        self, queries: np.ndarray, candidates: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose the k nearest of `candidates`, `(queries, candidates)`, ordered by distance, then by index."""
        points = np.full((len(queries), k), NOWHERE, np.int64)
        distances = np.full((len(queries), k), np.inf, np.float32)
        for first in range(0, len(queries), QUERIES):
            block = slice(first, first + QUERIES)
            point_ids = candidates[block]
            differences = self.vectors[point_ids].astype(np.float32) - queries[block, None]
            lengths = np.sqrt(np.einsum("ijk,ijk->ij", differences, differences))
            lengths[point_ids == NOWHERE] = np.inf
            order = np.lexsort((point_ids, lengths))[:, :k]
            n = order.shape[1]
            points[block, :n] = np.take_along_axis(point_ids, order, axis=1)
            distances[block, :n] = np.take_along_axis(lengths, order, axis=1)
        return points, distances


def _find_smallest(scores: np.ndarray, k: int) -> np.ndarray:
    """Find the columns of the k smallest scores in each row, in any order; all columns if there are at most k."""
    if scores.shape[1] <= k:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.argpartition(scores, k - 1, axis=1)[:, :k]


def average_distances(distances: np.ndarray) -> np.ndarray:
    """Mean of each cell's finite `distances`, `(cells, k)`: (cells,) float32. NaN without a finite one."""
    is_finite = np.isfinite(distances)
    sums = np.where(is_finite, distances, 0).sum(axis=1, dtype=np.float64)
    n = is_finite.sum(axis=1)
    mean = np.divide(sums, n, out=np.full(len(n), np.nan), where=n > 0)
    return mean.astype(np.float32)


def has_faiss() -> bool:
    """True if faiss, the library of the graph, is installed (extra `atlas`)."""
    try:
        _faiss()
    except ImportError:
        return False
    return True


def write_graph(path: Path, vectors: np.ndarray) -> str:
    """Write the graph of the points with these `vectors`, `(points, width)` float16.

    Returns the name and version of the library.
    """
    faiss = _faiss()
    graph = faiss.IndexHNSW(_storage(vectors[:0]), LINKS)
    graph.hnsw.efConstruction = BUILD_WIDTH
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # several threads would add points in an order that varies
    try:
        # all points in one call: a graph that grows by batches finds fewer of the neighbours
        graph.add(vectors.astype(np.float32))
        with atomic_path(path) as temporary:
            faiss.write_index(graph, str(temporary), faiss.IO_FLAG_SKIP_STORAGE)
    except RuntimeError as error:
        raise DataError(f"{path}: could not be written: {in_one_line(error)}") from None
    finally:
        faiss.omp_set_num_threads(threads)
    return f"faiss {faiss.__version__}"


def read_graph(path: Path, vectors: np.ndarray, remedy: str) -> Any:
    """Read the graph of `vectors`. Compare the SHA-256 of the file first: the library trusts what it reads.

    Raises DataError if the file is no graph, or a graph of another number or width of vectors.
    """
    faiss = _faiss()
    try:
        graph = faiss.read_index(str(path))
        is_whole = isinstance(graph, faiss.IndexHNSW) and graph.storage is None
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read: {in_one_line(error)}; {remedy}") from None
    if not is_whole or (graph.ntotal, graph.d) != vectors.shape:
        raise DataError(
            f"{path}: expected a graph of {vectors.shape[0]:,} vectors of {vectors.shape[1]:,} numbers; {remedy}"
        )
    graph.storage = _storage(vectors)
    graph.own_fields = False
    # so that Python keeps the storage as long as the graph
    graph.referenced_objects = [graph.storage]
    return graph


def _faiss() -> Any:
    return import_module("faiss")


def _storage(vectors: np.ndarray) -> Any:
    """Make the library's own form of `vectors`, `(points, width)` float16."""
    faiss = _faiss()
    kind = faiss.ScalarQuantizer.QT_fp16
    storage = faiss.IndexScalarQuantizer(vectors.shape[1], kind, faiss.METRIC_L2)
    faiss.copy_array_to_vector(np.ascontiguousarray(vectors).view(np.uint8).ravel(), storage.codes)
    storage.ntotal = len(vectors)
    return storage
