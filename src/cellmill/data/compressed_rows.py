"""Reading rows of cells that preprocess compressed: gzip level 1 after HDF5's shuffle, in chunks of 4,096 values.

Any tool of scverse opens such a file. `shard` gathers single rows in random order, and does so by offset, without HDF5,
whose lock would let one thread read at a time: each chunk is one pread, inflated without Python's lock. A row of 2,000
genes lies in one or two chunks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.data.h5_file import one_line, open_h5
from cellmill.data.manifest import REMEDY
from cellmill.data.open_files import OpenFiles
from cellmill.data.shard_file import RowFile, open_rows, read_indptr
from cellmill.errors import DataError

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
