"""Opening the shards of a split, naming cells, and reading names and medians from a shard."""

from pathlib import Path
from typing import Literal

import numpy as np

from cellmill.data.inputs.h5 import UNREADABLE, one_line, open_h5, read_texts
from cellmill.data.packing.cell_file import ByteRange, OpenFiles, PackedCellFile
from cellmill.data.packing.cells import CellKind
from cellmill.data.rank_order import RankOrder, inverse_medians
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import open_index
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.errors import DataError


def open_shards(
    manifest: Manifest, split: str, copies: LocalCopies | None = None
) -> list[PackedCellFile]:
    """Return the shards of a split. Only the index is read; a shard is opened when it is first read.

    If `copies` has a copy of a shard, the copy is read instead. Raises DataError if the split has no cells, or
    if the index is missing or damaged.
    """
    shards = manifest.entry(split).shards
    files = OpenFiles(copies=copies)
    n_obs = np.array([shard.n_obs for shard in shards])
    # an array of the index has the entries of all shards, shard after shard: split it by shard
    indptr = open_index(manifest, split, "offsets")
    part_offsets = open_index(manifest, split, "borders")
    indptr_by_shard = np.split(indptr, np.cumsum(n_obs + 1)[:-1])
    part_offsets_by_shard = np.split(part_offsets, np.cumsum(2 * n_obs + 1)[:-1])
    cell_files = []
    for shard, shard_indptr, shard_part_offsets in zip(
        shards, indptr_by_shard, part_offsets_by_shard
    ):
        kind = CellKind(manifest.gene_order, manifest.n_genes, np.dtype(shard.dtype))
        cell_files.append(
            PackedCellFile(
                path=manifest.shard_path(shard),
                nnz=shard.nnz,
                kind=kind,
                packed=ByteRange(shard.bytes_at, shard.n_bytes),
                unchecked_indptr=shard_indptr,
                unchecked_part_offsets=shard_part_offsets,
                files=files,
                remedy=REMEDY,
            )
        )
    return cell_files


def read_names(path: Path, axis: Literal["obs", "var"]) -> np.ndarray:
    """Read the names of all cells (`obs`) or genes (`var`) of a file, as an array of texts.

    `path` is a shard, or a file that preprocess wrote. In a shard, the name of a cell is `dataset:name`.
    Raises DataError if the names cannot be read.
    """
    return _read_column(path, axis, None)


def name_cells(shards: list[PackedCellFile], cell_ids: np.ndarray) -> list[str]:
    """Name cells of a split for error messages, as `dataset:name (FILE row N)`.

    `cell_ids`, `(cells,)`, are indices of cells in the split. If the name of a cell cannot be read, the cell is
    called `unnamed cell (FILE row N)`.
    """
    shard_offsets = row_offsets([shard.n_obs for shard in shards])
    shard_numbers = np.searchsorted(shard_offsets, cell_ids, side="right") - 1
    rows = cell_ids - shard_offsets[shard_numbers]
    names = []
    for number, row in zip(shard_numbers.tolist(), rows.tolist()):
        path = shards[number].path
        try:
            name = read_names(path, "obs")[row]
        except DataError:
            name = "unnamed cell"
        names.append(f"{name} ({path.name} row {row})")
    return names


def read_medians(path: Path) -> np.ndarray:
    """Read the corpus median of each gene from a shard, `(genes,)` float32."""
    return _read_column(path, "var", "median").astype(np.float32)


def read_rank_order(
    manifest: Manifest, path: Path, max_unsorted_genes: int = 0
) -> RankOrder | None:
    """Return an object that sorts the genes of cells into rank order.

    Returns None if the shards already have the genes in rank order. `path` is the path of any shard; its
    medians are read. Cells with at most `max_unsorted_genes` genes are left as they are.
    """
    if manifest.gene_order == "rank":
        return None
    return RankOrder(inverse_medians(read_medians(path)), max_unsorted_genes)


def _read_column(path: Path, axis: Literal["obs", "var"], column: str | None) -> np.ndarray:
    """Read a column of the data frame `axis`. If `column` is None, read the names of its rows.

    Raises DataError if they cannot be read.
    """
    try:
        with open_h5(path, REMEDY) as file:
            if column is not None:
                return np.asarray(file[axis][column][:])
            return read_texts(file[axis][file[axis].attrs["_index"]])
    except (*UNREADABLE, OSError) as error:
        raise DataError(f"{path}: its {axis} cannot be read: {one_line(error)}; {REMEDY}") from None
