"""Features of perturbations: the mean vector of the genes that a perturbation perturbs.

The vectors of genes come from several sources, such as the model, or files of prior knowledge.

Legend: U units (see `profiles.py`), G genes, V genes of the vocabulary, F features of a gene or unit.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from cellmill.data.genes.names import names_of_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.evaluate.evaluated_model import PCA_CELLS, EvaluatedModel
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.features.gene_vectors import (
    GENE_VECTORS,
    LOADINGS,
    UNTRAINED_GENE_VECTORS,
    expression_statistics,
    gene_vectors,
    scaled_loadings,
)
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.tasks.perturbation.profiles import START_HALF, Profiles
from cellmill.models.gene_vectors import read_vectors
from cellmill.runs.results import ScoredMethod

CO_EXPRESSION = ScoredMethod("co-expression of controls")


def prior_method(name: str) -> ScoredMethod:
    """The name of a source: the gene vectors in the file that option `priors` calls `name`."""
    return ScoredMethod(f"prior {name}")


def average_gene_vectors(
    model: EvaluatedModel,
    profiles: Profiles,
    gene_names: Sequence[Sequence[str]],
    genes: Sequence[Sequence[int]],
    priors: Mapping[str, str],
) -> ByMethod:
    """(U, F) float64 by source: mean vector of a unit's perturbed genes. NaN for a unit whose genes have no
    vector.

    The sources are vectors and loadings of genes in the model, the co-expression of genes in controls,
    and files. `gene_names` are the names of each unit's perturbed genes. `genes` are the vocabulary rows
    of these genes, without genes that the model does not know. `priors` are the paths of the files by
    name. Raises DataError for a file that cannot be used.
    """
    vectors = gene_vectors(model)
    gene_tables = {LOADINGS: scaled_loadings(model.components)}  # (V, F) by source
    for source in (GENE_VECTORS, UNTRAINED_GENE_VECTORS):
        if source in vectors:
            gene_tables[source] = vectors[source]
    gene_tables[CO_EXPRESSION] = correlate_controls(profiles, model.vocabulary.n_genes)
    features = {source: _average_rows(genes, table) for source, table in gene_tables.items()}
    for name, path in priors.items():
        features[prior_method(name)] = _average_prior(Path(path), gene_names, model.vocabulary)
    return features


def correlate_controls(profiles: Profiles, n_genes: int) -> np.ndarray:
    """(V, F) float64: vectors of genes from their correlation over controls. Genes with correlated
    expression have similar vectors. NaN for genes that the dataset does not measure.

    The controls are the first PCA_CELLS controls that predictions start from. `n_genes` is V.
    """
    is_start = (profiles.half == START_HALF) & (profiles.stratum >= 0)
    controls = profiles.expression[np.flatnonzero(is_start)[:PCA_CELLS]]
    # Each gene is divided by its standard deviation. Then all variances are 1, and the loadings are
    # principal components of the correlation of genes.
    sd = expression_statistics(controls)[:, 1]
    weight = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    scaled = sp.csr_matrix(controls @ sp.diags(weight))
    loadings = scaled_loadings(pca(scaled.shape).fit(scaled))
    vectors = np.full((n_genes, loadings.shape[1]), np.nan)
    vectors[profiles.genes] = loadings
    return vectors


def _average_prior(
    path: Path, gene_names: Sequence[Sequence[str]], vocabulary: Vocabulary
) -> np.ndarray:
    """(U, F) float64: mean vector, in the file `path`, of a unit's perturbed genes. The dataset need not
    measure these genes. NaN for a unit of which the file has no gene.
    """
    names_by_gene = names_of_genes(chain.from_iterable(gene_names), vocabulary)
    # Vectors of the model's genes are read too, because `read_vectors` raises DataError for a file
    # that has none of the genes.
    model_genes = [*zip(vocabulary.gene_ids, vocabulary.symbols)]
    vectors = read_vectors(path, [*model_genes, *names_by_gene.values()])
    vectors_of_named = vectors[len(model_genes) :].double().numpy()
    row_by_gene = {}  # genes that the file has
    for row, gene in enumerate(names_by_gene):
        if np.isfinite(vectors_of_named[row]).all():
            row_by_gene[gene] = row
    unit_rows = []
    for genes in gene_names:
        unit_rows.append([row_by_gene[gene] for gene in genes if gene in row_by_gene])
    return _average_rows(unit_rows, vectors_of_named)


def _average_rows(unit_rows: Sequence[Sequence[int]], table: np.ndarray) -> np.ndarray:
    """(U, F) float64: mean of the rows of `table` that `unit_rows` has for each unit. NaN for a unit
    without rows.
    """
    means = np.full((len(unit_rows), table.shape[1]), np.nan)
    for unit, rows in enumerate(unit_rows):
        if rows:
            means[unit] = table[rows].mean(0)
    return means
