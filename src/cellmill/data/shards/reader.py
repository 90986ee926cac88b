"""Rows of shards and of preprocessed cells, read by offset without HDF5, in one file, as both end in the same reads.

Shards are .h5ad files whose rows are in rank order. X is spec CSR, contiguous, unfiltered and little-endian, so any
scverse tool opens a shard, and a block of cells is one `preadv` at a known offset: no HDF5 call, no copy. pread is
faster than mmap: 85k against 40k cells/s cold. Genes are int32: with uint16 `adata[:, genes]` crashes the interpreter.
Offsets are in the manifest and lengths of rows beside it, so a shard is opened when it is first read; `verify` in
`data/shards/manifest.py` hashes its bytes once before training. Shards of earlier versions are opened at once, and
checked against the manifest and against HDF5's own reads.

Preprocessed cells may be compressed: gzip level 1 after HDF5's shuffle, in chunks of 4,096 values, which any scverse
tool opens. Stage `shard` gathers single rows in random order, without HDF5, whose lock would let only one thread read
at a time: each chunk is one pread, decompressed without Python's lock. A row of 2,000 genes lies in one or two chunks.

`read_places` reads consecutive bytes into many memory locations listed in an array. `os.preadv` takes a list of
buffers instead: making it costs half a microsecond per cell, during which no other thread can run Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import h5py
import numpy as np

from cellmill.data.inputs.h5 import one_line, open_h5, read_texts
from cellmill.data.shards.index import OFFSETS, open_index
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest, ShardEntry
from cellmill.errors import DataError
from cellmill.files import special_kind

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


def places(array: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Address and number of bytes of each `array[start : start + size]`, `(n, 2)` uint64: as C's `struct iovec`.

    The array must live as long as the table is used. Raises IndexError when a place is not in it.
    """
    assert array.ndim == 1
    assert array.flags.c_contiguous
    assert array.flags.writeable
    if len(starts) and (starts.min() < 0 or sizes.min() < 0 or (starts + sizes).max() > len(array)):
        raise IndexError(f"expected places within {len(array):,} entries")
    table = np.empty((len(starts), 2), np.uint64)
    table[:, 0] = array.ctypes.data + array.itemsize * starts
    table[:, 1] = array.itemsize * sizes
    return table


def read_places(descriptor: int, table: np.ndarray, offset: int) -> int:
    """Fill the places of `table`, 1,024 at most, from `offset` of a file on. Returns the number of bytes read."""
    assert table.dtype == np.uint64
    assert table.flags.c_contiguous
    while (n_read := _preadv(descriptor, table.ctypes.data, len(table), offset)) < 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return int(n_read)


MOST_OPEN = 256
"""Files open at once: a quarter of the usual limit of a process. A window of a lane reads from 128 at most."""


@dataclass
class _Open:
    descriptor: int
    users: int = 0
    gone: bool = False  # to be closed by its last user


class OpenFiles:
    """Descriptors of the files used last; others are closed, and opened again when they are needed. Thread-safe.

    More than `most` are open only while as many threads read. `copies` are those that may be read instead.
    """

    def __init__(self, most: int = MOST_OPEN, copies: LocalCopies | None = None):
        self._most, self.copies = most, copies
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def reading(self, path: Path) -> Iterator[int]:
        """Descriptor of `path`, which stays open until the block ends. Raises OSError when it cannot be opened."""
        with self._lock:
            file = self._open.get(path)
            if file is not None:
                file.users += 1
                self._open.move_to_end(path)
        if file is None:
            file = self._opened(path)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                if file.gone and not file.users:
                    os.close(file.descriptor)

    def _opened(self, path: Path) -> _Open:
        # without the lock: it may take long on a shared file system; a FIFO would wait without end
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with self._lock:
            other = self._open.get(path)
            if other is not None:  # of a thread that was quicker
                os.close(descriptor)
                other.users += 1
                return other
            file = self._open[path] = _Open(descriptor, users=1)
            idle = [name for name, known in self._open.items() if not known.users]
            for name in idle[: max(len(self._open) - self._most, 0)]:
                self._drop(name)
            return file

    def close(self, path: Path) -> None:
        """Close one file, when nothing reads it any more."""
        with self._lock:
            if path in self._open:
                self._drop(path)

    def _drop(self, path: Path) -> None:
        file = self._open.pop(path)
        if file.users:
            file.gone = True
        else:
            os.close(file.descriptor)

    def __del__(self) -> None:
        for file in self._open.values():
            os.close(file.descriptor)


IOV_MAX = 1024  # buffers of one preadv; POSIX promises 16, Linux has had 1,024 since 2.4


class RowFile:
    """CSR matrix X of an .h5ad file, read by offset. Thread-safe.

    Attributes: `path`, `indptr` (`(n_obs + 1,)` int32 or int64, checked when it is first read), `n_obs`, `n_vars`,
    `nnz`, `dtype` of the counts, `offsets` of indices and data in bytes. The file is opened by `files` when it is first
    read.
    """

    def __init__(
        self,
        path: Path,
        indptr: np.ndarray,
        nnz: int,
        n_vars: int,
        dtype: np.dtype[Any],
        offsets: tuple[int, int],
        files: OpenFiles,
    ):
        self.path, self.nnz, self.n_vars, self.dtype, self.offsets = path, nnz, n_vars, dtype, offsets
        self.n_obs, self._indptr = len(indptr) - 1, indptr
        self._files, self._checked, self._indptr_checked = files, False, False

    @property
    def indptr(self) -> np.ndarray:
        """First nonzero of each row, and the end. Raises DataError when they fall, or are not of `nnz` nonzeros."""
        if not self._indptr_checked:
            p = self._indptr
            if p[0] or p[-1] != self.nnz or (p[1:] < p[:-1]).any():
                raise DataError(f"{self.path}: damaged: its offsets of rows are not of {self.nnz:,} nonzeros; {REMEDY}")
            self._indptr_checked = True
        return self._indptr

    def close(self) -> None:
        """Close the file. No thread may be reading it; it is opened again if it is read again."""
        self._files.close(self.path)

    def read_genes(self, start: int, buffers: Sequence[Any]) -> None:
        """Fill `buffers` in order with genes (int32), beginning at nonzero `start`."""
        self._read(self.offsets[0] + 4 * start, buffers)

    def read_counts(self, start: int, buffers: Sequence[Any]) -> None:
        """Fill `buffers` in order with counts (`dtype`), beginning at nonzero `start`."""
        self._read(self.offsets[1] + self.dtype.itemsize * start, buffers)

    def scatter_genes(self, start: int, table: np.ndarray) -> None:
        """As `read_genes`, into a table of `places`, which must live until then."""
        self._read(self.offsets[0] + 4 * start, table)

    def scatter_counts(self, start: int, table: np.ndarray) -> None:
        """As `read_counts`, into a table of `places`, which must live until then."""
        self._read(self.offsets[1] + self.dtype.itemsize * start, table)

    def check_size(self) -> None:
        """Open the file. Raises DataError when it is missing or too short for its nonzeros."""
        self._read(0, [])

    def _read(self, offset: int, buffers: Sequence[Any] | np.ndarray) -> None:
        copies = self._files.copies
        if copies is not None and (copy := copies.of(self.path)) is not None:
            try:
                with self._files.reading(copy) as descriptor:
                    self._read_all(descriptor, offset, buffers)
                return
            except (OSError, DataError) as error:
                copies.give_up(error, self.path)
        try:
            with self._files.reading(self.path) as descriptor:
                if not self._checked:
                    self._check_size(descriptor)
                self._read_all(descriptor, offset, buffers)
        except FileNotFoundError:
            raise DataError(f"{self.path}: no such file; {REMEDY}") from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {one_line(error)}; {REMEDY}") from None

    def _read_all(self, descriptor: int, offset: int, buffers: Sequence[Any] | np.ndarray) -> None:
        for first in range(0, len(buffers), IOV_MAX):
            offset += self._read_some(descriptor, offset, buffers[first : first + IOV_MAX])

    def _read_some(self, descriptor: int, offset: int, buffers: Sequence[Any] | np.ndarray) -> int:
        # one call reads up to 2 GiB, and a short read of a regular file means end of file: a retry would not end
        if isinstance(buffers, np.ndarray):
            n_bytes, n_read = int(buffers[:, 1].sum()), read_places(descriptor, buffers, offset)
        else:
            n_bytes, n_read = sum(buffer.nbytes for buffer in buffers), os.preadv(descriptor, buffers, offset)
        if n_read != n_bytes:
            raise DataError(
                f"{self.path}: short read: {n_read:,} of {n_bytes:,} bytes at {offset:,}; "
                f"the shard was truncated while open; {REMEDY}"
            )
        return n_bytes

    def _check_size(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{self.path}: expected a file, got a {special_kind(self.path) or 'folder'}; {REMEDY}")
        size = status.st_size
        needed = max(self.offsets[0] + 4 * self.nnz, self.offsets[1] + self.dtype.itemsize * self.nnz)
        if size < needed:
            raise DataError(f"{self.path}: truncated: {size:,} of at least {needed:,} bytes; {REMEDY}")
        self._checked = True


def open_rows(path: Path, files: OpenFiles) -> RowFile:
    """Open an .h5ad file that preprocess or shard wrote, with everything that HDF5 knows about its X.

    Raises DataError when X is not CSR that can be read by offset, or is damaged.
    """
    try:
        with open_h5(path, REMEDY) as file:
            x = file["X"]
            if x.attrs.get("encoding-type") != "csr_matrix":
                raise DataError(f"{path}: X is not a csr_matrix; {REMEDY}")
            n_obs, n_vars = (int(n) for n in x.attrs["shape"])
            indptr = read_indptr(path, x["indptr"], n_obs)
            offsets = offset_of(path, x["indices"], ("<i4",)), offset_of(path, x["data"], ("<u2", "<u4"))
            dtype: np.dtype[Any] = x["data"].dtype
            nnz = len(x["indices"])
            if len(x["data"]) != nnz or indptr[0] or indptr[-1] != nnz or (np.diff(indptr) < 0).any():
                raise DataError(f"{path}: damaged: X/indptr does not match X/indices and X/data; {REMEDY}")
            ends = [(x[name][:1], x[name][-1:]) for name in ("indices", "data")] if indptr[-1] else []
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise DataError(f"{path}: not a shard: {one_line(error)}; {REMEDY}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}; {REMEDY}") from None
    rows = RowFile(path, indptr, nnz, n_vars, dtype, offsets, files)
    rows.check_size()
    _check_ends(rows, ends)
    return rows


def offset_of(path: Path, dataset: h5py.Dataset, dtypes: tuple[str, ...]) -> int:
    """Offset of an array in its file, in bytes. Raises DataError when it cannot be read by offset."""
    name = f"{path}: {dataset.name}"
    if dataset.compression or dataset.shuffle or dataset.fletcher32 or dataset.scaleoffset:
        raise DataError(f"{name} is compressed or filtered, but rows are read by offset; {REMEDY}")
    if dataset.chunks is not None:
        raise DataError(f"{name} is chunked, but rows are read by offset; {REMEDY}")
    if len(dataset.shape) != 1:
        raise DataError(f"{name}: expected a list, got shape {dataset.shape}; {REMEDY}")
    if dataset.dtype not in [np.dtype(d) for d in dtypes]:
        raise DataError(f"{name}: expected {' or '.join(dtypes)}, got {dataset.dtype.str}; {REMEDY}")
    offset = dataset.id.get_offset()
    if offset is None and dataset.size:
        raise DataError(f"{name} has no offset in the file (virtual, external or never written); {REMEDY}")
    return offset or 0


def read_indptr(path: Path, dataset: h5py.Dataset, n_obs: int) -> np.ndarray:
    """Offsets of the rows of X, int64. Raises DataError when they are not of `n_obs` cells."""
    # before memory is taken for it: a damaged header may claim any size
    too_large = dataset.nbytes > path.stat().st_size
    if dataset.shape != (n_obs + 1,) or dataset.dtype.kind not in "iu" or too_large:
        raise DataError(f"{path}: damaged: X/indptr is not of {n_obs:,} cells; {REMEDY}")
    return np.asarray(dataset[:], np.int64)


def _check_ends(rows: RowFile, ends: list[tuple[np.ndarray, np.ndarray]]) -> None:
    last_at = rows.nnz - 1
    for read, (first, last) in zip((rows.read_genes, rows.read_counts), ends):
        read_first, read_last = np.empty_like(first), np.empty_like(last)
        read(0, [read_first])
        read(last_at, [read_last])
        if (read_first, read_last) != (first, last):
            raise DataError(f"{rows.path}: damaged: HDF5 and a read by offset differ; {REMEDY}")


def open_shards(manifest: Manifest, split: str, copies: LocalCopies | None = None) -> list[RowFile]:
    """Shards of a split, each opened when it is first read; at once if the manifest has no offsets.

    A shard of which `copies` has a copy is read there. Raises DataError naming what differs from the manifest.
    """
    entry, files = manifest.entry(split), OpenFiles(copies=copies)
    indptr = open_index(manifest, split, OFFSETS)
    if indptr is None:
        return [_open_shard(manifest, shard, files) for shard in entry.shards]
    starts = np.cumsum([0, *(shard.n_obs + 1 for shard in entry.shards)]).tolist()
    return [
        _indexed(manifest, shard, indptr[first:stop], files)
        for shard, (first, stop) in zip(entry.shards, pairwise(starts))
    ]


def _indexed(manifest: Manifest, shard: ShardEntry, indptr: np.ndarray, files: OpenFiles) -> RowFile:
    if shard.genes_at is None or shard.counts_at is None:
        raise DataError(f"{manifest.path}: no offsets of {shard.name}; {REMEDY}")
    offsets = (shard.genes_at, shard.counts_at)
    path, dtype = manifest.shard_path(shard), np.dtype(shard.dtype)
    return RowFile(path, indptr, shard.nnz, manifest.n_genes, dtype, offsets, files)


def read_gene_ids(path: Path) -> list[str]:
    """Names of the columns of X of a shard, or of a file that preprocess wrote."""
    try:
        with open_h5(path, REMEDY) as file:
            var = file["var"]
            return read_texts(var[var.attrs["_index"]]).tolist()
    except (LookupError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: its genes cannot be read: {one_line(error)}; {REMEDY}") from None


def cell_names(shards: Sequence[RowFile], cells: np.ndarray) -> list[str]:
    """`dataset:name (file row)` of cells by their index, `(cells,)` int64, in the `shards` of a split."""
    ends = np.cumsum([shard.n_obs for shard in shards])
    names = []
    for cell in cells.tolist():
        number = int(np.searchsorted(ends, cell, side="right"))
        shard = shards[number]
        row = cell - int(ends[number]) + shard.n_obs
        with open_h5(shard.path, REMEDY) as file:
            obs = file["obs"]
            name = read_texts(obs[obs.attrs["_index"]])[row]
        names.append(f"{name} ({shard.path.name} row {row})")
    return names


def _open_shard(manifest: Manifest, shard: ShardEntry, files: OpenFiles) -> RowFile:
    rows = open_rows(manifest.shard_path(shard), files)
    actual = (rows.n_obs, rows.nnz, rows.dtype.name, rows.n_vars)
    listed = (shard.n_obs, shard.nnz, shard.dtype, manifest.n_genes)
    for name, here, there in zip(("cells", "nonzeros", "dtype of counts", "genes"), actual, listed):
        if here != there:
            raise DataError(f"{rows.path}: expected {name} {there} as in the manifest, got {here}; {REMEDY}")
    return rows


_SHUFFLE, _GZIP = 1, 2  # bits of a chunk's mask: filters that it was stored without


@dataclass(frozen=True)
class _Chunks:
    """Places of the chunks of an array in its file."""

    offsets: np.ndarray  # `(chunks,)` int64
    sizes: np.ndarray  # `(chunks,)` int64, bytes as stored
    masks: np.ndarray  # `(chunks,)` uint8
    length: int  # values of a chunk
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _Chunks:
        """Raises ValueError unless every chunk was written."""
        (length,), n = dataset.chunks, -(-len(dataset) // dataset.chunks[0])
        chunks = cls(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.uint8), length, dataset.dtype)

        def add(chunk: Any) -> None:
            at = chunk.chunk_offset[0] // length
            chunks.offsets[at], chunks.sizes[at], chunks.masks[at] = chunk.byte_offset, chunk.size, chunk.filter_mask

        dataset.id.chunk_iter(add)
        if not chunks.sizes.all() or (chunks.sizes > 2 * length * dataset.dtype.itemsize + 1024).any():
            raise ValueError(f"{dataset.name} has chunks of impossible size")
        return chunks

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop`. Raises ValueError or zlib.error for a damaged chunk."""
        first, last = start // self.length, -(-stop // self.length)
        whole = [self._chunk(descriptor, at) for at in range(first, last)]
        values = whole[0] if len(whole) == 1 else np.concatenate([np.empty(0, self.dtype), *whole])
        return values[start - first * self.length : stop - first * self.length]

    def _chunk(self, descriptor: int, at: int) -> np.ndarray:
        size, mask = int(self.sizes[at]), int(self.masks[at])
        stored = os.pread(descriptor, size, int(self.offsets[at]))
        n_bytes = self.length * self.dtype.itemsize
        inflated = stored if mask & _GZIP else zlib.decompressobj().decompress(stored, n_bytes + 1)
        if len(stored) != size or len(inflated) != n_bytes:
            raise ValueError(f"a chunk has {len(inflated):,} bytes, not {n_bytes:,}")
        if mask & _SHUFFLE or self.dtype.itemsize == 1:
            return np.frombuffer(inflated, self.dtype)
        planes = np.frombuffer(inflated, np.uint8).reshape(self.dtype.itemsize, self.length)
        return np.ascontiguousarray(planes.T).view(self.dtype).ravel()


class CompressedRows(RowFile):
    """CSR matrix X of an .h5ad file whose indices and data are compressed. Thread-safe."""

    def __init__(
        self, path: Path, indptr: np.ndarray, nnz: int, n_vars: int, genes: _Chunks, counts: _Chunks, files: OpenFiles
    ):
        super().__init__(path, indptr, nnz, n_vars, counts.dtype, (0, 0), files)
        self._genes, self._counts = genes, counts

    def read_genes(self, start: int, buffers: Sequence[Any]) -> None:
        """Fill `buffers` in order with genes (int32), beginning at nonzero `start`."""
        self._fill(self._genes, start, buffers)

    def read_counts(self, start: int, buffers: Sequence[Any]) -> None:
        """Fill `buffers` in order with counts (`dtype`), beginning at nonzero `start`."""
        self._fill(self._counts, start, buffers)

    def _fill(self, chunks: _Chunks, start: int, buffers: Sequence[Any]) -> None:
        stop = start + sum(len(buffer) for buffer in buffers)
        try:
            with self._files.reading(self.path) as descriptor:
                values = chunks.read(descriptor, start, stop) if stop > start else np.empty(0, chunks.dtype)
        except (OSError, ValueError, zlib.error) as error:
            raise DataError(f"{self.path}: damaged: {one_line(error)}; run preprocess again") from None
        for buffer in buffers:
            buffer[:] = values[: len(buffer)]
            values = values[len(buffer) :]


def open_cells(path: Path, files: OpenFiles) -> RowFile:
    """Open an .h5ad file that preprocess wrote, compressed or not.

    Raises DataError when X is not CSR that can be read by offset, or is damaged.
    """
    try:
        with open_h5(path, REMEDY) as file:
            x = file["X"]
            genes, counts = x["indices"], x["data"]
            if not all(array.compression == "gzip" and array.shuffle for array in (genes, counts)):
                return open_rows(path, files)
            n_obs, n_vars = (int(n) for n in x.attrs["shape"])
            indptr, nnz = read_indptr(path, x["indptr"], n_obs), len(genes)
            if genes.dtype != "<i4" or counts.dtype not in ("<u2", "<u4") or len(counts) != nnz:
                raise ValueError("X/indices and X/data are not those that preprocess writes")
            return CompressedRows(path, indptr, nnz, n_vars, _Chunks.of(genes), _Chunks.of(counts), files)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise DataError(f"{path}: not cells of preprocess: {one_line(error)}; run preprocess again") from None
