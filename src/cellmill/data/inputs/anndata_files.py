"""AnnData inputs: groups of an HDF5 file, Zarr folders (version 2 or 3, also .zarr.zip), and AnnData objects in memory.

Counts are X, raw/X or a layer. obs and var may be stored as anndata before 0.7 did: one compound dataset, with
categories in uns. An AnnData in memory is read a block at a time without being copied.

Zarr folders with links, FIFOs or devices are refused, and so are arrays declared far larger than their stored bytes.
zarr itself refuses the codec pickle, which runs code.
"""

import operator
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from anndata.io import read_elem
from zarr.storage import ZipStore

from cellmill.data.arrays import text_index
from cellmill.data.inputs.h5 import one_line
from cellmill.data.inputs.matrices import MAX_LENGTH, CscMatrix, CsrMatrix, DenseMatrix, is_array, native
from cellmill.data.inputs.source import CountSource, StoredMatrix, reading
from cellmill.errors import DataError, did_you_mean


def read_table(file: Any, name: str) -> pd.DataFrame:
    """The data frame stored as the compound dataset `name`; field `index` (else the first) is its index."""
    records = file[name][()]
    if records.dtype.names is None:
        raise ValueError("expected a data frame, got an array without fields")
    columns = {field: _decoded(records[field]) for field in records.dtype.names}
    index = "index" if "index" in columns else "_index" if "_index" in columns else records.dtype.names[0]
    names = columns.pop(index)
    for field, codes in columns.items():
        categories = file.get(f"uns/{field}_categories")
        if categories is not None and np.issubdtype(codes.dtype, np.integer):
            columns[field] = pd.Categorical.from_codes(codes, _decoded(categories[()]))
    return pd.DataFrame(columns, index=pd.Index(names, dtype=object))


def _decoded(values: Any) -> np.ndarray:
    """Values with text as str."""
    values = np.atleast_1d(values)
    if values.dtype.kind not in "SO":
        return values.astype(values.dtype.newbyteorder("="))
    return np.array([v.decode() if isinstance(v, bytes) else v for v in values.tolist()], dtype=object)


ORDERED = "uns/cellmill/ordered"  # in a file whose rows of X are sequences, or genes in rank order
RANKED = "uns/cellmill/ranked"  # in one whose rows are genes in rank order, without counts
_RAW = ("raw/X", "raw/var"), ("raw.X", "raw.var")  # before anndata 0.7: names with dots


def is_anndata(file: Any) -> bool:
    """True if an open HDF5 or Zarr file has obs and var."""
    return file.get("obs") is not None and file.get("var") is not None


def open_anndata(path: Path, file: Any, counts: str) -> CountSource:
    """The matrix `counts` (`X`, `raw`, the name of a layer, or `layers/X`) of an open HDF5 file or Zarr group."""
    stored, genes = _find(path, file, counts)
    obs, var = _read_frame(path, file, "obs"), _read_frame(path, file, genes)
    matrix = _matrix(path, counts, stored)
    if matrix.shape != (len(obs), len(var)):
        raise DataError(
            f"{path}: expected {counts} of shape {(len(obs), len(var))}, as obs and var, got {matrix.shape}"
        )
    ordered = counts == "X" and ORDERED in file
    if ordered and not isinstance(matrix, CsrMatrix):
        kind = "csc" if isinstance(matrix, CscMatrix) else "dense"
        raise DataError(f"{path}: X has sequences, stored as {kind}: their order is lost; preprocess again")
    others = [name for name in _names(file) if name != counts]
    return CountSource(path, counts, matrix, obs, var, others, ordered, ranked=ordered and RANKED in file)


def layer_name(layer: str) -> str:
    """`counts` of a layer: its name, or `layers/X` for one that is called as another matrix."""
    return f"layers/{layer}" if layer in ("X", "raw") else layer


def layer_path(counts: str) -> str:
    """Place of a layer in a file, from its `counts`."""
    return counts if counts in ("layers/X", "layers/raw") else f"layers/{counts}"


def _find(path: Path, file: Any, counts: str) -> tuple[Any, str]:
    """The matrix `counts` and the name of its var."""
    places = _RAW if counts == "raw" else ((counts if counts == "X" else layer_path(counts), "var"),)
    for where, genes in places:
        if where in file and genes in file:
            return file[where], genes
    name = counts if counts in ("X", "raw") else f"layer {counts!r}"
    raise DataError(f"{path}: no {name} (the dataset's `counts`); {did_you_mean(counts, _names(file))}")


def _names(file: Any) -> list[str]:
    """Values of `counts` that the file has."""
    layers = file.get("layers")
    names = [] if layers is None or is_array(layers) else [layer_name(name) for name in sorted(layers)]
    raw = any(where in file for where, _ in _RAW)
    return [name for name, there in (("X", "X" in file), ("raw", raw)) if there] + names


def _matrix(path: Path, counts: str, stored: Any) -> StoredMatrix:
    if is_array(stored):
        if stored.shape is None or len(stored.shape) != 2:
            raise DataError(f"{path}: {counts} is stored with shape {stored.shape}; expected two dimensions")
        return DenseMatrix(path, counts, stored)
    old = stored.attrs.get("h5sparse_format")  # before anndata 0.7
    kind = stored.attrs.get("encoding-type", "unknown" if old is None else f"{_text(old)}_matrix")
    kinds: dict[str, type[CsrMatrix | CscMatrix]] = {"csr_matrix": CsrMatrix, "csc_matrix": CscMatrix}
    if kind not in kinds:
        raise DataError(f"{path}: {counts} is stored as {kind}; expected csr_matrix, csc_matrix or array")
    return kinds[str(kind)](path, counts, stored, _shape(path, counts, stored))


def _shape(path: Path, counts: str, stored: Any) -> tuple[int, int]:
    """Shape in the attributes of a sparse matrix."""
    shape = stored.attrs.get("shape", stored.attrs.get("h5sparse_shape"))
    try:
        n_obs, n_vars = (operator.index(n) for n in np.asarray(shape).tolist())
    except (TypeError, ValueError):
        got = " ".join(str(shape).split())[:80]
        raise DataError(f"{path}: {counts} is damaged: expected a shape of two whole numbers, got {got}") from None
    if not (0 <= n_obs <= MAX_LENGTH and 0 <= n_vars <= MAX_LENGTH):
        raise DataError(f"{path}: {counts} is damaged: shape {(n_obs, n_vars)} is outside 0 to {MAX_LENGTH:,}")
    return n_obs, n_vars


def _read_frame(path: Path, file: Any, name: str) -> pd.DataFrame:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # anndata's, of layouts before 0.8
            stored = file[name]
            frame = read_table(file, name) if is_array(stored) else read_elem(stored)
    except Exception as error:  # anndata wraps whatever h5py, numpy or pandas raise on a damaged or foreign group
        raise DataError(f"{path}: /{name} cannot be read: {one_line(error)}") from None
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{path}: /{name} is not a data frame")
    return frame.set_axis(text_index(frame.index), axis=0)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


MARKS = (".zgroup", "zarr.json", ".zmetadata")
_LARGE = 1 << 26  # bytes of an array, or of a chunk, that are read without a question
_MOST_CHUNK = 1 << 32  # bytes, as in HDF5
_MOST_RATIO = 100_000  # of declared to stored bytes
_PER_CELL = 16  # bytes of an obs column: one value of all cells is stored as nothing


def is_zarr(path: Path) -> bool:
    """True for a folder of Zarr and a .zarr.zip."""
    if path.is_dir():
        return path.name.endswith(".zarr") or any((path / mark).exists() for mark in MARKS)
    return path.name.lower().endswith((".zarr.zip", ".zip"))


def open_zarr(path: Path, counts: str) -> CountSource:
    """Open the matrix `counts` of an AnnData in Zarr. Raises DataError when it is damaged or refused."""
    if path.is_dir():
        _refuse_special(path)
        store: Any = path
    else:
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path}: not a zip file")
        store = ZipStore(path, mode="r")
    with reading(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr's, of strings in version 3
        try:
            group = zarr.open_group(store, mode="r")
        except (zarr.errors.GroupNotFoundError, FileNotFoundError):
            raise DataError(f"{path}: not a Zarr group: no .zgroup or zarr.json") from None
        if not is_anndata(group):
            raise DataError(f"{path}: not an AnnData: no obs and var groups")
        _check_arrays(path, group, counts)
        source = open_anndata(path, group, counts)
    if not path.is_dir():
        source.close_file = store.close
    return source


def _refuse_special(folder: Path) -> None:
    """Raise DataError for anything in `folder` that is neither a file nor a folder of its own."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _refuse_special(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "no regular file"
                raise DataError(f"{entry.path}: {kind}; expected regular files alone: copy the folder with cp -rL")


def _check_arrays(path: Path, group: Any, counts: str) -> None:
    n_obs = _n_obs(group)
    for part in ("obs", "var", "X" if counts == "X" else "raw" if counts == "raw" else layer_path(counts)):
        if part in group:
            for name, array in _arrays(group[part], part):
                _check_array(path, name, array, n_obs if part == "obs" else 0)


def _arrays(item: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, zarr.Array):
        yield name, item
        return
    for inner, array in item.members(max_depth=8):
        if isinstance(array, zarr.Array):
            yield f"{name}/{inner}", array


def _n_obs(group: Any) -> int:
    """Length of the index of obs, 0 if it is not stored."""
    obs = group["obs"]
    index = obs.get(str(obs.attrs.get("_index", "_index"))) if isinstance(obs, zarr.Group) else None
    if isinstance(index, zarr.Group):  # text of pandas 3: values and a mask
        index = index.get("values")
    if not isinstance(index, zarr.Array) or not index.shape or index.nchunks_initialized < index.nchunks:
        return 0
    return int(index.shape[0])


def _check_array(path: Path, name: str, array: Any, n_obs: int) -> None:
    size = max(1, array.dtype.itemsize)
    chunk = int(np.prod([float(n) for n in array.shards or array.chunks])) * size
    declared = int(np.prod([float(n) for n in array.shape])) * size
    if max(chunk, declared) <= _LARGE:
        return
    stored = array.nbytes_stored()
    if chunk > _MOST_CHUNK or declared > max(_LARGE, _MOST_RATIO * stored, _PER_CELL * n_obs):
        raise DataError(
            f"{path}: {name} is damaged: it declares {declared:,} bytes in chunks of {chunk:,}, and stores {stored:,}"
        )


class MemoryMatrix:
    """A numpy array or scipy matrix of cells x genes."""

    def __init__(self, values: Any) -> None:
        # a matrix stored by gene is transposed once: slices of cells would each read all of it
        self._values = values.tocsr() if sp.issparse(values) else values
        self.shape: tuple[int, int] = values.shape

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        for first in range(0, self.shape[0], block):
            rows = self._values[first : first + block]
            yield sp.csr_matrix(rows if sp.issparse(rows) else native(rows))

    def close(self) -> None:
        """Do nothing: there is no file."""


def open_memory(adata: Any, counts: str, dataset: str) -> CountSource:
    """The matrix `counts` (`X`, `raw` or the name of a layer) of an AnnData, called `dataset` in messages.

    Raises DataError for a matrix that is missing, or is neither of numpy nor of scipy.
    """
    if adata.isbacked:
        raise DataError(f"{dataset}: it is backed by {adata.filename}; pass adata.to_memory(), or embed the file")
    values = {"X": adata.X} | ({} if adata.raw is None else {"raw": adata.raw.X})
    values |= {layer_name(name): matrix for name, matrix in adata.layers.items() if name is not None}
    there = [name for name, matrix in values.items() if matrix is not None]
    if counts not in there:
        raise DataError(f"{dataset}: no {counts} (`counts`); {did_you_mean(counts, there)}")
    matrix = values[counts]
    if not (sp.issparse(matrix) or isinstance(matrix, np.ndarray)):
        kind = f"{type(matrix).__module__}.{type(matrix).__name__}"
        raise DataError(f"{dataset}: {counts} is a {kind}; expected a numpy array or a scipy matrix")
    obs, var = (
        table.set_axis(text_index(table.index), axis=0)
        for table in (adata.obs, (adata.raw if counts == "raw" else adata).var)
    )
    others = [name for name in there if name != counts]
    return CountSource(Path(dataset), counts, MemoryMatrix(matrix), obs, var, others, option="argument `counts`")
