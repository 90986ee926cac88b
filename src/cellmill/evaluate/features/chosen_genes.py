"""Choice of genes, by their variance or by their ranks in cells of different labels."""

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.evaluate.features.components import NO_VARIANCE

BLOCK = 1024  # at most this many cells are summed at once
RANKED_GENES = 500  # genes that are chosen by their ranks
VARIABLE_GENES = 2000  # genes that are chosen by their variance
BINS = 20  # bins of mean expression; dispersions are standardised within a bin
# sum of squares of a gene within labels, at least, so that no F statistic is infinite
MIN_WITHIN = 1e-9
# A cell's ranks are all equal if their variance, divided by their squared mean, is below this. A single
# gene of another rank makes it about 1 / genes.
NO_RANK_VARIANCE = 1e-9


def choose_variable_genes(profiles: sp.csr_matrix) -> np.ndarray:
    """Choose the VARIABLE_GENES most variable genes, as indices in ascending order.

    The method is scanpy's highly_variable_genes of flavor seurat. The dispersion of a gene is the variance of
    the counts per 10,000, divided by the mean of these counts. The logarithm of the dispersion is
    standardised over genes with similar means.
    """
    # mean and variance of the counts per 10,000 of each gene, from the log-normalised profiles
    n_cells, n_genes = profiles.shape
    sums = np.zeros(n_genes)
    squares = np.zeros(n_genes)
    for start in range(0, n_cells, BLOCK):
        block = profiles[start : start + BLOCK]
        counts = np.expm1(block.data).astype(np.float64)
        sums += np.bincount(block.indices, counts, n_genes)
        squares += np.bincount(block.indices, counts**2, n_genes)
    means = sums / n_cells
    variances = squares / n_cells - means**2

    # genes that vary: a smaller variance is a rounding error
    varying = np.flatnonzero(variances > NO_VARIANCE * means**2)
    varying_means = means[varying]

    # log dispersion, standardised within bins of the mean
    dispersion = pd.Series(np.log(variances[varying] / varying_means))
    bin_of_gene = pd.cut(np.log1p(varying_means), BINS, labels=False)
    bins = dispersion.groupby(bin_of_gene)
    deviation = dispersion - bins.transform("mean")
    scores = deviation / bins.transform("std")
    scores = scores.fillna(1)  # a gene that is alone in its bin has no standard deviation
    order = np.argsort(-scores.to_numpy(), kind="stable")
    return np.sort(varying[order[:VARIABLE_GENES]])


class RankScores:
    """Ranks of the genes of each cell by their log counts, standardised within the cell.

    Genes with equal values share their mean rank. All genes without a count share the lowest value of the
    cell. So the values are stored as that `lowest` value, `(cells,)`, and as the sparse `excess` of the
    other genes over the lowest value, `(cells, genes)`.
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
        # `excess` shares the indices of the profiles
        stored = (values, profiles.indices, profiles.indptr)
        self.excess = sp.csr_matrix(stored, shape=profiles.shape)

    def select(self, cells: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Choose the RANKED_GENES genes that differ most between labels, and return their values.

        Genes are chosen by the F statistic between the `labels`, `(chosen cells,)`, of `cells` (indices).
        Returns the values of all cells, `(all cells, RANKED_GENES)`, with genes in the order of the
        columns.
        """
        # sum of the values in each class, and sum of squares over all classes
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
            # the sum over cells of (excess + lowest)², multiplied out
            squares += 2 * (lowest @ excess) + lowest @ lowest
            squares += np.bincount(excess.indices, excess.data**2, len(squares))

        # F statistic of each gene by analysis of variance, up to a factor that all genes share
        sizes = is_member.sum(1)[:, None]
        explained = (sums**2 / sizes).sum(0)
        totals = sums.sum(0)
        between = explained - totals**2 / len(cells)
        within = np.maximum(squares - explained, MIN_WITHIN)
        f_statistics = between / within
        order = np.argsort(-f_statistics, kind="stable")
        chosen = np.sort(order[:RANKED_GENES])
        return np.asarray(self.excess[:, chosen].toarray() + self.lowest[:, None])


def _standardise_ranks(profiles: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """Return the `lowest` values of some cells, and the stored values of their `excess`.

    `RankScores` describes both.
    """
    n_cells, n_genes = profiles.shape
    n_expressed = np.diff(profiles.indptr)  # expressed genes of each cell
    n_absent = n_genes - n_expressed

    # Genes without a count have the lowest ranks, 1 to n_absent, and share the mean of these ranks. The
    # ranks of the expressed genes follow.
    cell = np.repeat(np.arange(n_cells), n_expressed)
    ranks_in_cell = pd.Series(profiles.data).groupby(cell).rank()
    ranks = n_absent[cell] + ranks_in_cell.to_numpy()
    absent_rank = (n_absent + 1) / 2
    mean_rank = (n_genes + 1) / 2

    # variance of all ranks of a cell
    squares = np.bincount(cell, ranks**2, n_cells)
    squares = squares + n_absent * absent_rank**2
    variance = squares / n_genes - mean_rank**2
    varies = variance > NO_RANK_VARIANCE * mean_rank**2
    # a cell with ranks that are all equal is divided by 1
    scale = np.sqrt(np.where(varies, variance, 1))
    return (absent_rank - mean_rank) / scale, (ranks - absent_rank[cell]) / scale[cell]
