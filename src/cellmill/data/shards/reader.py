"""Opening the shards of a split, naming its cells, and reading names and medians from a shard."""

from pathlib import Path
from typing import Literal

import numpy as np

from cellmill.data.inputs.h5 import UNREADABLE, one_line, open_h5, read_texts
from cellmill.data.packing.cell_file import ByteRange, OpenFiles, PackedCellFile
from cellmill.data.packing.cells import CellKind
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import open_index
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.errors import DataError


def open_shards(
    manifest: Manifest, split: str, copies: LocalCopies | None = None
) -> list[PackedCellFile]:
    """Open the index of a split; return its shards, whose files are opened when they are first read.

    A shard is read from its copy in `copies`, if there is one. Raises DataError if the split has no
    cells or no index.
    """
    shards = manifest.entry(split).shards
    files = OpenFiles(copies=copies)
    # both arrays have the entries of each shard in turn
    n_obs = np.array([shard.n_obs for shard in shards])
    indptr_by_shard = np.split(open_index(manifest, split, "offsets"), np.cumsum(n_obs + 1)[:-1])
    parts_by_shard = np.split(open_index(manifest, split, "borders"), np.cumsum(2 * n_obs + 1)[:-1])
    cell_files = []
    for shard, indptr, part_offsets in zip(shards, indptr_by_shard, parts_by_shard):
        kind = CellKind(manifest.gene_order, manifest.n_genes, np.dtype(shard.dtype))
        cell_files.append(
            PackedCellFile(
                path=manifest.shard_path(shard),
                nnz=shard.nnz,
                kind=kind,
                packed=ByteRange(shard.bytes_at, shard.n_bytes),
                unchecked_indptr=indptr,
                unchecked_part_offsets=part_offsets,
                files=files,
                remedy=REMEDY,
            )
        )
    return cell_files


def read_names(path: Path, axis: Literal["obs", "var"]) -> np.ndarray:
    """Read the names of cells or genes, `(n,)` object, of a shard or a file that preprocess wrote.

    Names of cells in shards are `dataset:name`.
    """
    return _read_column(path, axis, None)


def name_cells(shards: list[PackedCellFile], cell_ids: np.ndarray) -> list[str]:
    """Name cells of a split by id as `dataset:name (FILE row N)`, for error messages."""
    shard_offsets = row_offsets([shard.n_obs for shard in shards])
    shard_numbers = np.searchsorted(shard_offsets, cell_ids, side="right") - 1
    rows = cell_ids - shard_offsets[shard_numbers]
    names = []
    for number, row in zip(shard_numbers.tolist(), rows.tolist()):
        path = shards[number].path
        names.append(f"{read_names(path, 'obs')[row]} ({path.name} row {row})")
    return names


def read_medians(path: Path) -> np.ndarray:
    """Read the corpus median of each gene from a shard, `(genes,)` float32."""
    return _read_column(path, "var", "median").astype(np.float32)


def _read_column(path: Path, axis: Literal["obs", "var"], column: str | None) -> np.ndarray:
    """Read a column of the data frame `axis`, or its index if `column` is None."""
    try:
        with open_h5(path, REMEDY) as file:
            if column is not None:
                return np.asarray(file[axis][column][:])
            return read_texts(file[axis][file[axis].attrs["_index"]])
    except (*UNREADABLE, OSError) as error:
        raise DataError(f"{path}: its {axis} cannot be read: {one_line(error)}; {REMEDY}") from None
