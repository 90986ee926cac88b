"""Packed cells in .h5ad files: how preprocess and shard write them, and how they are found again.

`uns/packed` has the bytes (`packing.cell_file`) and what is needed to read them:

    bytes     uint8, contiguous, unfiltered, at a multiple of 4,096 bytes of the file
    borders   uint32 `(2 x cells + 1,)`: where the genes and the counts of each cell begin, and the
              end, in units of 8 bytes; int64 in files of more than 34 GB
    n_genes   int32 `(cells,)`: number of genes of each cell
    names     SHA-256 of the names of cells and genes: a program that drops or moves some of them
              keeps `uns` as it was
    order     `genes` if the genes of a cell ascend, else `rank`
    dtype     `uint16` or `uint32`, of the counts

The file has no X: it opens in any program of scverse, with obs and var. `cellmill unpack` writes
one with X.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.h5 import (
    UNREADABLE,
    FrameColumns,
    create_h5,
    decode,
    one_line,
    open_h5,
    write_frames,
)
from cellmill.data.inputs.h5_walk import is_hdf5
from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.packing.cell_file import ByteRange, OpenFiles, PackedCellFile
from cellmill.data.packing.cells import CellKind, GeneOrder, pack_cells
from cellmill.data.packing.layout import ALIGNMENT
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.data.saved_work import SavedWork
from cellmill.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

PACKED = "uns/packed"
REMEDY = "run preprocess again"
_COPIED = 8 << 20  # bytes copied at a time


class PackedBlocks:
    """Packed cells in temporary files next to the output of `saved`.

    State `state` counts the cells that are there already. `dtype` of the counts is uint16 or uint32.
    """

    def __init__(
        self, saved: SavedWork, gene_order: GeneOrder, dtype: np.dtype[Any], state: str = ""
    ) -> None:
        self.gene_order = gene_order
        self.dtype = dtype
        self._bytes = saved.stream("bytes", state)
        self._sizes = saved.stream("sizes", state)  # bytes of each part, int64
        self._n_genes = saved.stream("n_genes", state)  # number of genes of each cell, int64
        self.streams = {"bytes": self._bytes, "sizes": self._sizes, "n_genes": self._n_genes}

    @property
    def n_cells(self) -> int:
        """Number of cells so far."""
        return self._n_genes.size // 8

    def add(self, rows: sp.csr_matrix) -> None:
        """Append cells."""
        indptr = rows.indptr.astype(np.int64)
        assert not rows.nnz or 0 < rows.data.min() <= rows.data.max() <= np.iinfo(self.dtype).max
        genes = np.require(rows.indices, np.int32, ["C", "W"])
        counts = np.require(rows.data, self.dtype, ["C", "W"])
        packed, sizes = pack_cells(SparseCounts(indptr, genes, counts), self.gene_order)
        self._bytes.write(packed)
        self._sizes.write(sizes.astype(np.int64))
        self._n_genes.write(np.diff(indptr))

    def save(self, file: Any, names: str) -> None:
        """Write the group `uns/packed` of a new file; `names` is their digest."""
        sizes = np.empty(2 * self.n_cells, np.int64)
        self._sizes.read_into(sizes, 0)
        part_offsets = row_offsets(sizes)
        n_genes = np.empty(self.n_cells, np.int64)
        self._n_genes.read_into(n_genes, 0)
        group = file.require_group("uns").create_group("packed")
        group.attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
        stored = group.create_dataset("bytes", (int(part_offsets[-1]),), "u1")
        for first in range(0, len(stored), _COPIED):
            part = np.empty(min(_COPIED, len(stored) - first), np.uint8)
            self._bytes.read_into(part, first)
            stored[first : first + len(part)] = part
            file.disk.raise_if_failed()
        units = part_offsets // ALIGNMENT
        is_large = units[-1] > np.iinfo(np.uint32).max
        filters = {"compression": "gzip", "shuffle": True}
        group.create_dataset("borders", data=units.astype("<i8" if is_large else "<u4"), **filters)
        group.create_dataset("n_genes", data=n_genes.astype("<i4"), **filters)
        for name in ("bytes", "borders", "n_genes"):
            group[name].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        texts = {"order": self.gene_order, "dtype": self.dtype.name, "names": names}
        for name, text in texts.items():
            group[name] = text
            group[name].attrs.update({"encoding-type": "string", "encoding-version": "0.2.0"})


def write_packed(
    path: Path,
    obs: pd.DataFrame | FrameColumns | Callable[[], FrameColumns],
    var: pd.DataFrame,
    blocks: Iterable[sp.csr_matrix],
    gene_order: GeneOrder,
    dtype: np.dtype[Any],
    *,
    ordered: bool = False,
    ranked: bool = False,
    recorded: Mapping[str, Any] = MappingProxyType({}),
    packed: PackedBlocks | None = None,
) -> None:
    """Write an .h5ad with packed counts instead of X.

    `packed` has the rows before `blocks`, if there are any. `obs` may be a function, called after
    the last block. `blocks` are rows in order, with counts above 0 of at most `dtype`; columns
    ascend within a row if `gene_order` is `genes`. `ordered` rows are sequences, `ranked` rows genes in
    rank order; uns/cellmill gets `recorded`. Raises OSError naming `path`, which stays as it was,
    on a full disk.
    """
    with create_h5(path) as file, SavedWork(path, None) as unsaved:
        if packed is None:
            packed = PackedBlocks(unsaved, gene_order, dtype)
        for block in blocks:
            packed.add(block)
        frame = obs() if callable(obs) else obs
        n_rows = packed.n_cells
        assert len(frame.index) == n_rows, f"{len(frame.index)} obs for {n_rows} rows"
        write_frames(file, frame, var, ordered, ranked, recorded)
        packed.save(file, digest_names(frame.index, var.index))


def digest_names(*axes: pd.Index) -> str:
    """SHA-256 of the names of cells and genes."""
    digest = hashlib.sha256()
    for names in axes:
        digest.update("\n".join(map(str, names)).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def check_names(path: Path, file: Any, *axes: pd.Index) -> None:
    """Raise DataError unless the packed cells of a file are those of its obs and var."""
    stored = file[f"{PACKED}/names"][()]
    if decode(stored) != digest_names(*axes):
        raise DataError(
            f"{path}: its cells or genes were changed, but not its packed counts; change what `cellmill unpack` "
            "writes instead"
        )


def open_packed(path: Path, files: OpenFiles) -> PackedCellFile:
    """Open packed cells. Raises DataError when they are damaged or of another format."""
    with open_h5(path, REMEDY) as file:
        return find_packed(path, file, files)


def is_packed(path: Path) -> bool:
    """True for an HDF5 file of packed cells."""
    if not is_hdf5(path):
        return False
    with open_h5(path) as file:
        return PACKED in file


def find_packed(path: Path, file: h5py.File, files: OpenFiles) -> PackedCellFile:
    """Packed cells of an open file. Raises DataError if it has none, or they are damaged."""
    if PACKED not in file:
        raise DataError(
            f"{path}: not cells that preprocess wrote: no {PACKED}; give a file that preprocess or shard wrote"
        )
    try:
        group = file[PACKED]
        order = decode(group["order"][()])
        dtype = np.dtype(decode(group["dtype"][()]))
        if order not in ("rank", "genes") or dtype not in ("uint16", "uint32"):
            raise ValueError(f"{PACKED} has an unknown order or dtype")
        # before memory is taken for it: a damaged header may claim any size
        max_size = 256 * path.stat().st_size
        for name in ("borders", "n_genes"):
            if (
                group[name].ndim != 1
                or group[name].dtype.kind not in "iu"
                or group[name].size > max_size
            ):
                raise ValueError(f"{PACKED}/{name} has a size or dtype that it cannot have")
        offsets = row_offsets(np.asarray(group["n_genes"][:], np.int64))
        n_vars = len(file["var"][file["var"].attrs["_index"]])
        return PackedCellFile(
            path=path,
            nnz=int(offsets[-1]),
            kind=CellKind("genes" if order == "genes" else "rank", n_vars, dtype),
            packed=locate(group["bytes"]),
            unchecked_indptr=offsets,
            unchecked_part_offsets=group["borders"][:],
            files=files,
            remedy=REMEDY,
        )
    except UNREADABLE as error:
        raise DataError(
            f"{path}: not cells that preprocess wrote: {one_line(error)}; {REMEDY}"
        ) from None


def locate(array: h5py.Dataset) -> ByteRange:
    """Where an array lies in its file. Raises ValueError unless it is in one piece."""
    if array.chunks is not None:  # compressed arrays are chunked
        raise ValueError(f"{array.name} is chunked or compressed, but is read by offset")
    offset = array.id.get_offset()
    if offset is None and array.size:
        raise ValueError(
            f"{array.name} has no offset in the file (virtual, external or never written)"
        )
    return ByteRange(offset or 0, array.size * array.dtype.itemsize)


class PackedMatrix(StoredMatrix):
    """Counts of packed cells."""

    def __init__(self, rows: PackedCellFile):
        self._rows = rows
        self.shape = (rows.n_obs, rows.kind.n_genes)

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for first in range(start, self.shape[0], block):
            n = min(block, self.shape[0] - first)
            offsets, genes, counts = self._rows.read(first, n)
            yield sp.csr_matrix((counts, genes, offsets), shape=(n, self.shape[1]))

    def close(self) -> None:
        self._rows.close()
