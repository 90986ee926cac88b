"""Scalar products of sparse cells, computed once and sliced for every fold, fit and neighbour search."""

from functools import cached_property
from typing import Self

import numpy as np
import scipy.sparse as sp
from sklearn.utils.sparsefuncs import mean_variance_axis

MAX_DOUBLE = 2048  # cells whose products are float64; those of more are float32
BLOCK = 4096  # genes that are dense at once
ROW_BLOCK = 512  # cells whose products of rare genes are computed at once
RARE = 0.03  # share of the cells below which pairs of a gene's cells are sooner added one by one


class CellProducts:
    """Products of all pairs of `cells`, `(n, genes)`, which are computed when they are first read."""

    def __init__(self, cells: sp.csr_matrix, digest: str) -> None:
        self.cells = cells
        self.digest = digest  # SHA-256 of the cells

    @cached_property
    def plain(self) -> np.ndarray:
        """Products of the cells, `(n, n)`."""
        return _multiply_pairs(self.cells)

    @cached_property
    def scaled(self) -> np.ndarray:
        """Products of the cells divided by the standard deviation of each gene over all of them."""
        scale = choose_scale(self.cells)
        return _multiply_pairs(divide_genes(self.cells, scale))

    def forget_scaled(self) -> None:
        """Free the memory of `scaled`; it is computed again when it is read."""
        self.__dict__.pop("scaled", None)


class SharedCells:
    """Some cells of `source`: features `(cells, genes)` whose products are shared by all that read
    them.
    """

    def __init__(self, source: CellProducts, rows: np.ndarray) -> None:
        self.source = source
        self.rows = rows  # indices of the cells in `source`
        self.shape = (len(rows), source.cells.shape[1])

    def __getitem__(self, cells: np.ndarray | slice) -> Self:
        return type(self)(self.source, self.rows[cells])

    @property
    def is_whole(self) -> bool:
        """True if these are all cells of the source, in their order."""
        return np.array_equal(self.rows, np.arange(self.source.cells.shape[0]))

    @property
    def matrix(self) -> sp.csr_matrix:
        """The features themselves."""
        return self.source.cells if self.is_whole else self.source.cells[self.rows]

    def products(self, others: Self) -> np.ndarray:
        """Products with other cells of the source: `(cells, others)`; not to be changed."""
        if self.is_whole and others.is_whole:
            return self.source.plain
        return self.source.plain[self.rows].take(others.rows, axis=1)

    def squares(self) -> np.ndarray:
        """Product of each cell with itself, `(cells,)`."""
        return self.source.plain.diagonal()[self.rows]


def choose_scale(cells: sp.csr_matrix) -> np.ndarray:
    """Standard deviation of each gene, float64 `(genes,)`; 1 for a constant gene."""
    mean, variance = mean_variance_axis(cells.astype(np.float64), axis=0)
    return np.sqrt(np.where(variance > 1e-20 * mean**2, variance, 1))


def divide_genes(cells: sp.csr_matrix, scale: np.ndarray) -> sp.csr_matrix:
    """Cells, each gene divided by its `scale`, `(genes,)`."""
    factors = (1 / scale).astype(cells.dtype)
    return (cells @ sp.diags_array(factors)).tocsr()


def _multiply_pairs(cells: sp.csr_matrix) -> np.ndarray:
    n = cells.shape[0]
    dtype = np.float64 if n <= MAX_DOUBLE else np.float32
    columns = cells.tocsc()
    is_rare = np.diff(columns.indptr) < RARE * n
    products = np.zeros((n, n), dtype)
    common = np.flatnonzero(~is_rare)
    for first in range(0, len(common), BLOCK):
        block = columns[:, common[first : first + BLOCK]]
        dense = block.toarray().astype(dtype, copy=False)
        products += dense @ dense.T
    rare = columns[:, np.flatnonzero(is_rare)].tocsr().astype(dtype, copy=False)
    for first in range(0, n, ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        products[rows] += (rare[rows] @ rare.T).toarray()
    return products
