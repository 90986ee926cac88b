"""Fit of the ridge regression that stage consolidate exports next to a decoder.

Legend: C cells, G hidden genes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.data.arrays import divide
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.hidden_genes.decoder import decode_expression
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.hidden_genes.ridge import GeneRidge
from cellmill.evaluate.task import Context
from cellmill.evaluate.training_shards import read_counts

# at most this many training cells are used; shards are shuffled, so the first are a random sample
MAX_TRAINING_CELLS = 20_000
MIN_REGRESSION_CELLS = 4  # a regression needs at least this many cells, and this many genes
VALIDATION_CELLS = 500  # at most this many validation cells are used
PARTS = 5  # the genes are divided into this many parts, and each part is hidden once
NOISES = 2.0 ** np.arange(8)  # noises to choose from: multiples of the fitted `GeneRidge.noise`
# multiple without validation cells: the one that is chosen on most datasets of docs/quality.md
NOISE_WITHOUT_VALIDATION = 8.0
WEIGHTS = np.arange(11) / 10  # weights of the decoder to choose from
GROUPS = ("dataset", "donor", "batch")  # obs columns; correlations are over cells of equal levels
ROUNDING = 1e-6  # a centred value below this fraction of the value is a rounding error


def fit_ridge(model: EvaluatedModel) -> GeneRidge | None:
    """Fit to the training cells, and choose noise and decoder_weight on the validation cells.

    If there are too few validation cells, or if no gene varies within a group of them, the noise is
    NOISE_WITHOUT_VALIDATION and the weight stays 0.5. Returns None if there are too few training cells or
    genes.
    """
    with threadpool_limits(1):  # sums in one order: the same bits on any number of cores
        counts = read_counts(model.manifest, MAX_TRAINING_CELLS)
        if min(counts.shape) < MIN_REGRESSION_CELLS:
            return None
        ridge = GeneRidge.fit(counts)
        chosen = None
        if model.manifest.splits["val"].n_obs >= MIN_REGRESSION_CELLS:
            with _open_validation(model) as context:
                group = _group_cells(model.manifest, context.reader.n_obs)
                chosen = _choose_noise_and_weight(ridge, context, group)
        if chosen is None:
            return replace(ridge, noise=ridge.noise * np.float32(NOISE_WITHOUT_VALIDATION))
        return chosen


def _group_cells(manifest: Manifest, n_cells: int) -> np.ndarray:
    """Number the groups of the first `n_cells` validation cells, (C,) int64.

    A group is the cells of one dataset, donor and batch. Task imputation scores within larger groups,
    which are folds of donors or batches.
    """
    columns = [name for name in GROUPS if name in manifest.obs_levels]
    levels = CellColumns(manifest, "val", "levels", columns)[:n_cells]
    _, group = np.unique(levels, axis=0, return_inverse=True)
    return group.ravel()


@contextmanager
def _open_validation(model: EvaluatedModel) -> Iterator[Context]:
    """Open the first validation cells as a dataset under evaluation."""
    counts = read_counts(model.manifest, VALIDATION_CELLS, "val")
    var = pd.DataFrame(index=model.vocabulary.gene_ids)
    adata = import_module("anndata").AnnData(counts, var=var)
    n_cells = len(adata)
    with CountsReader(open_memory(adata, "X", "validation cells")) as reader:
        is_scored = np.ones(n_cells, bool)
        yield Context(
            "", reader, is_scored, np.zeros((n_cells, 0)), {}, model, Evaluate.model_validate({})
        )


def _choose_noise_and_weight(
    ridge: GeneRidge, context: Context, group: np.ndarray
) -> GeneRidge | None:
    """Return the regression with the noise and the decoder's weight that predict hidden genes best.

    The measure is the mean over genes of the correlation over cells. It is computed within each `group`,
    (C,) int64. Returns None if no gene varies within a group.
    """
    genes = context.measured_genes
    part_of_gene = seeded(context.model.seed, draws.RIDGE_PARTS).permutation(len(genes)) % PARTS
    every_cell = np.arange(context.reader.n_obs)
    counts = read_rows(context.reader, every_cell)
    scores = np.zeros((len(NOISES), len(WEIGHTS)))  # sums over genes of their correlations
    n_varying = 0  # genes that vary within a group, and so have a correlation
    for part in range(PARTS):
        hidden_genes = genes[part_of_gene == part]
        cells = PartlyHiddenCells.from_context(context, every_cell, counts, hidden_genes)
        vectors = cells.embed(cells.network)
        decoded = decode_expression(cells, vectors)
        assert decoded is not None, "expected a model with cell_decoding"
        decoded = _centre(decoded, group)
        true = _centre(cells.hidden_expression, group)
        n_varying += int(np.count_nonzero(_dot(true, true)))
        for row, by_ridge in enumerate(cells.predict_by_ridge(ridge, NOISES)):
            scores[row] += _score_weights(decoded, _centre(by_ridge, group), true)
    if not n_varying:
        return None
    best, column = np.unravel_index(scores.argmax(), scores.shape)
    noise = ridge.noise * np.float32(NOISES[best])
    weight = np.array([WEIGHTS[column]], np.float32)
    # each gene was hidden in one part, so the sum has one correlation of each gene
    correlation = float(scores.max() / n_varying)
    return replace(ridge, noise=noise, decoder_weight=weight, validation_correlation=correlation)


def _centre(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Subtract each gene's mean over the cells of a group: (C, G). Rounding errors become 0."""
    groups = range(group.max() + 1)
    means = np.stack([values[group == number].mean(0) for number in groups])
    centred = values - means[group]
    is_rounding = np.abs(centred) <= ROUNDING * np.abs(values)
    return np.where(is_rounding, 0, centred)


def _score_weights(decoded: np.ndarray, by_ridge: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Score each of WEIGHTS by the sum over genes of a correlation, (weights,).

    The correlation is between the weighted mean of `decoded` and `by_ridge`, and the `true` expression.
    All are (C, G), with means of 0. A gene without a correlation adds 0.
    """
    # variance of the weighted mean and its covariance with the true expression, (weights, G), from
    # the products of the parts
    weight = WEIGHTS[:, None]
    rest = 1 - weight
    covariance = weight * _dot(decoded, true)
    covariance += rest * _dot(by_ridge, true)
    variance = weight**2 * _dot(decoded, decoded)
    variance += rest**2 * _dot(by_ridge, by_ridge)
    variance += 2 * weight * rest * _dot(decoded, by_ridge)
    product = np.maximum(variance, 0) * _dot(true, true)
    correlations = divide(covariance, np.sqrt(product))
    return np.nan_to_num(correlations).sum(1)


def _dot(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sum over cells of the products of two arrays, (C, G): (G,) float64."""
    return np.einsum("cg,cg->g", first, second, dtype=np.float64)
