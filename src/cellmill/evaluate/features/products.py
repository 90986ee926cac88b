"""Scalar products of sparse cells, computed once and sliced for every fold, fit and neighbour search.

`FeatureCache` keeps them, and the features of the cells that a task read last, for the next task.
"""

import hashlib
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import blas

from cellmill.evaluate.features.components import NO_VARIANCE, fit_own_components
from cellmill.evaluate.methods import Features

MAX_DOUBLE = 2048  # most cells whose products are float64; products of more cells are float32
GENE_BLOCK = 2048  # genes that are dense at once
CELL_BLOCK = 512  # cells that are read or multiplied at once
# genes with counts in a smaller share of the cells are rare: sparse products are faster for them
RARE_FRAC = 0.03


class CellProducts:
    """Products of all pairs of cells, which are computed when they are first read."""

    def __init__(self, profiles: sp.csr_matrix, digest: str) -> None:
        self.profiles = profiles  # (n, genes)
        self.digest = digest  # SHA-256 of the profiles

    @cached_property
    def plain(self) -> np.ndarray:
        """Products of the cells, `(n, n)`."""
        return _multiply_pairs(self.profiles)

    @cached_property
    def scaled(self) -> np.ndarray:
        """Products of the cells divided by the standard deviation of each gene over all of them."""
        return _multiply_pairs(self.profiles, compute_scale(self.profiles))

    @cached_property
    def components(self) -> np.ndarray:
        """Principal components fitted on the cells themselves, `(n, components)`."""
        return fit_own_components(self.profiles)

    def forget_scaled(self) -> None:
        """Free the memory of `scaled`; it is computed again when it is read."""
        self.__dict__.pop("scaled", None)


class SharedCells:
    """A view of some rows of a CellProducts, `(cells, genes)`; all views share its products."""

    def __init__(self, source: CellProducts, rows: np.ndarray) -> None:
        self.source = source
        self.rows = rows  # indices of the cells in `source`
        self.shape = (len(rows), source.profiles.shape[1])

    def __getitem__(self, cells: np.ndarray | slice) -> Self:
        return type(self)(self.source, self.rows[cells])

    @property
    def is_whole(self) -> bool:
        """True if these are all cells of the source, in their order."""
        return np.array_equal(self.rows, np.arange(self.source.profiles.shape[0]))

    @property
    def matrix(self) -> sp.csr_matrix:
        """The features themselves."""
        return self.source.profiles if self.is_whole else self.source.profiles[self.rows]

    def products(self, others: Self) -> np.ndarray:
        """Products with other cells of the source: `(cells, others)`; not to be changed."""
        if self.is_whole and others.is_whole:
            return self.source.plain
        return self.source.plain[self.rows].take(others.rows, axis=1)

    def squares(self) -> np.ndarray:
        """Product of each cell with itself, `(cells,)`."""
        return self.source.plain.diagonal()[self.rows]


class FeatureCache:
    """Features and products of the cells that a task read last, for the next task. Memory has room for
    one set of cells.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], np.ndarray, Features] | None = None
        self._products: CellProducts | None = None

    def share(self, profiles: sp.csr_matrix) -> SharedCells:
        """Cells with these profiles, whose products tasks share."""
        if self._products is None or self._products.profiles is not profiles:
            digest = digest_arrays("", profiles)
            if self._products is None or self._products.digest != digest:
                self._products = CellProducts(profiles, digest)
        return SharedCells(self._products, np.arange(profiles.shape[0]))

    def keep(self, sources: tuple[Any, ...], cells: np.ndarray, features: Features) -> None:
        """Keep the features of `cells` (indices), made from `sources`."""
        self._kept = (sources, cells, features)

    def find(self, sources: tuple[Any, ...], cells: np.ndarray) -> Features | None:
        """Features of `cells` (indices) that were kept, if made from the same objects `sources`."""
        if self._kept is None:
            return None
        kept_sources, kept_cells, features = self._kept
        is_same = all(kept is source for kept, source in zip(kept_sources, sources))
        return features if is_same and np.array_equal(kept_cells, cells) else None


def digest_arrays(about: str, *values: Any) -> str:
    """SHA-256 of a text and arrays, dense or sparse."""
    digest = hashlib.sha256(about.encode())
    for value in values:
        parts = [value]
        if isinstance(value, SharedCells):
            digest.update(value.source.digest.encode())
            parts = [value.rows]
        elif sp.issparse(value):
            parts = [value.data, value.indices, value.indptr, np.array(value.shape)]
        for array in map(np.ascontiguousarray, parts):
            digest.update(f" {array.dtype} {array.shape} ".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def compute_scale(profiles: sp.csr_matrix) -> np.ndarray:
    """Standard deviation of each gene, float64 `(genes,)`; 1 for a constant gene."""
    return compute_scales(profiles, np.ones((1, profiles.shape[0])))[0]


def compute_scales(profiles: sp.csr_matrix, is_member: np.ndarray) -> np.ndarray:
    """Standard deviation of each gene over the members of each group, `(groups, genes)` float64; 1
    for a constant gene.

    `is_member`, `(groups, cells)` float64, is 1 for members and 0 for other cells.
    """
    sums = np.zeros((len(is_member), profiles.shape[1]))
    squares = np.zeros_like(sums)
    for start in range(0, profiles.shape[0], CELL_BLOCK):
        block = profiles[start : start + CELL_BLOCK].astype(np.float64)
        members = is_member[:, start : start + CELL_BLOCK]
        sums += members @ block
        np.square(block.data, out=block.data)
        squares += members @ block
    sizes = is_member.sum(1, keepdims=True)
    squared_means = (sums / sizes) ** 2
    variances = squares / sizes - squared_means
    # below this bound the difference is a rounding error
    return np.sqrt(np.where(variances > NO_VARIANCE * squared_means, variances, 1))


def divide_genes(profiles: sp.csr_matrix, scale: np.ndarray) -> sp.csr_matrix:
    """Divide each gene by its `scale`, `(genes,)`. The result shares the indices of `profiles`."""
    factors = (1 / scale).astype(profiles.dtype)
    values = profiles.data * factors[profiles.indices]
    return sp.csr_matrix((values, profiles.indices, profiles.indptr), shape=profiles.shape)


def _multiply_pairs(profiles: sp.csr_matrix, scale: np.ndarray | None = None) -> np.ndarray:
    """Products of all pairs of cells, `(n, n)`, after division of each gene by its `scale`, `(genes,)`.

    Besides the products, only blocks of genes and the rare genes are in memory.
    """
    n, width = profiles.shape
    dtype = np.float64 if n <= MAX_DOUBLE else np.float32
    scale = np.ones(width) if scale is None else scale
    factors = (1 / scale).astype(profiles.dtype)
    is_rare = np.bincount(profiles.indices, minlength=width) < RARE_FRAC * n
    multiply = blas.dsyrk if n <= MAX_DOUBLE else blas.ssyrk
    products = np.zeros((n, n), dtype, order="F")
    # add the products over common genes, in dense blocks, to the lower triangle
    common = np.flatnonzero(~is_rare)
    for start in range(0, len(common), GENE_BLOCK):
        genes = common[start : start + GENE_BLOCK]
        dense = profiles[:, genes].toarray()
        dense *= factors[genes]
        by_gene = dense.astype(dtype, copy=False).T
        multiply(1, by_gene, 1, products, trans=1, lower=1, overwrite_c=1)
    # copy the lower triangle to the upper one
    for start in range(0, n, CELL_BLOCK):
        stop = start + CELL_BLOCK
        corner = products[start:stop, start:stop]
        corner += np.tril(corner, -1).T
        products[start:stop, stop:] = products[stop:, start:stop].T
    # add the sparse products over rare genes
    genes = np.flatnonzero(is_rare)
    rare = divide_genes(profiles[:, genes], scale[genes]).astype(dtype, copy=False)
    for start in range(0, n, CELL_BLOCK):
        rows = slice(start, start + CELL_BLOCK)
        products[:, rows] += (rare[rows] @ rare.T).toarray().T
    return products.T  # symmetric, and its rows are contiguous
