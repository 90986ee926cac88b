"""Baseline of objective next_gene: the frequencies of genes at similar ranks in training cells.

The rank of a gene is its position in the cell, whose genes are in rank order. Ranks are divided into
buckets (`data.rank_order.rank_buckets`), and a bucket has one frequency for each gene. To predict the next
gene of a cell, the baseline takes the frequencies of the position's bucket. Candidates are the genes that
the cell does not have yet: the genes at earlier positions of the cell are excluded.
"""

from itertools import pairwise

import numpy as np

from cellmill.data.rank_order import rank_buckets


class RankBaseline:
    """Prediction of each next gene from the frequencies of genes at similar ranks in training cells."""

    def __init__(self, by_rank: np.ndarray) -> None:
        """Compute the frequencies from `by_rank` (buckets, genes) int64, the tokens of training cells."""
        n_genes = by_rank.shape[1]
        # Each bucket gets `n_genes` tokens more, which have the frequencies of all buckets together. So
        # no frequency is 0, and the frequencies of a bucket with few tokens are close to those of all
        overall = (by_rank.sum(0) + 1) / (by_rank.sum() + n_genes)
        smoothed = by_rank + n_genes * overall
        # (buckets, genes): float64 above 0, with sum 1 in each bucket
        self.frequencies: np.ndarray = smoothed / smoothed.sum(1, keepdims=True)
        # (buckets, genes): the vocabulary rows of all genes, the most frequent gene first
        self.genes_by_frequency: np.ndarray = np.argsort(-self.frequencies, axis=1, kind="stable")

    def score(
        self, genes: np.ndarray, positions_in_cell: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which predictions are correct, (targets,) bool, and their cross-entropies, float64.

        `genes` (targets,) int64 are the vocabulary rows of the genes to predict: all genes of a cell in
        their order, one cell after another. `positions_in_cell` (targets,) int64 are their positions.
        """
        buckets = rank_buckets(positions_in_cell)
        is_correct = np.zeros(len(genes), bool)
        cross_entropy = np.zeros(len(genes))
        cell_starts = np.flatnonzero(positions_in_cell == 0)
        for start, end in pairwise([*cell_starts, len(genes)]):
            cell_genes = genes[start:end]
            for bucket in np.unique(buckets[start:end]):
                # the targets of this cell in this bucket: by position in the cell, and among all targets
                positions = np.flatnonzero(buckets[start:end] == bucket)
                targets = start + positions
                is_correct[targets], cross_entropy[targets] = self._score_bucket(
                    bucket, cell_genes, positions
                )
        return is_correct, cross_entropy

    def _score_bucket(
        self, bucket: int, cell_genes: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score the predictions at some positions of one cell, which are all in one bucket.

        Return which predictions are correct, and their cross-entropies, (positions,) each. `cell_genes` are
        the vocabulary rows of the cell's genes, in order.

        A gene of the cell is a candidate up to its own position in the cell. A gene that the cell lacks is
        a candidate at every position. `candidate_until` holds the last position at which each gene is a
        candidate. The prediction at position p is the most frequent gene whose `candidate_until` is at
        least p. In the order of frequency, it is the first gene at which the running maximum of
        `candidate_until` reaches p. In a cell with genes 0 and 2, of four genes:

            genes_by_frequency    0 3 2 1
            candidate_until       0 2 1 2
            running maximum       0 2 2 2
            predicted             0 at position 0, 3 at position 1
        """
        # The probability of a gene is its frequency divided by the frequency of all candidates. These
        # are all genes except the earlier genes of the cell. Rounding errors must not make the frequency
        # of all candidates smaller than the gene's own frequency
        frequencies = self.frequencies[bucket][cell_genes]
        earlier_frequency = np.cumsum(frequencies) - frequencies
        candidate_frequency = np.maximum(1 - earlier_frequency, frequencies)
        cross_entropy = np.log(candidate_frequency[positions] / frequencies[positions])

        genes_by_frequency = self.genes_by_frequency[bucket]
        candidate_until = np.full(len(genes_by_frequency), len(cell_genes))
        candidate_until[cell_genes] = np.arange(len(cell_genes))
        running_max = np.maximum.accumulate(candidate_until[genes_by_frequency])
        predicted = genes_by_frequency[np.searchsorted(running_max, positions)]
        return predicted == cell_genes[positions], cross_entropy
