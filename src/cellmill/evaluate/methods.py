"""Features that several tasks score, as methods without a classifier; tasks define more."""

from dataclasses import replace
from typing import Any

import numpy as np

from cellmill.evaluate.components import COMPONENTS
from cellmill.runs.results import ScoredMethod

Features = dict[ScoredMethod, Any]
"""Features of each method, `(cells, width)`, dense or sparse."""
Arrays = dict[ScoredMethod, np.ndarray]
"""An array of each method."""
EMBEDDING = ScoredMethod("embedding", kind="model", network="trained")
# all genes of the dataset, if the other features have only the genes that datasets share
FULL_PANEL = replace(EMBEDDING, features="embedding, full panel", kind="variant")
WITH_COMPONENTS = replace(EMBEDDING, features="embedding with PCA50", kind="variant")
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
