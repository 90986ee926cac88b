"""Counts of an .h5ad file, read in row blocks, never the whole matrix.

`open_counts` reads CSR, CSC and dense matrices from X, raw or a layer, checks that they are counts and returns
canonical CSR blocks. A CSC matrix is transposed once through a temporary file.
"""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem

from cellmill.data.h5_file import named_errors, one_line, open_h5
from cellmill.errors import DataError, did_you_mean

_CSC_VALUES = 1 << 22  # values of a CSC matrix in memory at once during transposition
_CSC_ROWS = 1024  # fewest rows of one bucket of the transposition; smaller ones make writes too short
_DENSE_BYTES = 1 << 26
ORDERED = "uns/cellmill/ordered"  # in a file whose rows of X are sequences
_LOG_MAX = 15.0  # exp(15) is 3 million: no log-transformed count is larger, few other normalisations stay below


class CountsReader(AbstractContextManager["CountsReader"]):
    """Counts of one .h5ad file; made by `open_counts`, closed by `close` or a `with` block.

    Attributes: `path`, `counts` (X, raw or a layer), `n_obs`, `n_vars`, `obs` and `var` (DataFrames with unique text
    indices), `var_names`, and `ordered`: rows are sequences, whose columns stand in their own order and may repeat.
    """

    ordered: bool = False

    def __init__(self, path: Path, counts: str, file: h5py.File, matrix: Any, obs: pd.DataFrame, var: pd.DataFrame):
        self.path, self.counts, self.obs, self.var = path, counts, obs, var
        self.var_names: list[str] = list(var.index)
        self.n_obs, self.n_vars = len(obs), len(var)
        self._file, self._matrix = file, matrix
        self._format = _format(path, counts, matrix)
        self.ordered = counts == "X" and ORDERED in file
        if self.ordered and self._format != "csr":
            raise DataError(f"{path}: X has sequences, stored as {self._format}: their order is lost; preprocess again")
        self._indptr = self._checked_indptr() if self._format != "dense" else np.zeros(0, np.int64)
        self._transposed: IO[bytes] | None = None
        self._bucket, self._starts = 0, np.zeros(0, np.int64)  # rows per bucket, start of each bucket

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and drop the transposed copy of a CSC matrix."""
        if self._transposed is not None:
            self._transposed.close()
        self._file.close()

    def obs_column(self, name: str, owner: str) -> pd.Series:
        """Column `name` of obs. Raises DataError, naming the option `owner` that asks for it, when it is missing."""
        if name not in self.obs:
            known = [str(column) for column in self.obs.columns]
            raise DataError(f"{self.path}: no obs column {name!r} ({owner}); {did_you_mean(name, known)}")
        return self.obs[name]

    def rows(self, block: int = 4096) -> Iterator[sp.csr_matrix]:
        """All cells in order, `block` at a time: CSR `(cells, n_vars)`, uint32, columns ascending, no stored zeros.

        Columns of `ordered` rows are as stored.

        May be called again. Raises DataError at the first value that is not a count, naming cell and gene, and when
        the file is damaged.
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
                pieces = (self._matrix[a : min(a + step, last)] for a in range(first, last, step))
                # scipy has no sparse float16
                parts = [sp.csr_matrix(p.astype(np.float32) if p.dtype == np.float16 else p) for p in pieces]
            yield parts[0] if len(parts) == 1 else sp.vstack(parts, format="csr")

    def _csc_rows(self, block: int) -> Iterator[sp.csr_matrix]:
        bucket = block * -(-_CSC_ROWS // block)
        record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", self._matrix["data"].dtype)])
        if self._transposed is None or self._bucket != bucket:
            with named_errors(Path(tempfile.gettempdir())):
                self._starts, self._bucket = self._transpose(bucket, record), bucket
        assert self._transposed is not None
        for first, (start, stop) in zip(range(0, self.n_obs, bucket), pairwise(self._starts.tolist())):
            self._transposed.seek(start * record.itemsize)
            entries = np.frombuffer(self._transposed.read((stop - start) * record.itemsize), record)
            rows = min(bucket, self.n_obs - first)
            # columns are in ascending order and tocsr keeps the order within a row
            coordinates = (entries["row"].astype(np.int32), entries["column"].astype(np.int32))
            matrix = sp.coo_matrix((entries["value"], coordinates), shape=(rows, self.n_vars)).tocsr()
            yield from (matrix[row : row + block] for row in range(0, rows, block))

    def _transpose(self, bucket: int, record: np.dtype[Any]) -> np.ndarray:
        """Write the values, sorted into buckets of rows, to a temporary file; return the start of each bucket."""
        sizes = np.zeros(-(-self.n_obs // bucket), np.int64)
        for indices in self._index_pieces():
            sizes += np.bincount(indices // bucket, minlength=len(sizes))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        if self._transposed is not None:
            self._transposed.close()
        self._transposed = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115
        position, edges = starts[:-1].copy(), np.minimum(np.arange(len(sizes) + 1) * bucket, self.n_obs)
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
                    self._transposed.seek(int(position[number]) * record.itemsize)
                    self._transposed.write(entries[a:b].tobytes())
                    position[number] += b - a
        return starts

    def _column_pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns with at most `_CSC_VALUES` values, or of one column."""
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
            raise DataError(f"{self.path}: {self.counts} is damaged: an index is outside its {width:,} columns")
        return indices.astype(np.int32, copy=False)

    def _checked_indptr(self) -> np.ndarray:
        with self._reading():
            indptr = self._matrix["indptr"][:].astype(np.int64)
        length = (self.n_obs if self._format == "csr" else self.n_vars) + 1
        n_values = len(self._matrix["data"])
        fits = len(indptr) == length and indptr[0] == 0 and indptr[-1] == n_values == len(self._matrix["indices"])
        if not fits or (np.diff(indptr) < 0).any():
            raise DataError(f"{self.path}: {self.counts} is damaged: indptr does not match data and indices")
        return indptr

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise DataError(f"{self.path}: damaged: {one_line(error)}") from None

    def _as_counts(self, matrix: sp.csr_matrix, first: int) -> sp.csr_matrix:
        values = matrix.data
        if values.dtype.kind not in "buif":
            raise DataError(f"{self.path}: {self.counts} expected counts, got {values.dtype}")
        if values.dtype.kind == "f":
            self._refuse(~np.isfinite(values), "is not finite", "; counts are whole numbers from 0", matrix, first)
        if values.dtype.kind in "if":
            self._refuse(values < 0, "is negative", f": it looks scaled; {self._elsewhere()}", matrix, first)
        if values.dtype.kind == "f":
            fractional = values != np.floor(values)
            if fractional.any():
                logs = values.max() < _LOG_MAX and 2 * np.count_nonzero(fractional) > np.count_nonzero(values)
                looks = "log-transformed" if logs else "normalised"
                self._refuse(fractional, "is fractional", f": it looks {looks}; {self._elsewhere()}", matrix, first)
        if len(values) and values.max() > np.iinfo(np.uint32).max:
            self._refuse(values == values.max(), "is too large", "; the limit is 2^32 - 1", matrix, first)
        counts = sp.csr_matrix((values.astype(np.uint32), matrix.indices, matrix.indptr), shape=matrix.shape)
        if self.ordered:
            return counts
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
        others = [name for name in _matrices(self._file) if name != self.counts]
        if not others:
            return "the file has no other matrix; use a file with raw counts"
        return f"raw counts may be in {' or '.join(others)}: set the dataset's `counts`"


def open_counts(path: Path | str, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` (`X`, `raw` or the name of a layer) of an .h5ad file.

    Raises DataError when the file is missing, truncated or not an .h5ad, lacks the matrix, has no cells or genes, or
    has duplicate obs or var names.
    """
    path = Path(path)
    file = open_h5(path)
    try:
        for name in ("obs", "var"):
            if not isinstance(file.get(name), h5py.Group):
                raise DataError(f"{path}: {_other_format(file)}")
        matrix, var = _find(path, file, counts)
        obs, var = _read_frame(path, file["obs"]), _read_frame(path, var)
        shape = tuple(int(n) for n in (matrix.attrs["shape"] if isinstance(matrix, h5py.Group) else matrix.shape))
        if shape != (len(obs), len(var)):
            raise DataError(f"{path}: expected {counts} of shape {(len(obs), len(var))}, as obs and var, got {shape}")
        if 0 in shape:
            raise DataError(f"{path}: empty: {len(obs)} cells x {len(var)} genes")
        for kind, names in (("obs", obs.index), ("var", var.index)):
            refuse_duplicates(path, kind, names, f"call {kind}_names_make_unique() and write the file again")
        return CountsReader(path, counts, file, matrix, obs, var)
    except BaseException:
        file.close()
        raise


def _find(path: Path, file: h5py.File, counts: str) -> tuple[Any, Any]:
    """The matrix `counts` and the group of its var."""
    where = counts if counts == "X" else "raw/X" if counts == "raw" else f"layers/{counts}"
    genes = "raw/var" if counts == "raw" else "var"
    if where in file and genes in file:
        return file[where], file[genes]
    name = counts if counts in ("X", "raw") else f"layer {counts!r}"
    raise DataError(f"{path}: no {name} (the dataset's `counts`); {did_you_mean(counts, _matrices(file))}")


def _matrices(file: h5py.File) -> list[str]:
    """Values of `counts` that the file has."""
    layers = file.get("layers")
    names = list(layers) if isinstance(layers, h5py.Group) else []
    return [name for name, where in (("X", "X"), ("raw", "raw/X")) if where in file] + names


def _format(path: Path, counts: str, matrix: Any) -> str:
    if isinstance(matrix, h5py.Dataset) and matrix.ndim == 2:
        return "dense"
    encoding = matrix.attrs.get("encoding-type", "unknown")
    if encoding not in ("csr_matrix", "csc_matrix") or any(n not in matrix for n in ("data", "indices", "indptr")):
        raise DataError(f"{path}: {counts} is stored as {encoding}; expected csr_matrix, csc_matrix or array")
    return str(encoding)[:3]


def _other_format(file: h5py.File) -> str:
    """Description of an HDF5 file that is not an .h5ad."""
    if "matrix" in file:
        return "a 10x Genomics .h5 file; read it with scanpy.read_10x_h5 and write it as .h5ad"
    if isinstance(file.get("obs"), h5py.Dataset):
        return "an .h5ad from before anndata 0.7; read it with anndata.read_h5ad and write it again"
    return "not an .h5ad: no obs and var groups"


def _read_frame(path: Path, group: h5py.Group) -> pd.DataFrame:
    try:
        frame = read_elem(group)
    except Exception as error:  # anndata wraps whatever h5py, numpy or pandas raise on a damaged or foreign group
        raise DataError(f"{path}: {group.name} cannot be read: {one_line(error)}") from None
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{path}: {group.name} is not a data frame")
    return frame.set_axis(frame.index.astype(str), axis=0)


def refuse_duplicates(path: Path, kind: str, names: pd.Index, remedy: str) -> None:
    """Raise DataError when two of the `names` of a file are equal."""
    repeated = names[names.duplicated()]
    if len(repeated):
        others = f" and {repeated.nunique() - 1:,} more repeat" if repeated.nunique() > 1 else ""
        raise DataError(
            f"{path}: {kind} names are not unique: {repeated[0]!r} occurs {int((names == repeated[0]).sum())} times"
            f"{others}; {remedy}"
        )
