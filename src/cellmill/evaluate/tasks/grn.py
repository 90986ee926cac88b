"""Task `grn`: similarity of genes against known regulations (edges from a transcription factor to a target).

Candidates are all pairs of a listed factor and a listed target, except a gene with itself: another gene may not have
been studied. Each kind of features ranks the targets of a factor by similarity: cosine of the model's gene vectors
(input, decoder, and untrained), centred over all genes because what all vectors share says nothing about a pair; cosine
of the loadings of principal components; Pearson and Spearman over training cells, of log-normalised counts. Regulation
may be negative, so `absolute` ranks by size. `random` is the mean score of random rankings.

AUROC and AUPRC are means over factors, and a factor is one draw in the interval (`evaluate.scores`). Scores over all
pairs are given beside them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from scipy.stats import rankdata

from cellmill.config.parts.tasks import GrnConfig
from cellmill.data.genes.names import rows_of_names
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.scores import ScoreColumn, table_rows
from cellmill.evaluate.task import Context, TaskResult
from cellmill.evaluate.tasks.genes import RANDOM, Edge, GeneTask, auroc, average_precision, read_edges

SCORES = {"AUROC": auroc, "AUPRC": average_precision}
DRAWS = 20  # random rankings


@dataclass(frozen=True)
class Regulation:
    """Known edges among the model's genes."""

    factors: np.ndarray  # (factors,) int64: rows of the vocabulary, ascending
    targets: np.ndarray  # (targets,) int64
    edge: np.ndarray  # (factors, targets) bool
    left_out: list[str]  # factors with too few targets, or with no gene that is not a target

    @property
    def candidate(self) -> np.ndarray:
        """(factors, targets) bool: pairs of two different genes."""
        return np.asarray(self.factors[:, None] != self.targets)


class Grn(GeneTask):
    config: GrnConfig

    def judge(self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix) -> TaskResult:
        """AUROC and AUPRC of each kind of features. Raises DataError where too few edges have genes of the model."""
        config, path, vocabulary = self.config, Path(self.config.edges), context.model.vocabulary
        edges = read_edges(path)
        known = known_edges(edges, vocabulary, np.asarray(profiles.sum(axis=0)).ravel() > 0)
        if (n_known := len(known)) < config.min_edges:
            named = rows_of_names((name for edge in edges for name in edge), vocabulary)
            absent = sorted(name for name, row in named.items() if row < 0)
            such = f", not {', '.join(absent[:3])}" if absent else ""
            raise DataError(
                f"{path}: {len(edges) - n_known:,} of {len(edges):,} edges have a gene that the model does not know or "
                f"its training cells do not express; expected {config.min_edges:,} others, got {n_known:,}: name genes "
                f"by Ensembl id or current symbol{such}, or lower evaluate.tasks.grn.min_edges"
            )
        network = network_of(known, vocabulary, config.min_targets)
        line = (
            f"{n_known:,} of {len(edges):,} edges have two genes that the model knows and its training cells "
            f"express; {len(network.factors):,} factors have {config.min_targets} targets or more"
        )
        print(f"{context.dataset}: grn: {path}: {line}", flush=True)
        if left_out := ", ".join(network.left_out):
            print(f"{context.dataset}: grn: left out: {left_out}", flush=True)
        if not len(network.factors):
            raise DataError(f"{path}: {line}; lower evaluate.tasks.grn.min_targets, or give more edges")
        similarities = {name: _cosines(values, network) for name, values in vectors.items() if name != RANDOM}
        ends = [profiles[:, genes].toarray() for genes in (network.factors, network.targets)]
        similarities["co-expression, Pearson"] = correlations(*ends)
        similarities["co-expression, Spearman"] = correlations(*(rankdata(values, axis=0) for values in ends))
        if config.absolute:
            similarities = {name: np.abs(values) for name, values in similarities.items()}
        columns, pooled = scores_of(similarities, network, context.options.seed)
        numbers = {
            "edges": len(edges),
            "known_edges": n_known,
            "factors": len(network.factors),
            "targets": len(network.targets),
            "share_of_edges": float(network.edge[network.candidate].mean()),
            "left_out": left_out or "none",
        }
        rows = [row | pooled[row["name"]] for row in table_rows(columns)]
        return TaskResult.from_columns(columns, numbers, rows=rows)


def scores_of(
    similarities: Mapping[str, np.ndarray], network: Regulation, seed: int
) -> tuple[list[ScoreColumn], dict[str, dict[str, float]]]:
    """A column for each score, with the factors as units, and scores over all pairs by row."""
    columns = []
    pooled: dict[str, dict[str, float]] = {name: {} for name in (*similarities, "random")}
    for score, function in SCORES.items():
        heading = f"{score}, all pairs"
        scores = {}
        for name, values in similarities.items():
            scores[name], pooled[name][heading] = _scores(function, network, values)
        generator = np.random.Generator(np.random.Philox(key=[seed, 8]))
        drawn = [_scores(function, network, generator.random(network.edge.shape)) for _ in range(DRAWS)]
        scores["random"] = np.mean([by_factor for by_factor, _ in drawn], axis=0)
        pooled["random"][heading] = float(np.mean([of_all for _, of_all in drawn]))
        columns.append(ScoreColumn(score, f"{score} of edges", scores))
    return columns, pooled


def _scores(
    function: Callable[[np.ndarray, np.ndarray], float], network: Regulation, values: np.ndarray
) -> tuple[np.ndarray, float]:
    """Scores of each factor's candidates, (1, factors) float64, and of all candidates together."""
    candidate = network.candidate
    lines = zip(network.edge, candidate, values)
    by_factor = np.array([[function(edge[pair], of_factor[pair]) for edge, pair, of_factor in lines]])
    return by_factor, function(network.edge[candidate], values[candidate])


def known_edges(edges: list[Edge], vocabulary: Vocabulary, usable: np.ndarray) -> np.ndarray:
    """(edges, 2) int64: vocabulary rows of the edges of two different genes of `usable`, (genes,) bool, each once."""
    rows = rows_of_names((name for edge in edges for name in edge), vocabulary)
    pairs = np.array([(rows[factor], rows[target]) for factor, target in edges], np.int64)
    found = (pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1]) & usable[pairs].all(1)
    return np.unique(pairs[found], axis=0)


def network_of(pairs: np.ndarray, vocabulary: Vocabulary, min_targets: int) -> Regulation:
    """The network of known edges, without the factors that cannot be judged."""
    factors, targets = np.unique(pairs[:, 0]), np.unique(pairs[:, 1])
    edge = np.zeros((len(factors), len(targets)), bool)
    edge[np.searchsorted(factors, pairs[:, 0]), np.searchsorted(targets, pairs[:, 1])] = True
    n_edges = edge.sum(1)
    n_others = (factors[:, None] != targets).sum(1) - n_edges
    kept = (n_edges >= min_targets) & (n_others > 0)
    return Regulation(factors[kept], targets, edge[kept], sorted(vocabulary.symbols[row] for row in factors[~kept]))


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(m, n) float64: Pearson of the columns of `first` (cells, m) and `second` (cells, n); 0 for constant ones."""
    return _standard(first).T @ _standard(second)


def _cosines(values: np.ndarray, network: Regulation) -> np.ndarray:
    """(factors, targets) float64: cosines of vectors (genes, width), centred over the genes."""
    centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit[network.factors] @ unit[network.targets].T)


def _standard(values: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and length 1."""
    centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
    length = np.linalg.norm(centred, axis=0)
    return np.divide(centred, length, out=np.zeros_like(centred), where=length > 1e-9)
