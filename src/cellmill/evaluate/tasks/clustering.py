"""Task `clustering`: agreement (NMI and ARI) of Leiden clusters of the evaluated cells with their
labels.

NMI and ARI are not means over cells. A cell's score here is the measure plus its derivative by the
cell's weight, times the number of cells (infinitesimal jackknife, Efron 1981); its mean is the
measure itself. Intervals of differences are over cells, taking the clusters as given, and over
seeds (`evaluate.intervals`). Leiden is igraph's: modularity with a resolution (Traag, Waltman & van
Eck 2019, Sci. Rep. 9:5233), run until nothing improves.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import ClusteringConfig
from cellmill.data.inputs.source import optional_package
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.features.components import COMPONENTS, fit_own_components
from cellmill.evaluate.features.neighbors import NeighborGraph, jaccard_weights
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, add_note
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Task
from cellmill.runs.results import ScoredMethod, TaskResult

TINY = 1e-12  # entropies, and shares of pairs, that are rounding errors


class Clusters(NamedTuple):
    """Cluster ids of the cells, (seeds, cells) int16, at two resolutions."""

    best_resolution: float  # the one with the highest mean ARI
    at_best: np.ndarray
    at_fixed: np.ndarray


class Clustering(Task):
    config: ClusteringConfig

    def run(self, context: Context) -> TaskResult:
        """NMI and ARI at the best and at the fixed resolution, or only at the fixed one if no other ran;
        skipped without two labels of enough cells.
        """
        igraph = optional_package("igraph", "cluster", "task clustering")
        config = self.config
        chosen = labelled_cells(
            context, "clustering", config.min_cells, "evaluate.tasks.clustering.min_cells"
        )
        labels = chosen.labels
        features = cell_features(context, chosen.cells)
        genes = features.pop(ALL_GENES)
        components = ScoredMethod(f"PCA{COMPONENTS} of the scored cells")
        shared = context.feature_cache.share(genes)
        scaled = StandardScaler(with_mean=False).fit_transform(genes)
        features |= {
            components: shared.source.components,
            add_note(components, ", scaled genes"): fit_own_components(scaled),
            ALL_GENES: shared,
        }
        del scaled  # before the products of all genes take as much memory
        clusters_by_method = {
            method: self._find_clusters(method, values, labels, context, igraph)
            for method, values in features.items()
        }
        columns = []
        *best, fixed = config.levels()  # texts in headings
        for level in (*best, fixed):
            for metric, score in (("ARI", ari_scores), ("NMI", nmi_scores)):
                scores = {}
                for method, clusters in clusters_by_method.items():
                    by_seed = clusters.at_fixed if level == fixed else clusters.at_best
                    scores[method] = np.stack(
                        [score(labels, cluster_ids) for cluster_ids in by_seed]
                    )
                columns.append(ScoreColumn(f"{metric}, {level}", f"{metric}, {level}", scores))
        rows = table_rows(columns)
        for row in rows:
            clusters = clusters_by_method[row.method]
            if best:
                row.numbers["best resolution"] = clusters.best_resolution
                row.numbers["clusters there"] = _average_n_clusters(clusters.at_best)
            row.numbers["clusters, fixed"] = _average_n_clusters(clusters.at_fixed)
        figures = chosen.figures | {"neighbors": config.neighbors, "seeds": config.seeds}
        # against the best baseline in each column, then against all baselines by the first ARI
        verdicts = [column.best_verdict() for column in columns]
        verdicts += [
            columns[0].verdict(EMBEDDING, method) for method in columns[0].select_kind("baseline")
        ]
        return tabulate(columns, figures, rows=rows, verdicts=[*dict.fromkeys(verdicts)])

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        config = self.config
        resolutions = {*config.resolutions, config.resolution}
        n_features = 6 + sizes.n_external
        # for each of the features: Leiden, and the distances of all pairs of cells
        leiden_s = 1.2e-6 * len(resolutions) * config.seeds * n * config.neighbors
        own_s = sizes.products_s(n) + 2 * sizes.components_s(n)
        return sizes.features_s(n) + own_s + n_features * (leiden_s + 1.5e-8 * n**2)

    def _find_clusters(
        self, method: ScoredMethod, features: Any, labels: np.ndarray, context: Context, igraph: Any
    ) -> Clusters:
        """Clusters of the cells by `features`; clusters of baselines are cached."""
        config = self.config
        seed = context.options.seed

        def compute() -> np.ndarray:
            """The clusters as one array, for the cache."""
            edges = jaccard_weights(NeighborGraph.build(features, config.neighbors))
            graph = make_graph(igraph, edges)
            seeds = range(seed, seed + config.seeds)
            by_resolution = {}
            for resolution in dict.fromkeys([*config.resolutions, config.resolution]):
                by_resolution[resolution] = np.stack(leiden(igraph, graph, resolution, seeds))

            def mean_ari(resolution: float) -> float:
                scores = [ari_scores(labels, ids) for ids in by_resolution[resolution]]
                return float(np.mean(scores))

            best = max(config.resolutions, key=mean_ari)
            found = Clusters(best, by_resolution[best], by_resolution[config.resolution])
            return pack_clusters(found, config.resolutions)

        if method.network is not None:
            rows = compute()
        else:
            about = (
                f"igraph {igraph.__version__} {config.model_dump_json()} {seed} {labels.tolist()}"
            )
            rows = context.prediction_cache.get_or_compute(about, features, compute)
        return unpack_clusters(rows, config.resolutions)


def pack_clusters(clusters: Clusters, resolutions: Sequence[float]) -> np.ndarray:
    """One array, (1 + 2 seeds, cells) int16: index of the best of `resolutions` in each cell, cluster
    ids there, and cluster ids at the fixed resolution.
    """
    n_cells = clusters.at_best.shape[1]
    index = np.full((1, n_cells), resolutions.index(clusters.best_resolution))
    return np.concatenate([index, clusters.at_best, clusters.at_fixed]).astype(np.int16)


def unpack_clusters(packed: np.ndarray, resolutions: Sequence[float]) -> Clusters:
    """The clusters of which `pack_clusters` made `packed`."""
    at_best, at_fixed = np.split(packed[1:], 2)
    return Clusters(resolutions[packed[0, 0]], at_best, at_fixed)


def make_graph(igraph: Any, edges: sp.coo_matrix) -> Any:
    """Graph of `edges`, which are an upper triangle, of weights above 0."""
    pairs = np.stack([edges.row, edges.col], axis=1)
    return igraph.Graph(n=edges.shape[0], edges=pairs, edge_attrs={"weight": edges.data})


def leiden(igraph: Any, graph: Any, resolution: float, seeds: Iterable[int]) -> list[np.ndarray]:
    """Cluster id of each cell, int64 `(cells,)`, for each seed."""
    by_seed = []
    options = {
        "objective_function": "modularity",
        "weights": "weight",
        "resolution": resolution,
        "n_iterations": -1,
    }
    try:
        for seed in seeds:
            igraph.set_random_number_generator(random.Random(seed))
            by_seed.append(np.asarray(graph.community_leiden(**options).membership, np.int64))
    finally:
        igraph.set_random_number_generator(random)  # igraph's own default
    return by_seed


def nmi_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is 2 I / (H + H'), scikit-learn's
    `normalized_mutual_info_score`.
    """
    in_both, in_class, in_cluster = _count_cells(classes, clusters)
    n = len(classes)
    # (cells,): surprise of a cell's class and cluster, and the information that they share
    surprise = -np.log(in_class / n) - np.log(in_cluster / n)
    information = np.log(in_both * n / (in_class * in_cluster))
    entropies = -np.log(in_class / n).mean() + -np.log(in_cluster / n).mean()
    shared = information.mean()
    if entropies < TINY:  # one class and one cluster
        return np.ones(n)
    nmi = 2 * shared / entropies
    # derivatives by the weight of a cell, times n
    d_shared = information - shared
    d_entropies = surprise - entropies
    return nmi + (2 * d_shared / entropies - nmi * d_entropies / entropies)


def ari_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is scikit-learn's `adjusted_rand_score` (Hubert &
    Arabie 1985).
    """
    in_both, in_class, in_cluster = _count_cells(classes, clusters)
    n = len(classes)
    pairs = n * (n - 1) / 2
    # pairs of cells that share both, a class, a cluster; the sum of sizes over cells is the sum of
    # squared sizes over groups
    both = (in_both.sum() - n) / 2
    same_class = (in_class.sum() - n) / 2
    same_cluster = (in_cluster.sum() - n) / 2
    expected = same_class * same_cluster / pairs
    largest = (same_class + same_cluster) / 2
    if largest - expected < TINY * pairs:  # all cells together, or each alone, in both
        return np.ones(n)
    ari = (both - expected) / (largest - expected)
    # derivatives by the weight of a cell, (cells,)
    d_both = in_both - 0.5
    d_class = in_class - 0.5
    d_cluster = in_cluster - 0.5
    d_expected = d_class * same_cluster + same_class * d_cluster - expected * (n - 0.5)
    d_expected = d_expected / pairs
    d_largest = (d_class + d_cluster) / 2
    slope = d_both - d_expected - ari * (d_largest - d_expected)
    slope = slope / (largest - expected)
    return ari + n * (slope - slope.mean())


def _count_cells(
    classes: np.ndarray, clusters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of cells in both the class and the cluster of each cell, in its class, in its
    cluster; float64 `(cells,)`.
    """
    _, class_of_cell = np.unique(classes, return_inverse=True)
    _, cluster_of_cell = np.unique(clusters, return_inverse=True)
    table = np.zeros((class_of_cell.max() + 1, cluster_of_cell.max() + 1))
    np.add.at(table, (class_of_cell, cluster_of_cell), 1.0)
    in_both = table[class_of_cell, cluster_of_cell]
    in_class = table.sum(1)[class_of_cell]
    in_cluster = table.sum(0)[cluster_of_cell]
    return in_both, in_class, in_cluster


def _average_n_clusters(clusters: np.ndarray) -> float:
    """Mean over seeds of the number of clusters."""
    return float(np.mean([len(np.unique(cluster_ids)) for cluster_ids in clusters]))
