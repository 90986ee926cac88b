"""Task `clustering`: Leiden clusters of the evaluated cells against their label, by NMI and ARI.

Every kind of features gets the same graph (k nearest cells, Jaccard weights), seeds and resolutions: the embedding;
the same architecture untrained; 50 principal components of the model's training cells; 50 of the scored cells
themselves, of log-normalised genes and of genes scaled to variance 1; all genes. Components of the scored cells have
seen the cells that are clustered, which the embedding has not: an advantage of the baseline. Clusters never see the
label. The best resolution is chosen by the label, as is usual, for each kind of features by its own mean ARI: NMI, not
corrected for chance, grows with the number of clusters. Scores there are too high, of all rows alike, and those at the
fixed resolution are not. Intervals of differences are over cells, for the clusters as they are, and over seeds
(`evaluate.agreement`, `evaluate.paired`).
"""

from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.config.structure_tasks import ClusteringConfig
from cellmill.evaluate.agreement import ari_scores, nmi_scores
from cellmill.evaluate.baseline_cache import BaselineCache
from cellmill.evaluate.classifiers import OF_THE_MODEL, read_rows
from cellmill.evaluate.features import Features, with_components, with_external
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.leiden import LeidenGraph, import_igraph
from cellmill.evaluate.neighbor_graph import NeighborGraph, jaccard_weights
from cellmill.evaluate.score_table import EMBEDDING, ScoreColumn, against_best, differences, kind_of, table_rows
from cellmill.evaluate.task import Context, TaskResult
from cellmill.runs.verdict import Verdict

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
