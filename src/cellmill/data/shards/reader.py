"""Shards of a corpus, whose rows are read by offset, and the names in them."""

from pathlib import Path
from typing import Literal

import numpy as np

from cellmill.data.inputs.h5 import UNREADABLE, one_line, open_h5, read_texts
from cellmill.data.packing.cells import CellKind
from cellmill.data.packing.row_file import ByteRange, OpenFiles, RowFile
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import open_index
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.errors import DataError


def open_shards(manifest: Manifest, split: str, copies: LocalCopies | None = None) -> list[RowFile]:
    """Shards of a split, each opened when it is first read.

    A shard is read from its copy in `copies`, if there is one. Raises DataError if the split has no
    cells or no index.
    """
    shards = manifest.entry(split).shards
    files = OpenFiles(copies=copies)
    offsets = open_index(manifest, split, "offsets")
    units = open_index(manifest, split, "borders")
    shard_offsets = row_offsets([shard.n_obs + 1 for shard in shards])
    unit_offsets = row_offsets([2 * shard.n_obs + 1 for shard in shards])
    opened = []
    for number, shard in enumerate(shards):
        kind = CellKind(manifest.order, manifest.n_genes, np.dtype(shard.dtype))
        opened.append(
            RowFile(
                path=manifest.shard_path(shard),
                nnz=shard.nnz,
                kind=kind,
                packed=ByteRange(shard.bytes_at, shard.n_bytes),
                unchecked_indptr=offsets[shard_offsets[number] : shard_offsets[number + 1]],
                unchecked_part_offsets=units[unit_offsets[number] : unit_offsets[number + 1]],
                files=files,
                remedy=REMEDY,
            )
        )
    return opened


def read_names(path: Path, axis: Literal["obs", "var"]) -> np.ndarray:
    """Names of the cells (`dataset:name` in shards) or genes of a shard or a file that preprocess
    wrote, object.
    """
    return _read_frame(path, axis, None)


def read_medians(path: Path) -> np.ndarray:
    """Corpus median of each gene, `(genes,)` float32, of a shard."""
    return _read_frame(path, "var", "median").astype(np.float32)


def _read_frame(path: Path, axis: Literal["obs", "var"], column: str | None) -> np.ndarray:
    """A column of a data frame, or its index."""
    try:
        with open_h5(path, REMEDY) as file:
            if column is not None:
                return np.asarray(file[axis][column][:])
            return read_texts(file[axis][file[axis].attrs["_index"]])
    except (*UNREADABLE, OSError) as error:
        raise DataError(f"{path}: its {axis} cannot be read: {one_line(error)}; {REMEDY}") from None
