"""Principal components of sparse cells, and genes chosen by their ranks or their variance."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.linalg import svd
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.base import BaseEstimator
from sklearn.utils.extmath import svd_flip
from sklearn.utils.sparsefuncs import mean_variance_axis

COMPONENTS = 50
# length of a component relative to the first, below which it is noise: rounding errors are below
# 1e-4, the 50th component of cells is usually above 1e-2
NO_SPREAD = 3e-4
NO_SPREAD_SINGLE = 3e-3  # the same, of products that are float32
NO_VARIANCE = 1e-12  # variance of a gene relative to its squared mean, below which it is constant
BLOCK = 1024  # cells whose products are copied at once
MAX_DENSE = 2048  # features whose products are computed at once
RANKED_GENES = 500
VARIABLE_GENES = 2000
BINS = 20  # bins of mean expression, within which dispersions are standardised


class PrincipalComponents(BaseEstimator):
    """The components of scikit-learn's PCA with ARPACK, but no more than the rank of the cells.

    Past the rank, ARPACK returns random vectors, so scikit-learn's PCA would differ between
    evaluations.
    """

    components_: np.ndarray  # (components, features)
    explained_variance_: np.ndarray  # (components,)

    def __init__(self, n_components: int) -> None:
        self.n_components = n_components

    def fit(self, cells: sp.csr_matrix, labels: None = None) -> Self:
        """Fit to `cells`, `(n, features)`."""
        self.fit_transform(cells)
        return self

    def fit_transform(self, cells: sp.csr_matrix, labels: None = None) -> np.ndarray:
        """Fit to `cells`, `(n, features)`, and return their components."""
        mean = mean_variance_axis(cells, axis=0)[0]

        # centred cells X, without making them dense: X @ x, and X.T @ x
        def multiply(x: np.ndarray) -> np.ndarray:
            return cells @ x - mean @ x

        def multiply_transposed(x: np.ndarray) -> np.ndarray:
            return cells.T @ x - np.multiply.outer(mean, x.sum(0))

        n, width = cells.shape
        # eigenvectors of the smaller of X X' and X' X, then the exact SVD inside their span
        if n < width:

            def multiply_cells(x: np.ndarray) -> np.ndarray:
                return multiply(multiply_transposed(x))

            basis = find_eigenvectors(multiply_cells, n, self.n_components, cells.dtype)
            loadings, lengths, rotation = svd(multiply_transposed(basis), full_matrices=False)
            left = basis @ rotation.T
            right = loadings.T
        else:

            def multiply_genes(x: np.ndarray) -> np.ndarray:
                return multiply_transposed(multiply(x))

            if width <= MAX_DENSE:
                centred = cells.toarray() - mean.astype(cells.dtype)
                gram = centred.T @ centred
                multiply_genes = gram.__matmul__
            basis = find_eigenvectors(multiply_genes, width, self.n_components, cells.dtype)
            left, lengths, rotation = svd(multiply(basis), full_matrices=False)
            right = rotation @ basis.T
        left, right = svd_flip(left, right, u_based_decision=False)
        has_spread = lengths > NO_SPREAD * lengths[0]
        rank = max(1, int(has_spread.sum()))
        self.components_ = right[:rank]
        lengths = lengths[:rank]
        self.explained_variance_ = lengths**2 / (n - 1)
        self._center = mean @ self.components_.T
        return np.asarray(left[:, :rank] * lengths)

    def transform(self, cells: sp.csr_matrix) -> np.ndarray:
        """Components of `cells`, `(n, features)`."""
        return np.asarray(cells @ self.components_.T - self._center)


def find_eigenvectors(
    multiply: Callable[[np.ndarray], np.ndarray], size: int, n_components: int, dtype: Any
) -> np.ndarray:
    """Orthonormal eigenvectors of the largest eigenvalues, `(size, n_components)`, of a symmetric
    matrix that `multiply` multiplies by.
    """
    gram = LinearOperator((size, size), multiply, dtype=dtype)
    # float64 would have a float32 matrix copied to twice its size
    start = np.random.RandomState(0).uniform(-1, 1, size).astype(dtype)
    # ARPACK takes neither one gene nor cells without any counts
    if size == 1 or not gram.matvec(start).any():
        return np.eye(size, n_components, dtype=dtype)
    _, vectors = eigsh(gram, n_components, v0=start, rng=0)
    basis, _ = np.linalg.qr(vectors)
    return basis


def project_on_fitted(products: np.ndarray, fitted: np.ndarray, components: int) -> np.ndarray:
    """Principal components of all cells, fitted on the cells `fitted` (indices), from the
    `products` of all pairs of cells, `(cells, cells)`: `(cells, components)` or fewer.
    """
    n = len(products)
    n_fitted = len(fitted)
    # products of the fitted cells, (fitted cells, fitted cells): no copy if these are all cells
    gram = products
    if not np.array_equal(fitted, np.arange(n)):
        gram = np.empty((n_fitted, n_fitted), products.dtype)
        for first in range(0, n_fitted, BLOCK):
            rows = fitted[first : first + BLOCK]
            gram[first : first + BLOCK] = products[rows].take(fitted, axis=1)
    means = gram.mean(0)

    # products of the fitted cells after their mean is subtracted, times x
    def multiply(x: np.ndarray) -> np.ndarray:
        multiplied = gram @ (x - x.mean(0))
        return np.asarray(multiplied - multiplied.mean(0))

    basis = find_eigenvectors(multiply, n_fitted, components, gram.dtype)
    in_basis = basis.T @ multiply(basis)
    eigenvalues, rotation = np.linalg.eigh(in_basis)
    # the largest first
    lengths = np.sqrt(np.maximum(eigenvalues[::-1], 0))
    vectors = basis @ rotation[:, ::-1]
    no_spread = NO_SPREAD if gram.dtype == np.float64 else NO_SPREAD_SINGLE
    has_spread = lengths > no_spread * lengths[0]
    rank = max(1, int(has_spread.sum()))
    divisors = np.maximum(lengths[:rank], np.finfo(gram.dtype).tiny)
    directions = vectors[:, :rank] / divisors
    directions -= directions.mean(0)  # so the mean product of each cell does not matter
    projected = np.empty((n, rank), products.dtype)
    for first in range(0, n, BLOCK):
        centred = products[first : first + BLOCK].take(fitted, axis=1) - means
        projected[first : first + BLOCK] = centred @ directions
    return projected


def pca(shape: Sequence[int], components: int = COMPONENTS) -> PrincipalComponents:
    """Unfitted principal components for an array of `shape`, fewer than `components` if it is
    small.
    """
    n_components = min(components, min(shape) - 1)
    return PrincipalComponents(max(1, n_components))


def fit_own_components(profiles: sp.csr_matrix) -> np.ndarray:
    """Principal components fitted on the cells themselves, `(cells, components)`."""
    return np.asarray(pca(profiles.shape).fit_transform(profiles))


def choose_variable_genes(profiles: sp.csr_matrix) -> np.ndarray:
    """The VARIABLE_GENES most variable genes, ascending: scanpy's highly_variable_genes of flavor
    seurat.

    Variance over mean of counts per 10,000; its logarithm is standardised over genes of like means.
    """
    n, width = profiles.shape
    sums = np.zeros(width)
    squares = np.zeros(width)
    for first in range(0, n, BLOCK):
        block = profiles[first : first + BLOCK]
        counts = np.expm1(block.data).astype(np.float64)
        sums += np.bincount(block.indices, counts, width)
        squares += np.bincount(block.indices, counts**2, width)
    mean = sums / n
    variance = squares / n - mean**2
    variance[variance < NO_VARIANCE * mean**2] = 0  # a rounding error
    varying = np.flatnonzero(variance > 0)
    mean = mean[varying]
    dispersion = pd.Series(np.log(variance[varying] / mean))
    bin_of_gene = pd.cut(np.log1p(mean), BINS, labels=False)
    bins = dispersion.groupby(bin_of_gene)
    deviation = dispersion - bins.transform("mean")
    scores = deviation / bins.transform("std")
    scores = scores.fillna(1)  # a gene that is the only one in its bin has no deviation
    order = np.argsort(-scores.to_numpy(), kind="stable")
    return np.sort(varying[order[:VARIABLE_GENES]])


class RankedGenes:
    """Genes of each cell by the rank of their log counts, standardised within the cell; equal
    values share a rank.

    Stored as the value of the genes without a count, `zero`, `(cells,)`, and what the other genes
    have `above` it, sparse.
    """

    def __init__(self, genes: sp.csr_matrix) -> None:
        if not genes.data.all():
            genes = genes.copy()
            genes.eliminate_zeros()
        n = genes.shape[0]
        self.zero = np.empty(n)
        # shares the indices of the genes
        values = np.empty(genes.nnz)
        for first in range(0, n, BLOCK):
            block = genes[first : first + BLOCK]
            start = genes.indptr[first]
            zero, above = _standardise_ranks(block)
            self.zero[first : first + BLOCK] = zero
            values[start : start + block.nnz] = above
        self.above = sp.csr_matrix((values, genes.indices, genes.indptr), shape=genes.shape)

    def select(self, cells: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Values of all cells, dense, of the RANKED_GENES genes of largest F between the `labels`
        of some `cells`; genes are in their order.
        """
        classes, class_of_cell = np.unique(labels, return_inverse=True)
        member = np.eye(len(classes))[class_of_cell].T  # (classes, cells)
        sums = np.zeros((len(classes), self.above.shape[1]))  # (classes, genes)
        squares = np.zeros(self.above.shape[1])
        for first in range(0, len(cells), BLOCK):
            block = cells[first : first + BLOCK]
            above = self.above[block]
            zero = self.zero[block]
            members = member[:, first : first + BLOCK]
            sums += members @ above + (members @ zero)[:, None]
            # squares of `above` plus `zero`
            squares += 2 * (zero @ above) + zero @ zero
            squares += np.bincount(above.indices, above.data**2, len(squares))
        sizes = member.sum(1)[:, None]
        explained = (sums**2 / sizes).sum(0)
        totals = sums.sum(0)
        between = explained - totals**2 / len(cells)
        within = np.maximum(squares - explained, 1e-9)
        f = between / within  # up to a factor that all genes share
        order = np.argsort(-f, kind="stable")
        chosen = np.sort(order[:RANKED_GENES])
        values = self.above[:, chosen].toarray()
        return np.asarray(values + self.zero[:, None])


def _standardise_ranks(genes: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """`zero`, and the stored values of `above`, of `RankedGenes` for some cells."""
    n, width = genes.shape
    n_expressed = np.diff(genes.indptr)  # (cells,)
    n_absent = width - n_expressed
    # cell of each stored value
    cell = np.repeat(np.arange(n), n_expressed)
    ranks_in_cell = pd.Series(genes.data).groupby(cell).rank()
    ranks = n_absent[cell] + ranks_in_cell.to_numpy()
    middle = (width + 1) / 2  # mean rank of a cell
    lowest = (n_absent + 1) / 2  # shared rank of the genes without a count
    squares = np.bincount(cell, ranks**2, n)
    squares = squares + n_absent * lowest**2
    variance = squares / width - middle**2
    varies = variance > 1e-9 * middle**2
    # 1 for a cell whose values are all equal
    scale = np.sqrt(np.where(varies, variance, 1))
    return (lowest - middle) / scale, (ranks - lowest[cell]) / scale[cell]
