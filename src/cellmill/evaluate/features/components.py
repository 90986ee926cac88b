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

COMPONENTS = 50  # principal components of cells, at most
# A component is noise if its singular value, divided by the first singular value, is at most this.
# Rounding errors have ratios below 1e-4. The 50th component of cells usually has one above 1e-2.
MIN_SINGULAR_RATIO = 3e-4
MIN_SINGULAR_RATIO_SINGLE = 3e-3  # the same bound for products that are float32
# A gene is constant if its variance, divided by its squared mean, is at most this. Such a variance is
# the difference of two sums, which has rounding errors of about 1e-13.
NO_VARIANCE = 1e-12
BLOCK = 1024  # products of at most this many cells are copied at once
MAX_DENSE = 2048  # at most this many genes have their products with each other stored


class PrincipalComponents(BaseEstimator):
    """Principal components, equal to those of scikit-learn's PCA with ARPACK.

    There are no more components than the rank of the cells. ARPACK returns random vectors for further
    components, so these would differ between evaluations.
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
        """Fit to `profiles`, `(cells, genes)`, and return their components, `(cells, components)`.

        In comments, X are the centred profiles: the mean of each gene is subtracted.
        """
        n_cells, n_genes = profiles.shape
        mean = mean_variance_axis(profiles, axis=0)[0]
        # Xᵀ X, if it is used below and small enough to be stored
        gram = None
        if n_genes <= min(n_cells, MAX_DENSE):
            centred = profiles.toarray() - mean.astype(profiles.dtype)
            gram = centred.T @ centred

        # The next four functions multiply x by X, Xᵀ, X Xᵀ and Xᵀ X. X itself is never made, because
        # it would be dense.
        def multiply(x: np.ndarray) -> np.ndarray:
            return profiles @ x - mean @ x

        def multiply_transposed(x: np.ndarray) -> np.ndarray:
            return profiles.T @ x - np.multiply.outer(mean, x.sum(0))

        def multiply_cells(x: np.ndarray) -> np.ndarray:
            return multiply(multiply_transposed(x))

        def multiply_genes(x: np.ndarray) -> np.ndarray:
            return multiply_transposed(multiply(x)) if gram is None else gram @ x

        # Find the eigenvectors of the smaller matrix, X Xᵀ or Xᵀ X, by iteration. Then compute the
        # exact singular value decomposition of X within the space of these eigenvectors.
        if n_cells < n_genes:
            basis = find_eigenvectors(multiply_cells, n_cells, self.n_components, profiles.dtype)
            loadings, singular_values, rotation = svd(
                multiply_transposed(basis), full_matrices=False
            )
            left = basis @ rotation.T
            right = loadings.T
        else:
            basis = find_eigenvectors(multiply_genes, n_genes, self.n_components, profiles.dtype)
            left, singular_values, rotation = svd(multiply(basis), full_matrices=False)
            right = rotation @ basis.T
        left, right = svd_flip(left, right, u_based_decision=False)

        # leave out components that are noise
        is_kept = singular_values > MIN_SINGULAR_RATIO * singular_values[0]
        rank = max(1, int(is_kept.sum()))
        self.components_ = right[:rank]
        singular_values = singular_values[:rank]
        self.explained_variance_ = singular_values**2 / (n_cells - 1)
        self._center = mean @ self.components_.T
        return np.asarray(left[:, :rank] * singular_values)

    def transform(self, profiles: sp.csr_matrix) -> np.ndarray:
        """Return the components of `profiles`, `(cells, genes)`: `(cells, components)`."""
        return np.asarray(profiles @ self.components_.T - self._center)


def find_eigenvectors(
    multiply: Callable[[np.ndarray], np.ndarray], size: int, n_components: int, dtype: Any
) -> np.ndarray:
    """Find the eigenvectors of a symmetric matrix with the largest eigenvalues, `(size, n_components)`.

    The eigenvectors are orthonormal. `multiply` returns the product of the matrix and a vector.
    """
    gram = LinearOperator((size, size), multiply, dtype=dtype)
    # The first vector has the dtype of the matrix. A float64 vector would make numpy copy a float32
    # matrix as float64 in each product.
    start = np.random.RandomState(0).uniform(-1, 1, size).astype(dtype)
    # ARPACK fails for a single gene, and for cells without any counts
    if size == 1 or not gram.matvec(start).any():
        return np.eye(size, n_components, dtype=dtype)
    _, vectors = eigsh(gram, n_components, v0=start, rng=0)
    basis, _ = np.linalg.qr(vectors)
    return basis


def project_on_fitted(products: np.ndarray, fitted: np.ndarray, n_components: int) -> np.ndarray:
    """Compute principal components of all cells, fitted on the cells `fitted` (indices).

    `products`, `(cells, cells)`, are the dot products of all pairs of cells. Returns the components,
    `(cells, n_components)`, or fewer if the rank of the fitted cells is lower.
    """
    n_cells = len(products)
    n_fitted = len(fitted)
    # products of the fitted cells, (fitted cells, fitted cells); not copied if all cells are fitted
    gram = products
    if not np.array_equal(fitted, np.arange(n_cells)):
        gram = np.empty((n_fitted, n_fitted), products.dtype)
        for start in range(0, n_fitted, BLOCK):
            rows = fitted[start : start + BLOCK]
            gram[start : start + BLOCK] = products[rows].take(fitted, axis=1)
    means = gram.mean(0)

    # multiply x by the products of the centred fitted cells; centring subtracts means of products
    def multiply(x: np.ndarray) -> np.ndarray:
        multiplied = gram @ (x - x.mean(0))
        return np.asarray(multiplied - multiplied.mean(0))

    basis = find_eigenvectors(multiply, n_fitted, n_components, gram.dtype)
    in_basis = basis.T @ multiply(basis)
    eigenvalues, rotation = np.linalg.eigh(in_basis)
    # eigh returns the smallest eigenvalue first; the largest one comes first here
    singular_values = np.sqrt(np.maximum(eigenvalues[::-1], 0))
    vectors = basis @ rotation[:, ::-1]

    # leave out components that are noise
    min_ratio = MIN_SINGULAR_RATIO if gram.dtype == np.float64 else MIN_SINGULAR_RATIO_SINGLE
    is_kept = singular_values > min_ratio * singular_values[0]
    rank = max(1, int(is_kept.sum()))

    # project all cells, in blocks
    divisors = np.maximum(singular_values[:rank], np.finfo(gram.dtype).tiny)
    directions = vectors[:, :rank] / divisors
    directions -= directions.mean(0)  # so the mean of a cell's products adds nothing
    projected = np.empty((n_cells, rank), products.dtype)
    for start in range(0, n_cells, BLOCK):
        centred = products[start : start + BLOCK].take(fitted, axis=1) - means
        projected[start : start + BLOCK] = centred @ directions
    return projected


def pca(shape: Sequence[int], n_components: int = COMPONENTS) -> PrincipalComponents:
    """Make an unfitted `PrincipalComponents` for profiles of `shape`, (cells, genes).

    A small shape has fewer than `n_components`.
    """
    return PrincipalComponents(max(1, min(n_components, min(shape) - 1)))


def fit_own_components(profiles: sp.csr_matrix) -> np.ndarray:
    """Fit principal components to `profiles`, and return the components of these cells, `(cells, components)`."""
    return np.asarray(pca(profiles.shape).fit_transform(profiles))
