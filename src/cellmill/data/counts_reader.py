"""Counts in .h5ad files, read and written in row blocks, never the whole matrix.

`open_counts` reads CSR, CSC and dense matrices from X, raw or a layer, checks that they are counts and gives
canonical CSR blocks. A CSC matrix is transposed once through a temporary file. `write_cells` writes X as contiguous,
unfiltered, aligned CSR, so that a row is one pread; anndata's own writer chunks sparse arrays.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem, write_elem

from cellmill.errors import DataError
from cellmill.files import atomic_path

ALIGNMENT = 4096  # bytes; direct I/O and page-aligned preads want it
_CSC_VALUES = 1 << 22  # values of a CSC matrix held at once while it is transposed
_CSC_ROWS = 1024  # fewest rows of one bucket of the transposition; smaller ones make writes too short
_DENSE_BYTES = 1 << 26
_LOG_MAX = 15.0  # exp(15) is 3 million: no log-transformed count is larger, few other normalisations stay below


class CountsReader:
    """The counts of one .h5ad file; made by `open_counts`, closed by `close` or a `with` block.

    Attributes: `path`, `counts` (where they lie), `n_obs`, `n_vars`, `obs` and `var` (DataFrames with unique text
    indices) and `var_names`.
    """

    def __init__(self, path: Path, counts: str, file: h5py.File, matrix: Any, obs: pd.DataFrame, var: pd.DataFrame):
        self.path, self.counts, self.obs, self.var = path, counts, obs, var
        self.var_names: list[str] = list(var.index)
        self.n_obs, self.n_vars = len(obs), len(var)
        self._file, self._matrix = file, matrix
        self._format = _format(path, counts, matrix)
        self._indptr = self._checked_indptr() if self._format != "dense" else np.zeros(0, np.int64)
        self._transposed: IO[bytes] | None = None
        self._bucket, self._starts = 0, np.zeros(0, np.int64)  # of the transposed copy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and drops the transposed copy of a CSC matrix."""
        if self._transposed is not None:
            self._transposed.close()
        self._file.close()

    def rows(self, block: int = 4096) -> Iterator[sp.csr_matrix]:
        """All cells in order, `block` at a time: CSR `(cells, n_vars)`, uint32, columns ascending, no stored zeros.

        May be called again. Raises DataError naming cell and gene at the first value that is no count, and when the
        file turns out damaged.
        """
        read = {"csr": self._csr_rows, "csc": self._csc_rows, "dense": self._dense_rows}[self._format]
        first = 0
        for matrix in read(block):
            yield self._as_counts(matrix, first)
            first += matrix.shape[0]

    def _csr_rows(self, block: int) -> Iterator[sp.csr_matrix]:
        for first in range(0, self.n_obs, block):
            indptr = self._indptr[first : first + block + 1]
            indices, data = self._values(int(indptr[0]), int(indptr[-1]), self.n_vars)
            yield sp.csr_matrix((data, indices, indptr - indptr[0]), shape=(len(indptr) - 1, self.n_vars))

    def _dense_rows(self, block: int) -> Iterator[sp.csr_matrix]:
        tall = self._matrix.chunks[0] if self._matrix.chunks else 1
        fit = max(1, _DENSE_BYTES // (self.n_vars * self._matrix.dtype.itemsize))
        step = max(tall, fit // tall * tall)  # whole chunks: each is decompressed once
        for first in range(0, self.n_obs, block):
            last = min(first + block, self.n_obs)
            with self._reading():
                parts = [sp.csr_matrix(self._dense(a, min(a + step, last))) for a in range(first, last, step)]
            yield parts[0] if len(parts) == 1 else sp.vstack(parts, format="csr")

    def _dense(self, first: int, last: int) -> np.ndarray:
        rows = self._matrix[first:last]
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows  # scipy has no sparse float16

    def _csc_rows(self, block: int) -> Iterator[sp.csr_matrix]:
        bucket = block * -(-_CSC_ROWS // block)
        record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", self._matrix["data"].dtype)])
        if self._transposed is None or self._bucket != bucket:
            with _named(Path(tempfile.gettempdir())):
                self._starts, self._bucket = self._transpose(bucket, record), bucket
        starts = self._starts
        assert self._transposed is not None
        for number, first in enumerate(range(0, self.n_obs, bucket)):
            self._transposed.seek(int(starts[number]) * record.itemsize)
            size = int(starts[number + 1] - starts[number])
            entries = np.frombuffer(self._transposed.read(size * record.itemsize), record)
            rows = min(bucket, self.n_obs - first)
            # columns came in ascending order and tocsr keeps the order inside a row
            place = (entries["row"].astype(np.int32), entries["column"].astype(np.int32))
            matrix = sp.coo_matrix((entries["value"], place), shape=(rows, self.n_vars)).tocsr()
            for start in range(0, rows, block):
                yield matrix[start : start + block]

    def _transpose(self, bucket: int, record: np.dtype[Any]) -> np.ndarray:
        """Values sorted into buckets of rows, one behind the other in a temporary file; where each starts."""
        sizes = np.zeros(-(-self.n_obs // bucket), np.int64)
        for indices in self._index_pieces():
            sizes += np.bincount(indices // bucket, minlength=len(sizes))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        if self._transposed is not None:
            self._transposed.close()
        self._transposed = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115
        place, edges = starts[:-1].copy(), np.minimum(np.arange(len(sizes) + 1) * bucket, self.n_obs)
        for low, high in self._column_pieces():
            start, stop = int(self._indptr[low]), int(self._indptr[high])
            indices, data = self._values(start, stop, self.n_obs)
            indptr = self._indptr[low : high + 1] - start
            piece = sp.csc_matrix((data, indices, indptr), shape=(self.n_obs, high - low)).tocsr()
            entries = np.empty(piece.nnz, record)
            entries["row"] = np.repeat(np.arange(self.n_obs) % bucket, np.diff(piece.indptr))
            entries["column"], entries["value"] = piece.indices + low, piece.data
            for number, (a, b) in enumerate(zip(piece.indptr[edges[:-1]], piece.indptr[edges[1:]])):
                if a < b:
                    self._transposed.seek(int(place[number]) * record.itemsize)
                    self._transposed.write(entries[a:b].tobytes())
                    place[number] += b - a
        return starts

    def _column_pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns with at most `_CSC_VALUES` values, or one column each."""
        low = 0
        while low < self.n_vars:
            high = int(np.searchsorted(self._indptr, self._indptr[low] + _CSC_VALUES, side="right")) - 1
            high = min(max(high, low + 1), self.n_vars)
            yield low, high
            low = high

    def _index_pieces(self) -> Iterator[np.ndarray]:
        for start in range(0, int(self._indptr[-1]), _CSC_VALUES):
            with self._reading():
                indices = self._matrix["indices"][start : start + _CSC_VALUES]
            yield self._checked_indices(indices, self.n_obs)

    def _values(self, start: int, stop: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        with self._reading():
            indices, data = self._matrix["indices"][start:stop], self._matrix["data"][start:stop]
        return self._checked_indices(indices, width), data

    def _checked_indices(self, indices: np.ndarray, width: int) -> np.ndarray:
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= width):
            raise DataError(f"{self.path}: {self.counts} is damaged: an index lies outside of its {width:,} columns")
        return indices.astype(np.int32, copy=False)

    def _checked_indptr(self) -> np.ndarray:
        with self._reading():
            indptr = self._matrix["indptr"][:].astype(np.int64)
        wanted = (self.n_obs if self._format == "csr" else self.n_vars) + 1
        n_values = len(self._matrix["data"])
        whole = len(indptr) == wanted and indptr[0] == 0 and indptr[-1] == n_values == len(self._matrix["indices"])
        if not whole or (np.diff(indptr) < 0).any():
            raise DataError(f"{self.path}: {self.counts} is damaged: its indptr does not fit its values")
        return indptr

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise DataError(f"{self.path}: damaged: {_line(error)}") from None

    def _as_counts(self, matrix: sp.csr_matrix, first: int) -> sp.csr_matrix:
        values = matrix.data
        if values.dtype.kind not in "buif":
            raise DataError(f"{self.path}: {self.counts} holds {values.dtype}, not counts")
        if values.dtype.kind == "f":
            self._refuse(~np.isfinite(values), "is not a number", "; counts are whole numbers from 0", matrix, first)
        if values.dtype.kind in "if":
            self._refuse(values < 0, "is negative", f": it looks scaled; {self._elsewhere()}", matrix, first)
        if values.dtype.kind == "f":
            parts = values != np.floor(values)
            if parts.any():
                logs = values.max() < _LOG_MAX and 2 * np.count_nonzero(parts) > np.count_nonzero(values)
                looks = "log-transformed" if logs else "normalised"
                self._refuse(parts, "is fractional", f": it looks {looks}; {self._elsewhere()}", matrix, first)
        if len(values) and values.max() > np.iinfo(np.uint32).max:
            self._refuse(values == values.max(), "is too large", "; counts fit in 32 bits", matrix, first)
        counts = sp.csr_matrix((values.astype(np.uint32), matrix.indices, matrix.indptr), shape=matrix.shape)
        if not counts.has_canonical_format:
            counts.sum_duplicates()
        if not counts.data.all():
            counts.eliminate_zeros()
        return counts

    def _refuse(self, bad: np.ndarray, fault: str, remedy: str, matrix: sp.csr_matrix, first: int) -> None:
        if not bad.any():
            return
        at = int(bad.argmax())
        cell = self.obs.index[first + int(np.searchsorted(matrix.indptr, at, side="right")) - 1]
        gene = self.var_names[matrix.indices[at]]
        raise DataError(
            f"{self.path}: {self.counts} does not hold counts: {matrix.data[at]:g} (cell {cell!r}, gene {gene!r}) "
            f"{fault}{remedy}"
        )

    def _elsewhere(self) -> str:
        others = [place for place in _places(self._file) if place != self.counts]
        if not others:
            return "the file has no other matrix, so take one with raw counts"
        return f"raw counts may be in {' or '.join(others)}: name it as the dataset's `counts`"


def open_counts(path: Path | str, counts: str = "X") -> CountsReader:
    """A reader of the counts in `counts` (`X`, `raw` or the name of a layer) of an .h5ad file.

    Raises DataError when the file is missing, truncated or no .h5ad, has no such matrix, no cells or genes, or
    obs or var names that are not unique.
    """
    path = Path(path)
    file = _open(path)
    try:
        for name in ("obs", "var"):
            if not isinstance(file.get(name), h5py.Group):
                raise DataError(f"{path}: {_what_it_is(file)}")
        matrix, var = _find(path, file, counts)
        obs, var = _read_frame(path, file["obs"]), _read_frame(path, var)
        shape = tuple(int(n) for n in (matrix.attrs["shape"] if isinstance(matrix, h5py.Group) else matrix.shape))
        if shape != (len(obs), len(var)):
            raise DataError(f"{path}: {counts} is {shape}, but there are {len(obs)} obs and {len(var)} var names")
        if 0 in shape:
            raise DataError(f"{path}: empty: {len(obs)} cells x {len(var)} genes")
        for kind, names in (("obs", obs.index), ("var", var.index)):
            _refuse_duplicates(path, kind, names)
        return CountsReader(path, counts, file, matrix, obs, var)
    except BaseException:
        file.close()
        raise


def select_columns(block: sp.csr_matrix, target: np.ndarray, n_columns: int) -> sp.csr_matrix:
    """Columns of `block` in other places: column j goes to `target[j]` (int32), or is left out where that is -1.

    Columns with the same target are summed. The result is canonical.
    """
    place = target[block.indices]
    keep = place >= 0
    if keep.all():
        indptr, data = block.indptr, block.data
    else:
        indptr = np.concatenate([[0], np.cumsum(keep)])[block.indptr]
        place, data = place[keep], block.data[keep]
    moved = sp.csr_matrix((data, place, indptr), shape=(block.shape[0], n_columns))
    if not moved.has_canonical_format:
        moved = moved.copy()  # sorting is in place, and the values may be the block's own
        moved.sum_duplicates()
    return moved


def row_sums(block: sp.csr_matrix, values: np.ndarray | None = None) -> np.ndarray:
    """Exact int64 sum over each row of `block`, of its counts or of other `values` in their places."""
    total = np.concatenate([[0], np.cumsum(block.data if values is None else values, dtype=np.int64)])
    return np.diff(total[block.indptr])


def count_dtype(largest: int) -> np.dtype[Any]:
    """uint16 where counts up to `largest` fit, else uint32."""
    return np.dtype("<u2" if largest <= np.iinfo(np.uint16).max else "<u4")


def write_cells(
    path: Path,
    obs: pd.DataFrame | Callable[[], pd.DataFrame],
    var: pd.DataFrame,
    blocks: Iterable[sp.csr_matrix],
    nnz: int | None,
    dtype: np.dtype[Any],
) -> None:
    """An .h5ad whose X is spec CSR: `dtype` data, int32 indices, int64 indptr, unfiltered, little-endian.

    Parameters
    ----------
    obs
        Or a function that gives it when the blocks are through, where only they tell which cells are left.
    blocks
        Rows of X in order, in any order inside a row; one is held at a time.
    nnz
        Values in all blocks; arrays are then contiguous and aligned to 4,096 bytes. None where it is not known
        beforehand: arrays grow in chunks.

    Raises OSError naming `path` when the disk is full; `path` is then left as it was.
    """
    with _h5_on_disk(path) as (file, disk):
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        group = file.create_group("X")
        indptr = _write_values(group, disk, blocks, nnz, np.dtype(dtype))
        group.create_dataset("indptr", data=indptr)
        shape = np.array([len(indptr) - 1, len(var)], np.int64)
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
        frame = obs() if callable(obs) else obs
        assert len(frame) == len(indptr) - 1, f"{len(frame)} obs for {len(indptr) - 1} rows"
        write_elem(file, "obs", frame)
        write_elem(file, "var", var)
        for name in ("layers", "obsm", "obsp", "uns", "varm", "varp"):
            write_elem(file, name, {})


@contextmanager
def create_h5(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file to write to that becomes `path` when the block ends well; arrays lie at multiples of 4,096 bytes.

    Raises OSError naming `path` when the disk is full.
    """
    with _h5_on_disk(path) as (file, _):
        yield file


@contextmanager
def _h5_on_disk(path: Path) -> Iterator[tuple[h5py.File, _Disk]]:
    path = Path(path)
    with _named(path), atomic_path(path) as temporary, open(temporary, "r+b", buffering=0) as raw:
        disk = _Disk(raw)
        try:
            with h5py.File(disk, "w", alignment_threshold=ALIGNMENT, alignment_interval=ALIGNMENT) as file:
                yield file, disk
        except (OSError, RuntimeError) as error:
            raise disk.error or error from None
        disk.check()


class _Disk:
    """The file under an HDF5 file. A failed write is kept for later, and what follows it is dropped.

    HDF5 must not see the failure: closing a file that cannot be written crashes the interpreter (seen with 2.0.0).
    """

    def __init__(self, file: io.FileIO):
        self._file = file
        self.error: OSError | None = None

    def check(self) -> None:
        """Raises the error that was kept."""
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while len(rest) and self.error is None:  # a disk that fills up takes a part first
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.error is None:
                self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size or 0

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = self._file.readinto(view) or 0
        view[got:] = bytes(len(view) - got)  # dropped by a failed write
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Nothing to do: `atomic_path` syncs the whole file."""


def _write_values(
    group: h5py.Group, disk: _Disk, blocks: Iterable[sp.csr_matrix], nnz: int | None, dtype: np.dtype[Any]
) -> np.ndarray:
    layout = {"shape": (nnz,)} if nnz is not None else {"shape": (0,), "maxshape": (None,), "chunks": (1 << 18,)}
    data = group.create_dataset("data", dtype=dtype.newbyteorder("<"), **layout)
    indices = group.create_dataset("indices", dtype="<i4", **layout)
    at, ends = 0, [np.zeros(1, np.int64)]
    for block in blocks:
        assert not block.nnz or block.data.max() <= np.iinfo(dtype).max, f"a count is too large for {dtype}"
        stop = at + block.nnz
        if nnz is None:
            data.resize((stop,))
            indices.resize((stop,))
        if block.nnz:
            data[at:stop] = block.data.astype(dtype, copy=False)
            indices[at:stop] = block.indices
            disk.check()
        ends.append(at + block.indptr[1:].astype(np.int64))
        at = stop
    assert nnz is None or at == nnz, f"{at} values were written where {nnz} were announced"
    return np.concatenate(ends)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Gives an OSError that has no file name this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        text = str(error)
        if "truncated" in text:
            size, wanted = path.stat().st_size, re.search(r"stored_eof = (\d+)", text)
            of = f" of {int(wanted[1]):,}" if wanted else ""
            raise DataError(f"{path}: truncated: {size:,}{of} bytes are there; copy it again") from None
        if "signature not found" in text:
            raise DataError(f"{path}: not an HDF5 file, so not an .h5ad") from None
        raise DataError(f"{path}: cannot be read: {_line(error)}") from None


def _find(path: Path, file: h5py.File, counts: str) -> tuple[Any, Any]:
    """The matrix called `counts`, and the group of its var."""
    where = counts if counts == "X" else "raw/X" if counts == "raw" else f"layers/{counts}"
    genes = "raw/var" if counts == "raw" else "var"
    if where in file and genes in file:
        return file[where], file[genes]
    places = _places(file)
    near = difflib.get_close_matches(counts, places, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the file has: {', '.join(places) or 'no matrix'}"
    what = counts if counts in ("X", "raw") else f"layer {counts!r}"
    raise DataError(f"{path}: no {what} (the dataset's `counts`); {hint}")


def _places(file: h5py.File) -> list[str]:
    layers = file.get("layers")
    names = list(layers) if isinstance(layers, h5py.Group) else []
    return [name for name, where in (("X", "X"), ("raw", "raw/X")) if where in file] + names


def _format(path: Path, counts: str, matrix: Any) -> str:
    if isinstance(matrix, h5py.Dataset) and matrix.ndim == 2:
        return "dense"
    encoding = matrix.attrs.get("encoding-type", "unknown")
    if encoding not in ("csr_matrix", "csc_matrix") or any(n not in matrix for n in ("data", "indices", "indptr")):
        raise DataError(f"{path}: {counts} is stored as {encoding}; a csr_matrix, csc_matrix or array is wanted")
    return str(encoding)[:3]


def _what_it_is(file: h5py.File) -> str:
    if "matrix" in file:
        return "a 10x Genomics .h5 file; read it with scanpy.read_10x_h5 and write it as .h5ad"
    if isinstance(file.get("obs"), h5py.Dataset):
        return "an .h5ad of before anndata 0.7; read it with anndata.read_h5ad and write it again"
    return "an HDF5 file, but not an .h5ad: it has no obs and var"


def _read_frame(path: Path, group: h5py.Group) -> pd.DataFrame:
    try:
        frame = read_elem(group)
    except Exception as error:  # anndata wraps whatever h5py, numpy or pandas raise on a damaged or foreign group
        raise DataError(f"{path}: {group.name} cannot be read: {_line(error)}") from None
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{path}: {group.name} is not a data frame")
    return frame.set_axis(frame.index.astype(str), axis=0)


def _refuse_duplicates(path: Path, kind: str, names: pd.Index) -> None:
    repeated = names[names.duplicated()]
    if len(repeated):
        others = f" and {repeated.nunique() - 1:,} more repeat" if repeated.nunique() > 1 else ""
        raise DataError(
            f"{path}: {kind} names are not unique: {repeated[0]!r} occurs {int((names == repeated[0]).sum())} times"
            f"{others}; call {kind}_names_make_unique() and write the file again"
        )


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
