"""Vectors of genes, and what the tasks on them share: `gene_embedding` and `grn`
(docs/evaluation.md).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from scipy.stats import rankdata

from cellmill.config.parts.tokens import SPECIAL
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.components import COMPONENTS, PrincipalComponents
from cellmill.evaluate.methods import EMBEDDING, UNTRAINED, ByMethod
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.files import require_file
from cellmill.models.family import Model
from cellmill.runs.results import ScoredMethod, TaskResult

GENE_VECTORS = replace(EMBEDDING, features="embedding of genes")
UNTRAINED_GENE_VECTORS = replace(UNTRAINED, features="untrained embedding of genes")
LOADINGS = ScoredMethod(f"PCA{COMPONENTS} of genes")
RANDOM = ScoredMethod("random vectors")


class GeneTask(Task):
    """Task on the vectors of genes: it reads no cells of a dataset, so its result is computed once
    for all of them.
    """

    reads_cells = False

    def run(self, context: Context) -> TaskResult:
        """Scores of each kind of gene features; skipped for a model without gene vectors."""
        model = context.model
        vectors = gene_vectors(model)
        if not vectors:
            raise Skipped(f"family {model.config['family']} has no vectors of genes")
        vectors[LOADINGS] = scaled_loadings(model.components)
        return self.score(context, vectors, model.training_profiles())

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """Scores of `vectors` (genes, width); `profiles` (cells, genes) are log-normalised
        training cells.
        """
        raise NotImplementedError


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


def read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line that is neither empty nor a comment (#). Raises DataError if
    there is none.
    """
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split("\t")]
            lines.append((number, fields))
    if not lines:
        raise DataError(f"{path}: empty")
    return lines


def auroc(member: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs of a member and a non-member in which the member has the higher score; ties
    count half.
    """
    return float(placements(member, scores)[member].mean())


def placements(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: for a member the share of non-members with a lower score, for a non-member the
    share of members with a higher score.

    The mean over members and the mean over non-members are both the AUROC (DeLong et al. 1988,
    Biometrics 44:837).
    """
    n_members = int(member.sum())
    n_others = len(member) - n_members
    ranks = rankdata(scores)
    # a rank among all minus the rank in its own group is the number of lower scores in the other
    n_lower_others = ranks[member] - rankdata(scores[member])
    n_lower_members = ranks[~member] - rankdata(scores[~member])
    shares = np.empty(len(member))
    shares[member] = n_lower_others / n_others
    shares[~member] = 1 - n_lower_members / n_members
    return shares


def auroc_terms(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: terms whose mean is the AUROC and has DeLong's variance."""
    shares = placements(member, scores)
    area = shares[member].mean()
    n_members = member.sum()
    n_others = len(member) - n_members
    weight = np.where(member, len(member) / n_members, len(member) / n_others)
    terms: np.ndarray = area + weight * (shares - area)
    return terms
