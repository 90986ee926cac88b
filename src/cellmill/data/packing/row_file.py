"""Rows of packed cells, read by offset without HDF5.

Shards, and cells that preprocess wrote, are .h5ad files with obs and var as anndata writes them.
Their counts are one array of bytes, `uns/packed/bytes`, contiguous and unfiltered, which has a part
of genes and a part of counts of each cell in turn (`layout`). So any run of cells is one `pread` at
a known offset, which is faster than mmap: 85k against 40k cells/s cold. A shard is opened when it
is first read, since all offsets are beside the manifest.
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
# open files: a quarter of the usual limit of a process. A window of a lane reads at most 128 shards
MAX_OPEN = 256
# bytes between two rows that are read with them: one more call would cost as much
_MAX_GAP = 1 << 14


@dataclass
class _Open:
    """Descriptor of a file, closed when nothing refers to it."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class Copies(Protocol):
    """Copies of files that may be read instead of them."""

    def find(self, shard: Path) -> Path | None:
        """Path of the copy of a file; None if there is none."""

    def give_up(self, error: Exception, shard: Path) -> None:
        """Stop using copies."""


class OpenFiles:
    """The `max_open` files used last, kept open. Thread-safe.

    `open` returns a file, whose descriptor stays open while the caller holds it; it raises OSError
    when the file cannot be opened. `copies` are files that may be read instead.
    """

    def __init__(self, max_open: int = MAX_OPEN, copies: Copies | None = None):
        self.copies = copies
        # a FIFO would wait without end
        self.open = lru_cache(max_open)(
            lambda path: _Open(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        )


class ByteRange(NamedTuple):
    """Bytes of a file that hold one array."""

    offset: int  # in bytes
    n_bytes: int


@dataclass(eq=False)
class RowFile:
    """Packed cells of an .h5ad file. Thread-safe.

    The file is opened by `files` when it is first read, and its size checked.
    """

    path: Path
    nnz: int
    kind: CellKind
    packed: ByteRange
    unchecked_indptr: np.ndarray  # `(cells + 1,)`
    # `(2 * cells + 1,)`: where the genes and then the counts of each cell begin in `packed`, and
    # the end, in units of 8 bytes
    unchecked_part_offsets: np.ndarray
    files: OpenFiles
    remedy: str
    _is_checked: bool = field(default=False, init=False)

    @property
    def n_obs(self) -> int:
        return len(self.unchecked_indptr) - 1

    @cached_property
    def indptr(self) -> np.ndarray:
        """First nonzero of each row, and the end. Raises DataError unless they ascend from 0 to
        `nnz`.
        """
        indptr = self.unchecked_indptr
        # a group, at most 256 values, takes at least the two bytes of its header: checked before
        # memory is taken for nnz values
        max_nnz = GROUP // 2 * self.packed.n_bytes
        is_possible = indptr[0] == 0 and indptr[-1] == self.nnz and self.nnz <= max_nnz
        if not is_possible or (indptr[1:] < indptr[:-1]).any():
            raise self._damaged(
                f"its row offsets do not ascend from 0 to {self.nnz:,} nonzeros, or do not fit its bytes"
            )
        return indptr

    @cached_property
    def part_offsets(self) -> np.ndarray:
        """`unchecked_part_offsets`. Raises DataError unless they ascend from 0 to the number of bytes."""
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
        """Cells `first` to `first + n`."""
        offsets = self.indptr[first : first + n + 1].astype(np.int64)
        offsets -= offsets[0]
        genes = np.empty(offsets[-1], np.int32)
        counts = np.empty(offsets[-1], self.kind.dtype)
        self.read_rows(np.arange(first, first + n), offsets[:-1], genes, counts)
        return SparseCounts(offsets, genes, counts)

    def read_rows(
        self, rows: np.ndarray, targets: np.ndarray, genes: np.ndarray, counts: np.ndarray
    ) -> None:
        """Unpack `rows`, `(rows,)` int64, into `genes`, int32, from positions `targets` on, and their
        counts likewise, uint16 or uint32 that holds them. Few reads if rows ascend.
        """
        if not len(rows):
            return
        gene_starts, count_starts, ends = (self.byte_of(2 * rows + i) for i in range(3))
        first_row, last_row = _join_reads(gene_starts, ends)
        read_starts = gene_starts[first_row]
        read_ends = ends[last_row]
        offsets = row_offsets(read_ends - read_starts)
        memory = recycled_empty(offsets[-1], np.uint8)
        self.read_bytes(read_starts, read_ends, offsets, memory)
        # from a byte of the file to one of the memory
        moved = np.repeat(offsets[:-1] - read_starts, last_row - first_row + 1)
        n_genes = (self.indptr[rows + 1] - self.indptr[rows]).astype(np.int64)
        cells = PackedCells(
            memory, gene_starts + moved, count_starts + moved, ends + moved, n_genes
        )
        try:
            cells.unpack_into(self.kind, n_genes, targets, genes, counts)
        except DamagedPart as error:
            raise self._damaged(f"row {rows[error.part]}: {error}") from None

    def byte_of(self, parts: np.ndarray) -> np.ndarray:
        """First byte, int64, of parts. Part `2 * c` is the genes of cell c, the next one its counts."""
        return self.part_offsets[parts].astype(np.int64) * ALIGNMENT

    def read_bytes(
        self, starts: np.ndarray, stops: np.ndarray, targets: np.ndarray, memory: np.ndarray
    ) -> None:
        """Read packed bytes `starts` to `stops` to positions `targets` of `memory`."""
        view = memory.data
        spans = list(zip(starts.tolist(), stops.tolist(), targets.tolist()))

        def read(descriptor: int) -> None:
            for start, stop, target in spans:
                part = view[target : target + stop - start]
                _read_into(part, descriptor, self.packed.offset + start)

        self._with_file(read)

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{self.path}: damaged: {reason}; {self.remedy}")

    def _with_file(self, use: Callable[[int], T]) -> T:
        """Result of `use`, called with a descriptor of the local copy, or else of the file."""
        copies = self.files.copies
        copy = None if copies is None else copies.find(self.path)
        if copies is None or copy is None:
            return self._with_original(use)
        try:
            file = self.files.open(copy)
            return use(file.descriptor)
        except (OSError, ValueError) as error:
            copies.give_up(error, self.path)
            return self._with_original(use)

    def _with_original(self, use: Callable[[int], T]) -> T:
        """Result of `use`. Raises DataError if the file cannot be read."""
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
        end = self.packed.offset + self.packed.n_bytes
        if status.st_size < end:
            raise ValueError(f"truncated: {status.st_size:,} of at least {end:,} bytes")
        self._is_checked = True


def _join_reads(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last row of each read: rows that follow within `_MAX_GAP` bytes share one."""
    gaps = starts[1:] - ends[:-1]
    is_far = (gaps < 0) | (gaps > _MAX_GAP)
    first_row = np.concatenate([[0], np.flatnonzero(is_far) + 1])
    last_row = np.append(first_row[1:], len(starts)) - 1
    return first_row, last_row


def _read_into(memory: memoryview, descriptor: int, offset: int) -> None:
    """Fill `memory` from `offset` on. Raises ValueError at the end of the file."""
    n_bytes = len(memory)
    n_read = 0
    while n_read < n_bytes:  # one call reads up to 2 GiB
        n = os.preadv(descriptor, [memory[n_read:]], offset + n_read)
        if n == 0:
            raise ValueError(
                f"short read: {n_read:,} of {n_bytes:,} bytes at {offset:,}: the file was truncated while open"
            )
        n_read += n
