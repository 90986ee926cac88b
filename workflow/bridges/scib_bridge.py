"""Metrics of scib-metrics on an embedding and on principal components, each by the package's own function.

Neighbours are exact, each cell its own first one, 90, 50 and 15 of them as in the package's Benchmarker. There is no
total. Without two batches the metrics of labels alone are computed.
"""

from missing import end_without

try:
    import numpy as np
    import scib_metrics as scib
    from embedded_cells import EmbeddedCells, judge, neighbors_with_self
    from scib_metrics.nearest_neighbors import NeighborsResults
except ImportError as error:
    end_without("scib-metrics", "0.5.10", error)


def measure(vectors: np.ndarray, cells: EmbeddedCells) -> dict[str, float]:
    """Metrics by name; those that read batches only where there are several."""
    labels, batches = cells.labels, cells.batches
    nearest = NeighborsResults(*neighbors_with_self(vectors, 90))
    of_15, of_50 = (nearest.subset_neighbors(min(k, nearest.n_neighbors)) for k in (15, 50))
    clusters = {
        "leiden": scib.nmi_ari_cluster_labels_leiden(of_15, labels, optimize_resolution=True)
    }
    clusters["kmeans"] = scib.nmi_ari_cluster_labels_kmeans(vectors, labels)
    found = {
        "clisi_knn": scib.clisi_knn(nearest, labels),
        "graph_connectivity": scib.graph_connectivity(of_15, labels),
        "silhouette_label": scib.silhouette_label(vectors, labels),
        **{
            f"{score}_{how}": value
            for how, scores in clusters.items()
            for score, value in scores.items()
        },
    }
    if batches is not None:
        found |= {
            "isolated_labels": scib.isolated_labels(vectors, labels, batches),
            "ilisi_knn": scib.ilisi_knn(nearest, batches),
            "kbet": scib.kbet(of_50, batches)[0],
            "kbet_per_label": scib.kbet_per_label(of_50, batches, labels),
            "bras": scib.bras(vectors, labels, batches),
            "pcr_comparison": scib.pcr_comparison(
                cells.features["PCA50"], vectors, batches, categorical=True
            ),
        }
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    judge("scib-metrics", measure)
