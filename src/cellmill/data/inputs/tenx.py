"""10x Genomics .h5 files, as Cell Ranger writes them: version 3 (group `matrix`) and 2 (a group per genome).

Both store genes x cells compressed by cell. Genes are named by id, which is unique; `var` has `symbol`, and in version
3 `feature_types` and `genome`. `counts` is X, or the name of a genome to read its genes alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.matrices import WHOLE, SparseMatrix, StoredMatrix, checked_shape, is_array, require_kind
from cellmill.data.inputs.source import CountSource
from cellmill.errors import DataError, did_you_mean

_V2 = ("barcodes", "genes", "gene_names", "data", "indices", "indptr", "shape")


def is_tenx(path: Path, file: Any) -> bool:
    """True if an open HDF5 file has the groups of version 3 or 2."""
    return file is not None and (_is_v3(file) or bool(_genomes(file)))


def open_tenx(path: Path, file: Any, counts: str) -> CountSource:
    """The matrix of an open HDF5 file, with all genes (`X`) or the genes of genome `counts`."""
    if _is_v3(file):
        return _open_v3(path, file["matrix"], counts)
    genomes = _genomes(file)
    if counts == "X" and len(genomes) > 1:
        raise DataError(f"{path}: has {len(genomes)} genomes; set the dataset's `counts` to {' or '.join(genomes)}")
    genome = genomes[0] if counts == "X" else counts
    _require_genome(path, genome, genomes)
    matrix, barcodes = _matrix_of(path, file[genome])
    ids = read_texts(path, file[genome]["genes"], "genes", matrix.shape[1])
    names = read_texts(path, file[genome]["gene_names"], "gene_names", len(ids))
    return CountSource(path, counts, matrix, barcodes, pd.DataFrame({"symbol": names}, index=ids))


class GenesOf(StoredMatrix):
    """Some genes of a matrix."""

    def __init__(self, matrix: StoredMatrix, columns: np.ndarray):
        self._matrix, self._columns = matrix, columns
        self.shape = (matrix.shape[0], len(columns))

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        return (part[:, self._columns] for part in self._matrix.blocks(block))


def _is_v3(file: Any) -> bool:
    matrix = file.get("matrix")
    return matrix is not None and not is_array(matrix) and "features" in matrix


def _genomes(file: Any) -> list[str]:
    """Groups of a file of version 2."""
    groups = {name: file.get(name) for name in file}
    return [n for n, g in groups.items() if g is not None and not is_array(g) and all(key in g for key in _V2)]


def _open_v3(path: Path, group: Any, counts: str) -> CountSource:
    matrix, barcodes = _matrix_of(path, group)
    features = group["features"]
    columns = {"id": read_texts(path, features.get("id"), "features/id", matrix.shape[1])}
    for column, name in {"symbol": "name", "feature_types": "feature_type", "genome": "genome"}.items():
        if name in features:
            columns[column] = read_texts(path, features[name], f"features/{name}", matrix.shape[1])
    genomes = sorted({*columns.get("genome", ())} - {""})
    if len(genomes) > 1:  # Cell Ranger puts the genome before ids and symbols
        for column in columns.keys() & {"id", "symbol"}:
            texts = zip(columns[column], columns["genome"])
            columns[column] = [text.removeprefix(g).lstrip("_") if g else text for text, g in texts]
    ids = columns.pop("id")
    var = pd.DataFrame(columns, index=pd.Index(ids, dtype=object))
    if counts == "X":
        return CountSource(path, counts, matrix, barcodes, var, genomes if len(genomes) > 1 else [])
    _require_genome(path, counts, ["X", *genomes])
    chosen = np.flatnonzero(var["genome"] == counts)
    return CountSource(path, counts, GenesOf(matrix, chosen), barcodes, var.iloc[chosen])


def _require_genome(path: Path, genome: str, known: list[str]) -> None:
    if genome not in known:
        raise DataError(f"{path}: no matrix {genome!r} (the dataset's `counts`); {did_you_mean(genome, known)}")


def _matrix_of(path: Path, group: Any) -> tuple[SparseMatrix, pd.DataFrame]:
    """Matrix and obs. The file's shape is genes x cells, so its columns are our rows."""
    stored = require_kind(path, "shape", group.get("shape"), WHOLE)
    n_vars, n_obs = checked_shape(path, "matrix", stored[:3])
    barcodes = read_texts(path, group.get("barcodes"), "barcodes", n_obs)
    matrix = SparseMatrix(path, "matrix", group, (n_obs, n_vars))
    return matrix, pd.DataFrame(index=pd.Index(barcodes, dtype=object))


def read_texts(path: Path, array: Any, name: str, length: int) -> list[str]:
    """Values of a text array as str. Raises DataError unless it has `length` of them."""
    if not is_array(array) or array.shape != (length,):
        shape = array.shape if is_array(array) else None
        raise DataError(f"{path}: damaged: expected {length:,} {name}, got {'none' if shape is None else shape}")
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array[()].tolist()]
