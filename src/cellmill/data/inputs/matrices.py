"""Matrices of cells x genes, read in blocks of cells: sparse by cell or by gene, dense, or in memory.

Sparse ones are three arrays `data`, `indices` and `indptr`; dense ones are cells x genes (AnnData)
or genes x cells (Loom). HDF5 and Zarr arrays share the names `shape`, `dtype`, `chunks` and
slicing.
"""

import math
import operator
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.derived.row_order import OrderedRows
from cellmill.data.inputs.h5 import reading
from cellmill.data.rows import row_numbers, row_offsets
from cellmill.errors import DataError
from cellmill.files import named_errors

REAL = "buif"  # kinds of numpy dtypes
WHOLE = "ui"
MAX_LENGTH = 2**31 - 1  # cells, and genes: indices of scipy are int32 here
LARGE = 1 << 26  # bytes; smaller arrays may be declared by any file
_MAX_CHUNK = 1 << 32  # bytes, as in HDF5
# ratio of declared to stored bytes; the filters of h5py and hdf5plugin stay below
_MAX_RATIO = 100_000
# bytes per cell that an obs column may declare: Zarr stores none if all values are equal
_MAX_CELL_BYTES = 16

Pieces = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Rows and columns, int within the shape, and values, each `(n,)`."""
_MIN_BUCKET_ROWS = 1024  # buckets of fewer rows would make writes too short
_MAX_BUCKETS = 60_000  # their numbers are sorted as 16-bit integers, which is fast
_PIECE_VALUES = 1 << 22  # values in memory at once while a matrix compressed by gene is transposed
_SLAB_BYTES = 1 << 26  # dense values in memory at once, if chunks allow it
_MAX_EMPTY = 1000  # blocks without values that are passed over where some values are looked for
_MAX_SLABS = 4  # a chunk of more slabs is cheaper to transpose on disk than to hold in memory


class StoredMatrix:
    """Matrix of cells x genes.

    A subclass sets `shape` and defines `parts`, `parts_from` if it can begin at any row, or `pieces` if
    cells are not in order.
    """

    shape: tuple[int, int]
    _buckets: "RowBuckets | None" = None

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        """Yield all cells in order, in parts of about `block`: CSR `(cells, genes)`.

        Values are of any real dtype in native byte order, and indices int32 within the width. The
        entries of a row are in any order, and may be repeated. May be called again. Holds a few parts
        in memory. Raises DataError when the file is damaged.
        """
        if type(self).parts_from is StoredMatrix.parts_from:
            raise NotImplementedError("a stored matrix defines parts, parts_from or pieces")
        return self.parts_from(0, block)

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        """`parts` from row `start` on. A format that overrides this reads none of those before."""
        return _skip_rows(self.parts(block), start)

    def pieces(self) -> Pieces | None:
        """Yield all values in any order, in pieces that fit in memory, to be sorted by cell on disk.

        None if `parts` is defined.
        """
        return None

    def some(self, n: int) -> sp.csr_matrix:
        """Return the first `n` cells or more, or some values of all cells if it is not stored by cell.

        Empty cells, as in a corner of a slide, give way to later ones. Raises StopIteration without cells.
        """
        pieces = self.pieces()
        if pieces is None:
            parts = self.parts(n)
            first = next(parts)
            seen = chain([first], islice(parts, _MAX_EMPTY))
            return next((part for part in seen if part.data.any()), first)
        rows, columns, values = next(pieces)
        return sp.csr_matrix((native(values), (rows, columns)), shape=self.shape)

    @property
    def is_by_cell(self) -> bool:
        """False if the whole matrix is sorted by cell on disk before a row can be read."""
        return self.pieces() is None

    def blocks(self, block: int, first: int = 0) -> Iterator[sp.csr_matrix]:
        """The rows from `first` on in order, `block` cells at a time (the last may be shorter)."""
        if self._buckets is None:
            pieces = self.pieces()
            if pieces is not None:
                self._buckets = RowBuckets(self.shape, pieces)
        if self._buckets is None:
            parts = self.parts_from(first, block)
        else:
            parts = _skip_rows(self._buckets.parts(block), first)
        held: list[sp.csr_matrix] = []
        missing = block  # cells until the next block is complete
        for part in parts:
            start = 0
            n = part.shape[0]
            while start < n:
                stop = min(n, start + missing)
                held.append(part if stop - start == n else part[start:stop])
                missing -= stop - start
                start = stop
                if not missing:
                    yield _stack(held)
                    held = []
                    missing = block
        if held:
            yield _stack(held)

    def close(self) -> None:
        """Drop the temporary file, if any."""
        if self._buckets is not None:
            self._buckets.close()


def _skip_rows(parts: Iterator[sp.csr_matrix], first: int) -> Iterator[sp.csr_matrix]:
    """The rows of `parts` from row `first` on."""
    for part in parts:
        n = part.shape[0]
        if first < n:
            yield part[first:] if first else part
        first = max(0, first - n)


def _stack(parts: list[sp.csr_matrix]) -> sp.csr_matrix:
    return parts[0] if len(parts) == 1 else sp.vstack(parts, format="csr")


def is_array(item: Any) -> bool:
    """True for an array, False for a group, a committed type or None."""
    return hasattr(item, "shape") and hasattr(item, "dtype")


def native(values: Any) -> np.ndarray:
    """Return the values as an array in native byte order.

    float16 becomes float32, since scipy has no sparse form of it.
    """
    values = np.asarray(values)
    dtype = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype.newbyteorder("=")
    return values.astype(dtype, copy=False)


def require_kind(path: Path, name: str, array: Any, kinds: str, n_dims: int = 1) -> Any:
    """Return `array`. Raises DataError unless it has `n_dims` dimensions and a dtype of `kinds`."""
    if not is_array(array) or array.shape is None:
        raise DataError(f"{path}: {name} is {'missing' if array is None else 'not an array'}")
    if len(array.shape) != n_dims:
        raise DataError(
            f"{path}: {name} is damaged: expected {n_dims} dimensions, got shape {tuple(array.shape)}"
        )
    if getattr(array.dtype, "kind", "O") not in kinds:
        wanted = "counts" if kinds == REAL else "whole numbers"
        raise DataError(f"{path}: {name} expected {wanted}, got {array.dtype}")
    return array


def size_problem(name: str, array: Any, stored: Callable[[], int], n_cells: int = 0) -> str | None:
    """Say what is wrong with an HDF5 or Zarr array that declares far more bytes than it has `stored`.

    Reading it would fill the memory. A column of obs has `n_cells`.
    """
    size = max(1, array.dtype.itemsize)
    declared = math.prod(array.shape) * size
    chunk = math.prod(getattr(array, "shards", None) or array.chunks or (0,)) * size
    if max(declared, chunk) <= LARGE:
        return None
    n_stored = stored()
    max_declared = max(LARGE, _MAX_RATIO * n_stored, _MAX_CELL_BYTES * n_cells)
    if chunk <= _MAX_CHUNK and declared <= max_declared:
        return None
    return f"{name} is damaged: it declares {declared:,} bytes in shape {array.shape} and stores {n_stored:,}"


def absent_chunks(name: str, array: Any) -> list[str]:
    """A line on chunks that a Zarr array declares and does not store, if there are any."""
    n = getattr(array, "nchunks", 0)
    n_absent = n - getattr(array, "nchunks_initialized", 0)
    if n_absent < 1:
        return []
    return [
        f"{name}: {n_absent:,} of {n:,} chunks are not stored and read as zeros; if it is a copy, copy it again"
    ]


class SequentialArray:
    """One-dimensional stored array, read in ascending slices.

    What was read last is kept, so no chunk is decoded twice.
    """

    def __init__(self, path: Path, array: Any):
        self._path = path
        self._array = array
        self._chunk = max(1, array.chunks[0]) if array.chunks else 1
        self._first = 0
        self._kept = native(np.zeros(0, array.dtype))

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop` in native byte order. Raises DataError when the file is damaged."""
        if not self._first <= start <= self._first + len(self._kept):
            self._first = start // self._chunk * self._chunk
            self._kept = self._kept[:0]
        last = self._first + len(self._kept)
        if last < stop:
            end = min(len(self), -(-stop // self._chunk) * self._chunk)
            with reading(self._path):
                fresh = native(self._array[last:end])
            if len(fresh) != end - last:
                raise DataError(
                    f"{self._path}: damaged: expected {end - last:,} values, got {len(fresh):,}"
                )
            begin = min(start, last)
            held = self._kept[begin - self._first :]
            self._first = begin
            self._kept = np.concatenate([held, fresh]) if len(held) else fresh
        return self._kept[start - self._first : stop - self._first]


class RowBuckets:
    """Values of a matrix of `shape` in a temporary file, sorted into buckets of rows.

    A piece is written at once, bucket by bucket, so memory holds one piece or one bucket. The file
    is in the folder of `TMPDIR`; OSError names that folder when it is full.
    """

    def __init__(self, shape: tuple[int, int], pieces: Pieces) -> None:
        self.shape = shape
        self._rows = max(_MIN_BUCKET_ROWS, -(-shape[0] // _MAX_BUCKETS))
        self._record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", "f4")])
        self._segments: list[list[tuple[int, int]]] = [[] for _ in range(0, shape[0], self._rows)]
        self._file = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115 - closed by close()
        self._n_values = 0
        self._ordered: OrderedRows | None = OrderedRows(shape)
        try:
            for piece in pieces:
                if self._ordered is None or not self._ordered.add(*piece):
                    self._sort_earlier()
                    self._add(*piece)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the temporary files."""
        self._file.close()
        if self._ordered is not None:
            self._ordered.close()

    def _sort_earlier(self) -> None:
        """Add the pieces that were in order, since a later one is not."""
        if self._ordered is not None:
            for piece in self._ordered.triples():
                self._add(*piece)
            self._ordered.close()
            self._ordered = None

    def _add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        self._record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", values.dtype)])
        bucket = (rows // self._rows).astype(np.uint16)
        if (bucket[1:] < bucket[:-1]).any():  # most tools write cell by cell
            order = np.argsort(bucket, kind="stable")
            rows = rows[order]
            columns = columns[order]
            values = values[order]
            bucket = bucket[order]
        records = np.empty(len(rows), self._record)
        records["row"] = rows % self._rows
        records["column"] = columns
        records["value"] = values
        start = self._n_values
        sizes = np.bincount(bucket, minlength=len(self._segments))
        for segments, size in zip(self._segments, sizes.tolist()):
            if size:
                segments.append((start, size))
            start += size
        with named_errors(Path(tempfile.gettempdir())):
            self._file.seek(self._n_values * self._record.itemsize)
            self._file.write(records.data)
        self._n_values = start

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        """Yield the rows bucket by bucket, or `block` at a time; entries in the order of the pieces."""
        if self._ordered is not None:
            yield from self._ordered.parts(block)
            return
        for number, segments in enumerate(self._segments):
            pieces = [np.empty(0, self._record)]
            for start, size in segments:
                self._file.seek(start * self._record.itemsize)
                stored = self._file.read(size * self._record.itemsize)
                pieces.append(np.frombuffer(stored, self._record))
            records = np.concatenate(pieces)
            n_rows = min(self._rows, self.shape[0] - number * self._rows)
            # 16-bit integers are sorted fast
            rows: Any = records["row"].astype(np.uint16 if n_rows <= 1 << 16 else np.uint32)
            if (rows[1:] < rows[:-1]).any():
                records = records[np.argsort(rows, kind="stable")]
            values = np.ascontiguousarray(records["value"])
            columns = records["column"].astype(np.int32)
            indptr = row_offsets(np.bincount(rows, minlength=n_rows))
            yield sp.csr_matrix((values, columns, indptr), shape=(n_rows, self.shape[1]))


def checked_shape(path: Path, name: str, shape: Any) -> tuple[int, int]:
    """Return the stored shape of a matrix. Raises DataError unless scipy can index such a matrix."""
    try:
        first, second = (operator.index(n) for n in np.asarray(shape).tolist())
    except (TypeError, ValueError):
        got = " ".join(str(shape).split())[:80]
        raise DataError(
            f"{path}: {name} is damaged: expected a shape of two whole numbers, got {got}"
        ) from None
    if not (0 <= first <= MAX_LENGTH and 0 <= second <= MAX_LENGTH):
        raise DataError(
            f"{path}: {name} is damaged: shape {(first, second)} is outside 0 to {MAX_LENGTH:,}"
        )
    return first, second


class SparseMatrix(StoredMatrix):
    """Three arrays compressed by cell (CSR), or `by_gene` (CSC), which are transposed on disk."""

    def __init__(
        self, path: Path, name: str, group: Any, shape: tuple[int, int], by_gene: bool = False
    ):
        self.path = path
        self.name = name
        self.shape = shape
        self.by_gene = by_gene
        stored = {key: group.get(key) for key in ("data", "indices", "indptr")}
        for key, array in stored.items():
            require_kind(path, f"{name}/{key}", array, REAL if key == "data" else WHOLE)
            # a chunk of indptr that is all zeros, of cells without counts, is never stored
            absent = absent_chunks(f"{name}/{key}", array) if key != "indptr" else []
            if absent:
                raise DataError(f"{path}: damaged: {absent[0]}")
        self._data = SequentialArray(path, stored["data"])
        self._indices = SequentialArray(path, stored["indices"])
        n = len(self._data)
        fits = stored["indptr"].shape[0] == shape[by_gene] + 1 and len(self._indices) == n
        if fits:  # before memory is taken for it: a damaged file may declare any size
            with reading(path):
                indptr = np.asarray(stored["indptr"][:]).astype(np.int64)
            fits = indptr[0] == 0 and indptr[-1] == n and bool((np.diff(indptr) >= 0).all())
        if not fits:
            raise DataError(f"{path}: {name} is damaged: indptr does not match data and indices")
        self._indptr = indptr

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for first in range(start, self.shape[0], block):
            last = min(first + block, self.shape[0])
            indptr, indices, data = self._read(first, last)
            yield sp.csr_matrix((data, indices, indptr), shape=(last - first, self.shape[1]))

    def pieces(self) -> Pieces | None:
        return self._columns() if self.by_gene else None

    def _columns(self) -> Pieces:
        """Columns with at most `_PIECE_VALUES` values together, or one column."""
        low = 0
        while low < self.shape[1]:
            stop = self._indptr[low] + _PIECE_VALUES
            high = int(np.searchsorted(self._indptr, stop, side="right")) - 1
            high = min(max(high, low + 1), self.shape[1])
            indptr, rows, values = self._read(low, high)
            yield rows, (low + row_numbers(indptr)).astype(np.int32), values
            low = high

    def _read(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """indptr from 0, int32 indices and values of `low` to `high` on the compressed axis."""
        indptr = self._indptr[low : high + 1]
        n_minor = self.shape[1 - self.by_gene]
        start = int(indptr[0])
        stop = int(indptr[-1])
        indices = self._indices.read(start, stop)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= n_minor):
            raise DataError(
                f"{self.path}: {self.name} is damaged: an index is outside its {n_minor:,} columns"
            )
        return indptr - start, indices.astype(np.int32, copy=False), self._data.read(start, stop)


class DenseMatrix(StoredMatrix):
    """Dense array, read in slabs of whole chunks: each chunk is decoded once.

    Chunks that span too many cells are read in slabs of genes and transposed on disk.
    """

    def __init__(self, path: Path, name: str, array: Any, cells_axis: int = 0):
        self._path = path
        self._cells_axis = cells_axis
        self._array = require_kind(path, name, array, REAL, 2)
        self.shape = (int(array.shape[cells_axis]), int(array.shape[1 - cells_axis]))

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for cells in self._slabs(axis=0):
            if cells.stop > start:
                part = sp.csr_matrix(self._read(cells, slice(None)))
                yield part[max(0, start - cells.start) :]

    def pieces(self) -> Pieces | None:
        chunk, fit = self._lengths(axis=0)
        if min(chunk, self.shape[0]) <= _MAX_SLABS * fit:
            return None
        return self._columns()

    def _columns(self) -> Pieces:
        for genes in self._slabs(axis=1):
            part = sp.coo_matrix(self._read(slice(None), genes))
            yield part.row, part.col + genes.start, part.data

    def _slabs(self, axis: int) -> Iterator[slice]:
        """Yield ranges of cells (axis 0) or genes (1), each with as many whole chunks as fit in memory.

        A range has at least one chunk.
        """
        chunk, fit = self._lengths(axis)
        step = max(chunk, fit // chunk * chunk)
        for start in range(0, self.shape[axis], step):
            yield slice(start, min(start + step, self.shape[axis]))

    def _lengths(self, axis: int) -> tuple[int, int]:
        """Length of a chunk along cells (axis 0) or genes (1), and the length of a slab."""
        chunks = self._array.chunks or (1, 1)
        line_bytes = self.shape[1 - axis] * self._array.dtype.itemsize
        fit = max(1, _SLAB_BYTES // max(1, line_bytes))
        return max(1, chunks[axis ^ self._cells_axis]), fit

    def _read(self, cells: slice, genes: slice) -> np.ndarray:
        with reading(self._path):
            if self._cells_axis == 0:
                return native(self._array[cells, genes])
            return native(self._array[genes, cells]).T
