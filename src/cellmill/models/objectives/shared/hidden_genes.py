"""Metric hidden_genes: correlation over cells of predicted and measured expression of hidden genes.

Views of step HIDDEN_GENES hide every fifth gene from all cells, so a prediction of it cannot be read
off the shown tokens. Each process sums moments of these genes over its cells; the metric is computed
from the sums of all processes.

Legend: C cells with targets, D width of the decoder's last layer, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellmill.data.arrays import TARGET_SUM
from cellmill.models.objectives.shared.views import HIDDEN_GENE_STRIDE
from cellmill.parallel.torch_private import is_dtensor
from cellmill.parallel.vocab_parallel import token_logits

COMPARED_CELLS = 256  # cells whose predicted profiles exist at once
N_MOMENTS = 5  # sums per hidden gene (`GeneMoments`)
MIN_VARIANCE_FRAC = 1e-9  # of the sum of squares; a smaller variance is a rounding error


class GeneMoments(NamedTuple):
    """Sums over cells, `(hidden genes,)` float64 each."""

    predicted: np.ndarray
    measured: np.ndarray
    predicted_squares: np.ndarray
    measured_squares: np.ndarray
    products: np.ndarray


def count_sums(n_tokens: int) -> int:
    """Count the sums of a vocabulary: the number of cells, then N_MOMENTS of each hidden gene."""
    return 1 + N_MOMENTS * -(-n_tokens // HIDDEN_GENE_STRIDE)


def sum_hidden_genes(
    decoded: Tensor, table: Tensor, bias: Tensor, cell: Tensor, genes: Tensor, fractions: Tensor
) -> Tensor:
    """Sum the moments over cells: the number of cells, then `GeneMoments`; `(count_sums(V),)` float64.

    Logits are `decoded` `(C, D)` times `table` `(V, D)` plus `bias` `(V,)`. Entries of the measured
    profiles are by `cell`, token id `genes` and `fractions` of the cell's sum, `(entries,)` each.
    Measured is log(1 + 10,000 fraction). Predicted is the softmax, scaled so that the cell's visible
    genes have the same sum in both.
    """
    logs = torch.log1p(TARGET_SUM * fractions)
    sums = decoded.new_zeros(count_sums(len(bias)), dtype=torch.float64)
    sums[0] = len(decoded)
    for start in range(0, len(decoded), COMPARED_CELLS):
        logits = token_logits(decoded[start : start + COMPARED_CELLS], table, bias)
        if is_dtensor(logits):
            logits = logits.full_tensor()
        entries = (cell >= start) & (cell < start + COMPARED_CELLS)
        profiles = torch.zeros_like(logits)
        profiles[cell[entries] - start, genes[entries]] = logs[entries]
        measured = profiles[:, ::HIDDEN_GENE_STRIDE]
        predicted = logits.softmax(1)[:, ::HIDDEN_GENE_STRIDE]
        visible = profiles.sum(1) - measured.sum(1)
        visible_probability = (1 - predicted.sum(1)).clamp(min=1e-9)
        predicted = predicted * (visible / visible_probability)[:, None]
        moments = (predicted, measured, predicted**2, measured**2, predicted * measured)
        sums[1:] += torch.cat([moment.sum(0, dtype=torch.float64) for moment in moments])
    return sums


def correlate_hidden_genes(sums: Sequence[float]) -> dict[str, float]:
    """Compute the mean of the correlations over hidden genes that a cell expresses.

    `sums` are those of `sum_hidden_genes`. A gene with constant predictions or measurements counts
    as 0. Empty if no cell expresses a hidden gene.
    """
    n_cells = max(sums[0], 1)
    gene = GeneMoments(*np.reshape(sums[1:], (N_MOMENTS, -1)))
    covariance = gene.products - gene.predicted * gene.measured / n_cells
    squares = np.stack([gene.predicted_squares, gene.measured_squares])
    variances = squares - np.stack([gene.predicted, gene.measured]) ** 2 / n_cells
    varies = (variances > MIN_VARIANCE_FRAC * squares).all(0)
    norms = np.sqrt(np.where(varies, variances, 1).prod(0))
    is_expressed = gene.measured > 0
    if not is_expressed.any():
        return {}
    return {"hidden_genes": float((covariance / norms * varies)[is_expressed].mean())}
