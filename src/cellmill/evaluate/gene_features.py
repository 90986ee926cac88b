"""Features of genes: what a model and its training cells know of them."""

from collections.abc import Iterable

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.tokens import SPECIAL
from cellmill.evaluate.score_table import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, EvaluatedModel
from cellmill.models.family import Model

OF_GENES = f"{EMBEDDING} of genes"
RANDOM = "random vectors"


def gene_features(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Features of the vocabulary's genes by name, (genes, width): embeddings, and loadings of training cells' PCA."""
    features = loadings(model)
    for name, network in (
        (OF_GENES, model.network),
        (f"{UNTRAINED} {EMBEDDING} of genes", model.untrained),
    ):
        if (values := gene_embeddings(network)) is not None:
            features[name] = values
    return features


def loadings(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Loadings of the training cells' principal components, (genes, components), under their name."""
    components = model.components
    return {f"PCA{COMPONENTS} of genes": components.components_.T * np.sqrt(components.explained_variance_)}


def all_gene_vectors(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Vectors of the vocabulary's genes in the model by name, (genes, width) each: of its input and of its decoder.

    Behind them those of the model untrained, and random ones of the first's width. Empty for a model without any.
    """
    own = _tables(model.network)
    if not own:
        return {}
    untrained = {f"{UNTRAINED} {name}": values for name, values in _tables(model.untrained).items()}
    shape = next(iter(own.values())).shape
    random = np.random.Generator(np.random.Philox(key=[model.seed, 6])).normal(size=shape)
    return own | untrained | {RANDOM: random}


def _tables(network: Model) -> dict[str, np.ndarray]:
    tables = {} if (values := gene_embeddings(network)) is None else {OF_GENES: values}
    parameters = dict(network.named_parameters())
    for name in sorted(network.objective.gene_rows):
        if name in parameters and parameters[name].ndim == 2 and parameters[name].shape[1] > 1:  # not a bias
            rows = parameters[name].detach()[len(SPECIAL) :].float().cpu().numpy()
            tables[f"{OF_GENES}, {name.removesuffix('.weight')}"] = rows
    return tables


def expression_statistics(profiles: sp.csr_matrix) -> np.ndarray:
    """(genes, 3) float64: mean, standard deviation and share of cells with the gene, of profiles (cells, genes)."""
    n, dense = profiles.shape[0], profiles.astype(np.float64)
    mean = np.asarray(dense.mean(axis=0)).ravel()
    square = np.asarray(dense.multiply(dense).mean(axis=0)).ravel()
    detected = np.bincount(profiles.indices[profiles.data > 0], minlength=profiles.shape[1]) / n
    return np.stack([mean, np.sqrt(np.maximum(square - mean**2, 0)), detected], axis=1)


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
