"""Metric hidden_genes: correlation over cells of predicted and measured expression of hidden genes.

In its views every fifth gene is hidden from all cells (`HIDDEN_GENE_STRIDE`), so the shown tokens do
not contain the answer. Each process sums moments of these genes over its cells; the metric is computed
from the sums of all processes.

A measurement is log(1 + 10,000 f), where f is the gene's fraction of the cell's expression. With the
default options (likelihood softmax, `weights: log1p`) f is a fraction of the cell's sum of
log(1 + count), so a measurement is a logarithm of a logarithm. With other options it is a fraction of
the cell's sum of counts. So runs with the default options compare only with each other.

A prediction is the gene's probability in the softmax, which estimates f, times a factor per cell: the
sum of the visible genes' measurements divided by the sum of their probabilities. Pearson's r needs no
common scale. But a measurement is a logarithm and a prediction is not, so even exact probabilities
would not reach r = 1.

Legend: C cells with targets, D input width of the decoder's output layer, V size of the vocabulary.
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

CELLS_PER_CHUNK = 256  # cells whose predicted profiles exist at once


class GeneMoments(NamedTuple):
    """Sums over cells, `(hidden genes,)` float64 each.

    Tensors in `_sum_moments`, arrays in `mean_gene_correlation`.
    """

    predicted: Any
    measured: Any
    predicted_squares: Any
    measured_squares: Any
    products: Any


N_MOMENTS = len(GeneMoments._fields)


def n_moment_sums(vocab_size: int) -> int:
    """Return the number of sums: one of cells, and N_MOMENTS of each hidden gene."""
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
    """Sum over cells: the number of cells, then `GeneMoments`; `(n_moment_sums(V),)` float64.

    - `features`, `(C, D)`, are multiplied by `table`, `(V, D)`; plus `bias`, `(V,)`, they give logits
    - entries, `(entries,)` each, are the genes of the measured profiles: `entry_rows` has the row of the
      entry's cell in `features`, and `entry_fractions` have sum 1 in each cell
    """
    log_expression = torch.log1p(TARGET_SUM * entry_fractions)
    sums = features.new_zeros(n_moment_sums(len(bias)), dtype=torch.float64)
    sums[0] = len(features)
    for start in range(0, len(features), CELLS_PER_CHUNK):
        end = start + CELLS_PER_CHUNK
        logits = token_logits(features[start:end], table, bias)
        if is_dtensor(logits):
            logits = logits.full_tensor()
        in_chunk = (entry_rows >= start) & (entry_rows < end)
        profiles = torch.zeros_like(logits)
        profile_rows = entry_rows[in_chunk] - start
        profiles[profile_rows, entry_token_ids[in_chunk]] = log_expression[in_chunk]
        sums[1:] += _sum_moments(logits.softmax(1), profiles)
    return sums


def _sum_moments(probabilities: Tensor, profiles: Tensor) -> Tensor:
    """Compute the `GeneMoments` of some cells, `(N_MOMENTS * hidden genes,)` float64.

    `probabilities` are the model's, and `profiles` the measurements of all genes, `(cells, V)` each.
    """
    measured = profiles[:, ::HIDDEN_GENE_STRIDE]
    hidden_probabilities = probabilities[:, ::HIDDEN_GENE_STRIDE]
    visible_sum = profiles.sum(1) - measured.sum(1)
    visible_probability = (1 - hidden_probabilities.sum(1)).clamp(min=1e-9)
    predicted = hidden_probabilities * (visible_sum / visible_probability)[:, None]
    # float64 before squares are taken: the variance of equal cells is then 0, or too small to count
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
    """Compute metric `hidden_genes`: the mean correlation of hidden genes, each over all cells.

    `sums` come from `sum_gene_moments`. Genes that no cell expresses are left out; without any other
    gene the result is empty. The correlation of constant predictions or measurements is 0.
    """
    n_cells = max(sums[0], 1)
    moments = GeneMoments(*np.reshape(sums[1:], (N_MOMENTS, -1)))  # `(hidden genes,)` each
    # sums over cells of products and of squares of the deviations from the mean
    deviation_products = moments.products - moments.predicted * moments.measured / n_cells
    squares = np.stack([moments.predicted_squares, moments.measured_squares])
    deviation_squares = squares - np.stack([moments.predicted, moments.measured]) ** 2 / n_cells
    has_variance = (deviation_squares > MIN_VARIANCE_FRAC * squares).all(0)
    norms = np.sqrt(np.where(has_variance, deviation_squares, 1).prod(0))
    correlations = deviation_products / norms * has_variance
    is_expressed = moments.measured > 0
    if not is_expressed.any():
        return {}
    return {"hidden_genes": float(correlations[is_expressed].mean())}
