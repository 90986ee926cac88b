"""Task `grn`: similarity of the gene vectors of transcription factors and their targets
(docs/evaluation.md).

For each factor of a known regulatory network, genes are ranked by their similarity with the factor. The
known targets should be ranked first. Vectors are centred over all genes, because what all vectors have in
common says nothing about a pair. Intervals are over transcription factors.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.stats import rankdata

from cellmill.config.parts.tasks import GrnConfig
from cellmill.data.genes.names import rows_of_names
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.expression import cross_correlations
from cellmill.evaluate.features.gene_vectors import RANDOM
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.gene_task import GeneTask, compute_auroc, read_lines
from cellmill.runs.results import ScoredMethod, TaskResult

CO_EXPRESSION_PEARSON = ScoredMethod("co-expression, Pearson")
CO_EXPRESSION_SPEARMAN = ScoredMethod("co-expression, Spearman")
RANDOM_RANKING = ScoredMethod("random")
RANDOM_RANKINGS = 20  # row RANDOM_RANKING has the mean scores of this many random rankings
MIN_LENGTH = 1e-12  # vectors that are shorter are divided by this length, so that zeros stay zeros


class RegulatoryNetwork(NamedTuple):
    """Known edges from transcription factors to target genes. All genes are rows of the vocabulary."""

    factors: np.ndarray  # (factors,) int64, ascending
    targets: np.ndarray  # (targets,) int64, ascending: all genes that are a target of some factor
    is_edge: np.ndarray  # (factors, targets) bool: True for the known targets of a factor
    # factors that are not scored: they have too few targets, or all other genes are their targets
    left_out: np.ndarray

    @property
    def is_candidate(self) -> np.ndarray:
        """(factors, targets) bool: True for pairs of two different genes. These pairs are ranked."""
        return self.factors[:, None] != self.targets


class Grn(GeneTask):
    config: GrnConfig

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """AUROC and AUPRC of the known targets, by the similarity of gene vectors and of expression.

        Raises DataError if too few edges, or no factor, can be used.
        """
        is_expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        network, figures = self._read_network(context, is_expressed)
        similarities = compare_genes(vectors, profiles, network)
        if self.config.absolute:
            similarities = {method: np.abs(values) for method, values in similarities.items()}
        columns, pooled = _score_rankings(similarities, network, context.options.seed)
        rows = [replace(row, numbers=pooled[row.method]) for row in table_rows(columns)]
        return tabulate(columns, figures, rows=rows)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        edges = read_edges(Path(self.config.edges))
        n_pairs = len({factor for factor, _ in edges}) * len({target for _, target in edges})
        return super().estimate_s(sizes) + 7e-5 * n_pairs

    def _read_network(
        self, context: Context, is_expressed: np.ndarray
    ) -> tuple[RegulatoryNetwork, dict[str, Any]]:
        """Network of the edges that can be used, and figures for metrics.json. Prints how many edges and
        factors these are.

        The genes of an edge must be known to the model and expressed. `is_expressed` is (genes,) bool over
        the vocabulary.
        """
        config = self.config
        path = Path(config.edges)
        vocabulary = context.model.vocabulary
        edges = read_edges(path)
        usable_edges = select_usable_edges(edges, vocabulary, is_expressed)
        n_usable = len(usable_edges)
        if n_usable < config.min_edges:
            row_by_name = rows_of_names(chain.from_iterable(edges), vocabulary)
            unknown = sorted(name for name, row in row_by_name.items() if row < 0)
            examples = f", not {', '.join(unknown[:3])}" if unknown else ""
            raise DataError(
                f"{path}: {n_usable:,} of {len(edges):,} edges can be used (two different genes that the model knows "
                f"and its training cells express); at least {config.min_edges:,} are needed: name genes by Ensembl id "
                f"or current symbol{examples}, or lower evaluate.tasks.grn.min_edges"
            )

        network = build_network(usable_edges, config.min_targets)
        n_factors = len(network.factors)
        line = (
            f"{n_usable:,} of {len(edges):,} edges have two genes that the model knows and its training cells "
            f"express; {n_factors:,} factors have {config.min_targets} targets or more"
        )
        print(f"{context.dataset}: grn: {path}: {line}", flush=True)
        left_out = ", ".join(sorted(vocabulary.symbols[row] for row in network.left_out))
        if left_out:
            print(f"{context.dataset}: grn: left out: {left_out}", flush=True)
        if not n_factors:
            raise DataError(
                f"{path}: {line}; lower evaluate.tasks.grn.min_targets, or give more edges"
            )

        figures = {
            "edges": len(edges),
            "known_edges": n_usable,
            "factors": n_factors,
            "targets": len(network.targets),
            "share_of_edges": float(network.is_edge[network.is_candidate].mean()),
            "left_out": left_out or "none",
        }
        return network, figures


def read_edges(path: Path) -> list[tuple[str, str]]:
    """Pairs of a transcription factor and a target, with the names in the file. Each pair is listed once.

    Raises DataError for a line without two names.
    """
    edges: dict[tuple[str, str], None] = {}
    for number, fields in read_lines(path):
        if len(fields) < 2 or not fields[0] or not fields[1]:
            raise DataError(
                f"{path}, line {number}: expected a transcription factor and a target, separated by a tab, got "
                f"{len(fields)} columns"
            )
        edges[fields[0], fields[1]] = None
    return [*edges]


def select_usable_edges(
    edges: Iterable[tuple[str, str]], vocabulary: Vocabulary, is_expressed: np.ndarray
) -> np.ndarray:
    """(edges, 2) int64: factor and target of each edge that can be used, as rows of the vocabulary. Each
    edge is listed once.

    An edge can be used if it has two different genes that the model knows and that are expressed.
    `is_expressed` is (genes,) bool over the vocabulary.
    """
    row_by_name = rows_of_names(chain.from_iterable(edges), vocabulary)
    pairs = np.array(
        [(row_by_name[factor], row_by_name[target]) for factor, target in edges], np.int64
    )
    is_known = (pairs >= 0).all(1)
    are_different = pairs[:, 0] != pairs[:, 1]
    are_expressed = is_expressed[pairs].all(1)
    return np.unique(pairs[is_known & are_different & are_expressed], axis=0)


def build_network(pairs: np.ndarray, min_targets: int) -> RegulatoryNetwork:
    """The network of the edges `pairs`, (edges, 2) rows of the vocabulary.

    Factors with fewer than `min_targets` targets are left out, and factors whose targets are all ranked
    genes.
    """
    factors = np.unique(pairs[:, 0])
    targets = np.unique(pairs[:, 1])
    is_edge = np.zeros((len(factors), len(targets)), bool)
    factor_rows = np.searchsorted(factors, pairs[:, 0])
    target_columns = np.searchsorted(targets, pairs[:, 1])
    is_edge[factor_rows, target_columns] = True
    # for each factor, how many of the ranked genes are targets, and how many are not
    n_edges = is_edge.sum(1)
    n_others = (factors[:, None] != targets).sum(1) - n_edges
    kept = (n_edges >= min_targets) & (n_others > 0)
    return RegulatoryNetwork(factors[kept], targets, is_edge[kept], left_out=factors[~kept])


def compare_genes(
    vectors: ByMethod, profiles: sp.csr_matrix, network: RegulatoryNetwork
) -> ByMethod:
    """Similarity of each factor and target, (factors, targets) by method. It is the cosine of their
    centred gene vectors, or the correlation of their expression over the cells in `profiles`.

    `vectors` are (genes, width) by method, and `profiles` are (cells, genes).
    """
    similarities = {}
    for method, values in vectors.items():
        if method == RANDOM:
            continue  # row RANDOM_RANKING has random similarities instead
        centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
        length = np.linalg.norm(centred, axis=1, keepdims=True)
        scaled = centred / np.maximum(length, MIN_LENGTH)
        cosines = scaled[network.factors] @ scaled[network.targets].T
        similarities[method] = np.asarray(cosines)
    factor_expression = profiles[:, network.factors].toarray()
    target_expression = profiles[:, network.targets].toarray()
    similarities[CO_EXPRESSION_PEARSON] = cross_correlations(factor_expression, target_expression)
    similarities[CO_EXPRESSION_SPEARMAN] = cross_correlations(
        rankdata(factor_expression, axis=0), rankdata(target_expression, axis=0)
    )
    return similarities


def _score_rankings(
    similarities: ByMethod, network: RegulatoryNetwork, seed: int
) -> tuple[list[ScoreColumn], dict[ScoredMethod, dict[str, float]]]:
    """Scores of the ranking by each method, in two forms: columns with a score for each factor, and scores
    over the pairs of all factors together, by method and heading.
    """
    is_edge = network.is_edge
    is_candidate = network.is_candidate
    columns = []
    pooled: dict[ScoredMethod, dict[str, float]] = {
        method: {} for method in (*similarities, RANDOM_RANKING)
    }
    for score, compute in (("AUROC", compute_auroc), ("AUPRC", compute_average_precision)):
        heading = f"{score}, all pairs"
        scores = {}
        for method, values in similarities.items():
            scores[method] = _score_factors(compute, is_edge, is_candidate, values)
            pooled[method][heading] = compute(is_edge[is_candidate], values[is_candidate])
        # means of the scores over random rankings
        generator = seeded(seed, draws.RANDOM_PAIRS)
        by_factor = []
        over_pairs = []
        for _ in range(RANDOM_RANKINGS):
            values = generator.random(is_edge.shape)
            by_factor.append(_score_factors(compute, is_edge, is_candidate, values))
            over_pairs.append(compute(is_edge[is_candidate], values[is_candidate]))
        scores[RANDOM_RANKING] = np.mean(by_factor, axis=0)
        pooled[RANDOM_RANKING][heading] = float(np.mean(over_pairs))
        columns.append(ScoreColumn(score, f"{score} of edges", scores))
    return columns, pooled


def _score_factors(
    compute: Callable[[np.ndarray, np.ndarray], float],
    is_edge: np.ndarray,
    is_candidate: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """(1, factors) float64: score of each factor over the genes that are ranked for it. `compute`
    returns the score of one factor, given which genes are targets, and the similarities of the genes.
    """
    rows = zip(is_edge, is_candidate, values)
    return np.array([[compute(edges[ranked], row[ranked]) for edges, ranked, row in rows]])


def compute_average_precision(is_member: np.ndarray, scores: np.ndarray) -> float:
    """Area under the curve of precision over recall, as a sum of steps. Genes with equal scores are one
    step.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(is_member[order])
    falling = scores[order]
    # index of the last of each group of equal scores
    ends = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    precision = hits[ends] / (ends + 1)
    recall = hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0) * precision).sum())
