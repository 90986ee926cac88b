"""Principal components of sparse profiles."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import svd
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.base import BaseEstimator
from sklearn.utils.extmath import svd_flip
from sklearn.utils.sparsefuncs import mean_variance_axis

COMPONENTS = 50
# singular value relative to the first, below which a component is noise: rounding errors are below
# 1e-4, the 50th component of cells is usually above 1e-2
MIN_SINGULAR_RATIO = 3e-4
MIN_SINGULAR_RATIO_SINGLE = 3e-3  # the same, of products that are float32
# variance of a gene relative to its squared mean, below which it is constant: it is a difference of
# two sums, whose rounding errors are about 1e-13
NO_VARIANCE = 1e-12
BLOCK = 1024  # cells whose products are copied at once
MAX_DENSE = 2048  # genes whose products with each other are stored, not multiplied anew


class PrincipalComponents(BaseEstimator):
    """The components of scikit-learn's PCA with ARPACK, but no more than the rank of the cells.

    Past the rank, ARPACK returns random vectors, so scikit-learn's PCA would differ between
    evaluations.
    """

    components_: np.ndarray  # (components, genes)
    explained_variance_: np.ndarray  # (components,)

    def __init__(self, n_components: int) -> None:
        self.n_components = n_components

    def fit(self, profiles: sp.csr_matrix, labels: None = None) -> Self:
        """Fit to `profiles`, `(cells, genes)`."""
        self.fit_transform(profiles)
        return self

    def fit_transform(self, profiles: sp.csr_matrix, labels: None = None) -> np.ndarray:
        """Fit to `profiles`, `(cells, genes)`, and return their components, `(cells, components)`."""
        n, width = profiles.shape
        mean = mean_variance_axis(profiles, axis=0)[0]
        # Xᵀ X of the centred profiles X, if it is used and small
        gram = None
        if width <= min(n, MAX_DENSE):
            centred = profiles.toarray() - mean.astype(profiles.dtype)
            gram = centred.T @ centred

        # products with x of X, Xᵀ, X Xᵀ and Xᵀ X; X is not made dense
        def multiply(x: np.ndarray) -> np.ndarray:
            return profiles @ x - mean @ x

        def multiply_transposed(x: np.ndarray) -> np.ndarray:
            return profiles.T @ x - np.multiply.outer(mean, x.sum(0))

        def multiply_cells(x: np.ndarray) -> np.ndarray:
            return multiply(multiply_transposed(x))

        def multiply_genes(x: np.ndarray) -> np.ndarray:
            return multiply_transposed(multiply(x)) if gram is None else gram @ x

        # eigenvectors of the smaller of X Xᵀ and Xᵀ X, then the exact SVD inside their span
        if n < width:
            basis = find_eigenvectors(multiply_cells, n, self.n_components, profiles.dtype)
            loadings, singular_values, rotation = svd(
                multiply_transposed(basis), full_matrices=False
            )
            left = basis @ rotation.T
            right = loadings.T
        else:
            basis = find_eigenvectors(multiply_genes, width, self.n_components, profiles.dtype)
            left, singular_values, rotation = svd(multiply(basis), full_matrices=False)
            right = rotation @ basis.T
        left, right = svd_flip(left, right, u_based_decision=False)
        is_kept = singular_values > MIN_SINGULAR_RATIO * singular_values[0]
        rank = max(1, int(is_kept.sum()))
        self.components_ = right[:rank]
        singular_values = singular_values[:rank]
        self.explained_variance_ = singular_values**2 / (n - 1)
        self._center = mean @ self.components_.T
        return np.asarray(left[:, :rank] * singular_values)

    def transform(self, profiles: sp.csr_matrix) -> np.ndarray:
        """Components of `profiles`, `(cells, genes)`."""
        return np.asarray(profiles @ self.components_.T - self._center)


def find_eigenvectors(
    multiply: Callable[[np.ndarray], np.ndarray], size: int, n_components: int, dtype: Any
) -> np.ndarray:
    """Orthonormal eigenvectors of the largest eigenvalues, `(size, n_components)`, of a symmetric
    matrix that `multiply` multiplies by.
    """
    gram = LinearOperator((size, size), multiply, dtype=dtype)
    # in the matrix's dtype: a product with a float64 vector would copy a float32 matrix as float64
    start = np.random.RandomState(0).uniform(-1, 1, size).astype(dtype)
    # ARPACK takes neither one gene nor cells without any counts
    if size == 1 or not gram.matvec(start).any():
        return np.eye(size, n_components, dtype=dtype)
    _, vectors = eigsh(gram, n_components, v0=start, rng=0)
    basis, _ = np.linalg.qr(vectors)
    return basis


def project_on_fitted(products: np.ndarray, fitted: np.ndarray, n_components: int) -> np.ndarray:
    """Principal components of all cells, fitted on the cells `fitted` (indices), from the
    `products` of all pairs of cells, `(cells, cells)`: `(cells, n_components)` or fewer.
    """
    n = len(products)
    n_fitted = len(fitted)
    # products of the fitted cells, (fitted cells, fitted cells): no copy if these are all cells
    gram = products
    if not np.array_equal(fitted, np.arange(n)):
        gram = np.empty((n_fitted, n_fitted), products.dtype)
        for start in range(0, n_fitted, BLOCK):
            rows = fitted[start : start + BLOCK]
            gram[start : start + BLOCK] = products[rows].take(fitted, axis=1)
    means = gram.mean(0)

    # products of the fitted cells after their mean is subtracted, times x
    def multiply(x: np.ndarray) -> np.ndarray:
        multiplied = gram @ (x - x.mean(0))
        return np.asarray(multiplied - multiplied.mean(0))

    basis = find_eigenvectors(multiply, n_fitted, n_components, gram.dtype)
    in_basis = basis.T @ multiply(basis)
    eigenvalues, rotation = np.linalg.eigh(in_basis)
    # the largest first
    singular_values = np.sqrt(np.maximum(eigenvalues[::-1], 0))
    vectors = basis @ rotation[:, ::-1]
    min_ratio = MIN_SINGULAR_RATIO if gram.dtype == np.float64 else MIN_SINGULAR_RATIO_SINGLE
    is_kept = singular_values > min_ratio * singular_values[0]
    rank = max(1, int(is_kept.sum()))
    divisors = np.maximum(singular_values[:rank], np.finfo(gram.dtype).tiny)
    directions = vectors[:, :rank] / divisors
    directions -= directions.mean(0)  # so the mean product of each cell does not matter
    projected = np.empty((n, rank), products.dtype)
    for start in range(0, n, BLOCK):
        centred = products[start : start + BLOCK].take(fitted, axis=1) - means
        projected[start : start + BLOCK] = centred @ directions
    return projected


def pca(shape: Sequence[int], n_components: int = COMPONENTS) -> PrincipalComponents:
    """Unfitted principal components for an array of `shape`, fewer than `n_components` if it is
    small.
    """
    return PrincipalComponents(max(1, min(n_components, min(shape) - 1)))


def fit_own_components(profiles: sp.csr_matrix) -> np.ndarray:
    """Principal components fitted on the cells themselves, `(cells, components)`."""
    return np.asarray(pca(profiles.shape).fit_transform(profiles))
