"""Rows of a matrix whose values already come in order of rows.

They are kept in temporary files in the folder of `TMPDIR`. Most text files list their values cell by
cell. These need no sorting: columns and values are appended as they come, and read back in order.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from cellmill.data.rows import row_numbers, row_offsets
from cellmill.files import named_errors

_ROWS = 1024  # rows in memory at once while they are read back to be sorted


class OrderedRows:
    """Values in order of rows.

    `add` refuses a piece that is not in order, and `triples` gives back what was added.
    """

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape
        self._lengths = np.zeros(shape[0], np.int64)
        self._last = 0
        self._columns = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115 - closed by close()
        self._values = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115
        self._dtype = np.dtype(np.float64)

    def close(self) -> None:
        """Remove the temporary files."""
        self._columns.close()
        self._values.close()

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> bool:
        """Append a piece, and return True.

        If a row of it comes before a row that was added, keep nothing and return False.
        """
        if not len(rows):
            return True
        if rows[0] < self._last or (rows[1:] < rows[:-1]).any():
            return False
        first = int(rows[0])
        lengths = np.bincount(rows - first)
        self._lengths[first : first + len(lengths)] += lengths
        self._last = int(rows[-1])
        self._dtype = values.dtype
        with named_errors(Path(tempfile.gettempdir())):
            self._columns.write(np.ascontiguousarray(columns, dtype=np.int32).data)
            self._values.write(np.ascontiguousarray(values).data)
        return True

    def triples(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows, columns and values that were added."""
        first = 0
        for part in self.parts(_ROWS):
            rows = first + row_numbers(part.indptr)
            if len(rows):
                yield rows, part.indices, part.data
            first += part.shape[0]

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        """All rows in order, `block` at a time."""
        offsets = row_offsets(self._lengths)
        self._columns.seek(0)
        self._values.seek(0)
        for low in range(0, self.shape[0], block):
            indptr = offsets[low : low + block + 1] - offsets[low]
            n = int(indptr[-1])
            columns = np.empty(n, np.int32)
            values = np.empty(n, self._dtype)
            if n:
                self._columns.readinto(columns.data)
                self._values.readinto(values.data)
            yield sp.csr_matrix((values, columns, indptr), shape=(len(indptr) - 1, self.shape[1]))
