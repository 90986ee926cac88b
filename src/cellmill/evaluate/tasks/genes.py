"""Shared parts of the gene tasks: features of genes, readers of gene files, and scores of rankings.

Users' files name genes as sets (GMT), lists or edges; the readers return names, which are then matched to a vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from scipy.stats import rankdata
from sklearn.decomposition import PCA

from cellmill.config.parts.tokens import SPECIAL
from cellmill.errors import DataError
from cellmill.evaluate.scores import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, Context, EvaluatedModel, Task, TaskResult
from cellmill.files import require_file
from cellmill.models.family import Model

OF_GENES = f"{EMBEDDING} of genes"
RANDOM = "random vectors"


class GeneTask(Task):
    """Task on the vectors of genes: it reads no cells of a dataset, so its result is computed once for all of them."""

    _known: TaskResult | None = None

    def run(self, context: Context) -> TaskResult:
        """Scores of each kind of gene features; skipped for a model without gene vectors."""
        model = context.model
        if self._known is None:
            if vectors := all_gene_vectors(model):
                self._known = self.judge(context, vectors | loadings(model), model.training_profiles())
            else:
                self._known = TaskResult(skipped=f"family {model.config['family']} has no vectors of genes")
        return self._known

    def judge(self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix) -> TaskResult:
        """Scores of `vectors` (genes, width) by name; `profiles` (cells, genes) are log-normalised training cells."""
        raise NotImplementedError


def gene_features(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Features of the vocabulary's genes by name, (genes, width): loadings of training cells' PCA, and embeddings."""
    named = ((OF_GENES, model.network), (f"{UNTRAINED} {EMBEDDING} of genes", model.untrained))
    embeddings = {name: values for name, network in named if (values := gene_embeddings(network)) is not None}
    return loadings(model) | embeddings


def loadings(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Loadings of the training cells' principal components, (genes, components), under their name."""
    return {f"PCA{COMPONENTS} of genes": loadings_of(model.components)}


def loadings_of(components: PCA) -> np.ndarray:
    """(genes, components) float64: each component in units of its standard deviation over cells."""
    return np.asarray(components.components_.T * np.sqrt(components.explained_variance_))


def all_gene_vectors(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Vectors of the vocabulary's genes by name, (genes, width): in the model's input and decoder, in the same of the
    untrained model, and random ones of the first's width. Empty for a model without any."""
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


Edge = tuple[str, str]
"""Transcription factor and target, as they are written."""


def read_gene_sets(path: Path) -> dict[str, list[str]]:
    """Genes of each set of a GMT file, each once. Raises DataError naming the malformed line."""
    sets: dict[str, list[str]] = {}
    for number, fields in _lines(path):
        genes = [gene for gene in fields[2:] if gene]
        if not fields[0] or not genes:
            raise DataError(
                f"{path}, line {number}: expected a name, a description and genes, separated by tabs (GMT), got "
                f"{len(fields)} columns"
            )
        if fields[0] in sets:
            raise DataError(f"{path}, line {number}: a second set {fields[0]!r}; leave one out")
        sets[fields[0]] = [*dict.fromkeys(genes)]
    return sets


def read_genes(path: Path) -> list[str]:
    """First column of a file without a header, each name once. Raises DataError for an empty file."""
    return [*dict.fromkeys(fields[0] for _, fields in _lines(path) if fields[0])]


def read_edges(path: Path) -> list[Edge]:
    """Edges, each once. Raises DataError naming the malformed line."""
    edges: dict[Edge, None] = {}
    for number, fields in _lines(path):
        if len(fields) < 2 or not fields[0] or not fields[1]:
            raise DataError(
                f"{path}, line {number}: expected a transcription factor and a target, separated by a tab, got "
                f"{len(fields)} columns"
            )
        edges[fields[0], fields[1]] = None
    return [*edges]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line that is neither empty nor a comment (#). Raises DataError if there is none."""
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    lines = [
        (number, [field.strip() for field in line.split("\t")])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        raise DataError(f"{path}: empty")
    return lines


def auroc(member: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs of a member and another in which the member has the higher score; ties count half."""
    return float(placements(member, scores)[member].mean())


def placements(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: of a member the share of others with a lower score, of another that of members with a higher one.

    Means over the members and over the others are both the AUROC (DeLong et al. 1988, Biometrics 44:837).
    """
    n_members = int(member.sum())
    n_others = len(member) - n_members
    ranks = rankdata(scores)
    found = np.empty(len(member))
    found[member] = (ranks[member] - rankdata(scores[member])) / n_others
    found[~member] = 1 - (ranks[~member] - rankdata(scores[~member])) / n_members
    return found


def auroc_terms(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: terms whose mean is the AUROC, and the variance of whose mean is DeLong's."""
    found = placements(member, scores)
    area = found[member].mean()
    weight = np.where(member, len(member) / member.sum(), len(member) / (~member).sum())
    terms: np.ndarray = area + weight * (found - area)
    return terms


def average_precision(member: np.ndarray, scores: np.ndarray) -> float:
    """Area under the steps of precision over recall; ties are one step."""
    order = np.argsort(-scores, kind="stable")
    hits, ranked = np.cumsum(member[order]), scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    precision, recall = hits[ends] / (ends + 1), hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0) * precision).sum())
