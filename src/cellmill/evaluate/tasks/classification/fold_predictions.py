"""Predicted classes of the tested cells of each fold, for tasks `probe`, `few_shot` and `leave_out`.

Classes are predicted by each pair of features and classifier. All features have the same folds. They
also have the same classifiers, except RANKED, which has one logistic regression only. Classifiers are
fitted on the fitted cells of a fold (`Fold.fitted`). So are all features that are fitted, except the
components of the model's training cells.
"""

from collections.abc import Iterable

import numpy as np
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.classifiers.fitted import (
    make_cached_classifiers,
    precompute_folds,
    predict_all,
    predict_majority,
    without_overhead,
)
from cellmill.evaluate.features.chosen_genes import (
    VARIABLE_GENES,
    RankScores,
    choose_variable_genes,
)
from cellmill.evaluate.features.components import COMPONENTS, pca, project_on_fitted
from cellmill.evaluate.features.products import SharedCells
from cellmill.evaluate.methods import (
    ALL_GENES,
    EMBEDDING,
    MAJORITY,
    RANKED,
    TRAINING_COMPONENTS,
    WITH_COMPONENTS,
    ByMethod,
    Features,
    select_cells,
)
from cellmill.evaluate.prediction_cache import PredictionCache
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context
from cellmill.runs.results import ScoredMethod


@without_overhead()
def predict_folds(
    predictions: ClassPredictions,
    features: Features,
    folds: Iterable[Fold],
    neighbors: int,
    context: Context,
    condition: str = "",
    with_fitted_features: bool = False,
) -> None:
    """Predict the classes of the tested cells of each fold, and record the classes in `predictions`.

    `features` has the features of all cells, `(cells, width)`, by method. Each fold adds RANKED, which is
    fitted on the fitted cells of the fold.

    With `with_fitted_features`, each fold also adds the features of `fit_components`, WITH_COMPONENTS and
    MAJORITY. Only task `few_shot` does without these. It fits equally many cells of each class, so no class
    is the largest.
    """
    labels = predictions.labels
    folds = [*folds]
    shared = context.feature_cache.share(features[ALL_GENES])
    if not context.options.classifiers:  # classifiers of other packages cannot read shared products
        features = {**features, ALL_GENES: shared}
        precompute_folds(shared, labels, folds, context.prediction_cache.predictions)

    # The components of all folds are computed before the ranks of genes. Both computations need much memory,
    # but not at the same time.
    components = [
        fit_components(shared, fold.fitted, COMPONENTS, context.prediction_cache)
        if with_fitted_features
        else {}
        for fold in folds
    ]
    ranked = RankScores(shared.matrix)

    for (repetition, fitted, tested), fold_components in zip(folds, components):
        # add the features that are fitted on the fitted cells of this fold
        selected = ranked.select(fitted, labels[fitted])
        fold_features = {**features, RANKED: selected, **fold_components}
        if with_fitted_features:
            fold_features[WITH_COMPONENTS] = _join_components(features, fitted)

        # fit the classifiers, and predict the tested cells
        fitted_features = select_cells(fold_features, fitted)
        classifiers = make_cached_classifiers(fitted_features, labels[fitted], neighbors, context)
        predicted = predict_all(classifiers, select_cells(fold_features, tested))
        if with_fitted_features:
            predicted[MAJORITY] = predict_majority(labels[fitted], len(tested))
        predictions.record(condition, repetition, tested, predicted)


def _join_components(features: Features, fitted: np.ndarray) -> np.ndarray:
    """Join the embedding and the components of the training cells: `(cells, width + components)`.

    The embedding is first standardised by the means and standard deviations of the cells `fitted` (indices).
    """
    scaler = StandardScaler().fit(features[EMBEDDING][fitted])
    return np.hstack([scaler.transform(features[EMBEDDING]), features[TRAINING_COMPONENTS]])


def fit_components(
    shared: SharedCells, fitted: np.ndarray, n_components: int, cache: PredictionCache
) -> ByMethod:
    """Compute principal components of all cells, `(cells, components)` by method.

    The components are fitted on the cells `fitted` (indices). One method has components of all genes, the
    other has components of the variable genes. If there are at most VARIABLE_GENES genes, all genes count
    as variable, and the second method is left out. The result is empty if there are fewer than two fitted
    cells or fewer than two genes.
    """
    n_genes = shared.shape[1]
    if min(len(fitted), n_genes) < 2:
        return {}
    unfitted = pca((len(fitted), n_genes), n_components)
    features = {
        ScoredMethod(f"PCA{n_components}"): cache.get_or_compute(
            f"{unfitted!r} from products, fitted on {fitted.tolist()}",
            shared,
            lambda: project_on_fitted(shared.products(shared), fitted, unfitted.n_components),
        )
    }
    if n_genes > VARIABLE_GENES:
        profiles = shared.matrix
        variable = profiles[:, choose_variable_genes(profiles[fitted])]
        unfitted_variable = pca((len(fitted), variable.shape[1]), n_components)
        method = ScoredMethod(f"PCA{n_components} of variable genes")
        features[method] = cache.get_or_compute(
            f"{unfitted_variable!r} fitted on {fitted.tolist()}",
            variable,
            lambda: unfitted_variable.fit(variable[fitted]).transform(variable),
        )
    return features
