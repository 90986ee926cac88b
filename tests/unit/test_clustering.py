"""Task clustering: measures against scikit-learn, planted groups found again, the same numbers every time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from cellmill.config.parts.tasks import ClusteringConfig
from cellmill.evaluate.tasks.clustering import Clustering, ari_scores, nmi_scores
from cellmill.evaluate.tasks.integration import NeighborGraph, jaccard_weights
from tests.unit.evaluated import make_context

MEASURES = [(nmi_scores, normalized_mutual_info_score), (ari_scores, adjusted_rand_score)]


@pytest.mark.parametrize(("scores", "reference"), MEASURES)
def test_scores_of_cells_have_the_measure_as_mean_and_its_spread_as_theirs(scores: Any, reference: Any) -> None:
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 400)
    clusters = np.where(random.random(400) < 0.7, classes, random.integers(0, 6, 400))
    made = scores(classes, clusters)
    assert made.mean() == pytest.approx(reference(classes, clusters), abs=1e-12)
    draws = random.integers(0, 400, (300, 400))
    bootstrap = np.std([reference(classes[cells], clusters[cells]) for cells in draws])
    assert made.std() / 20 == pytest.approx(bootstrap, rel=0.15)
    named = np.array(["d", "a", "c", "b"])[classes]
    np.testing.assert_allclose(scores(named, clusters), made, atol=1e-12)
    np.testing.assert_allclose(scores(clusters, classes), made, atol=1e-12)
    for same in (np.zeros(9, int), np.arange(9)):
        assert scores(same, same).mean() == pytest.approx(1)
    assert scores(classes, np.zeros(400, int)).mean() == pytest.approx(0, abs=1e-12)


def test_the_graph_has_the_nearest_cells_and_jaccard_weights_by_hand() -> None:
    line = np.array([[0.0], [1.0], [3.0], [7.0]])
    graph = NeighborGraph.of(line, 2)
    assert graph.indices.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert graph.distances.tolist() == [[1, 3], [1, 2], [2, 3], [4, 6]]
    weights = jaccard_weights(graph).toarray()
    # neighbours with themselves: {0, 1, 2} three times, and {1, 2, 3}, which shares two of four
    assert weights.tolist() == [[0, 1, 1, 0], [0, 0, 1, 0.5], [0, 0, 0, 0.5], [0, 0, 0, 0]]
    np.testing.assert_array_equal(NeighborGraph.of(line, 90).indices.shape, (4, 3))


def test_planted_groups_are_found_with_an_interval_and_the_same_clusters_again(tmp_path: Path, simulated: Path) -> None:
    pytest.importorskip("igraph")
    context = make_context(tmp_path, simulated)
    label = context.roles["label"].astype(str)
    classes = np.unique(label, return_inverse=True)[1]
    random = np.random.default_rng(0)
    vectors = (10 * np.eye(16)[classes] + random.normal(size=(len(classes), 16))).astype(np.float32)
    planted = replace(context, vectors=vectors)
    config = ClusteringConfig(resolutions=[0.1, 1.0], seeds=2, min_cells=5)
    result = Clustering(config).run(planted)
    rows = {row["name"]: row for row in result.rows}
    assert list(rows) == [
        "embedding",
        "untrained",
        "PCA50 of the training cells",
        "PCA50 of the scored cells",
        "PCA50 of the scored cells, scaled genes",
        "all genes",
    ]
    own = rows["embedding"]
    assert own["ARI, best resolution_repetitions"] == own["NMI, best resolution_repetitions"] == [1.0, 1.0]
    assert own["clusters there"] == len(result.figures["classes"])
    noise = replace(context, vectors=random.normal(size=vectors.shape).astype(np.float32))
    lost = Clustering(config).run(noise)
    assert abs(lost.rows[0]["ARI, resolution 1_mean"]) < 0.1
    assert lost.rows[1:] == result.rows[1:]  # of cached baselines too
    assert any(v.outcome == "behind" for v in lost.verdicts)
    again = Clustering(config).run(replace(planted, baselines=type(context.baselines)()))
    assert again.to_json() == result.to_json()
