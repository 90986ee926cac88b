"""Dense matrices, stored as cells x genes (AnnData) or genes x cells (Loom)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.row_buckets import RowBuckets
from cellmill.data.inputs.source import reading, reblocked
from cellmill.data.inputs.values import REAL, chunk_length, native, require_kind

_SLAB_BYTES = 1 << 26  # dense values in memory at once, if chunks allow it
_TALL = 4  # a chunk of more slabs than this is cheaper to transpose on disk than to hold


class DenseMatrix:
    """Dense array, read in slabs of whole chunks: each chunk is decoded once.

    Chunks that span too many cells are read in slabs of genes and transposed through a temporary file.
    """

    def __init__(self, path: Path, name: str, array: Any, cells_axis: int = 0):
        self._path, self._cells_axis = path, cells_axis
        self._array = require_kind(path, name, array, REAL, 2)
        n_obs, n_vars = (int(array.shape[axis]) for axis in (cells_axis, 1 - cells_axis))
        self.shape = (n_obs, n_vars)
        self._transposed: RowBuckets | None = None

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        fit, tall = self._fit(self.shape[1]), chunk_length(self._array, self._cells_axis)
        if min(tall, self.shape[0]) <= _TALL * fit:
            return reblocked(self._slabs(max(tall, fit // tall * tall)), block)
        if self._transposed is None:
            self._transposed = self._transpose()
        return self._transposed.blocks(block)

    def close(self) -> None:
        """Drop the temporary file, if there is one."""
        if self._transposed is not None:
            self._transposed.close()

    def _fit(self, width: int) -> int:
        return max(1, _SLAB_BYTES // max(1, width * self._array.dtype.itemsize))

    def _slabs(self, step: int) -> Iterator[sp.csr_matrix]:
        for first in range(0, self.shape[0], step):
            yield sp.csr_matrix(self._dense(slice(first, min(first + step, self.shape[0])), slice(None)))

    def _transpose(self) -> RowBuckets:
        n_obs, n_vars = self.shape
        wide = chunk_length(self._array, 1 - self._cells_axis)
        step = max(wide, self._fit(n_obs) // wide * wide)
        buckets = RowBuckets(self.shape, native(np.zeros(0, self._array.dtype)).dtype)
        try:
            for low in range(0, n_vars, step):
                part = sp.coo_matrix(self._dense(slice(None), slice(low, min(low + step, n_vars))))
                buckets.add(part.row, part.col + low, part.data)
        except BaseException:
            buckets.close()
            raise
        return buckets

    def _dense(self, cells: slice, genes: slice) -> np.ndarray:
        with reading(self._path):
            if self._cells_axis == 0:
                return native(self._array[cells, genes])
            return native(self._array[genes, cells]).T
