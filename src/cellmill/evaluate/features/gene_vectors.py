"""Features of genes that tasks on genes compare.

A gene has a vector in a model, a row of loadings of principal components, and statistics of its
expression.
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
    """Vectors of the vocabulary's genes, (genes, width), by method.

    A model has a table of gene vectors at its input, in its decoder, or in both. Each table of the model
    is a method, and so is the same table of the untrained model. A further method has random vectors,
    which are as wide as the model's first table. The result is empty if the model has no such table.
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
    """Tables of `network` that have a vector for each gene, (genes, width) float32, by name."""
    tables = {}
    parameters = dict(network.named_parameters())
    table = getattr(getattr(network, "gene_embedding", None), "weight", None)
    if table is not None:
        # a model that was given gene vectors adds their projection to the vectors that it learns
        given_vectors = getattr(network, "gene_vectors", None)
        if given_vectors is not None:
            table = table + given_vectors.project(given_vectors.table.weight)
        tables[GENE_VECTORS.features] = table
    for name in sorted(network.objective.gene_rows):
        parameter = parameters.get(name)
        # a bias also has a row for each gene, but a single number is not a vector
        if parameter is not None and parameter.ndim == 2 and parameter.shape[1] > 1:
            module = name.removesuffix(".weight")
            tables[f"{GENE_VECTORS.features}, {module}"] = parameter
    # the first rows of a table belong to special tokens
    return {name: table[len(SPECIAL) :].float().cpu().numpy() for name, table in tables.items()}


def scaled_loadings(components: PrincipalComponents) -> np.ndarray:
    """Loadings of each gene, (genes, components) float64.

    Each column is multiplied by the standard deviation of its component over cells.
    """
    standard_deviations = np.sqrt(components.explained_variance_)
    return np.asarray(components.components_.T * standard_deviations)


def expression_statistics(profiles: sp.csr_matrix) -> np.ndarray:
    """Three statistics of each gene in `profiles`, (cells, genes).

    Returns (genes, 3) float64: the mean, the standard deviation, and the share of cells that express
    the gene.
    """
    n_cells, n_genes = profiles.shape
    values = profiles.astype(np.float64)
    means = np.asarray(values.mean(axis=0)).ravel()
    mean_squares = np.asarray(values.multiply(values).mean(axis=0)).ravel()
    # rounding can make the variance of a constant gene negative
    standard_deviations = np.sqrt(np.maximum(mean_squares - means**2, 0))
    expressed_genes = profiles.indices[profiles.data > 0]
    expressing_fracs = np.bincount(expressed_genes, minlength=n_genes) / n_cells
    return np.stack([means, standard_deviations, expressing_fracs], axis=1)
