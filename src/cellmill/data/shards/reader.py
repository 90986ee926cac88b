"""Rows of shards and of preprocessed cells, read by offset without HDF5.

Shards are .h5ad files whose rows are in rank order. X is spec CSR, contiguous, unfiltered and
little-endian, so any scverse tool opens a shard, and a block of cells is one `preadv` at a known
offset: no HDF5 call, no copy. pread is faster than mmap: 85k against 40k cells/s cold. Genes are
int32, the narrowest integers that scipy indexes columns by. Offsets are in the manifest and lengths
of rows beside it, so a shard is opened when it is first read.

Preprocessed cells may be compressed: gzip level 1 after HDF5's shuffle, in chunks of 4,096 values.
Stage `shard` gathers single rows in random order, without HDF5, whose lock would let only one
thread read at a time: each chunk is one pread, decompressed without Python's lock. A row of 2,000
genes lies in one or two chunks.

C's `preadv` reads consecutive bytes into many memory locations listed in an array. `os.preadv`
takes a list of buffers instead: making it costs half a microsecond per cell, during which no other
thread can run Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import h5py
import numpy as np

from cellmill.data.inputs.h5 import one_line, open_h5, read_texts
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import open_index
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.errors import DataError
from cellmill.files import special_kind

T = TypeVar("T")
# open files: a quarter of the usual limit of a process. A window of a lane reads at most 128
MOST_OPEN = 256
IOV_MAX = 1024  # buffers of one preadv; POSIX promises 16, Linux has had 1,024 since 2.4
# bits of a chunk's mask: filters that it was stored without
_SHUFFLE = 1
_GZIP = 2
_PREPROCESS = "run preprocess again"
# raised by libraries for a damaged header
_UNREADABLE = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError)

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


def iovecs(array: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Address and bytes of each `array[start : start + size]`, `(n, 2)` uint64, as C's `struct
    iovec`.

    The addresses are valid while the array lives. Raises IndexError for a slice that is not in it.
    """
    assert array.flags.c_contiguous
    assert array.flags.writeable
    is_inside = not len(starts) or (
        min(starts.min(), sizes.min()) >= 0 and (starts + sizes).max() <= len(array)
    )
    if not is_inside:
        raise IndexError(f"expected slices within {len(array):,} entries, got one beyond")
    table = np.empty((len(starts), 2), np.uint64)
    table[:, 0] = array.ctypes.data + array.itemsize * starts
    table[:, 1] = array.itemsize * sizes
    return table


@dataclass
class _Open:
    """Descriptor of a file, closed when nothing refers to it."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class OpenFiles:
    """The `most` files used last, kept open. Thread-safe.

    `open` returns a file, whose descriptor stays open while the caller holds it; it raises OSError
    when the file cannot be opened. `copies` are files that may be read instead.
    """

    def __init__(self, most: int = MOST_OPEN, copies: LocalCopies | None = None):
        self.copies = copies
        # a FIFO would wait without end
        self.open = lru_cache(most)(lambda path: _Open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))


@dataclass(frozen=True)
class Contiguous:
    """An array that lies in its file in one piece."""

    offset: int  # in bytes
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Contiguous:
        """Raises ValueError unless it can be read by offset."""
        if dataset.chunks is not None:  # as it is where anything is compressed
            raise ValueError(
                f"{dataset.name} is chunked or compressed, but rows are read by offset"
            )
        offset = dataset.id.get_offset()
        if offset is None and dataset.size:
            raise ValueError(
                f"{dataset.name} has no offset in the file (virtual, external or never written)"
            )
        return cls(offset or 0, dataset.dtype)

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop`. Raises ValueError at the end of the file."""
        values = np.empty(stop - start, self.dtype)
        self.scatter(
            descriptor, start, iovecs(values, np.zeros(1, np.int64), np.array([len(values)]))
        )
        return values

    def scatter(self, descriptor: int, start: int, table: np.ndarray) -> None:
        """Fill the memory of a table of `iovecs` with the values from `start` on.

        Raises ValueError at the end of the file.
        """
        offset = self.offset + self.dtype.itemsize * start
        for first in range(0, len(table), IOV_MAX):
            part = table[first : first + IOV_MAX]
            n_bytes = int(part[:, 1].sum())
            n_read = _read_into(part, descriptor, offset)
            # one call reads up to 2 GiB, and a short read of a regular file means end of file: a
            # retry would not end
            if n_read != n_bytes:
                raise ValueError(
                    f"short read: {n_read:,} of {n_bytes:,} bytes at {offset:,}: the file was truncated while open"
                )
            offset += n_bytes


def _read_into(table: np.ndarray, descriptor: int, offset: int) -> int:
    """Call C's preadv, again if a signal interrupts it; return the number of bytes read."""
    while True:
        n_read = int(_preadv(descriptor, table.ctypes.data, len(table), offset))
        if n_read >= 0:
            return n_read
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class Chunks:
    """An array in chunks, compressed by gzip after HDF5's shuffle."""

    offsets: np.ndarray  # `(chunks,)` int64
    sizes: np.ndarray  # `(chunks,)` int64, bytes as stored
    masks: np.ndarray  # `(chunks,)` int64, filters that each was stored without
    length: int  # values of a chunk
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Chunks:
        """Raises ValueError unless every chunk was written."""
        (length,) = dataset.chunks
        n = -(-len(dataset) // length)
        table = np.zeros((n, 3), np.int64)

        def add(chunk: Any) -> None:
            row = table[chunk.chunk_offset[0] // length]
            row[:] = chunk.byte_offset, chunk.size, chunk.filter_mask

        dataset.id.chunk_iter(add)
        offsets, sizes, masks = table.T
        most = 2 * length * dataset.dtype.itemsize + 1024
        if not sizes.all() or (sizes > most).any():
            raise ValueError(f"{dataset.name} has chunks of impossible size")
        return cls(offsets, sizes, masks, length, dataset.dtype)

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop`. Raises ValueError or zlib.error for a damaged chunk."""
        first = start // self.length
        values = [np.empty(0, self.dtype)]
        for number in range(first, -(-stop // self.length)):
            values.append(self._read_chunk(descriptor, number))
        skipped = first * self.length
        return np.concatenate(values)[start - skipped : stop - skipped]

    def _read_chunk(self, descriptor: int, number: int) -> np.ndarray:
        size = int(self.sizes[number])
        mask = int(self.masks[number])
        n_bytes = self.length * self.dtype.itemsize
        stored = os.pread(descriptor, size, int(self.offsets[number]))
        inflated = stored
        if not mask & _GZIP:
            inflated = zlib.decompressobj().decompress(stored, n_bytes + 1)
        if len(stored) != size or len(inflated) != n_bytes:
            raise ValueError(f"a chunk has {len(inflated):,} bytes, not {n_bytes:,}")
        values = np.frombuffer(inflated, np.uint8)
        if not mask & _SHUFFLE:  # bytes of equal significance stand together
            planes = values.reshape(self.dtype.itemsize, self.length)
            values = np.ascontiguousarray(planes.T).ravel()
        return values.view(self.dtype)


@dataclass(eq=False)
class RowFile:
    """CSR matrix X of an .h5ad file. Thread-safe.

    The file is opened by `files` when it is first read, and its size checked.
    """

    path: Path
    nnz: int
    n_vars: int
    genes: Contiguous | Chunks  # int32
    counts: Contiguous | Chunks
    files: OpenFiles
    starts: np.ndarray  # indptr, not checked yet
    remedy: str = REMEDY
    _is_checked: bool = field(default=False, init=False)

    @property
    def n_obs(self) -> int:
        return len(self.starts) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the counts."""
        return self.counts.dtype

    @cached_property
    def indptr(self) -> np.ndarray:
        """First nonzero of each row, and the end. Raises DataError unless they ascend from 0 to
        `nnz`.
        """
        starts = self.starts
        if starts[0] or starts[-1] != self.nnz or (starts[1:] < starts[:-1]).any():
            raise DataError(
                f"{self.path}: damaged: its offsets of rows are not of {self.nnz:,} nonzeros; {self.remedy}"
            )
        return starts

    def close(self) -> None:
        """Close all files of `files`, while no thread reads them; a later read opens them again."""
        self.files.open.cache_clear()

    def read_genes(self, start: int, stop: int) -> np.ndarray:
        """Genes (int32) of nonzeros `start` to `stop`."""
        return self._read(lambda descriptor: self.genes.read(descriptor, start, stop))

    def read_counts(self, start: int, stop: int) -> np.ndarray:
        """Counts (`dtype`) of nonzeros `start` to `stop`."""
        return self._read(lambda descriptor: self.counts.read(descriptor, start, stop))

    def scatter(self, start: int, genes: np.ndarray, counts: np.ndarray | None) -> None:
        """Fill the memory of tables of `iovecs` with genes and counts from nonzero `start` on."""

        def read(descriptor: int) -> None:
            for array, table in ((self.genes, genes), (self.counts, counts)):
                if table is not None:
                    assert isinstance(array, Contiguous)
                    array.scatter(descriptor, start, table)

        self._read(read)

    def _read(self, read: Callable[[int], T]) -> T:
        """Result of `read`, called with a descriptor of the file or of its local copy."""
        copies = self.files.copies
        copy = None if copies is None else copies.find(self.path)
        if copies is not None and copy is not None:
            try:
                file = self.files.open(copy)
                return read(file.descriptor)
            except (OSError, ValueError) as error:
                copies.give_up(error, self.path)
        try:
            file = self.files.open(self.path)
            if not self._is_checked:
                self._check_size(os.fstat(file.descriptor))
            return read(file.descriptor)
        except FileNotFoundError:
            reason = "no such file"
        except OSError as error:
            reason = f"cannot be read: {one_line(error)}"
        except (ValueError, zlib.error) as error:
            reason = f"damaged: {one_line(error)}"
        raise DataError(f"{self.path}: {reason}; {self.remedy}")

    def _check_size(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = special_kind(self.path) or "folder"
            raise DataError(f"{self.path}: expected a file, got a {kind}; {self.remedy}")
        for array in (self.genes, self.counts):
            if isinstance(array, Contiguous):
                end = array.offset + array.dtype.itemsize * self.nnz
                if status.st_size < end:
                    raise ValueError(f"truncated: {status.st_size:,} of at least {end:,} bytes")
        self._is_checked = True


def open_shards(manifest: Manifest, split: str, copies: LocalCopies | None = None) -> list[RowFile]:
    """Shards of a split, each opened when it is first read.

    A shard is read from its copy in `copies`, if there is one. Raises DataError if the split has no
    cells or no index.
    """
    shards = manifest.entry(split).shards
    files = OpenFiles(copies=copies)
    indptr = open_index(manifest, split, "offsets")
    borders = row_offsets([shard.n_obs + 1 for shard in shards])
    opened = []
    for shard, (first, stop) in zip(shards, pairwise(borders.tolist())):
        genes = Contiguous(shard.genes_at, np.dtype("<i4"))
        counts = Contiguous(shard.counts_at, np.dtype(shard.dtype))
        path = manifest.shard_path(shard)
        opened.append(
            RowFile(path, shard.nnz, manifest.n_genes, genes, counts, files, indptr[first:stop])
        )
    return opened


def open_cells(path: Path, files: OpenFiles) -> RowFile:
    """Open an .h5ad file that preprocess wrote, compressed or not.

    Raises DataError when X is not CSR that can be read by offset, or is damaged.
    """
    try:
        with open_h5(path, _PREPROCESS) as file:
            x = file["X"]
            n_obs, n_vars = (int(n) for n in x.attrs["shape"])
            genes = x["indices"]
            counts = x["data"]
            indptr = x["indptr"]
            is_ours = genes.dtype == "<i4" and counts.dtype in ("<u2", "<u4")
            if not is_ours or genes.ndim != 1 or counts.shape != genes.shape:
                raise ValueError("X/indices and X/data are not those that preprocess writes")
            # before memory is taken for it: a damaged header may claim any size
            too_large = indptr.nbytes > path.stat().st_size
            if indptr.shape != (n_obs + 1,) or indptr.dtype.kind not in "iu" or too_large:
                raise ValueError(f"X/indptr is not of {n_obs:,} cells")
            starts = np.asarray(indptr[:], np.int64)
            return RowFile(
                path,
                len(genes),
                n_vars,
                _locate(genes),
                _locate(counts),
                files,
                starts,
                _PREPROCESS,
            )
    except _UNREADABLE as error:
        raise DataError(
            f"{path}: not cells of preprocess: {one_line(error)}; {_PREPROCESS}"
        ) from None


def _locate(array: h5py.Dataset) -> Contiguous | Chunks:
    is_compressed = array.compression == "gzip" and array.shuffle
    return Chunks.of(array) if is_compressed else Contiguous.of(array)


def read_names(path: Path, axis: Literal["obs", "var"]) -> np.ndarray:
    """Names of the cells (`dataset:name` in shards) or genes of a shard or a file that preprocess
    wrote, object.
    """
    try:
        with open_h5(path, REMEDY) as file:
            return read_texts(file[axis][file[axis].attrs["_index"]])
    except (*_UNREADABLE, OSError) as error:
        raise DataError(
            f"{path}: its names of {axis} cannot be read: {one_line(error)}; {REMEDY}"
        ) from None
