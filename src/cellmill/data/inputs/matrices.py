"""Count matrices of HDF5 and Zarr files, read in blocks of cells: sparse by cell or by gene, and dense.

Sparse ones are three arrays `data`, `indices` and `indptr`; dense ones are cells x genes (AnnData) or genes x cells
(Loom). HDF5 and Zarr arrays share the names `shape`, `dtype`, `chunks` and slicing. A matrix stored by gene is
transposed on disk: values arrive in any order and are sorted into buckets of rows in a temporary file.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.source import reading, reblocked
from cellmill.errors import DataError
from cellmill.files import named_errors

REAL = "buif"  # kinds of numpy dtypes
WHOLE = "ui"
MAX_LENGTH = 2**31 - 1  # cells, and genes: indices of scipy are int32 here


def is_array(item: Any) -> bool:
    """True for an array, False for a group, a committed type or None."""
    return hasattr(item, "shape") and hasattr(item, "dtype")


def native(values: Any) -> np.ndarray:
    """The values as an array in native byte order; float16, which scipy has no sparse form of, as float32."""
    values = np.asarray(values)
    dtype = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype.newbyteorder("=")
    return values.astype(dtype, copy=False)


def chunk_length(array: Any, axis: int = 0) -> int:
    """Length of a chunk along `axis`; 1 for an array without chunks."""
    chunks = array.chunks
    return max(1, int(chunks[axis])) if chunks else 1


def require_kind(path: Path, name: str, array: Any, kinds: str, n_dims: int = 1) -> Any:
    """Return `array`. Raises DataError unless it is an array of `n_dims` dimensions whose dtype is of `kinds`."""
    if not is_array(array) or array.shape is None:
        raise DataError(f"{path}: {name} is {'missing' if array is None else 'not an array'}")
    if len(array.shape) != n_dims:
        raise DataError(f"{path}: {name} is damaged: expected {n_dims} dimensions, got shape {tuple(array.shape)}")
    kind = getattr(array.dtype, "kind", "O")
    if kind not in kinds:
        wanted = "counts" if kinds == REAL else "whole numbers"
        raise DataError(f"{path}: {name} expected {wanted}, got {array.dtype}")
    return array


class SequentialArray:
    """One-dimensional stored array, read in ascending slices; the last chunk is kept, so none is decoded twice."""

    def __init__(self, path: Path, array: Any):
        self._path, self._array = path, array
        self.dtype = native(np.zeros(0, array.dtype)).dtype
        self._chunk = chunk_length(array)
        self._first, self._kept = 0, np.zeros(0, self.dtype)

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop` in native byte order. Raises DataError when the file is damaged."""
        if self._chunk == 1:
            return self._decoded(start, stop)
        last = self._first + len(self._kept)
        held = self._kept[start - self._first :] if self._first <= start < last else self._kept[:0]
        begin, end = start + len(held), min(len(self), -(-stop // self._chunk) * self._chunk)
        if begin >= stop:
            return held[: stop - start]
        begin_chunk = begin if len(held) else begin // self._chunk * self._chunk
        fresh = self._decoded(begin_chunk, end)[begin - begin_chunk :]
        whole = np.concatenate([held, fresh]) if len(held) else fresh
        self._kept = whole[-self._chunk :].copy()
        self._first = end - len(self._kept)
        return whole[: stop - start]

    def _decoded(self, start: int, stop: int) -> np.ndarray:
        with reading(self._path):
            values = native(self._array[start:stop])
        if len(values) != stop - start:
            raise DataError(f"{self._path}: damaged: expected {stop - start:,} values, got {len(values):,}")
        return values


_ROWS = 1024  # fewest rows of one bucket: smaller ones make writes too short
_MOST_BUCKETS = 60_000  # their numbers are sorted as 16-bit integers, which is fast


class RowBuckets:
    """Values of a matrix of `shape`; `add` all of them, then read `blocks` any number of times.

    A piece that is added is written at once, bucket by bucket, so memory holds one piece or one bucket. The file is in
    the folder of `TMPDIR`; OSError names that folder when it is full.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype) -> None:
        self.shape = shape
        self._rows = max(_ROWS, -(-shape[0] // _MOST_BUCKETS))
        self._record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", dtype)])
        self._segments: list[list[tuple[int, int]]] = [[] for _ in range(0, shape[0], self._rows)]
        self._file = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115 - closed by close()
        self._n_values = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Add values, `(n,)`, at `rows` and `columns`, int within the shape."""
        bucket = (rows // self._rows).astype(np.uint16)
        order = np.argsort(bucket, kind="stable")
        records = np.empty(len(rows), self._record)
        records["row"], records["column"], records["value"] = rows[order] % self._rows, columns[order], values[order]
        stops = np.cumsum(np.bincount(bucket, minlength=len(self._segments)))
        start = 0
        for segments, stop in zip(self._segments, stops.tolist()):
            if start < stop:
                segments.append((self._n_values + start, stop - start))
            start = stop
        with named_errors(Path(tempfile.gettempdir())):
            self._file.seek(self._n_values * self._record.itemsize)
            self._file.write(records.data)
        self._n_values += len(rows)

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """All rows in order, `block` at a time; entries of a row in the order in which they were added."""
        return reblocked((self._bucket(number) for number in range(len(self._segments))), block)

    def close(self) -> None:
        """Drop the temporary file."""
        self._file.close()

    def _bucket(self, number: int) -> sp.csr_matrix:
        records = np.concatenate([self._read(*part) for part in self._segments[number]] or [self._read(0, 0)])
        n_rows = min(self._rows, self.shape[0] - number * self._rows)
        rows = records["row"].astype(np.uint16 if n_rows <= 1 << 16 else np.uint32)
        order = np.argsort(rows, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
        columns = records["column"][order].astype(np.int32)
        return sp.csr_matrix((records["value"][order], columns, indptr), shape=(n_rows, self.shape[1]))

    def _read(self, start: int, size: int) -> np.ndarray:
        self._file.seek(start * self._record.itemsize)
        return np.frombuffer(self._file.read(size * self._record.itemsize), self._record)


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


_SLAB_BYTES = 1 << 26  # dense values in memory at once, if chunks allow it
_TALL = 4  # a chunk of more slabs than this is cheaper to transpose on disk than to hold


class DenseMatrix:
    """Dense array, read in slabs of whole chunks: each chunk is decoded once.

    Chunks that span too many cells are read in slabs of genes and transposed through a temporary file.
    """

    def __init__(self, path: Path, name: str, array: Any, cells_axis: int = 0):
        self._path, self._cells_axis = path, cells_axis
        self._array = require_kind(path, name, array, REAL, 2)
        n_obs, n_vars = (int(array.shape[axis]) for axis in (cells_axis, 1 - cells_axis))
        self.shape = (n_obs, n_vars)
        self._transposed: RowBuckets | None = None

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        fit, tall = self._fit(self.shape[1]), chunk_length(self._array, self._cells_axis)
        if min(tall, self.shape[0]) <= _TALL * fit:
            return reblocked(self._slabs(max(tall, fit // tall * tall)), block)
        if self._transposed is None:
            self._transposed = self._transpose()
        return self._transposed.blocks(block)

    def close(self) -> None:
        """Drop the temporary file, if there is one."""
        if self._transposed is not None:
            self._transposed.close()

    def _fit(self, width: int) -> int:
        return max(1, _SLAB_BYTES // max(1, width * self._array.dtype.itemsize))

    def _slabs(self, step: int) -> Iterator[sp.csr_matrix]:
        for first in range(0, self.shape[0], step):
            yield sp.csr_matrix(self._dense(slice(first, min(first + step, self.shape[0])), slice(None)))

    def _transpose(self) -> RowBuckets:
        n_obs, n_vars = self.shape
        wide = chunk_length(self._array, 1 - self._cells_axis)
        step = max(wide, self._fit(n_obs) // wide * wide)
        buckets = RowBuckets(self.shape, native(np.zeros(0, self._array.dtype)).dtype)
        try:
            for low in range(0, n_vars, step):
                part = sp.coo_matrix(self._dense(slice(None), slice(low, min(low + step, n_vars))))
                buckets.add(part.row, part.col + low, part.data)
        except BaseException:
            buckets.close()
            raise
        return buckets

    def _dense(self, cells: slice, genes: slice) -> np.ndarray:
        with reading(self._path):
            if self._cells_axis == 0:
                return native(self._array[cells, genes])
            return native(self._array[genes, cells]).T
