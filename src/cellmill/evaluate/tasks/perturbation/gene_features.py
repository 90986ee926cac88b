"""Features of perturbations: vectors of the perturbed genes, by their source.

Legend: U units, G genes, V genes of the vocabulary, F features of a unit.
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
    """Gene vectors of a file, one of `priors`."""
    return ScoredMethod(f"prior {name}")


def average_gene_vectors(
    model: EvaluatedModel,
    profiles: Profiles,
    gene_names: Sequence[Sequence[str]],
    genes: Sequence[Sequence[int]],
    priors: Mapping[str, str],
) -> ByMethod:
    """(U, F) by source: mean vector of a unit's perturbed genes, NaN for a unit without a vector.

    Sources are the model, the correlation of genes over the controls that predictions start from,
    and the files `priors` by name. `gene_names` are the names of each unit's perturbed genes, and
    `genes` the vocabulary rows of those that the model knows. Raises DataError for an unusable file.
    """
    vectors = gene_vectors(model)
    by_gene = {LOADINGS: scaled_loadings(model.components)}
    for source in (GENE_VECTORS, UNTRAINED_GENE_VECTORS):
        if source in vectors:
            by_gene[source] = vectors[source]
    by_gene[CO_EXPRESSION] = correlate_controls(profiles, model.vocabulary.n_genes)
    features = {source: _average_rows(genes, table) for source, table in by_gene.items()}
    for name, path in priors.items():
        features[prior_method(name)] = _average_prior(Path(path), gene_names, model.vocabulary)
    return features


def correlate_controls(profiles: Profiles, n_genes: int) -> np.ndarray:
    """(V, F): loadings of the correlation of genes over the starting controls; NaN for genes that
    the dataset does not measure. `n_genes` is V.
    """
    is_start = (profiles.half == START_HALF) & (profiles.stratum >= 0)
    controls = profiles.expression[np.flatnonzero(is_start)[:PCA_CELLS]]
    # with unit variances, the components of genes are the components of their correlation
    sd = expression_statistics(controls)[:, 1]
    weight = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    standard = sp.csr_matrix(controls @ sp.diags(weight))
    measured = scaled_loadings(pca(standard.shape).fit(standard))
    loadings = np.full((n_genes, measured.shape[1]), np.nan)
    loadings[profiles.genes] = measured
    return loadings


def _average_prior(
    path: Path, gene_names: Sequence[Sequence[str]], vocabulary: Vocabulary
) -> np.ndarray:
    """(U, F): mean vector in the file of a unit's perturbed genes, measured or not."""
    named = names_of_genes(chain.from_iterable(gene_names), vocabulary)
    # read for all genes of the model too: a file that has none of them is an error
    genes = [*zip(vocabulary.gene_ids, vocabulary.symbols)]
    vectors = read_vectors(path, [*genes, *named.values()])[len(genes) :].double().numpy()
    row_of_name = {}
    for row, name in enumerate(named):
        if np.isfinite(vectors[row]).all():
            row_of_name[name] = row
    rows = []
    for names in gene_names:
        rows.append([row_of_name[name] for name in names if name in row_of_name])
    return _average_rows(rows, vectors)


def _average_rows(unit_rows: Sequence[Sequence[int]], table: np.ndarray) -> np.ndarray:
    """(U, F) float64: mean of `table` over the rows of each unit; NaN for a unit without rows."""
    means = np.full((len(unit_rows), table.shape[1]), np.nan)
    for unit, rows in enumerate(unit_rows):
        if rows:
            means[unit] = table[rows].mean(0)
    return means
