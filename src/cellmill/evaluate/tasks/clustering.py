"""Task `clustering`: agreement of Leiden clusters of the evaluated cells with their labels.

The agreement is measured by NMI (normalised mutual information) and ARI (adjusted Rand index). NMI and
ARI are not means over cells, but an interval needs a score for each cell. With n cells, the score of a
cell is the measure plus n times the derivative of the measure by the weight of the cell (infinitesimal
jackknife, Efron 1981). The mean of the scores is the measure.

Intervals of differences take the clusters as given. They are over cells and over seeds
(`evaluate.intervals`). The clusters are computed by the Leiden algorithm of igraph, which maximises the
modularity at a resolution (Traag, Waltman & van Eck 2019, Sci. Rep. 9:5233). It runs until nothing
improves.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
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
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, Features, add_note
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Task
from cellmill.runs.results import ScoredMethod, TaskResult

TINY = 1e-12  # an entropy, or a share of pairs of cells, below this is a rounding error


class Clusters(NamedTuple):
    """Clusters of the cells by one method, at two resolutions."""

    best_resolution: float  # the resolution with the highest ARI, averaged over seeds
    at_best: np.ndarray  # (seeds, cells) int16: cluster ids at the best resolution
    at_fixed: np.ndarray  # (seeds, cells) int16: cluster ids at the fixed resolution


class Clustering(Task):
    config: ClusteringConfig

    def run(self, context: Context) -> TaskResult:
        """NMI and ARI at the best and at the fixed resolution. If option `resolutions` has the fixed
        resolution only, there are no columns for the best one.

        Raises Skipped if fewer than two labels have enough cells.
        """
        igraph = optional_package("igraph", "cluster", "task clustering")
        config = self.config
        chosen = labelled_cells(
            context, "clustering", config.min_cells, "evaluate.tasks.clustering.min_cells"
        )
        clusters_by_method = {
            method: self._find_clusters(method, values, chosen.labels, context, igraph)
            for method, values in compute_features(context, chosen.cells).items()
        }
        columns = self._make_columns(chosen.labels, clusters_by_method)

        rows = table_rows(columns)
        has_best_level = len(config.levels()) > 1
        for row in rows:
            clusters = clusters_by_method[row.method]
            if has_best_level:
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
        # for the features of each method: Leiden with all seeds and resolutions, and distances between
        # all pairs of cells
        leiden_s = 1.2e-6 * len(resolutions) * config.seeds * n * config.neighbors
        own_s = sizes.products_s(n) + 2 * sizes.components_s(n)
        return sizes.features_s(n) + own_s + n_features * (leiden_s + 1.5e-8 * n**2)

    def _make_columns(
        self, labels: np.ndarray, clusters_by_method: Mapping[ScoredMethod, Clusters]
    ) -> list[ScoreColumn]:
        """Columns of ARI and NMI at each level. A level is a resolution in words, such as `best
        resolution`. The last level is the fixed resolution.
        """
        columns = []
        levels = self.config.levels()
        for level in levels:
            for metric, score in (("ARI", compute_ari_terms), ("NMI", compute_nmi_terms)):
                scores = {}
                for method, clusters in clusters_by_method.items():
                    by_seed = clusters.at_fixed if level == levels[-1] else clusters.at_best
                    scores[method] = np.stack([score(labels, ids) for ids in by_seed])
                columns.append(ScoreColumn(f"{metric}, {level}", f"{metric}, {level}", scores))
        return columns

    def _find_clusters(
        self, method: ScoredMethod, features: Any, labels: np.ndarray, context: Context, igraph: Any
    ) -> Clusters:
        """Clusters of the cells by the features of one method. Clusters of methods that use no network are
        cached.
        """
        config = self.config
        seed = context.options.seed

        def compute() -> np.ndarray:
            """The clusters as one array, which the cache can hold."""
            edges = jaccard_weights(NeighborGraph.build(features, config.neighbors))
            graph = make_graph(igraph, edges)
            seeds = range(seed, seed + config.seeds)
            by_resolution = {}  # (seeds, cells) cluster ids
            for resolution in dict.fromkeys([*config.resolutions, config.resolution]):
                by_resolution[resolution] = np.stack(run_leiden(igraph, graph, resolution, seeds))

            def average_ari(resolution: float) -> float:
                scores = [compute_ari_terms(labels, ids) for ids in by_resolution[resolution]]
                return float(np.mean(scores))

            best = max(config.resolutions, key=average_ari)
            found = Clusters(best, by_resolution[best], by_resolution[config.resolution])
            return pack_clusters(found, config.resolutions)

        if method.network is not None:
            packed = compute()
        else:
            about = (
                f"igraph {igraph.__version__} {config.model_dump_json()} {seed} {labels.tolist()}"
            )
            packed = context.prediction_cache.get_or_compute(about, features, compute)
        return unpack_clusters(packed, config.resolutions)


def compute_features(context: Context, cells: np.ndarray) -> Features:
    """Features of the `cells` (indices) by method: the usual features, and principal components of these
    cells, of plain and of scaled genes.
    """
    features = cell_features(context, cells)
    genes = features.pop(ALL_GENES)
    components = ScoredMethod(f"PCA{COMPONENTS} of the scored cells")
    shared = context.feature_cache.share(genes)
    # the scaled genes are dropped before the products of all genes take as much memory
    scaled = StandardScaler(with_mean=False).fit_transform(genes)
    of_scaled = fit_own_components(scaled)
    del scaled
    features |= {
        components: shared.source.components,
        add_note(components, ", scaled genes"): of_scaled,
        ALL_GENES: shared,
    }
    return features


def pack_clusters(clusters: Clusters, resolutions: Sequence[float]) -> np.ndarray:
    """The clusters as one array, (1 + 2 * seeds, cells) int16.

    Each value of the first row is the index of the best resolution in `resolutions`. Then follow the
    cluster ids at the best resolution, with a row for each seed. The last rows are the cluster ids at the
    fixed resolution.
    """
    n_cells = clusters.at_best.shape[1]
    index = np.full((1, n_cells), resolutions.index(clusters.best_resolution))
    return np.concatenate([index, clusters.at_best, clusters.at_fixed]).astype(np.int16)


def unpack_clusters(packed: np.ndarray, resolutions: Sequence[float]) -> Clusters:
    """The clusters that `pack_clusters` packed into the array `packed`."""
    at_best, at_fixed = np.split(packed[1:], 2)
    return Clusters(resolutions[packed[0, 0]], at_best, at_fixed)


def make_graph(igraph: Any, edges: sp.coo_matrix) -> Any:
    """igraph's graph of the cells. `edges`, (cells, cells), is an upper triangle of weights above 0."""
    pairs = np.stack([edges.row, edges.col], axis=1)
    return igraph.Graph(n=edges.shape[0], edges=pairs, edge_attrs={"weight": edges.data})


def run_leiden(
    igraph: Any, graph: Any, resolution: float, seeds: Iterable[int]
) -> list[np.ndarray]:
    """Cluster ids of the cells, (cells,) int64, for each of `seeds`."""
    by_seed = []
    options = {
        "objective_function": "modularity",
        "weights": "weight",
        "resolution": resolution,
        "n_iterations": -1,  # until nothing improves
    }
    try:
        for seed in seeds:
            igraph.set_random_number_generator(random.Random(seed))
            by_seed.append(np.asarray(graph.community_leiden(**options).membership, np.int64))
    finally:
        igraph.set_random_number_generator(random)  # the default of igraph
    return by_seed


def compute_nmi_terms(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """A score of each cell, (cells,) float64. The mean of the scores is the NMI, as scikit-learn's
    `normalized_mutual_info_score` computes it.

    The NMI is 2 I / (H + H'). I is the information that classes and clusters share. H and H' are the
    entropies of classes and of clusters.
    """
    n_by_cell = _count_cells(classes, clusters)
    n = len(classes)
    # (cells,): information in the class and in the cluster of a cell, and the information that both share
    of_class = -np.log(n_by_cell.in_class / n)
    of_cluster = -np.log(n_by_cell.in_cluster / n)
    information = np.log(n_by_cell.in_both * n / (n_by_cell.in_class * n_by_cell.in_cluster))
    entropies = of_class.mean() + of_cluster.mean()
    shared = information.mean()
    if entropies < TINY:  # one class and one cluster
        return np.ones(n)
    nmi = 2 * shared / entropies
    # derivatives by the weight of a cell, times the number of cells
    d_shared = information - shared
    d_entropies = of_class + of_cluster - entropies
    return nmi + (2 * d_shared / entropies - nmi * d_entropies / entropies)


def compute_ari_terms(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """A score of each cell, (cells,) float64. The mean of the scores is the ARI (Hubert & Arabie 1985), as
    scikit-learn's `adjusted_rand_score` computes it.
    """
    n_by_cell = _count_cells(classes, clusters)
    n = len(classes)
    # Numbers of pairs of cells that have the same class and cluster, the same class, and the same
    # cluster. The sum of group sizes over cells is the sum of squared sizes over groups.
    n_pairs = n * (n - 1) / 2
    same_both = (n_by_cell.in_both.sum() - n) / 2
    same_class = (n_by_cell.in_class.sum() - n) / 2
    same_cluster = (n_by_cell.in_cluster.sum() - n) / 2
    # `same_both` would be `expected` for random clusters, and `largest` for clusters that are the classes
    expected = same_class * same_cluster / n_pairs
    largest = (same_class + same_cluster) / 2
    if largest - expected < TINY * n_pairs:  # all cells together, or each cell alone, in both
        return np.ones(n)
    ari = (same_both - expected) / (largest - expected)
    # derivatives of these numbers by the weight of a cell, (cells,)
    d_both = n_by_cell.in_both - 0.5
    d_class = n_by_cell.in_class - 0.5
    d_cluster = n_by_cell.in_cluster - 0.5
    d_expected = d_class * same_cluster + same_class * d_cluster - expected * (n - 0.5)
    d_expected = d_expected / n_pairs
    d_largest = (d_class + d_cluster) / 2
    # derivative of the ARI, by the quotient rule
    d_ari = d_both - d_expected - ari * (d_largest - d_expected)
    d_ari = d_ari / (largest - expected)
    # centred, so that the mean of the scores is the ARI
    return ari + n * (d_ari - d_ari.mean())


class _CellCounts(NamedTuple):
    """Numbers of cells that are grouped with each cell, (cells,) float64. The cell itself counts."""

    in_both: np.ndarray  # cells of the same class and the same cluster
    in_class: np.ndarray  # cells of the same class
    in_cluster: np.ndarray  # cells of the same cluster


def _count_cells(classes: np.ndarray, clusters: np.ndarray) -> _CellCounts:
    """Count, for each cell, the cells of the same class, of the same cluster, and of both."""
    _, class_of_cell = np.unique(classes, return_inverse=True)
    _, cluster_of_cell = np.unique(clusters, return_inverse=True)
    table = np.zeros((class_of_cell.max() + 1, cluster_of_cell.max() + 1))
    np.add.at(table, (class_of_cell, cluster_of_cell), 1.0)
    return _CellCounts(
        in_both=table[class_of_cell, cluster_of_cell],
        in_class=table.sum(1)[class_of_cell],
        in_cluster=table.sum(0)[cluster_of_cell],
    )


def _average_n_clusters(clusters: np.ndarray) -> float:
    """Number of clusters, averaged over seeds. `clusters` are (seeds, cells) cluster ids."""
    return float(np.mean([len(np.unique(cluster_ids)) for cluster_ids in clusters]))
