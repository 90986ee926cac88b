"""Genes chosen by their variance, or by their ranks in cells of different labels."""

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.evaluate.features.components import NO_VARIANCE

BLOCK = 1024  # cells that are summed at once
RANKED_GENES = 500
VARIABLE_GENES = 2000
BINS = 20  # bins of mean expression, within which dispersions are standardised
MIN_WITHIN = 1e-9  # variation of a gene within labels, at least: no F is infinite
# variance of a cell's ranks relative to their squared mean, below which all are equal: one other
# rank gives about 1 / genes
NO_RANK_VARIANCE = 1e-9


def choose_variable_genes(profiles: sp.csr_matrix) -> np.ndarray:
    """The VARIABLE_GENES most variable genes, ascending: scanpy's highly_variable_genes of flavor
    seurat.

    Variance over mean of counts per 10,000; its logarithm is standardised over genes of similar means.
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

    def __init__(self, profiles: sp.csr_matrix) -> None:
        if not profiles.data.all():
            profiles = profiles.copy()
            profiles.eliminate_zeros()
        n = profiles.shape[0]
        self.zero = np.empty(n)
        values = np.empty(profiles.nnz)
        for first in range(0, n, BLOCK):
            block = profiles[first : first + BLOCK]
            start = profiles.indptr[first]
            zero, above = _standardise_ranks(block)
            self.zero[first : first + BLOCK] = zero
            values[start : start + block.nnz] = above
        # shares the indices of the profiles
        stored = (values, profiles.indices, profiles.indptr)
        self.above = sp.csr_matrix(stored, shape=profiles.shape)

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
        within = np.maximum(squares - explained, MIN_WITHIN)
        f = between / within  # up to a factor that all genes share
        order = np.argsort(-f, kind="stable")
        chosen = np.sort(order[:RANKED_GENES])
        values = self.above[:, chosen].toarray()
        return np.asarray(values + self.zero[:, None])


def _standardise_ranks(profiles: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """`zero`, and the stored values of `above`, of `RankedGenes` for some cells."""
    n, width = profiles.shape
    n_expressed = np.diff(profiles.indptr)  # (cells,)
    n_absent = width - n_expressed
    # cell of each stored value
    cell = np.repeat(np.arange(n), n_expressed)
    ranks_in_cell = pd.Series(profiles.data).groupby(cell).rank()
    ranks = n_absent[cell] + ranks_in_cell.to_numpy()
    middle = (width + 1) / 2  # mean rank of a cell
    lowest = (n_absent + 1) / 2  # shared rank of the genes without a count
    squares = np.bincount(cell, ranks**2, n)
    squares = squares + n_absent * lowest**2
    variance = squares / width - middle**2
    varies = variance > NO_RANK_VARIANCE * middle**2
    # 1 for a cell whose values are all equal
    scale = np.sqrt(np.where(varies, variance, 1))
    return (lowest - middle) / scale, (ranks - lowest[cell]) / scale[cell]
