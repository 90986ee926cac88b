"""Features of genes: their vectors in a model, the loadings of principal components, and statistics of
their expression.
"""

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.components import COMPONENTS, PrincipalComponents
from cellmill.evaluate.methods import EMBEDDING, UNTRAINED, ByMethod
from cellmill.models.family import Model
from cellmill.runs.results import ScoredMethod

GENE_VECTORS = replace(EMBEDDING, features="embedding of genes")
UNTRAINED_GENE_VECTORS = replace(UNTRAINED, features="untrained embedding of genes")
LOADINGS = ScoredMethod(f"PCA{COMPONENTS} of genes")
RANDOM = ScoredMethod("random vectors")


def gene_vectors(model: EvaluatedModel) -> ByMethod:
    """Vectors of the vocabulary's genes, (genes, width), by method; empty for a model without any.

    Methods are the input and the decoder of the model, the same tables of the untrained model, and
    random vectors as wide as the model's first table.
    """
    vectors = {}
    for name, table in _read_tables(model.network).items():
        vectors[replace(EMBEDDING, features=name)] = table
    if not vectors:
        return {}
    shape = next(iter(vectors.values())).shape
    for name, table in _read_tables(model.untrained).items():
        vectors[replace(UNTRAINED, features=f"untrained {name}")] = table
    vectors[RANDOM] = seeded(model.seed, draws.RANDOM_GENE_VECTORS).normal(size=shape)
    return vectors


@torch.no_grad()
def _read_tables(network: Model) -> dict[str, np.ndarray]:
    """Tables with a row for each gene, (genes, width), by name."""
    tables = {}
    parameters = dict(network.named_parameters())
    table = getattr(getattr(network, "gene_embedding", None), "weight", None)
    if table is not None:
        # a model with given gene vectors adds their projection to its own
        given_vectors = getattr(network, "gene_vectors", None)
        if given_vectors is not None:
            table = table + given_vectors.project(given_vectors.table.weight)
        tables[GENE_VECTORS.features] = table
    for name in sorted(network.objective.gene_rows):
        parameter = parameters.get(name)
        # a bias has no vectors
        if parameter is not None and parameter.ndim == 2 and parameter.shape[1] > 1:
            module = name.removesuffix(".weight")
            tables[f"{GENE_VECTORS.features}, {module}"] = parameter
    return {name: table[len(SPECIAL) :].float().cpu().numpy() for name, table in tables.items()}


def scaled_loadings(components: PrincipalComponents) -> np.ndarray:
    """(genes, components) float64: each component in units of its standard deviation over cells."""
    sd = np.sqrt(components.explained_variance_)
    return np.asarray(components.components_.T * sd)


def expression_statistics(profiles: sp.csr_matrix) -> np.ndarray:
    """(genes, 3) float64: mean, standard deviation and share of cells with the gene, of profiles
    (cells, genes).
    """
    n_cells, n_genes = profiles.shape
    values = profiles.astype(np.float64)
    mean = np.asarray(values.mean(axis=0)).ravel()
    mean_square = np.asarray(values.multiply(values).mean(axis=0)).ravel()
    # rounding can make the variance of a constant negative
    sd = np.sqrt(np.maximum(mean_square - mean**2, 0))
    expressed = profiles.indices[profiles.data > 0]
    detected = np.bincount(expressed, minlength=n_genes) / n_cells
    return np.stack([mean, sd, detected], axis=1)
