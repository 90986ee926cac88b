"""Fit of the ridge regression that an export has next to its decoder, at stage consolidate."""

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

# training cells used at most; shards are shuffled, so the first cells are a random sample
MAX_TRAINING_CELLS = 20_000
MIN_REGRESSION_CELLS = 4  # cells, or genes, that a regression needs
VALIDATION_CELLS = 500  # used at most
PARTS = 5  # parts of the genes, hidden in turn
NOISES = 2.0 ** np.arange(8)  # in units of the mean residual variance of a gene
NOISE_WITHOUT_VALIDATION = 8.0  # the choice on most datasets of docs/quality.md
WEIGHTS = np.arange(11) / 10  # of the decoder
GROUPS = ("dataset", "donor", "batch")  # obs columns within whose levels correlations are computed


def fit_ridge(model: EvaluatedModel) -> GeneRidge | None:
    """Fit to the training cells, and choose noise and decoder_weight on validation cells.

    Without enough of these, or if no gene varies within a group of them, the noise is
    NOISE_WITHOUT_VALIDATION. None for too few training cells.
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
    """(C,) int64: group of each of the first validation cells: cells of one dataset, donor and batch.

    Task imputation scores within larger groups, its folds of donors or batches.
    """
    columns = [name for name in GROUPS if name in manifest.obs_levels]
    levels = CellColumns(manifest, "val", "levels", columns)[:n_cells]
    _, group = np.unique(levels, axis=0, return_inverse=True)
    return group.ravel()


@contextmanager
def _open_validation(model: EvaluatedModel) -> Iterator[Context]:
    """Validation cells as a dataset."""
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
    """The regression with the noise and the weight of the largest mean correlation of hidden genes
    over cells, within each `group`, (C,) int64. None if no gene varies within a group.
    """
    genes = context.measured_genes
    part_of_gene = seeded(context.model.seed, draws.RIDGE_PARTS).permutation(len(genes)) % PARTS
    every_cell = np.arange(context.reader.n_obs)
    counts = read_rows(context.reader, every_cell)
    scores = np.zeros((len(NOISES), len(WEIGHTS)))
    n_varying = 0  # genes that have a correlation
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
    # a gene is hidden once
    correlation = float(scores.max() / n_varying)
    return replace(ridge, noise=noise, decoder_weight=weight, validation_correlation=correlation)


def _centre(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(C, G): values minus the gene's mean over the cells of the group; 0 for rounding errors."""
    groups = range(group.max() + 1)
    means = np.stack([values[group == number].mean(0) for number in groups])
    centred = values - means[group]
    is_rounding = np.abs(centred) <= 1e-6 * np.abs(values)
    return np.where(is_rounding, 0, centred)


def _score_weights(decoded: np.ndarray, by_ridge: np.ndarray, true: np.ndarray) -> np.ndarray:
    """(weights,): sum over genes of the correlation between the weighted mean and the true expression,
    all (C, G) with means of 0; 0 for a gene without a correlation.
    """
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
    """(G,) float64: sum over cells of the products."""
    return np.einsum("cg,cg->g", first, second, dtype=np.float64)
