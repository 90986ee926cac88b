"""AnnData groups of an HDF5 file or a Zarr folder: obs, var, and X, raw/X or a layer."""

import operator
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata.io import read_elem

from cellmill.data.h5_file import one_line
from cellmill.data.inputs.dense import DenseMatrix
from cellmill.data.inputs.legacy_layout import read_table
from cellmill.data.inputs.source import CountSource, StoredMatrix
from cellmill.data.inputs.sparse import CscMatrix, CsrMatrix
from cellmill.data.inputs.values import MAX_LENGTH, is_array
from cellmill.data.text_columns import text_index
from cellmill.errors import DataError, did_you_mean

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
