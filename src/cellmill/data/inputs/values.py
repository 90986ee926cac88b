"""Arrays of HDF5 and Zarr files, which share the names `shape`, `dtype`, `chunks` and slicing."""

from pathlib import Path
from typing import Any

import numpy as np

from cellmill.data.inputs.source import reading
from cellmill.errors import DataError

REAL = "buif"  # kinds of numpy dtypes
WHOLE = "ui"
MAX_LENGTH = 2**31 - 1  # cells, and genes: indices of scipy are int32 here


def is_array(item: Any) -> bool:
    """True for an array, False for a group, a committed type or None."""
    return hasattr(item, "shape") and hasattr(item, "dtype")


def native(values: Any) -> np.ndarray:
    """The values as an array in native byte order; float16, which scipy has no sparse form of, as float32."""
    values = np.asarray(values)
    dtype = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype.newbyteorder("=")
    return values.astype(dtype, copy=False)


def chunk_length(array: Any, axis: int = 0) -> int:
    """Length of a chunk along `axis`; 1 for an array without chunks."""
    chunks = array.chunks
    return max(1, int(chunks[axis])) if chunks else 1


def require_kind(path: Path, name: str, array: Any, kinds: str, n_dims: int = 1) -> Any:
    """Return `array`. Raises DataError unless it is an array of `n_dims` dimensions whose dtype is of `kinds`."""
    if not is_array(array) or array.shape is None:
        raise DataError(f"{path}: {name} is {'missing' if array is None else 'not an array'}")
    if len(array.shape) != n_dims:
        raise DataError(f"{path}: {name} is damaged: expected {n_dims} dimensions, got shape {tuple(array.shape)}")
    kind = getattr(array.dtype, "kind", "O")
    if kind not in kinds:
        wanted = "counts" if kinds == REAL else "whole numbers"
        raise DataError(f"{path}: {name} expected {wanted}, got {array.dtype}")
    return array


class SequentialArray:
    """One-dimensional stored array, read in ascending slices; the last chunk is kept, so none is decoded twice."""

    def __init__(self, path: Path, array: Any):
        self._path, self._array = path, array
        self.dtype = native(np.zeros(0, array.dtype)).dtype
        self._chunk = chunk_length(array)
        self._first, self._kept = 0, np.zeros(0, self.dtype)

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values `start` to `stop` in native byte order. Raises DataError when the file is damaged."""
        if self._chunk == 1:
            return self._decoded(start, stop)
        last = self._first + len(self._kept)
        held = self._kept[start - self._first :] if self._first <= start < last else self._kept[:0]
        begin, end = start + len(held), min(len(self), -(-stop // self._chunk) * self._chunk)
        if begin >= stop:
            return held[: stop - start]
        begin_chunk = begin if len(held) else begin // self._chunk * self._chunk
        fresh = self._decoded(begin_chunk, end)[begin - begin_chunk :]
        whole = np.concatenate([held, fresh]) if len(held) else fresh
        self._kept = whole[-self._chunk :].copy()
        self._first = end - len(self._kept)
        return whole[: stop - start]

    def _decoded(self, start: int, stop: int) -> np.ndarray:
        with reading(self._path):
            values = native(self._array[start:stop])
        if len(values) != stop - start:
            raise DataError(f"{self._path}: damaged: expected {stop - start:,} values, got {len(values):,}")
        return values
