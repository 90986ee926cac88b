"""AnnData inputs: groups of an HDF5 file, Zarr folders, and AnnData objects in memory.

Zarr is of version 2 or 3, also zipped (.zarr.zip). Counts are X, raw/X or a layer. obs and var may be
stored as anndata before 0.7 did: one compound dataset, with categories in uns. Zarr folders with links,
FIFOs or devices are refused; zarr itself refuses the codec pickle, which runs code.
"""

import os
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import zarr
from anndata import AnnData
from zarr.storage import ZipStore

from cellmill.config.datasets import COUNTS
from cellmill.config.section import shown
from cellmill.data.arrays import text_index
from cellmill.data.inputs.containers import (
    add_columns,
    choose_part,
    is_anndata,
    members,
    parts_of,
    stored_index,
)
from cellmill.data.inputs.derived.recovered import RecoveredCounts, matrix_to_recover
from cellmill.data.inputs.frames import open_obs, read_frame
from cellmill.data.inputs.h5 import decode
from cellmill.data.inputs.matrices import (
    DenseMatrix,
    SparseMatrix,
    StoredMatrix,
    absent_chunks,
    checked_shape,
    is_array,
    native,
    size_problem,
)
from cellmill.data.inputs.packed_cells import PACKED, PackedMatrix, check_names, find_packed
from cellmill.data.inputs.source import (
    COUNTS_RULE_KEY,
    GENE_LENGTH,
    CountSource,
    DeclaredNames,
    Format,
    look_at,
    require_matrix,
)
from cellmill.data.packing.cell_file import OpenFiles
from cellmill.errors import ConfigError, DataError

NOTES = "uns/cellmill"  # text on what preprocessing did to the counts
ORDERED = f"{NOTES}/ordered"  # rows of X are sequences, or genes in rank order
RANKED = f"{NOTES}/ranked"  # rows are genes in rank order, without counts
_OF_PEGASUS = (
    "pegasusio wrote its names of cells, without the -1 of Cell Ranger, or with the number in front: tables of labels "
    "may have the suffix"
)
_SET_OF_SNAPATAC = (
    "it lists files of snapatac2 and has no counts: give one of those, or write "
    "data.to_adata().write_h5ad('cells.h5ad')"
)
_SAMPLE = 100  # cells of a matrix that show what its values look like
_MANY_FILES = 2_000
_SMALL_FILE = 4_096  # bytes
_BY_GENE = {"csr_matrix": False, "csc_matrix": True}


def open_anndata(path: Path, file: Any, counts: str) -> CountSource:
    """Open the matrix `counts` of an open HDF5 file or Zarr group.

    `counts` is `X`, `raw`, the name of a layer, or `layers/X`. A file of several AnnData gives one of
    them (`containers.py`). `expm1(raw)` recovers counts from logarithms.
    """
    if not is_anndata(file):
        return _open_part(path, file, counts)
    logs = matrix_to_recover(counts)
    if logs is not None:
        source = open_anndata(path, file, logs)
        source.matrix = RecoveredCounts(path, logs, source.matrix, read_frame(path, file, "obs"))
        return source
    known = _matrices(file)
    if not known and "uns/AnnDataSet" in file:
        raise DataError(f"{path}: {_SET_OF_SNAPATAC}")
    require_matrix(path, counts, known)
    stored, genes = known[counts]
    obs = open_obs(path, file) if stored == PACKED else read_frame(path, file, "obs")
    var = read_frame(path, file, genes)
    if stored == PACKED:
        check_names(path, file, obs.index, var.index)
    matrix = _open_matrix(path, counts, file, stored)
    others = [name for name in known if name != counts]
    shape = (len(obs.index), len(var))
    if matrix.shape != shape:
        remedy = f"; set {COUNTS} to {' or '.join(others)}" if others else ""
        raise DataError(
            f"{path}: expected {counts} of shape {shape}, as obs and var, got {matrix.shape}{remedy}"
        )
    ordered = counts == "X" and ORDERED in file
    keeps_order = stored == PACKED or (isinstance(matrix, SparseMatrix) and not matrix.by_gene)
    if ordered and not keeps_order:
        raise DataError(
            f"{path}: X has sequences, but is no csr_matrix: their order is lost; preprocess again"
        )
    is_of_pegasus = file["obs"].attrs.get("_index") == "barcodekey"
    notes = [_OF_PEGASUS] if is_of_pegasus else []
    notes += absent_chunks(counts, file[stored])
    return CountSource(
        path,
        counts,
        matrix,
        obs,
        var,
        others=others,
        ordered=ordered,
        ranked=ordered and RANKED in file,
        recorded=_read_record(file),
        notes=notes,
        look=partial(_look, path, file),
    )


def _read_record(file: Any) -> dict[str, str]:
    """Texts in uns/cellmill, by name; none from a file of other tools."""
    recorded: dict[str, str] = {}
    group = file.get(NOTES)
    if group is None or is_array(group):
        return recorded
    for name in (COUNTS_RULE_KEY, GENE_LENGTH):
        value: Any = group.get(name)
        if is_array(value) and value.shape == ():
            recorded[name] = decode(value[()])
    return recorded


def _open_part(path: Path, file: Any, counts: str) -> CountSource:
    """One AnnData of a file of several, whose part `counts` may name before a `#`."""
    part, mark, name = counts.rpartition("#")
    chosen = choose_part(path, file, part if mark else None)
    part = chosen.rpartition("/")[2]
    source = open_anndata(Path(f"{path}#{part}"), file[chosen], name)
    if "mod" in file and "obs" in file:
        own = read_frame(path, file[chosen], "obs")
        whole = read_frame(path, file, "obs")
        source.obs = add_columns(path, own, whole, file.get(f"obsmap/{part}"))
    if not mark:
        source.notes.append(f"{chosen} is read, of {', '.join(parts_of(file))}")
    return source


def _look(path: Path, file: Any) -> dict[str, str]:
    """What the first values of every matrix look like."""
    looks = {}
    for name, (stored, _) in _matrices(file).items():
        try:
            looks[name] = look_at(_open_matrix(path, name, file, stored).some(_SAMPLE))
        except (DataError, StopIteration):
            looks[name] = "cannot be read"
    return looks


def _names_in_h5ad(path: Path, file: Any) -> DeclaredNames | None:
    """Names in an open HDF5 file or Zarr group; None before anndata 0.7, and for a file of several AnnData."""
    if not is_anndata(file):
        return None
    obs = file["obs"]
    columns = np.asarray(obs.attrs.get("column-order"), object)
    if columns.ndim != 1:
        return None
    names = list(map(decode, columns))
    categories = {name: obs.get(f"{name}/categories") for name in names}
    counts = []
    for name, (matrix, var) in _matrices(file).items():
        # MuDataSeurat keeps scaled values of the variable genes as X next to all genes
        index = stored_index(file[var])
        is_narrow = (
            index is not None and is_array(file[matrix]) and file[matrix].shape[1:] != index.shape
        )
        if matrix == PACKED or not is_narrow:
            counts.append(name)
    return DeclaredNames(names, counts, categories)


def _names_in_zarr(path: Path, file: Any) -> DeclaredNames | None:
    """Names in a Zarr folder."""
    for _ in _checked_files(path):
        pass
    with warnings.catch_warnings(action="ignore"):  # zarr's, of strings in version 3
        return _names_in_h5ad(path, zarr.open_group(path, mode="r", use_consolidated=False))


def _matrices(file: Any) -> dict[str, tuple[str, str]]:
    """Where the matrices of a file and their var are, by the value of `counts`."""
    matrices = {"X": ("X", "var"), "raw": ("raw/X", "raw/var")}
    if not _has_matrix(file, "X"):
        matrices["X"] = (PACKED, "var")
    if "raw/X" not in file:
        matrices["raw"] = ("raw.X", "raw.var")  # before anndata 0.7
    for name in members(file, "layers"):
        matrices[_layer_name(name)] = (f"layers/{name}", "var")
    return {
        counts: (matrix, var)
        for counts, (matrix, var) in matrices.items()
        if _has_matrix(file, matrix) and var in file
    }


def _has_matrix(file: Any, name: str) -> bool:
    """True if a file has `name`, and not as anndata's null, which MuData writes for a missing X."""
    return name in file and decode(file[name].attrs.get("encoding-type")) != "null"


def _layer_name(layer: str) -> str:
    """`counts` of a layer: its name, or `layers/X` for one that is called as another matrix."""
    return f"layers/{layer}" if layer in ("X", "raw") else layer


def _open_matrix(path: Path, counts: str, file: Any, name: str) -> StoredMatrix:
    """Matrix `name` of a file, which `counts` stands for."""
    if name == PACKED:
        return PackedMatrix(find_packed(path, file, OpenFiles()))
    stored = file[name]
    if is_array(stored):
        return DenseMatrix(path, counts, stored)
    kind = "unknown"
    if "h5sparse_format" in stored.attrs:  # before anndata 0.7
        kind = f"{decode(stored.attrs['h5sparse_format'])}_matrix"
    kind = decode(stored.attrs.get("encoding-type", kind))  # bytes, as Julia and rhdf5 write them
    if kind not in _BY_GENE:
        raise DataError(
            f"{path}: {counts} is stored as {kind}; expected csr_matrix, csc_matrix or array"
        )
    shape = stored.attrs.get("shape", stored.attrs.get("h5sparse_shape"))
    return SparseMatrix(path, counts, stored, checked_shape(path, counts, shape), _BY_GENE[kind])


def _is_zarr(path: Path, file: Any) -> bool:
    """True for a folder of Zarr and a .zarr.zip."""
    if not path.is_dir():
        return path.name.lower().endswith(".zip")
    marks = (".zgroup", "zarr.json")
    return path.suffix == ".zarr" or any((path / mark).exists() for mark in marks)


def _open_zarr(path: Path, file: Any, counts: str) -> CountSource:
    note = None
    if path.is_dir():
        note = _describe_tiny_files([*_checked_files(path)])
    elif not zipfile.is_zipfile(path):
        raise DataError(f"{path}: not a zip file")
    store: Any = path if path.is_dir() else ZipStore(path, mode="r")
    with warnings.catch_warnings(action="ignore"):  # zarr's, of strings in version 3
        try:
            # consolidated metadata stays as it was when more is written later
            group = zarr.open_group(store, mode="r", use_consolidated=False)
        except (zarr.errors.GroupNotFoundError, FileNotFoundError):
            fault = f"{path}: not a Zarr group: no .zgroup or zarr.json"
            if not path.is_dir():
                fault += "; a zip of other files: unpack it, and give what is in it"
            raise DataError(fault) from None
        if not (is_anndata(group) or parts_of(group)):
            raise DataError(f"{path}: not an AnnData: no obs and var groups{_hint(path, group)}")
        _check_sizes(path, group, counts)
        source = open_anndata(path, group, counts)
    if note is not None:
        source.notes.append(note)
    if not path.is_dir():
        source.close_file = store.close
    return source


def _hint(path: Path, group: Any) -> str:
    """Say what to do about a Zarr of several AnnData or of another tool; else empty.

    annbatch writes several AnnData. Pegasus, Xenium and Scarf have other groups.
    """
    if "cell_features" in group:
        return "; it is the matrix of Xenium: give cell_feature_matrix.h5, which lies next to it"
    if "cellData" in group:
        return "; it was written by Scarf: write it as .h5ad (scarf.writers.to_h5ad(ds.RNA, 'cells.h5ad'))"
    for name, item in sorted(group.members()):
        if is_anndata(item):
            return f"; it has {name}: give {path / name}"
        if not is_array(item) and "barcode_metadata" in item:
            return "; it was written by Pegasus: write it as .h5ad (pegasusio.write_output(data, 'cells.h5ad'))"
    return ""


def _checked_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """List the files in a folder.

    Raises DataError for anything that is neither a file nor a folder of its own.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _checked_files(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "no regular file"
                raise DataError(
                    f"{entry.path}: {kind}; expected regular files alone: copy the folder with cp -rL"
                )
            else:
                yield entry


def _describe_tiny_files(files: list[os.DirEntry[str]]) -> str | None:
    """A line for a folder of many small files, which anndata 0.13 writes with zarr before 3.1.4."""
    if len(files) < _MANY_FILES:
        return None
    sample = files[:: len(files) // 200]
    mean = sum(entry.stat().st_size for entry in sample) / len(sample)
    if mean > _SMALL_FILE:
        return None
    return (
        f"{len(files):,} files with {mean:,.0f} bytes on average are read about 40 times slower than large ones; write "
        "it again with zarr 3.1.4 or later, or as .h5ad"
    )


def _check_sizes(path: Path, group: Any, counts: str) -> None:
    if not is_anndata(group):
        part, mark, counts = counts.rpartition("#")
        group = group[choose_part(path, group, part if mark else None)]
    counts = matrix_to_recover(counts) or counts
    index = stored_index(group["obs"])
    n_obs = 0
    if isinstance(index, zarr.Array) and index.shape and index.nchunks_initialized == index.nchunks:
        n_obs = int(index.shape[0])
    for part in ("obs", "var", *_matrices(group).get(counts, ())):
        item = group.get(part)
        arrays = {part: item}
        if isinstance(item, zarr.Group):
            arrays |= {f"{part}/{name}": member for name, member in item.members(max_depth=8)}
        n_cells = n_obs if part == "obs" else 0
        for name, array in arrays.items():
            if isinstance(array, zarr.Array):
                problem = size_problem(name, array, array.nbytes_stored, n_cells)
                if problem is not None:
                    raise DataError(f"{path}: {problem}")


class MemoryMatrix(StoredMatrix):
    """A numpy array or scipy matrix, read a block at a time without a copy of the whole."""

    def __init__(self, values: Any) -> None:
        # a matrix stored by gene is transposed once: slices of cells would each read all of it
        self._values = values.tocsr() if sp.issparse(values) else values
        self.shape = values.shape

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for first in range(start, self.shape[0], block):
            rows = self._values[first : first + block]
            yield sp.csr_matrix(rows if sp.issparse(rows) else native(rows))


def open_memory(adata: Any, counts: str, dataset: str) -> CountSource:
    """Open the matrix `counts` (`X`, `raw` or the name of a layer) of an AnnData in memory.

    Messages call it `dataset`. Raises DataError for a matrix that is missing, or is neither of numpy
    nor of scipy, ConfigError for another object.
    """
    if not isinstance(adata, AnnData):
        raise ConfigError(
            f"expected an AnnData, got {shown(adata)}; to read a file: anndata.read_h5ad(path)"
        )
    if adata.isbacked:
        raise DataError(
            f"{dataset}: it is backed by {adata.filename}; pass adata.to_memory(), or embed the file"
        )
    matrices = {"X": adata.X, "raw": None if adata.raw is None else adata.raw.X}
    for name, matrix in adata.layers.items():
        if name is not None:
            matrices[_layer_name(name)] = matrix
    names = [name for name, matrix in matrices.items() if matrix is not None]
    option = "argument `counts`"
    if adata.X is None and "packed" in adata.uns:
        raise DataError(
            f"{dataset}: its counts are packed: open the file with cellmill.open_cells, or give its path"
        )
    require_matrix(dataset, counts, names, option)
    matrix = matrices[counts]
    if not (sp.issparse(matrix) or isinstance(matrix, np.ndarray)):
        kind = f"{type(matrix).__module__}.{type(matrix).__name__}"
        raise DataError(
            f"{dataset}: {counts} is a {kind}; expected a numpy array or a scipy matrix"
        )
    var = adata.raw.var if counts == "raw" else adata.var
    obs, var = (table.set_axis(text_index(table.index), axis=0) for table in (adata.obs, var))
    others = [name for name in names if name != counts]
    return CountSource(Path(dataset), counts, MemoryMatrix(matrix), obs, var, others, option=option)


H5AD = Format(
    ".h5ad, .h5mu",
    lambda path, file: file is not None and (is_anndata(file) or bool(parts_of(file))),
    open_anndata,
    _names_in_h5ad,
)
ZARR = Format(".zarr", _is_zarr, _open_zarr, _names_in_zarr)
