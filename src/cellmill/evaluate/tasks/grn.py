"""Task `grn`: targets of transcription factors, ranked by the similarity of gene vectors
(docs/evaluation.md).

Vectors are centred over all genes, because what all vectors share says nothing about a pair.
Intervals are over transcription factors.
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
from cellmill.evaluate.tasks.gene_task import GeneTask, auroc, read_lines
from cellmill.runs.results import ScoredMethod, TaskResult

CO_EXPRESSION_PEARSON = ScoredMethod("co-expression, Pearson")
CO_EXPRESSION_SPEARMAN = ScoredMethod("co-expression, Spearman")
RANDOM_RANKING = ScoredMethod("random")
DRAWS = 20  # random rankings


class RegulatoryNetwork(NamedTuple):
    """Edges from transcription factors to targets, both rows of the vocabulary, ascending."""

    factors: np.ndarray
    targets: np.ndarray
    is_edge: np.ndarray  # (factors, targets) bool
    left_out: np.ndarray  # factors with too few targets, or no gene that is not a target

    @property
    def is_candidate(self) -> np.ndarray:
        """(factors, targets) bool: pairs of two different genes."""
        return self.factors[:, None] != self.targets


class Grn(GeneTask):
    config: GrnConfig

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """AUROC and AUPRC of each kind of features. Raises DataError where too few edges have genes
        of the model.
        """
        is_expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        network, figures = self._read_network(context, is_expressed)
        similarities = compare_genes(vectors, profiles, network)
        if self.config.absolute:
            similarities = {method: np.abs(values) for method, values in similarities.items()}
        columns, pooled = _rank_pairs(similarities, network, context.options.seed)
        rows = [replace(row, numbers=pooled[row.method]) for row in table_rows(columns)]
        return tabulate(columns, figures, rows=rows)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        edges = read_edges(Path(self.config.edges))
        n_pairs = len({factor for factor, _ in edges}) * len({target for _, target in edges})
        return super().estimate_s(sizes) + 7e-5 * n_pairs

    def _read_network(
        self, context: Context, is_expressed: np.ndarray
    ) -> tuple[RegulatoryNetwork, dict[str, Any]]:
        """Network of the file's edges between genes of the mask `is_expressed`, (genes,) bool, and figures
        for metrics.json. Prints the coverage.
        """
        config = self.config
        path = Path(config.edges)
        vocabulary = context.model.vocabulary
        edges = read_edges(path)
        known = select_known_edges(edges, vocabulary, is_expressed)
        n_known = len(known)
        if n_known < config.min_edges:
            named = rows_of_names(chain.from_iterable(edges), vocabulary)
            absent = sorted(name for name, row in named.items() if row < 0)
            examples = f", not {', '.join(absent[:3])}" if absent else ""
            raise DataError(
                f"{path}: {n_known:,} of {len(edges):,} edges can be used (two different genes that the model knows "
                f"and its training cells express); at least {config.min_edges:,} are needed: name genes by Ensembl id "
                f"or current symbol{examples}, or lower evaluate.tasks.grn.min_edges"
            )
        network = build_network(known, config.min_targets)
        n_factors = len(network.factors)
        line = (
            f"{n_known:,} of {len(edges):,} edges have two genes that the model knows and its training cells "
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
            "known_edges": n_known,
            "factors": n_factors,
            "targets": len(network.targets),
            "share_of_edges": float(network.is_edge[network.is_candidate].mean()),
            "left_out": left_out or "none",
        }
        return network, figures


def read_edges(path: Path) -> list[tuple[str, str]]:
    """Transcription factors and targets as written, each pair once. Raises DataError naming the
    malformed line.
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


def select_known_edges(
    edges: Iterable[tuple[str, str]], vocabulary: Vocabulary, usable: np.ndarray
) -> np.ndarray:
    """(edges, 2) int64: vocabulary rows of the edges of two different genes of `usable`, (genes,)
    bool, each once.
    """
    rows = rows_of_names(chain.from_iterable(edges), vocabulary)
    pairs = np.array([(rows[factor], rows[target]) for factor, target in edges], np.int64)
    is_known = (pairs >= 0).all(1)
    differs = pairs[:, 0] != pairs[:, 1]
    is_usable = usable[pairs].all(1)
    return np.unique(pairs[is_known & differs & is_usable], axis=0)


def build_network(pairs: np.ndarray, min_targets: int) -> RegulatoryNetwork:
    """RegulatoryNetwork of the known edges `pairs`, (edges, 2)."""
    factors = np.unique(pairs[:, 0])
    targets = np.unique(pairs[:, 1])
    is_edge = np.zeros((len(factors), len(targets)), bool)
    factor_rows = np.searchsorted(factors, pairs[:, 0])
    target_columns = np.searchsorted(targets, pairs[:, 1])
    is_edge[factor_rows, target_columns] = True
    n_edges = is_edge.sum(1)
    n_others = (factors[:, None] != targets).sum(1) - n_edges
    kept = (n_edges >= min_targets) & (n_others > 0)
    return RegulatoryNetwork(factors[kept], targets, is_edge[kept], left_out=factors[~kept])


def compare_genes(
    vectors: ByMethod, profiles: sp.csr_matrix, network: RegulatoryNetwork
) -> ByMethod:
    """(factors, targets) by method: cosines of centred gene vectors, and correlations of the
    expression in `profiles`, (cells, genes).
    """
    similarities = {}
    for method, values in vectors.items():
        if method == RANDOM:
            continue  # `_rank_pairs` draws several random rankings instead
        centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
        length = np.linalg.norm(centred, axis=1, keepdims=True)
        unit = centred / np.maximum(length, 1e-12)
        cosines = unit[network.factors] @ unit[network.targets].T
        similarities[method] = np.asarray(cosines)
    factor_expression = profiles[:, network.factors].toarray()
    target_expression = profiles[:, network.targets].toarray()
    similarities[CO_EXPRESSION_PEARSON] = cross_correlations(factor_expression, target_expression)
    similarities[CO_EXPRESSION_SPEARMAN] = cross_correlations(
        rankdata(factor_expression, axis=0), rankdata(target_expression, axis=0)
    )
    return similarities


def _rank_pairs(
    similarities: ByMethod, network: RegulatoryNetwork, seed: int
) -> tuple[list[ScoreColumn], dict[ScoredMethod, dict[str, float]]]:
    """A column for each score, with the factors as units, and scores over all pairs by row."""
    is_edge = network.is_edge
    is_candidate = network.is_candidate
    columns = []
    pooled: dict[ScoredMethod, dict[str, float]] = {
        method: {} for method in (*similarities, RANDOM_RANKING)
    }
    for score, function in (("AUROC", auroc), ("AUPRC", average_precision)):
        heading = f"{score}, all pairs"
        scores = {}
        for method, values in similarities.items():
            scores[method] = _score_factors(function, is_edge, is_candidate, values)
            pooled[method][heading] = function(is_edge[is_candidate], values[is_candidate])
        generator = seeded(seed, draws.RANDOM_PAIRS)
        by_factor = []
        over_pairs = []
        for _ in range(DRAWS):
            values = generator.random(is_edge.shape)
            by_factor.append(_score_factors(function, is_edge, is_candidate, values))
            over_pairs.append(function(is_edge[is_candidate], values[is_candidate]))
        scores[RANDOM_RANKING] = np.mean(by_factor, axis=0)
        pooled[RANDOM_RANKING][heading] = float(np.mean(over_pairs))
        columns.append(ScoreColumn(score, f"{score} of edges", scores))
    return columns, pooled


def _score_factors(
    function: Callable[[np.ndarray, np.ndarray], float],
    is_edge: np.ndarray,
    is_candidate: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """(1, factors): score of each factor over its candidate targets."""
    rows = zip(is_edge, is_candidate, values)
    return np.array([[function(edges[pairs], row[pairs]) for edges, pairs, row in rows]])


def average_precision(member: np.ndarray, scores: np.ndarray) -> float:
    """Area under the steps of precision over recall; ties are one step."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(member[order])
    ranked = scores[order]
    # last rank of each group of equal scores
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    precision = hits[ends] / (ends + 1)
    recall = hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0) * precision).sum())
