"""Rows of different lengths, such as the genes of cells, and arithmetic on them. Imports only numpy.

The entries of all rows stand one after the other in one array. Rows are given by their lengths, or by
their offsets (`indptr` of a CSR matrix): the first entry of each, and the end of the last.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np

Columns = TypeVar("Columns", bound=NamedTuple)


class SparseCounts(NamedTuple):
    """Genes and counts of cells, cell after cell."""

    offsets: np.ndarray  # `(cells + 1,)` int64: first gene of each cell, and the end
    genes: np.ndarray  # `(nonzeros,)` int32
    counts: Any  # `(nonzeros,)` of any integer type; None if only genes were read

    @property
    def n_cells(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of genes of each cell, `(cells,)` int64."""
        return np.diff(self.offsets)


def choose_rows(columns: Columns, chosen: slice | np.ndarray) -> Columns:
    """Choose the same entries of every array of `columns`, whose arrays are equally long."""
    columns_class: Any = type(columns)
    rows: Columns = columns_class(*(column[chosen] for column in columns))
    return rows


def iterate_rows(columns: NamedTuple) -> Any:
    """Iterate over arrays of integers, which are equally long: yield a tuple with an int of each."""
    return zip(*(column.tolist() for column in columns))


def row_sums(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Sum each row of integer `values`, `(nonzeros,)`, exactly: `(rows,)` int64.

    Rows begin at `indptr`, `(rows + 1,)`, and may be empty.
    """
    starts = indptr[:-1]
    filled = np.flatnonzero(indptr[1:] > starts)
    sums = np.zeros(len(starts), np.int64)
    if len(filled):
        sums[filled] = np.add.reduceat(values, starts[filled], dtype=np.int64)
    return sums


def row_offsets(lengths: Any) -> np.ndarray:
    """First entry of each row of these lengths, and the end of the last: `(rows + 1,)` int64."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def positions_in_rows(offsets: np.ndarray) -> np.ndarray:
    """Position from 0 of each entry in its row, int64; rows begin at `offsets`, `(rows + 1,)`."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def row_numbers(offsets: np.ndarray) -> np.ndarray:
    """Row of each entry, int64; rows begin at `offsets`, `(rows + 1,)`."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
