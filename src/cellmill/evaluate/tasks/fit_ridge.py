"""Fit of the ridge regression that an export has next to its decoder, at stage consolidate."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.reader import CountsReader
from cellmill.evaluate.evaluated import EvaluatedModel, read_counts
from cellmill.evaluate.features import read_rows
from cellmill.evaluate.inference.ridge import GeneRidge
from cellmill.evaluate.scores import seeded
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.hidden_genes import HiddenGenes, decode_expression
from cellmill.evaluate.tasks.imputation import MAX_FITTED, MIN_CELLS, correlation

VALIDATION_CELLS = 500  # used at most
PARTS = 5  # parts of the genes, hidden in turn
NOISES = 2.0 ** np.arange(8)  # in units of the mean residual variance of a gene
NOISE_WITHOUT_VALIDATION = 8.0  # the choice on most datasets of docs/quality.md
WEIGHTS = np.arange(11) / 10  # of the decoder


def fit_ridge(model: EvaluatedModel) -> GeneRidge | None:
    """Fit to the training cells, and choose noise and decoder_weight on validation cells.

    None for too few cells.
    """
    with threadpool_limits(1):  # sums in one order: the same bits on any number of cores
        counts = read_counts(model.manifest, MAX_FITTED)[:MAX_FITTED]
        if min(counts.shape) < MIN_CELLS:
            return None
        ridge = GeneRidge.fit(counts)
        if model.manifest.splits["val"].n_obs < MIN_CELLS:
            return replace(ridge, noise=ridge.noise * np.float32(NOISE_WITHOUT_VALIDATION))
        with _open_validation(model) as context:
            return _choose(ridge, context)


@contextmanager
def _open_validation(model: EvaluatedModel) -> Iterator[Context]:
    """Validation cells as a dataset."""
    counts = read_counts(model.manifest, VALIDATION_CELLS, "val")[:VALIDATION_CELLS]
    var = pd.DataFrame(index=model.vocabulary.gene_ids)
    adata = import_module("anndata").AnnData(counts, var=var)
    n_cells = len(adata)
    with CountsReader(open_memory(adata, "X", "validation cells")) as reader:
        is_scored = np.ones(n_cells, bool)
        yield Context(
            "", reader, is_scored, np.zeros((n_cells, 0)), {}, model, Evaluate.model_validate({})
        )


def _choose(ridge: GeneRidge, context: Context) -> GeneRidge:
    """The regression with the noise, and then the weight, of the largest mean correlation over cells of
    hidden genes.
    """
    genes = context.measured_genes
    part_of_gene = seeded(context.model.seed, 10).permutation(len(genes)) % PARTS
    counts = read_rows(context.reader, np.arange(context.reader.n_obs))
    noisy = [replace(ridge, noise=ridge.noise * np.float32(noise)) for noise in NOISES]
    decoded_parts = []
    measured_parts = []
    predicted_parts: list[list[np.ndarray]] = [[] for _ in noisy]
    for part in range(PARTS):
        hidden = HiddenGenes(context, counts, genes[part_of_gene == part])
        vectors = hidden.embed(hidden.network)
        decoded = decode_expression(hidden, vectors)
        assert decoded is not None, "expected a model with cell_decoding"
        decoded_parts.append(decoded)
        measured_parts.append(hidden.expression())
        for candidate, predictions in zip(noisy, predicted_parts):
            predictions.append(hidden.predict_by(candidate))
    decoded = np.concatenate(decoded_parts, axis=1)
    measured = np.concatenate(measured_parts, axis=1)
    by_noise = [np.concatenate(predictions, axis=1) for predictions in predicted_parts]
    best = int(np.argmax([_score(predicted, measured) for predicted in by_noise]))
    chosen = noisy[best]
    weighted = [
        replace(chosen, decoder_weight=np.array([weight], np.float32)) for weight in WEIGHTS
    ]
    scores = [_score(each.mix(decoded, by_noise[best]), measured) for each in weighted]
    return weighted[int(np.argmax(scores))]


def _score(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean correlation of the genes; 0 for a gene without one."""
    return float(np.nan_to_num(correlation(predicted, measured)).mean())
