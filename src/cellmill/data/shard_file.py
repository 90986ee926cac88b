"""Shards: .h5ad files whose rows are in rank order and can be read by offset, as they are opened and read.

X is spec CSR, contiguous, unfiltered and little-endian, so any scverse tool opens a shard, and a block of cells is
one `preadv` at a known offset: no HDF5 call, no lock, no copy between. pread and not mmap: cold 85k against 40k cells
a second. Genes are int32: with uint16 `adata[:, genes]` crashes the interpreter. A shard is checked when it is opened,
against the manifest and against what HDF5 itself reads; its bytes are hashed by `verify`, once before training.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.data.manifest import REMEDY, Manifest, ShardEntry
from cellmill.errors import DataError

IOV_MAX = 1024  # buffers of one preadv; POSIX promises 16, Linux has had 1,024 since 2.4


class RowFile:
    """The CSR matrix X of an .h5ad file, read by offset; checked when opened.

    Attributes: `path`, `indptr` (`(n_obs + 1,)` int64), `n_obs`, `n_vars`, `dtype` of the counts. Safe to read from
    many threads.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            with _open(self.path) as file:
                x = file["X"]
                if x.attrs.get("encoding-type") != "csr_matrix":
                    raise DataError(f"{self.path}: X is no csr_matrix; {REMEDY}")
                self.n_obs, self.n_vars = (int(n) for n in x.attrs["shape"])
                self.indptr: np.ndarray = x["indptr"][:].astype(np.int64)
                self._indices_at = self._offset(x["indices"], ("<i4",))
                self._data_at = self._offset(x["data"], ("<u2", "<u4"))
                self.dtype: np.dtype[Any] = x["data"].dtype
                self._check_indptr(len(x["indices"]), len(x["data"]))
                ends = [(x[name][:1], x[name][-1:]) for name in ("indices", "data")] if self.indptr[-1] else []
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{self.path}: not a shard: {error}") from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {' '.join(str(error).split())}; {REMEDY}") from None
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            self._check_bytes(ends)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; nothing may be reading it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def read_genes(self, start: int, buffers: Sequence[Any]) -> None:
        """Fills `buffers` one after another with the genes (int32) from nonzero `start` on."""
        self._read(self._indices_at + 4 * start, buffers)

    def read_counts(self, start: int, buffers: Sequence[Any]) -> None:
        """Fills `buffers` one after another with the counts (`dtype`) from nonzero `start` on."""
        self._read(self._data_at + self.dtype.itemsize * start, buffers)

    def _read(self, offset: int, buffers: Sequence[Any]) -> None:
        for first in range(0, len(buffers), IOV_MAX):
            part = buffers[first : first + IOV_MAX]
            wanted = sum(buffer.nbytes for buffer in part)
            # one call reads up to 2 GiB and regular files give all there is: less means that the file ends early,
            # and waiting for the rest would be waiting for ever
            read = os.preadv(self._fd, part, offset)
            if read != wanted:
                raise DataError(
                    f"{self.path}: short read: {read:,} of {wanted:,} bytes at {offset:,}; "
                    f"the shard was truncated while open; {REMEDY}"
                )
            offset += wanted

    def _offset(self, dataset: h5py.Dataset, dtypes: tuple[str, ...]) -> int:
        name = f"{self.path}: {dataset.name}"
        if dataset.compression or dataset.shuffle or dataset.fletcher32 or dataset.scaleoffset:
            raise DataError(f"{name} is compressed or filtered, but rows are read by offset; {REMEDY}")
        if dataset.chunks is not None:
            raise DataError(f"{name} is chunked, but rows are read by offset; {REMEDY}")
        if dataset.dtype not in [np.dtype(d) for d in dtypes]:
            raise DataError(f"{name} is {dataset.dtype.str}, not {' or '.join(dtypes)}; {REMEDY}")
        offset = dataset.id.get_offset()
        if offset is None and dataset.size:
            raise DataError(f"{name} has no offset in the file (virtual, external or never written); {REMEDY}")
        return offset or 0

    def _check_indptr(self, n_indices: int, n_data: int) -> None:
        p = self.indptr
        if len(p) != self.n_obs + 1 or p[0] or p[-1] != n_indices or n_indices != n_data or (np.diff(p) < 0).any():
            raise DataError(f"{self.path}: X/indptr does not fit X/indices and X/data: damaged; {REMEDY}")

    def _check_bytes(self, ends: list[tuple[np.ndarray, np.ndarray]]) -> None:
        size, nnz = os.fstat(self._fd).st_size, int(self.indptr[-1])
        needed = max(self._indices_at + 4 * nnz, self._data_at + self.dtype.itemsize * nnz)
        if size < needed:
            raise DataError(f"{self.path}: truncated: {size:,} of at least {needed:,} bytes; {REMEDY}")
        for read, (first, last) in zip((self.read_genes, self.read_counts), ends):
            found = np.empty_like(first), np.empty_like(last)
            read(0, [found[0]])
            read(nnz - 1, [found[1]])
            if (found[0], found[1]) != (first, last):
                raise DataError(f"{self.path}: HDF5 and a read by offset differ: damaged; {REMEDY}")


def open_shards(manifest: Manifest, split: str) -> list[RowFile]:
    """Every shard of a split, checked against the manifest. Raises DataError naming the one that is not as recorded."""
    entry = manifest.entry(split)
    _allow_open_files(len(entry.shards))
    return [_open_shard(manifest, shard) for shard in entry.shards]


def cell_names(shards: Sequence[RowFile], cells: np.ndarray) -> list[str]:
    """`dataset:name (file row)` of cells by their place, (cells,) int64, in the `shards` of a split."""
    ends = np.cumsum([shard.n_obs for shard in shards])
    found = []
    for cell in cells.tolist():
        number = int(np.searchsorted(ends, cell, side="right"))
        shard = shards[number]
        row = cell - int(ends[number]) + shard.n_obs
        with _open(shard.path) as file:
            obs = file["obs"]
            name = obs[obs.attrs["_index"]].asstr()[row]
        found.append(f"{name} ({shard.path.name} row {row})")
    return found


def _open_shard(manifest: Manifest, shard: ShardEntry) -> RowFile:
    rows = RowFile(manifest.shard_path(shard))
    found = (rows.n_obs, int(rows.indptr[-1]), rows.dtype.name, rows.n_vars)
    wanted = (shard.n_obs, shard.nnz, shard.dtype, manifest.vocabulary["n_genes"])
    for what, here, there in zip(("cells", "nonzeros", "counts of type", "genes"), found, wanted):
        if here != there:
            raise DataError(f"{rows.path}: {what} {here}, the manifest has {there}: not the shard it lists; {REMEDY}")
    return rows


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"{path}: no such shard; {REMEDY}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "truncated" in str(error):
            stored = re.search(r"stored_eof = (\d+)", str(error))
            of = f" of {int(stored[1]):,}" if stored else ""
            raise DataError(f"{path}: truncated: {path.stat().st_size:,}{of} bytes; {REMEDY}") from None
        raise DataError(f"{path}: not an HDF5 file, or a damaged one; {REMEDY}") from None


def _allow_open_files(n: int) -> None:
    """1,024 files, the usual soft limit, are 16 million cells."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
