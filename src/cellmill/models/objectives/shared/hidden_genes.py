"""Metric hidden_genes: the correlation of predicted and measured expression, for genes that are hidden.

The views of this metric hide every fifth gene of the vocabulary from all cells (`HIDDEN_GENE_STRIDE`), so
the shown tokens do not contain the answer. For each hidden gene the predictions and the measurements are
correlated over all cells, and the metric is the mean of these correlations. Each process sums moments of
the hidden genes over its own cells, and the metric is computed from the sums of all processes.

The measurement of a gene in a cell is log(1 + 10,000 f), where f is the gene's fraction of the cell's
expression. With the default options (likelihood softmax, `weights: log1p`) f is a fraction of the cell's
sum of log(1 + count), so a measurement is the logarithm of a logarithm. With other options f is a fraction
of the cell's sum of counts. So the metric of a run with the default options can only be compared with the
metrics of other runs with the default options.

The prediction of a gene in a cell is the gene's probability in the softmax, multiplied by a factor of the
cell. The probability estimates f. The factor is the sum of the measurements of the cell's visible genes,
divided by the sum of their probabilities. Pearson's r does not need a common scale of predictions and
measurements. But a measurement is a logarithm and a prediction is not, so even exact probabilities would
not reach r = 1.

In the shapes below, "cells" are the cells with something to predict, and "vocabulary" is the number of
token ids. Token id 0 stands for padding. It counts as a hidden gene, but no cell expresses it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellmill.data.arrays import TARGET_SUM
from cellmill.models.objective import MIN_VARIANCE_FRAC
from cellmill.models.objectives.shared.views import HIDDEN_GENE_STRIDE
from cellmill.parallel.torch_private import is_dtensor
from cellmill.parallel.vocab_parallel import token_logits

CELLS_PER_CHUNK = 256
"""At most this number of cells have their predicted profiles in memory at once."""
MIN_VISIBLE_PROBABILITY = 1e-9
"""A cell's probability of all visible genes is raised to at least this number before it divides."""


class GeneMoments(NamedTuple):
    """Sums over cells, for each hidden gene, of predictions, measurements, their squares and products.

    Each field is (hidden genes,) float64. The fields are tensors in `_sum_moments`, and arrays in
    `mean_gene_correlation`.
    """

    predicted: Any
    measured: Any
    predicted_squares: Any
    measured_squares: Any
    products: Any


N_MOMENTS = len(GeneMoments._fields)


def n_moment_sums(vocab_size: int) -> int:
    """Return how many sums `sum_gene_moments` returns.

    One sum is the number of cells. Each hidden gene has N_MOMENTS further sums.
    """
    n_hidden_genes = math.ceil(vocab_size / HIDDEN_GENE_STRIDE)
    return 1 + N_MOMENTS * n_hidden_genes


def sum_gene_moments(
    features: Tensor,
    table: Tensor,
    bias: Tensor,
    entry_rows: Tensor,
    entry_token_ids: Tensor,
    entry_fractions: Tensor,
) -> Tensor:
    """Return the number of cells, followed by the `GeneMoments` over these cells, as one tensor.

    The result is (n_moment_sums(vocabulary),) float64. The fields of `GeneMoments` follow each other.

    The predictions come from `features` (cells, feature width). The logits of a cell are its features
    multiplied by `table` (vocabulary, feature width), plus `bias` (vocabulary,).

    The measurements come from entries. An entry is one gene of one cell:

    - `entry_rows` (entries,): the row of the entry's cell in `features`
    - `entry_token_ids` (entries,): the token id of the gene
    - `entry_fractions` (entries,): the gene's fraction of the cell's expression, with sum 1 in each cell
    """
    log_expression = torch.log1p(TARGET_SUM * entry_fractions)
    sums = features.new_zeros(n_moment_sums(len(bias)), dtype=torch.float64)
    sums[0] = len(features)
    for start in range(0, len(features), CELLS_PER_CHUNK):
        end = start + CELLS_PER_CHUNK
        logits = token_logits(features[start:end], table, bias)
        if is_dtensor(logits):
            logits = logits.full_tensor()

        # measured profiles of the chunk, (cells, vocabulary): genes without an entry are 0
        profiles = torch.zeros_like(logits)
        is_in_chunk = (entry_rows >= start) & (entry_rows < end)
        profile_rows = entry_rows[is_in_chunk] - start
        profiles[profile_rows, entry_token_ids[is_in_chunk]] = log_expression[is_in_chunk]
        sums[1:] += _sum_moments(logits.softmax(1), profiles)
    return sums


def _sum_moments(probabilities: Tensor, profiles: Tensor) -> Tensor:
    """Compute the `GeneMoments` of some cells, (N_MOMENTS * hidden genes,) float64.

    `probabilities` are the probabilities that the model gives to all genes, and `profiles` the
    measurements of all genes. Both are (cells, vocabulary).
    """
    measured = profiles[:, ::HIDDEN_GENE_STRIDE]
    hidden_probabilities = probabilities[:, ::HIDDEN_GENE_STRIDE]

    # the factor of each cell, which brings probabilities to the scale of its measurements
    visible_sum = profiles.sum(1) - measured.sum(1)
    visible_probability = (1 - hidden_probabilities.sum(1)).clamp(min=MIN_VISIBLE_PROBABILITY)
    predicted = hidden_probabilities * (visible_sum / visible_probability)[:, None]

    # Convert to float64 before squares are taken. If all cells are equal, the variance is then 0, or
    # below MIN_VARIANCE_FRAC
    predicted = predicted.double()
    measured = measured.double()
    terms = GeneMoments(
        predicted=predicted,
        measured=measured,
        predicted_squares=predicted**2,
        measured_squares=measured**2,
        products=predicted * measured,
    )
    return torch.cat([term.sum(0) for term in terms])


def mean_gene_correlation(sums: Sequence[float]) -> dict[str, float]:
    """Compute metric `hidden_genes`: the mean of the correlations of all hidden genes.

    `sums` are results of `sum_gene_moments`, added up over all cells. A gene that no cell expresses is left
    out. If no cell expresses any hidden gene, the result is empty. If the predictions or the measurements
    of a gene are constant, its correlation is 0.
    """
    n_cells = max(sums[0], 1)
    moments = GeneMoments(*np.reshape(sums[1:], (N_MOMENTS, -1)))

    # A deviation is the difference of a cell's prediction or measurement from the mean over cells. The
    # products of both deviations, and the squares of each deviation, are summed over cells. The shapes
    # are (hidden genes,) and (2, hidden genes)
    deviation_products = moments.products - moments.predicted * moments.measured / n_cells
    squares = np.stack([moments.predicted_squares, moments.measured_squares])
    deviation_squares = squares - np.stack([moments.predicted, moments.measured]) ** 2 / n_cells

    # a sum of squared deviations below MIN_VARIANCE_FRAC of the sum of squares is a rounding error
    has_variance = (deviation_squares > MIN_VARIANCE_FRAC * squares).all(0)
    norms = np.sqrt(np.where(has_variance, deviation_squares, 1).prod(0))
    correlations = deviation_products / norms * has_variance

    is_expressed = moments.measured > 0
    if not is_expressed.any():
        return {}
    return {"hidden_genes": float(correlations[is_expressed].mean())}
