"""Regressions that predict hidden genes from features of the visible genes.

Each regression is fitted twice: to standardised features, and to the features without scaling.
Standardising gives more weight to components with a small variance. This helps or hurts, depending on
the number of cells.

Legend: C cells, V genes of the vocabulary, G hidden genes, H hidden width.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.components import COMPONENTS, pca
from cellmill.evaluate.features.expression import ALPHAS
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.methods import EMBEDDING, KNN, UNTRAINED, ByMethod, select_cells
from cellmill.runs.results import ScoredMethod

VISIBLE_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of visible genes")
GENE_MEANS = ScoredMethod("gene means")


class VisibleFeatures(NamedTuple):
    """Profiles and embeddings of some cells. Both are computed from the visible genes only."""

    profiles: sp.csr_matrix  # (C, V) float32: log(1 + counts per 10,000)
    vectors: ByMethod  # (C, H) embeddings, by the model and by the untrained model

    @classmethod
    def compute(cls, cells: PartlyHiddenCells, model: EvaluatedModel) -> Self:
        """Features of all of `cells`."""
        vectors = {EMBEDDING: cells.embed(model.network), UNTRAINED: cells.embed(model.untrained)}
        return cls(cells.visible_profiles, vectors)

    def select(self, cells: np.ndarray) -> Self:
        """Features of some of the cells, `cells` (indices)."""
        return type(self)(self.profiles[cells], select_cells(self.vectors, cells))


def predict_by_regressions(
    expression: np.ndarray, fitted: VisibleFeatures, tested: VisibleFeatures, neighbors: int
) -> ByMethod:
    """Predicted expression of the hidden genes in the tested cells, (tested cells, G) by method.

    The methods are regressions on the embeddings, regressions on principal components of the profiles,
    and the mean of the fitted cells. `expression`, (fitted cells, G), is the expression of the hidden
    genes in the fitted cells. `neighbors` is the k of the kNN regressions, at most the number of fitted
    cells.
    """
    components = pca(fitted.profiles.shape).fit(fitted.profiles)
    fitted_features = fitted.vectors | {VISIBLE_COMPONENTS: components.transform(fitted.profiles)}
    tested_features = tested.vectors | {VISIBLE_COMPONENTS: components.transform(tested.profiles)}
    n_neighbors = min(neighbors, len(expression))
    predicted: ByMethod = {}
    for method, values in fitted_features.items():
        for ending, scaler in (("", StandardScaler()), (", unscaled", None)):
            regressors = {"ridge": RidgeCV(ALPHAS), KNN: KNeighborsRegressor(n_neighbors)}
            for name, regressor in regressors.items():
                regression = make_pipeline(scaler, regressor).fit(values, expression)
                regressed = replace(method, classifier=f"{name}{ending}")
                predicted[regressed] = regression.predict(tested_features[method])
    n_tested = tested.profiles.shape[0]
    predicted[GENE_MEANS] = np.tile(expression.mean(0), (n_tested, 1))
    return predicted
