"""Dot products of the sparse profiles of all pairs of cells.

The products are computed once. Every fold, fit and neighbour search takes a slice of them. `FeatureCache`
keeps the products and features of the cells that a task read last. The next task reuses them if it
reads the same cells.
"""

import hashlib
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import blas

from cellmill.evaluate.features.components import NO_VARIANCE, fit_own_components
from cellmill.evaluate.methods import Features

MAX_DOUBLE = 2048  # products of at most this many cells are float64; products of more are float32
GENE_BLOCK = 2048  # at most this many genes are made dense at once
CELL_BLOCK = 512  # at most this many cells are read or multiplied at once
# A gene is rare if a smaller share of the cells has counts of it. Products over rare genes are
# faster with sparse matrices.
RARE_FRAC = 0.03


class CellProducts:
    """Dot products of all pairs of cells. Each property is computed when it is first read."""

    def __init__(self, profiles: sp.csr_matrix, digest: str) -> None:
        self.profiles = profiles  # (cells, genes)
        self.digest = digest  # SHA-256 of `profiles`

    @cached_property
    def plain(self) -> np.ndarray:
        """Dot products of the profiles, `(cells, cells)`."""
        return _multiply_pairs(self.profiles)

    @cached_property
    def scaled(self) -> np.ndarray:
        """Dot products of the scaled profiles, `(cells, cells)`.

        Each gene is divided by its standard deviation over all cells.
        """
        return _multiply_pairs(self.profiles, compute_scale(self.profiles))

    @cached_property
    def components(self) -> np.ndarray:
        """Principal components of the cells, fitted to these cells, `(cells, components)`."""
        return fit_own_components(self.profiles)

    def forget_scaled(self) -> None:
        """Free the memory of `scaled`, which is computed again when it is read next."""
        self.__dict__.pop("scaled", None)


class SharedCells:
    """Some of the cells of a `CellProducts`, the source. All selections share the products of the source."""

    def __init__(self, source: CellProducts, rows: np.ndarray) -> None:
        self.source = source
        self.rows = rows  # indices of these cells in `source`
        self.shape = (len(rows), source.profiles.shape[1])  # (cells, genes)

    def __getitem__(self, cells: np.ndarray | slice) -> Self:
        """Select some of these cells."""
        return type(self)(self.source, self.rows[cells])

    @property
    def is_whole(self) -> bool:
        """True if these are all cells of the source, in their order."""
        return np.array_equal(self.rows, np.arange(self.source.profiles.shape[0]))

    @property
    def matrix(self) -> sp.csr_matrix:
        """Profiles of these cells, `(cells, genes)`."""
        return self.source.profiles if self.is_whole else self.source.profiles[self.rows]

    def products(self, others: Self) -> np.ndarray:
        """Dot products with other cells of the same source, `(cells, others)`.

        The array may be shared: do not change it.
        """
        if self.is_whole and others.is_whole:
            return self.source.plain
        return self.source.plain[self.rows].take(others.rows, axis=1)

    def squares(self) -> np.ndarray:
        """Dot product of each cell with itself, `(cells,)`."""
        return self.source.plain.diagonal()[self.rows]


class FeatureCache:
    """Features and products of the cells that a task read last, kept for the next task.

    Only one set of cells is kept, because memory has no room for more.
    """

    def __init__(self) -> None:
        # sources, cells and features, as `keep` was given them
        self._kept: tuple[tuple[Any, ...], np.ndarray, Features] | None = None
        self._products: CellProducts | None = None

    def share(self, profiles: sp.csr_matrix) -> SharedCells:
        """Return all cells with these `profiles`, (cells, genes).

        If the last call had equal profiles, the products of the last call are used again.
        """
        if self._products is None or self._products.profiles is not profiles:
            digest = digest_arrays("", profiles)
            if self._products is None or self._products.digest != digest:
                self._products = CellProducts(profiles, digest)
        return SharedCells(self._products, np.arange(profiles.shape[0]))

    def keep(self, sources: tuple[Any, ...], cells: np.ndarray, features: Features) -> None:
        """Keep the `features` of `cells` (indices), which were made from the objects `sources`."""
        self._kept = (sources, cells, features)

    def find(self, sources: tuple[Any, ...], cells: np.ndarray) -> Features | None:
        """Return the kept features of `cells` (indices).

        None if other cells are kept, or if the features were made from other objects than `sources`.
        """
        if self._kept is None:
            return None
        kept_sources, kept_cells, features = self._kept
        has_same_sources = all(kept is source for kept, source in zip(kept_sources, sources))
        return features if has_same_sources and np.array_equal(kept_cells, cells) else None


def digest_arrays(about: str, *values: Any) -> str:
    """SHA-256 of the text `about` and of `values`: dense arrays, sparse matrices or `SharedCells`."""
    digest = hashlib.sha256(about.encode())
    for value in values:
        arrays = [value]
        if isinstance(value, SharedCells):
            digest.update(value.source.digest.encode())
            arrays = [value.rows]
        elif sp.issparse(value):
            arrays = [value.data, value.indices, value.indptr, np.array(value.shape)]
        for array in map(np.ascontiguousarray, arrays):
            digest.update(f" {array.dtype} {array.shape} ".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def compute_scale(profiles: sp.csr_matrix) -> np.ndarray:
    """Standard deviation of each gene over all cells, `(genes,)` float64.

    A constant gene has 1, so that it can be divided by this scale.
    """
    return compute_scales(profiles, np.ones((1, profiles.shape[0])))[0]


def compute_scales(profiles: sp.csr_matrix, is_member: np.ndarray) -> np.ndarray:
    """Standard deviation of each gene over the cells of each group, `(groups, genes)` float64.

    A gene that is constant in a group has 1. `is_member`, `(groups, cells)` float64, is 1 for the cells
    of a group and 0 for other cells.
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
    # a variance below this bound is a rounding error of the difference: the gene is constant
    return np.sqrt(np.where(variances > NO_VARIANCE * squared_means, variances, 1))


def divide_genes(profiles: sp.csr_matrix, scale: np.ndarray) -> sp.csr_matrix:
    """Divide each gene of `profiles`, `(cells, genes)`, by its `scale`, `(genes,)`.

    The result shares the arrays of indices with `profiles`.
    """
    factors = (1 / scale).astype(profiles.dtype)
    values = profiles.data * factors[profiles.indices]
    return sp.csr_matrix((values, profiles.indices, profiles.indptr), shape=profiles.shape)


def _multiply_pairs(profiles: sp.csr_matrix, scale: np.ndarray | None = None) -> np.ndarray:
    """Dot products of all pairs of cells, `(cells, cells)`.

    Each gene is first divided by its `scale`, `(genes,)`, if that is given. Besides the products, memory
    holds only one dense block of genes at a time, and the rare genes.
    """
    n_cells, n_genes = profiles.shape
    dtype = np.float64 if n_cells <= MAX_DOUBLE else np.float32
    # BLAS function that multiplies a matrix by its own transpose
    multiply = blas.dsyrk if n_cells <= MAX_DOUBLE else blas.ssyrk
    scale = np.ones(n_genes) if scale is None else scale
    factors = (1 / scale).astype(profiles.dtype)
    is_rare = np.bincount(profiles.indices, minlength=n_genes) < RARE_FRAC * n_cells
    products = np.zeros((n_cells, n_cells), dtype, order="F")
    # add the products over common genes, in dense blocks, to the lower triangle
    common = np.flatnonzero(~is_rare)
    for start in range(0, len(common), GENE_BLOCK):
        genes = common[start : start + GENE_BLOCK]
        dense = profiles[:, genes].toarray()
        dense *= factors[genes]
        by_gene = dense.astype(dtype, copy=False).T
        multiply(1, by_gene, 1, products, trans=1, lower=1, overwrite_c=1)
    # copy the lower triangle to the upper one
    for start in range(0, n_cells, CELL_BLOCK):
        stop = start + CELL_BLOCK
        corner = products[start:stop, start:stop]
        corner += np.tril(corner, -1).T
        products[start:stop, stop:] = products[stop:, start:stop].T
    # add the sparse products over rare genes
    genes = np.flatnonzero(is_rare)
    rare = divide_genes(profiles[:, genes], scale[genes]).astype(dtype, copy=False)
    for start in range(0, n_cells, CELL_BLOCK):
        rows = slice(start, start + CELL_BLOCK)
        products[:, rows] += (rare[rows] @ rare.T).toarray().T
    return products.T  # the same values, because the matrix is symmetric, in contiguous rows
