"""Task `clustering`: agreement (NMI and ARI) of Leiden clusters of the evaluated cells with their labels.

Every kind of features gets the same graph (k nearest cells, Jaccard weights), seeds and resolutions: the embedding;
the same architecture untrained; 50 principal components of the model's training cells; 50 of the scored cells
themselves, of log-normalised genes and of genes scaled to variance 1; all genes. Components of the scored cells have
seen the clustered cells and the embedding has not, which is an advantage of the baseline.

Clusters never see the label, but the best resolution is chosen by it, as is usual: for each kind of features by its own
mean ARI, because NMI is not corrected for chance and grows with the number of clusters. Scores at the best resolution
are therefore too high, for all rows alike; scores at the fixed resolution are not.

NMI and ARI are not means over cells. A cell's score here is the measure plus its derivative by the cell's weight, times
the number of cells (infinitesimal jackknife, Efron 1981); its mean is the measure itself. Intervals of differences are
over cells, taking the clusters as given, and over seeds (`evaluate.scores`).

Leiden is igraph's (extra `cluster`): modularity with a resolution (Traag, Waltman & van Eck 2019, Sci. Rep. 9:5233),
run until nothing improves. The same graph and seed give the same clusters.
"""

import importlib
import random
from typing import Any

import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import ClusteringConfig
from cellmill.errors import ConfigError
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.features import OF_THE_MODEL, Features, read_rows, with_components, with_external
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.scores import EMBEDDING, ScoreColumn, against_best, differences, kind_of, table_rows
from cellmill.evaluate.task import Context, TaskResult
from cellmill.evaluate.tasks.mixing import NeighborGraph, jaccard_weights
from cellmill.runs.verdict import Verdict

TINY = 1e-12


def nmi_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is 2 I / (H + H'), scikit-learn's `normalized_mutual_info_score`."""
    joint, a, b = _sizes(classes, clusters)
    n = len(classes)
    # derivatives by the weight of a cell, times n: -log p - H, and so on
    entropy_a, entropy_b = -np.log(a / n).mean(), -np.log(b / n).mean()
    information = np.log(joint * n / (a * b))
    shared, whole = information.mean(), entropy_a + entropy_b
    if whole < TINY:  # one class and one cluster
        return np.ones(n)
    nmi = 2 * shared / whole
    slope = 2 * (information - shared) / whole - nmi * (-np.log(a / n) - np.log(b / n) - whole) / whole
    return nmi + slope


def ari_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is scikit-learn's `adjusted_rand_score` (Hubert & Arabie 1985)."""
    joint, a, b = _sizes(classes, clusters)
    n = len(classes)
    pairs = n * (n - 1) / 2
    # pairs of cells that are together: in both, by class, by cluster; the sum over cells of sizes is that of squares
    both, same_a, same_b = ((sizes.sum() - n) / 2 for sizes in (joint, a, b))
    expected, largest = same_a * same_b / pairs, (same_a + same_b) / 2
    if largest - expected < TINY * pairs:  # all cells together, or each alone, in both
        return np.ones(n)
    ari = (both - expected) / (largest - expected)
    d_both, d_a, d_b = (sizes - 0.5 for sizes in (joint, a, b))
    d_expected = (d_a * same_b + same_a * d_b - expected * (n - 0.5)) / pairs
    slope = (d_both - d_expected - ari * ((d_a + d_b) / 2 - d_expected)) / (largest - expected)
    return ari + n * (slope - slope.mean())


def _sizes(classes: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each cell: cells that share both its class and its cluster, its class, its cluster; float64 `(cells,)`."""
    _, a = np.unique(classes, return_inverse=True)
    _, b = np.unique(clusters, return_inverse=True)
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1.0)
    return table[a, b], table.sum(1)[a], table.sum(0)[b]


def import_igraph() -> Any:
    """igraph. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module("igraph")
    except ImportError:
        raise ConfigError(
            "task clustering requires igraph, which is missing: pip install 'cellmill[cluster]'"
        ) from None


class LeidenGraph:
    """An undirected weighted graph to cluster: `edges` are an upper triangle, of weights above 0."""

    def __init__(self, edges: sp.coo_matrix) -> None:
        self._igraph = import_igraph()
        pairs = np.stack([edges.row, edges.col], axis=1)
        self._graph = self._igraph.Graph(n=edges.shape[0], edges=pairs, edge_attrs={"weight": edges.data})

    def clusters(self, resolution: float, seed: int) -> np.ndarray:
        """Cluster of each cell, int64 `(cells,)`."""
        self._igraph.set_random_number_generator(random.Random(seed))
        try:
            found = self._graph.community_leiden(
                objective_function="modularity", weights="weight", resolution=resolution, n_iterations=-1
            )
        finally:
            self._igraph.set_random_number_generator(random)  # igraph's own default
        return np.asarray(found.membership, np.int64)


SCORES = {"ARI": ari_scores, "NMI": nmi_scores}


class Clustering:
    def __init__(self, config: ClusteringConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """NMI and ARI at the best and at the fixed resolution; skipped without two labels of enough cells."""
        igraph = import_igraph()
        config = self.config
        chosen = labelled_cells(context, "clustering", config.min_cells, "evaluate.tasks.clustering.min_cells")
        if isinstance(chosen, TaskResult):
            return chosen
        counts = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
        with threadpool_limits(1):  # sums in one order: the same clusters on any number of cores
            features = with_components(Features(context).of(counts, context.vectors[chosen.cells]))
            features = with_external(features, context, chosen.cells)
            found = {
                kind: self.cluster(kind, values, chosen.labels, context.options, context.baselines, igraph.__version__)
                for kind, values in features.items()
            }
        columns = []
        for number, where in enumerate(("best resolution", f"resolution {config.resolution:g}")):
            for name, score in SCORES.items():
                of_kind = {
                    kind: np.stack([score(chosen.labels, clusters) for clusters in both[number]])
                    for kind, (_, both) in found.items()
                }
                columns.append(ScoreColumn(f"{name}, {where}", f"{name}, {where}", of_kind))
        rows = [
            row
            | {"best resolution": found[row["name"]][0]}
            | {"clusters there": float(np.mean([len(np.unique(c)) for c in found[row["name"]][1][0]]))}
            | {"clusters, fixed": float(np.mean([len(np.unique(c)) for c in found[row["name"]][1][1]]))}
            for row in table_rows(columns)
        ]
        figures = chosen.figures | {"neighbors": config.neighbors, "seeds": config.seeds}
        return TaskResult(rows, columns[0].heading, judge(columns), figures, differences=differences(columns))

    def cluster(
        self, kind: str, features: Any, labels: np.ndarray, options: Evaluate, cache: BaselineCache, version: str
    ) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
        """Best resolution, and clusters `(seeds, cells)` there and at the fixed resolution."""
        config = self.config

        def clusters() -> np.ndarray:
            graph = LeidenGraph(jaccard_weights(NeighborGraph.of(features, config.neighbors)))
            seeds = range(options.seed, options.seed + config.seeds)
            made = {
                of: np.stack([graph.clusters(of, seed) for seed in seeds])
                for of in dict.fromkeys([*config.resolutions, config.resolution])
            }
            best = max(config.resolutions, key=lambda of: np.mean([ari_scores(labels, one) for one in made[of]]))
            both = made[best], made[config.resolution]
            head = np.full((1, len(labels)), config.resolutions.index(best))
            return np.concatenate([head, *both]).astype(np.int16)

        if kind in OF_THE_MODEL:
            made = clusters()
        else:
            about = f"igraph {version} {config.model_dump_json()} {options.seed} {labels.tolist()}"
            made = cache.features(about, features, clusters)
        return config.resolutions[made[0, 0]], (made[1 : 1 + config.seeds], made[1 + config.seeds :])


def judge(columns: list[ScoreColumn]) -> list[Verdict]:
    """Verdicts: against the best baseline in each column, then against every one by ARI at the best resolution."""
    others = [name for name in columns[0].scores if kind_of(name) == "baseline"]
    return list(dict.fromkeys([*against_best(columns), *(columns[0].compare(EMBEDDING, name) for name in others)]))
