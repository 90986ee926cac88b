"""Files of packed cells, read by offset without HDF5.

Shards, and the files that preprocess writes, are .h5ad files with obs and var as anndata writes them.
Their counts are one array of bytes, `uns/packed/bytes`, contiguous and unfiltered. Cell after cell, it
has a part with genes and a part with counts (`layout`). So any run of cells is one `pread` at a known
offset. This is faster than mmap: 85k against 40k cells/s with a cold cache. All offsets of shards are
in the index next to the manifest, so a shard is opened only when it is first read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from cellmill.data.packing.cells import CellKind, PackedCells
from cellmill.data.packing.codec import DamagedPart
from cellmill.data.packing.layout import ALIGNMENT, GROUP
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.errors import DataError
from cellmill.files import special_kind

T = TypeVar("T")
MAX_OPEN = 256  # a quarter of the usual limit of open files of a process
# cells at most this many bytes apart are read by one call, which costs less than two calls
_MAX_GAP = 1 << 14


@dataclass
class _OpenFile:
    """Descriptor of a file, closed when nothing refers to it."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class Copies(Protocol):
    """Local copies of files, which are read instead of the originals."""

    def find(self, shard: Path) -> Path | None:
        """Return the path of the copy of `shard`; None if there is none."""

    def give_up(self, error: Exception, shard: Path) -> None:
        """Stop using copies, because reading the copy of `shard` raised `error`."""


class OpenFiles:
    """Cache of open files: the `max_open` used last. Thread-safe.

    `open(path)` returns a file, whose descriptor stays open while the caller holds the file. It raises
    OSError when the file cannot be opened.
    """

    def __init__(self, max_open: int = MAX_OPEN, copies: Copies | None = None):
        self.copies = copies
        # without O_NONBLOCK, opening a FIFO waits forever
        self.open = lru_cache(max_open)(
            lambda path: _OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        )


class ByteRange(NamedTuple):
    """Bytes of a file that hold one array."""

    offset: int  # first byte, counted from the start of the file
    n_bytes: int


@dataclass(eq=False)
class PackedCellFile:
    """Packed cells of an .h5ad file; cell i is row i of its matrix. Thread-safe.

    `files` opens the file when it is first read, and then its size is checked. A local copy's size is
    not checked: if a read runs past its end, local copies are abandoned and the original is read.
    """

    path: Path
    nnz: int
    kind: CellKind
    packed: ByteRange
    unchecked_indptr: np.ndarray  # `(cells + 1,)` integers, see `indptr`
    # `(2 * cells + 1,)` integers: offsets in `packed` of each cell's genes and counts, and the end, in
    # units of 8 bytes
    unchecked_part_offsets: np.ndarray
    files: OpenFiles
    remedy: str  # ends the messages of errors: what the user can do
    _is_checked: bool = field(default=False, init=False)

    @property
    def n_obs(self) -> int:
        return len(self.unchecked_indptr) - 1

    @cached_property
    def indptr(self) -> np.ndarray:
        """First nonzero of each cell, and the number of nonzeros, `(cells + 1,)`, once they are checked.

        Raises DataError unless they ascend from 0 to `nnz`.
        """
        indptr = self.unchecked_indptr
        # a group of at most 256 values takes at least the two bytes of its trailer. This is checked
        # before memory for nnz values is allocated
        max_nnz = GROUP // 2 * self.packed.n_bytes
        is_possible = indptr[0] == 0 and indptr[-1] == self.nnz and self.nnz <= max_nnz
        if not is_possible or (indptr[1:] < indptr[:-1]).any():
            raise self._damaged(
                f"its row offsets do not ascend from 0 to {self.nnz:,} nonzeros, or do not fit its bytes"
            )
        return indptr

    @cached_property
    def part_offsets(self) -> np.ndarray:
        """Offsets of the parts (`unchecked_part_offsets`), once they are checked.

        Raises DataError unless they ascend from 0 to the number of bytes.
        """
        offsets = self.unchecked_part_offsets
        n_units, rest = divmod(self.packed.n_bytes, ALIGNMENT)
        is_whole = len(offsets) == 2 * self.n_obs + 1 and offsets[-1] == n_units and not rest
        if not is_whole or offsets[0] or (offsets[1:] < offsets[:-1]).any():
            raise self._damaged(
                f"its cell offsets do not ascend from 0 to {self.packed.n_bytes:,} bytes"
            )
        return offsets

    def close(self) -> None:
        """Close all files of `files`, while no thread reads them; a later read opens them again."""
        self.files.open.cache_clear()

    def read(self, first: int, n: int) -> SparseCounts:
        """Read cells `first:first + n`."""
        offsets = self.indptr[first : first + n + 1].astype(np.int64)
        offsets -= offsets[0]
        genes = np.empty(offsets[-1], np.int32)
        counts = np.empty(offsets[-1], self.kind.dtype)
        self.read_rows(np.arange(first, first + n), offsets[:-1], genes, counts)
        return SparseCounts(offsets, genes, counts)

    def read_rows(
        self, rows: np.ndarray, targets: np.ndarray, genes: np.ndarray, counts: np.ndarray
    ) -> None:
        """Read and unpack cells `rows`, `(rows,)` int64, into `genes` and `counts`.

        The genes and counts of each cell go to its position in `targets` and those that follow. `genes`
        is int32. `counts` is uint16 or uint32, which must hold the file's counts. Ascending rows need
        the fewest reads.
        """
        if not len(rows):
            return
        gene_starts = self.part_starts(2 * rows)
        count_starts = self.part_starts(2 * rows + 1)
        stops = self.part_starts(2 * rows + 2)
        first_cell, last_cell = _join_reads(gene_starts, stops)
        read_starts = gene_starts[first_cell]
        read_stops = stops[last_cell]
        offsets = row_offsets(read_stops - read_starts)
        memory = recycled_empty(offsets[-1], np.uint8)
        self.read_bytes(read_starts, read_stops, offsets[:-1], memory)
        # the distance of each cell's bytes in memory from its bytes in the file
        shift = np.repeat(offsets[:-1] - read_starts, last_cell - first_cell + 1)
        genes_per_cell = (self.indptr[rows + 1] - self.indptr[rows]).astype(np.int64)
        cells = PackedCells(
            memory, gene_starts + shift, count_starts + shift, stops + shift, genes_per_cell
        )
        try:
            cells.unpack_into(self.kind, genes_per_cell, targets, genes, counts)
        except DamagedPart as error:
            raise self._damaged(f"row {rows[error.index]}: {error}") from None

    def part_starts(self, parts: np.ndarray) -> np.ndarray:
        """Return the first byte of parts in `packed`, `(parts,)` int64.

        Part `2 * c` has the genes of cell c, part `2 * c + 1` its counts.
        """
        return self.part_offsets[parts].astype(np.int64) * ALIGNMENT

    def read_bytes(
        self, starts: np.ndarray, stops: np.ndarray, targets: np.ndarray, memory: np.ndarray
    ) -> None:
        """Read packed bytes `starts:stops` into `memory`, `(bytes,)` uint8, from positions `targets` on.

        The arrays `starts`, `stops` and `targets` are `(runs,)` int64.
        """
        view = memory.data
        runs = list(zip(starts.tolist(), stops.tolist(), targets.tolist()))

        def read(descriptor: int) -> None:
            for start, stop, target in runs:
                run_memory = view[target : target + stop - start]
                _read_into(run_memory, descriptor, self.packed.offset + start)

        self._with_open_file(read)

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{self.path}: damaged: {reason}; {self.remedy}")

    def _with_open_file(self, use: Callable[[int], T]) -> T:
        """Call `use` with a descriptor of the local copy if there is one, else of the file itself."""
        copies = self.files.copies
        copy = None if copies is None else copies.find(self.path)
        if copies is None or copy is None:
            return self._with_original_file(use)
        try:
            file = self.files.open(copy)
            return use(file.descriptor)
        except (OSError, ValueError) as error:
            copies.give_up(error, self.path)
            return self._with_original_file(use)

    def _with_original_file(self, use: Callable[[int], T]) -> T:
        """Call `use` with a descriptor of the file itself. Raises DataError if it cannot be read."""
        try:
            file = self.files.open(self.path)
            if not self._is_checked:
                self._check_size(os.fstat(file.descriptor))
            return use(file.descriptor)
        except FileNotFoundError:
            reason = "no such file"
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        except ValueError as error:
            reason = f"damaged: {error}"
        raise DataError(f"{self.path}: {reason}; {self.remedy}")

    def _check_size(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = special_kind(self.path) or "folder"
            raise DataError(f"{self.path}: expected a file, got a {kind}; {self.remedy}")
        stop = self.packed.offset + self.packed.n_bytes
        if status.st_size < stop:
            raise ValueError(f"truncated: {status.st_size:,} of at least {stop:,} bytes")
        self._is_checked = True


def _join_reads(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the first and last cell of each read. Cells at most `_MAX_GAP` bytes apart share a read.

    Cell i has the bytes `starts[i]:stops[i]`.
    """
    gaps = starts[1:] - stops[:-1]
    is_far = (gaps < 0) | (gaps > _MAX_GAP)
    first_cell = np.concatenate([[0], np.flatnonzero(is_far) + 1])
    last_cell = np.append(first_cell[1:], len(starts)) - 1
    return first_cell, last_cell


def _read_into(memory: memoryview, descriptor: int, offset: int) -> None:
    """Fill `memory` with bytes of a file from `offset` on. Raises ValueError if the file ends before."""
    n_bytes = len(memory)
    n_read = 0
    while n_read < n_bytes:  # one call reads up to 2 GiB
        n = os.preadv(descriptor, [memory[n_read:]], offset + n_read)
        if n == 0:
            raise ValueError(
                f"short read: {n_read:,} of {n_bytes:,} bytes at {offset:,}: the file was truncated while open"
            )
        n_read += n
