"""Methods that several tasks score, and the features of cells by method.

A method without a classifier names features. Tasks define more methods.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.evaluate.features.components import COMPONENTS
from cellmill.runs.results import ScoredMethod

Features = dict[ScoredMethod, Any]
"""Features of each method, `(cells, width)`, dense or sparse."""
ByMethod = dict[ScoredMethod, np.ndarray]
"""An array of each method: vectors, scores, class ids or class names."""
EMBEDDING = ScoredMethod("embedding", kind="model", network="trained")
# all genes of the dataset, if the other features have only the genes that datasets share
FULL_PANEL = replace(EMBEDDING, features="embedding, full panel", kind="variant")
WITH_COMPONENTS = replace(EMBEDDING, features=f"embedding with PCA{COMPONENTS}", kind="variant")
# the same architecture with initial weights
UNTRAINED = ScoredMethod("untrained", network="untrained")
ALL_GENES = ScoredMethod("all genes")
TRAINING_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of the training cells")
RANKED = ScoredMethod("rank-z genes, ANOVA")
MAJORITY = ScoredMethod("majority")
HALF_LABELS = ScoredMethod("all genes with half of the labels", kind="ceiling")
REGRESSION = "logistic regression"
UNSCALED_REGRESSION = "logistic regression, unscaled"
KNN = "kNN"


def add_note(method: ScoredMethod, note: str) -> ScoredMethod:
    """The method with a note after the name of its features, such as the cells it is fitted on."""
    return replace(method, features=f"{method.features}{note}")


def group_by_features(methods: Iterable[ScoredMethod]) -> dict[str, list[ScoredMethod]]:
    """Methods by the name of their features."""
    groups: dict[str, list[ScoredMethod]] = {}
    for method in methods:
        groups.setdefault(method.features, []).append(method)
    return groups


def select_cells(features: Features, cells: np.ndarray) -> Features:
    """Features of some of the `cells` (indices)."""
    return {method: values[cells] for method, values in features.items()}


def stack_cells(parts: Iterable[Features]) -> Features:
    """Features of the cells of all parts, one part after another."""
    all_features = [*parts]
    stacked: Features = {}
    for method in all_features[0]:
        values = [features[method] for features in all_features]
        stacked[method] = sp.vstack(values, "csr") if sp.issparse(values[0]) else np.vstack(values)
    return stacked
