"""HDF5 files that store genes x cells: 10x Genomics .h5 and Loom.

Cell Ranger writes the first, and loompy and velocyto write the second. 10x files, of version 3 (group
`matrix`) and 2 (a group per genome), are compressed by cell. Genes are named by id, which is unique;
`var` has `symbol`, and in version 3 `feature_types` and `genome`. `counts` is X, or the name of a
genome to read its genes alone.

Loom files are dense, with attributes of rows and columns. Genes are named by `Accession`, which is
unique, else by `Gene`; `counts` is X (`matrix`) or the name of a layer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.datasets import COUNTS
from cellmill.data.arrays import as_text, named_frame
from cellmill.data.inputs.containers import members
from cellmill.data.inputs.derived.grouped import GroupedColumns
from cellmill.data.inputs.matrices import (
    REAL,
    WHOLE,
    DenseMatrix,
    SparseMatrix,
    checked_shape,
    is_array,
    native,
    require_kind,
)
from cellmill.data.inputs.source import (
    CountSource,
    DeclaredNames,
    Format,
    mark_missing,
    require_matrix,
)
from cellmill.errors import DataError

_V2 = {"id": "genes", "symbol": "gene_names"}
_V3 = {
    "id": "features/id",
    "symbol": "features/name",
    "feature_types": "features/feature_type",
    "genome": "features/genome",
    "gene_id": "features/gene_id",  # of a probe
    "gene_name": "features/gene_name",
    "filtered_probes": "features/filtered_probes",
}
_LOOM_CELLS = ("CellID", "obs_names", "cell_id", "Barcode", "barcode", "colnames")
_LOOM_GENES = ("Accession", "var_names", "Gene", "gene_ids", "gene", "target_name", "rownames")
_LOOM_SYMBOLS = ("Gene", "gene", "symbol")


def _open_tenx(path: Path, file: Any, counts: str) -> CountSource:
    """The matrix of an open HDF5 file, with all genes (`X`) or the genes of genome `counts`."""
    is_v3 = _is_v3(file)
    name = "matrix"
    if not is_v3:
        known = _genomes(file)
        if counts == "X" and len(known) > 1:
            raise DataError(
                f"{path}: has {len(known)} genomes; set {COUNTS} to {' or '.join(known)}"
            )
        name = known[0] if counts == "X" else counts
        require_matrix(path, name, known)
    group = file[name]
    shape = require_kind(path, "shape", group.get("shape"), WHOLE)
    n_vars, n_obs = checked_shape(path, "matrix", shape[:3])
    barcodes = _read_texts(path, group.get("barcodes"), "barcodes", n_obs)
    # stored as genes x cells, by column
    matrix = SparseMatrix(path, "matrix", group, (n_obs, n_vars))
    columns = {}
    for column, array in (_V3 if is_v3 else _V2).items():
        if column == "id" or array in group:
            columns[column] = _read_texts(path, group.get(array), array, n_vars)
    genomes = sorted({*columns.get("genome", ())} - {""})
    if len(genomes) > 1:  # Cell Ranger puts the genome before ids and symbols
        for column in columns.keys() & {"id", "symbol"}:
            texts = zip(columns[column], columns["genome"])
            columns[column] = [text.removeprefix(g).lstrip("_") if g else text for text, g in texts]
    obs = named_frame(barcodes)
    var = named_frame(columns.pop("id"), columns)
    if counts == "X" or not is_v3:
        return CountSource(path, counts, matrix, obs, var, genomes if len(genomes) > 1 else [])
    require_matrix(path, counts, ["X", *genomes])
    chosen = np.flatnonzero(var["genome"] == counts)
    target = np.full(n_vars, -1)
    target[chosen] = np.arange(len(chosen))
    genome = GroupedColumns(matrix, target, len(chosen))
    return CountSource(path, counts, genome, obs, var.iloc[chosen])


def _is_v3(file: Any) -> bool:
    matrix = file.get("matrix")
    return matrix is not None and not is_array(matrix) and "features" in matrix


def _genomes(file: Any) -> list[str]:
    """Groups of a file of version 2."""
    # R's writeTENxMatrix has no gene_names
    arrays = {"barcodes", "data", "indices", "indptr", "shape", "genes"}
    return [name for name in file if arrays <= {*members(file, name)}]


def _read_texts(path: Path, array: Any, name: str, length: int) -> list[str]:
    """Values of an array as str. Raises DataError unless it has `length` of them."""
    if not is_array(array) or array.shape != (length,):
        got = array.shape if is_array(array) else None
        raise DataError(f"{path}: damaged: expected {length:,} {name}, got {got or 'none'}")
    values = array[()].tolist()
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def _names_in_loom(path: Path, file: Any) -> DeclaredNames:
    return DeclaredNames([*file["col_attrs"]], ["X", *members(file, "layers")])


def _open_loom(path: Path, file: Any, counts: str) -> CountSource:
    """The matrix of an open HDF5 file, or its layer `counts`."""
    known = _names_in_loom(path, file).counts
    require_matrix(path, counts, known)
    stored = file["matrix"] if counts == "X" else file["layers"][counts]
    matrix = DenseMatrix(path, counts, stored, cells_axis=1)
    frame = _loom_frame(path, file, "col_attrs", matrix.shape[0], _LOOM_CELLS)
    obs, written, notes = mark_missing(frame)
    var = _loom_frame(path, file, "row_attrs", matrix.shape[1], _LOOM_GENES)
    symbols = next((name for name in _LOOM_SYMBOLS if name in var), None)
    if symbols is not None:
        var = var.assign(symbol=var[symbols])
    others = [name for name in known if name != counts]
    return CountSource(path, counts, matrix, obs, var, others, notes=notes, written=written)


def _loom_frame(
    path: Path, file: Any, where: str, length: int, names: tuple[str, ...]
) -> pd.DataFrame:
    """Read attributes of one number or text each.

    They are indexed by the first of `names` with unique values, else by the first that exists. Without
    any of `names`, the index is the first text whose values differ: the other texts stay columns, of
    which the best one names the genes.
    """
    columns: dict[str, Any] = {}
    for name, array in file[where].items():
        if not is_array(array) or array.shape is None or len(array.shape) != 1:
            continue
        if array.dtype.names is not None:  # several values a cell or gene: regulons of SCENIC
            continue
        if array.dtype.kind in REAL and array.shape == (length,):
            columns[name] = native(array[()])
        else:
            columns[name] = _read_texts(path, array, f"{where}/{name}", length)
    unique = [name for name in columns if len(np.unique(columns[name])) == length]
    texts = [name for name in unique if isinstance(columns[name], list)]
    present = [name for name in names if name in columns]
    candidates = [*(name for name in present if name in unique), *present] or texts
    if not candidates:
        raise DataError(
            f"{path}: {where} has no names; expected one of {', '.join(names)}, or an attribute of text whose values "
            f"differ, got {', '.join(columns) or 'none'}"
        )
    return named_frame(list(map(as_text, columns[candidates[0]])), columns)


TENX = Format(
    "10x .h5",
    lambda path, file: file is not None and (_is_v3(file) or bool(_genomes(file))),
    _open_tenx,
)
LOOM = Format(
    ".loom",
    lambda path, file: (
        file is not None and is_array(file.get("matrix")) and {"row_attrs", "col_attrs"} <= {*file}
    ),
    _open_loom,
    _names_in_loom,
)
