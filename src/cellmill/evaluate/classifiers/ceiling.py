"""Ceiling of tasks that classify cells.

The ceiling is the score of a logistic regression on all genes, which is fitted on half of the labelled
cells. It is about the best score that the data allow.
"""

import numpy as np

from cellmill.evaluate import draws
from cellmill.evaluate.classifiers.fitted import precompute_folds, without_overhead
from cellmill.evaluate.classifiers.logistic import LogisticRegression
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.cell_features import compute_profiles
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.methods import REGRESSION
from cellmill.evaluate.prediction_cache import CachedClassifiers
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context


def predict_ceiling_labels(context: Context) -> np.ndarray:
    """Predict the label of each cell by the ceiling's regression, `(n_obs,)` text; "" for no prediction.

    The scored cells of labels with at least `evaluate.folds` cells are divided into two stratified halves.
    The labels of each half are predicted by a regression that is fitted on the other half.
    """
    column = context.roles["label"]
    seed = context.options.seed
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(column.iloc[scored], context.options.folds, seed)
    cells = scored[chosen.cells]
    labels = chosen.labels
    predicted = np.full(context.reader.n_obs, "", dtype=labels.dtype)
    if len(chosen.classes) < 2:
        return predicted
    shared = context.feature_cache.share(compute_profiles(context, cells))
    classifiers = {REGRESSION: LogisticRegression(standardised=True)}
    # shuffle the cells, sort them by label, and put them into the two halves in turn
    order = seeded(seed, draws.HALVES_OF_LABELS).permutation(len(labels))
    by_label = order[np.argsort(labels[order], kind="stable")]
    first = np.sort(by_label[::2])
    second = np.sort(by_label[1::2])
    folds = [Fold(0, second, first), Fold(0, first, second)]
    predictions = context.prediction_cache.predictions
    with without_overhead():
        precompute_folds(shared, labels, folds, predictions, [REGRESSION])
        for _, fitted, tested in folds:
            half_classifiers = CachedClassifiers(
                {REGRESSION: predictions}, classifiers, shared[fitted], labels[fitted]
            )
            predicted[cells[tested]] = half_classifiers.predict(shared[tested])[REGRESSION]
    return predicted
