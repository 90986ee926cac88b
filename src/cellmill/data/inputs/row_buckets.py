"""Transposition on disk: values that arrive in any order, sorted into buckets of rows in a temporary file."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.source import reblocked
from cellmill.files import named_errors

_ROWS = 1024  # fewest rows of one bucket: smaller ones make writes too short
_MOST_BUCKETS = 60_000  # their numbers are sorted as 16-bit integers, which is fast


class RowBuckets:
    """Values of a matrix of `shape`; `add` all of them, then read `blocks` any number of times.

    A piece that is added is written at once, bucket by bucket, so memory holds one piece or one bucket. The file is in
    the folder of `TMPDIR`; OSError names that folder when it is full.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype) -> None:
        self.shape = shape
        self._rows = max(_ROWS, -(-shape[0] // _MOST_BUCKETS))
        self._record = np.dtype([("row", "<u4"), ("column", "<u4"), ("value", dtype)])
        self._segments: list[list[tuple[int, int]]] = [[] for _ in range(0, shape[0], self._rows)]
        self._file = tempfile.TemporaryFile(prefix="cellmill-")  # noqa: SIM115 - closed by close()
        self._n_values = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Add values, `(n,)`, at `rows` and `columns`, int within the shape."""
        bucket = (rows // self._rows).astype(np.uint16)
        order = np.argsort(bucket, kind="stable")
        records = np.empty(len(rows), self._record)
        records["row"], records["column"], records["value"] = rows[order] % self._rows, columns[order], values[order]
        stops = np.cumsum(np.bincount(bucket, minlength=len(self._segments)))
        start = 0
        for segments, stop in zip(self._segments, stops.tolist()):
            if start < stop:
                segments.append((self._n_values + start, stop - start))
            start = stop
        with named_errors(Path(tempfile.gettempdir())):
            self._file.seek(self._n_values * self._record.itemsize)
            self._file.write(records.data)
        self._n_values += len(rows)

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """All rows in order, `block` at a time; entries of a row in the order in which they were added."""
        return reblocked((self._bucket(number) for number in range(len(self._segments))), block)

    def close(self) -> None:
        """Drop the temporary file."""
        self._file.close()

    def _bucket(self, number: int) -> sp.csr_matrix:
        records = np.concatenate([self._read(*part) for part in self._segments[number]] or [self._read(0, 0)])
        n_rows = min(self._rows, self.shape[0] - number * self._rows)
        rows = records["row"].astype(np.uint16 if n_rows <= 1 << 16 else np.uint32)
        order = np.argsort(rows, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
        columns = records["column"][order].astype(np.int32)
        return sp.csr_matrix((records["value"][order], columns, indptr), shape=(n_rows, self.shape[1]))

    def _read(self, start: int, size: int) -> np.ndarray:
        self._file.seek(start * self._record.itemsize)
        return np.frombuffer(self._file.read(size * self._record.itemsize), self._record)
