"""Loom files, as loompy and velocyto write them: dense genes x cells, with attributes of rows and columns.

Genes are named by `Accession`, which is unique, else by `Gene`; `counts` is X (`matrix`) or the name of a layer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.inputs.matrices import DenseMatrix, is_array, native
from cellmill.data.inputs.source import CountSource, DeclaredNames
from cellmill.data.inputs.tenx import read_texts
from cellmill.errors import DataError, did_you_mean

_CELLS = ("CellID", "obs_names", "cell_id", "Barcode", "barcode")
_GENES = ("Accession", "var_names", "Gene", "gene_ids", "gene")
_SYMBOLS = ("Gene", "gene", "symbol")


def is_loom(path: Path, file: Any) -> bool:
    """True if an open HDF5 file has a dense `matrix` and attributes of its rows and columns."""
    return file is not None and is_array(file.get("matrix")) and "row_attrs" in file and "col_attrs" in file


def names_in_loom(path: Path, file: Any) -> DeclaredNames:
    return DeclaredNames([*file["col_attrs"]], ["X", *sorted(file.get("layers", ()))])


def open_loom(path: Path, file: Any, counts: str) -> CountSource:
    """The matrix of an open HDF5 file, or its layer `counts`."""
    known = names_in_loom(path, file).counts
    if counts not in known:
        raise DataError(f"{path}: no layer {counts!r} (the dataset's `counts`); {did_you_mean(counts, known)}")
    array = file["matrix"] if counts == "X" else file["layers"][counts]
    matrix = DenseMatrix(path, counts, array, cells_axis=1)
    obs = _frame(path, file["col_attrs"], matrix.shape[0], _CELLS, "col_attrs")
    var = _frame(path, file["row_attrs"], matrix.shape[1], _GENES, "row_attrs")
    if (symbols := next((name for name in _SYMBOLS if name in var), None)) is not None:
        var = var.assign(symbol=var[symbols])
    return CountSource(path, counts, matrix, obs, var, [name for name in known if name != counts])


def _frame(path: Path, attributes: Any, length: int, names: tuple[str, ...], where: str) -> pd.DataFrame:
    """Attributes of one number or text each, indexed by the first of `names` that is unique, else that is there."""
    columns = {}
    for name in attributes:
        array = attributes[name]
        if is_array(array) and array.shape is not None and len(array.shape) == 1:
            is_number = array.dtype.kind in "buif" and array.shape == (length,)
            columns[name] = native(array[()]) if is_number else read_texts(path, array, f"{where}/{name}", length)
    there = [name for name in names if name in columns]
    if not there:
        raise DataError(f"{path}: {where} has no names; expected one of {', '.join(names)}, got {', '.join(columns)}")
    index = next((name for name in there if len(np.unique(columns[name])) == length), there[0])
    return pd.DataFrame(columns, index=pd.Index([str(text) for text in columns[index]], dtype=object))
