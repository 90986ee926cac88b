"""Features of genes: what a model and its training cells know of them."""

from collections.abc import Iterable

import numpy as np
import torch

from cellmill.config.tokens import SPECIAL
from cellmill.evaluate.score_table import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, EvaluatedModel
from cellmill.models.family import Model


def gene_features(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Features of the vocabulary's genes by name, (genes, width): embeddings, and loadings of training cells' PCA."""
    components = model.components
    loadings = components.components_.T * np.sqrt(components.explained_variance_)
    features = {f"PCA{COMPONENTS} of genes": loadings}
    for name, network in (
        (f"{EMBEDDING} of genes", model.network),
        (f"{UNTRAINED} {EMBEDDING} of genes", model.untrained),
    ):
        if (values := gene_embeddings(network)) is not None:
            features[name] = values
    return features


def gene_embeddings(network: Model) -> np.ndarray | None:
    """(genes, width) float32: a model's input embeddings, with those of given vectors; None for a model without."""
    table = getattr(getattr(network, "gene_embedding", None), "weight", None)
    if table is None:
        return None
    with torch.no_grad():
        vectors = getattr(network, "gene_vectors", None)
        whole = table if vectors is None else table + vectors.project(vectors.table.weight)
        return whole[len(SPECIAL) :].float().cpu().numpy()


def features_of(genes: Iterable[list[int]], values: np.ndarray) -> np.ndarray:
    """(units, width): mean of `values` over the genes of each unit; NaN for a unit without any."""
    rows = [values[of_unit].mean(0) if of_unit else np.full(values.shape[1], np.nan) for of_unit in genes]
    return np.array(rows, np.float64)
