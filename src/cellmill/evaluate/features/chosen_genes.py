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
    for start in range(0, n, BLOCK):
        block = profiles[start : start + BLOCK]
        counts = np.expm1(block.data).astype(np.float64)
        sums += np.bincount(block.indices, counts, width)
        squares += np.bincount(block.indices, counts**2, width)
    means = sums / n
    variances = squares / n - means**2
    # a smaller variance is a rounding error
    varying = np.flatnonzero(variances > NO_VARIANCE * means**2)
    mean = means[varying]
    dispersion = pd.Series(np.log(variances[varying] / mean))
    bin_of_gene = pd.cut(np.log1p(mean), BINS, labels=False)
    bins = dispersion.groupby(bin_of_gene)
    deviation = dispersion - bins.transform("mean")
    scores = deviation / bins.transform("std")
    scores = scores.fillna(1)  # a gene that is the only one in its bin has no deviation
    order = np.argsort(-scores.to_numpy(), kind="stable")
    return np.sort(varying[order[:VARIABLE_GENES]])


class RankScores:
    """Genes of each cell by the rank of their log counts, standardised within the cell; equal
    values share a rank.

    Stored as the `lowest` value, `(cells,)`, which all genes without a count have, and the `excess` of
    the other genes over it, sparse.
    """

    def __init__(self, profiles: sp.csr_matrix) -> None:
        if not profiles.data.all():
            profiles = profiles.copy()
            profiles.eliminate_zeros()
        n = profiles.shape[0]
        self.lowest = np.empty(n)
        values = np.empty(profiles.nnz)
        for start in range(0, n, BLOCK):
            block = profiles[start : start + BLOCK]
            offset = profiles.indptr[start]
            lowest, excess = _standardise_ranks(block)
            self.lowest[start : start + BLOCK] = lowest
            values[offset : offset + block.nnz] = excess
        # shares the indices of the profiles
        stored = (values, profiles.indices, profiles.indptr)
        self.excess = sp.csr_matrix(stored, shape=profiles.shape)

    def select(self, cells: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Values of all cells, dense, of the RANKED_GENES genes with the largest F statistic between the
        `labels` of some `cells`, in the order of the columns.
        """
        classes, class_of_cell = np.unique(labels, return_inverse=True)
        is_member = np.eye(len(classes))[class_of_cell].T  # (classes, cells)
        sums = np.zeros((len(classes), self.excess.shape[1]))  # (classes, genes)
        squares = np.zeros(self.excess.shape[1])  # (genes,)
        for start in range(0, len(cells), BLOCK):
            block = cells[start : start + BLOCK]
            excess = self.excess[block]
            lowest = self.lowest[block]
            in_class = is_member[:, start : start + BLOCK]
            sums += in_class @ excess + (in_class @ lowest)[:, None]
            # (excess + lowest)²
            squares += 2 * (lowest @ excess) + lowest @ lowest
            squares += np.bincount(excess.indices, excess.data**2, len(squares))
        sizes = is_member.sum(1)[:, None]
        # analysis of variance of each gene
        explained = (sums**2 / sizes).sum(0)
        totals = sums.sum(0)
        between = explained - totals**2 / len(cells)
        within = np.maximum(squares - explained, MIN_WITHIN)
        f = between / within  # up to a factor that all genes share
        order = np.argsort(-f, kind="stable")
        chosen = np.sort(order[:RANKED_GENES])
        return np.asarray(self.excess[:, chosen].toarray() + self.lowest[:, None])


def _standardise_ranks(profiles: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """The `lowest` values and the stored values of the `excess` of some cells (see `RankScores`)."""
    n, width = profiles.shape
    n_expressed = np.diff(profiles.indptr)  # (cells,)
    n_absent = width - n_expressed
    # ranks of the stored values, which follow those of the genes without a count
    cell = np.repeat(np.arange(n), n_expressed)
    ranks_in_cell = pd.Series(profiles.data).groupby(cell).rank()
    ranks = n_absent[cell] + ranks_in_cell.to_numpy()
    absent_rank = (n_absent + 1) / 2  # shared by the genes without a count
    mean_rank = (width + 1) / 2
    squares = np.bincount(cell, ranks**2, n)
    squares = squares + n_absent * absent_rank**2
    variance = squares / width - mean_rank**2
    varies = variance > NO_RANK_VARIANCE * mean_rank**2
    # 1 for a cell whose values are all equal
    scale = np.sqrt(np.where(varies, variance, 1))
    return (absent_rank - mean_rank) / scale, (ranks - absent_rank[cell]) / scale[cell]
