"""Sparse matrices as three arrays `data`, `indices` and `indptr`, compressed by cell or by gene."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.row_buckets import RowBuckets
from cellmill.data.inputs.source import reading
from cellmill.data.inputs.values import REAL, WHOLE, SequentialArray, require_kind
from cellmill.errors import DataError

_PIECE = 1 << 22  # values in memory at once while a matrix compressed by gene is transposed


class _Compressed:
    """The three arrays, checked; `n_major` is the compressed axis."""

    def __init__(self, path: Path, name: str, group: Any, n_major: int, n_minor: int):
        self.path, self.name, self.n_major, self.n_minor = path, name, n_major, n_minor
        stored = {key: group.get(key) for key in ("data", "indices", "indptr")}
        for key, array in stored.items():
            require_kind(path, f"{name}/{key}", array, REAL if key == "data" else WHOLE)
        self.data, self.indices = SequentialArray(path, stored["data"]), SequentialArray(path, stored["indices"])
        self.indptr = self._checked_indptr(stored["indptr"])

    def _checked_indptr(self, stored: Any) -> np.ndarray:
        fits = stored.shape[0] == self.n_major + 1 and len(self.data) == len(self.indices)
        if fits:
            with reading(self.path):
                indptr = np.asarray(stored[:]).astype(np.int64)
            if indptr[0] == 0 and indptr[-1] == len(self.data) and not (np.diff(indptr) < 0).any():
                return indptr
        raise DataError(f"{self.path}: {self.name} is damaged: indptr does not match data and indices")

    def piece(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """indptr from 0, int32 indices and values of rows `low` to `high` of the compressed axis."""
        indptr = self.indptr[low : high + 1]
        start, stop = int(indptr[0]), int(indptr[-1])
        indices = self.indices.read(start, stop)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.n_minor):
            raise DataError(f"{self.path}: {self.name} is damaged: an index is outside its {self.n_minor:,} columns")
        return indptr - start, indices.astype(np.int32, copy=False), self.data.read(start, stop)


class CsrMatrix:
    """Compressed by cell."""

    def __init__(self, path: Path, name: str, group: Any, shape: tuple[int, int]):
        self.shape = shape
        self._arrays = _Compressed(path, name, group, *shape)

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        for first in range(0, self.shape[0], block):
            last = min(first + block, self.shape[0])
            indptr, indices, data = self._arrays.piece(first, last)
            yield sp.csr_matrix((data, indices, indptr), shape=(last - first, self.shape[1]))

    def close(self) -> None:
        """Do nothing: there is no temporary file."""


class CscMatrix:
    """Compressed by gene; transposed through a temporary file when it is first read."""

    def __init__(self, path: Path, name: str, group: Any, shape: tuple[int, int]):
        self.shape = shape
        self._arrays = _Compressed(path, name, group, shape[1], shape[0])
        self._transposed: RowBuckets | None = None

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        if self._transposed is None:
            self._transposed = self._transpose()
        return self._transposed.blocks(block)

    def close(self) -> None:
        """Drop the temporary file."""
        if self._transposed is not None:
            self._transposed.close()

    def _transpose(self) -> RowBuckets:
        buckets = RowBuckets(self.shape, self._arrays.data.dtype)
        try:
            for low, high in self._column_pieces():
                indptr, rows, values = self._arrays.piece(low, high)
                buckets.add(rows, np.repeat(np.arange(low, high, dtype=np.int32), np.diff(indptr)), values)
        except BaseException:
            buckets.close()
            raise
        return buckets

    def _column_pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns with at most `_PIECE` values, or of one column."""
        low, indptr = 0, self._arrays.indptr
        while low < self.shape[1]:
            high = int(np.searchsorted(indptr, indptr[low] + _PIECE, side="right")) - 1
            high = min(max(high, low + 1), self.shape[1])
            yield low, high
            low = high
