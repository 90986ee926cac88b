"""Opening the shards of a split, naming its cells, and reading names and medians from a shard."""

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
    """Return the shards of a split, by its index; each file is opened when it is first read.

    A shard is read from its copy in `copies`, if there is one. Raises DataError if the split has no
    cells or no index.
    """
    shards = manifest.entry(split).shards
    files = OpenFiles(copies=copies)
    n_obs = np.array([shard.n_obs for shard in shards])
    # the arrays of the index have the entries of all shards, one shard after the other
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
    """Read the names of cells (`obs`) or genes (`var`), `(n,)` object.

    `path` is a shard, whose cells have names `dataset:name`, or a file that preprocess wrote.
    """
    return _read_column(path, axis, None)


def name_cells(shards: list[PackedCellFile], cell_ids: np.ndarray) -> list[str]:
    """Name cells of a split for error messages, as `dataset:name (FILE row N)`.

    A cell is an `unnamed cell` if its name cannot be read.
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
    """Return what sorts the genes of cells into rank order; None if shards store them in it.

    `path` is any of the shards. Cells of at most `max_unsorted_genes` genes stay as they are.
    """
    if manifest.gene_order == "rank":
        return None
    return RankOrder(inverse_medians(read_medians(path)), max_unsorted_genes)


def _read_column(path: Path, axis: Literal["obs", "var"], column: str | None) -> np.ndarray:
    """Read a column of the data frame `axis`, or its index if `column` is None."""
    try:
        with open_h5(path, REMEDY) as file:
            if column is not None:
                return np.asarray(file[axis][column][:])
            return read_texts(file[axis][file[axis].attrs["_index"]])
    except (*UNREADABLE, OSError) as error:
        raise DataError(f"{path}: its {axis} cannot be read: {one_line(error)}; {REMEDY}") from None
