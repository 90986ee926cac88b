"""Methods that several tasks score, and features of cells by method.

A method is features of cells, mostly with a classifier on them. The methods here have no classifier:
they stand for features. Tasks add classifiers, and define further methods.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.evaluate.features.components import COMPONENTS
from cellmill.runs.results import ScoredMethod

Features = dict[ScoredMethod, Any]
"""Features of cells by method, `(cells, width)`, dense or sparse."""
ByMethod = dict[ScoredMethod, np.ndarray]
"""An array by method, such as vectors, scores, class ids or class names."""

# vectors of the evaluated model
EMBEDDING = ScoredMethod("embedding", kind="model", network="trained")
# vectors computed from all genes of a dataset, where the other features have only shared genes
FULL_PANEL = replace(EMBEDDING, features="embedding, full panel", kind="variant")
# vectors of the model next to principal components
WITH_COMPONENTS = replace(EMBEDDING, features=f"embedding with PCA{COMPONENTS}", kind="variant")
# vectors of a model of the same architecture with initial weights
UNTRAINED = ScoredMethod("untrained", network="untrained")
# log-normalised counts of all genes of the dataset
ALL_GENES = ScoredMethod("all genes")
# principal components that were fitted on the model's training cells
TRAINING_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of the training cells")
# standardised ranks of the genes that differ most between labels (`features/chosen_genes.py`)
RANKED = ScoredMethod("rank-z genes, ANOVA")
# the largest class of the fitted cells, predicted for every cell
MAJORITY = ScoredMethod("majority")
# regression on all genes that was fitted on half of the labels (`classifiers/ceiling.py`)
HALF_LABELS = ScoredMethod("all genes with half of the labels", kind="ceiling")

# names of classifiers
REGRESSION = "logistic regression"
UNSCALED_REGRESSION = "logistic regression, unscaled"
KNN = "kNN"


def add_note(method: ScoredMethod, note: str) -> ScoredMethod:
    """Return the method with a note after the name of its features.

    A note says, for example, which cells the features were fitted on.
    """
    return replace(method, features=f"{method.features}{note}")


def group_by_features(methods: Iterable[ScoredMethod]) -> dict[str, list[ScoredMethod]]:
    """Group methods by the name of their features."""
    groups: dict[str, list[ScoredMethod]] = {}
    for method in methods:
        groups.setdefault(method.features, []).append(method)
    return groups


def select_cells(features: Features, cells: np.ndarray) -> Features:
    """Take the features of `cells` (indices)."""
    return {method: values[cells] for method, values in features.items()}


def stack_cells(parts: Iterable[Features]) -> Features:
    """Join the features of several groups of cells, one group after another."""
    all_features = [*parts]
    stacked: Features = {}
    for method in all_features[0]:
        values = [features[method] for features in all_features]
        stacked[method] = sp.vstack(values, "csr") if sp.issparse(values[0]) else np.vstack(values)
    return stacked
