"""CSR rows in a temporary file, between the pass that chooses genes and the one that writes them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from cellmill.data.counts_writer import count_dtype
from cellmill.files import named_errors


class RowSpill:
    """Blocks of counts of `n_columns` columns; `add` all of them, then read `blocks`. Memory holds one.

    The file is beside `out` and has no name, so a killed process leaves none. OSError names `out` on a full disk.
    """

    def __init__(self, out: Path, n_columns: int) -> None:
        self._out, self._n_columns = out, n_columns
        self._blocks: list[tuple[np.ndarray, np.dtype]] = []  # indptr and dtype of the counts
        self._column = count_dtype(n_columns - 1)  # two bytes, which take half of the time to write, for most inputs
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(prefix="cellmill-", dir=out.parent)  # noqa: SIM115 - closed by close()

    def add(self, block: sp.csr_matrix) -> None:
        """Append rows, of unsigned counts and int32 indices."""
        counts = block.data.astype(count_dtype(int(block.data.max(initial=0))), copy=False)
        with named_errors(self._out):
            self._file.write(block.indices.astype(self._column).data)
            self._file.write(np.ascontiguousarray(counts).data)
        self._blocks.append((block.indptr, counts.dtype))

    def blocks(self) -> Iterator[sp.csr_matrix]:
        """The blocks in the order in which they were added, each with counts of its own dtype."""
        with named_errors(self._out):
            self._file.seek(0)  # writes what is buffered
        for indptr, dtype in self._blocks:
            indices, counts = self._read(indptr[-1], self._column).astype(np.int32), self._read(indptr[-1], dtype)
            yield sp.csr_matrix((counts, indices, indptr), shape=(len(indptr) - 1, self._n_columns))

    def close(self) -> None:
        """Drop the temporary file."""
        self._file.close()

    def _read(self, size: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self._file.read(int(size) * dtype.itemsize), dtype)
