"""Tasks clustering and integration, and the UMAP: measures by hand and against scikit-learn, and
invariants.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import chisquare
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression
from sklearn.metrics import (
    adjusted_rand_score,
    normalized_mutual_info_score,
    pairwise_distances,
    silhouette_samples,
)
from sklearn.neighbors import NearestNeighbors

from cellmill.config.parts.tasks import ClusteringConfig, IntegrationConfig
from cellmill.evaluate.inference.umap import project
from cellmill.evaluate.methods import OF_TRAINING
from cellmill.evaluate.task import Context, run_task
from cellmill.evaluate.tasks import integration as mixing
from cellmill.evaluate.tasks.clustering import Clustering, ari_scores, nmi_scores
from cellmill.evaluate.tasks.integration import Integration, NeighborGraph, jaccard_weights

MEASURES = [(nmi_scores, normalized_mutual_info_score), (ari_scores, adjusted_rand_score)]


@pytest.mark.parametrize(("scores", "reference"), MEASURES)
def test_the_mean_score_of_cells_is_the_measure(scores: Any, reference: Any) -> None:
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


def test_the_graph_has_jaccard_weights() -> None:
    line = np.array([[0.0], [1.0], [3.0], [7.0]])
    graph = NeighborGraph.of(line, 2)
    assert graph.indices.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert graph.distances.tolist() == [[1, 3], [1, 2], [2, 3], [4, 6]]
    weights = jaccard_weights(graph).toarray()
    # neighbours with themselves: {0, 1, 2} three times, and {1, 2, 3}, which shares two of four
    assert weights.tolist() == [[0, 1, 1, 0], [0, 0, 1, 0.5], [0, 0, 0, 0.5], [0, 0, 0, 0]]
    np.testing.assert_array_equal(NeighborGraph.of(line, 90).indices.shape, (4, 3))


def test_planted_groups_are_found(
    context: Context,
) -> None:
    pytest.importorskip("igraph")
    label = context.roles["label"].astype(str)
    classes = np.unique(label, return_inverse=True)[1]
    random = np.random.default_rng(0)
    vectors = (10 * np.eye(16)[classes] + random.normal(size=(len(classes), 16))).astype(np.float32)
    planted = replace(context, vectors=vectors)
    config = ClusteringConfig(resolutions=[0.1, 1.0], seeds=2, min_cells=5)
    result = Clustering(config).run(planted)
    rows = {row.method.name: row for row in result.rows}
    assert list(rows) == [
        "embedding",
        "untrained",
        "PCA50 of the training cells",
        "PCA50 of the scored cells",
        "PCA50 of the scored cells, scaled genes",
        "all genes",
    ]
    own = rows["embedding"]
    assert (
        own.scores["ARI, best resolution"].repetitions
        == own.scores["NMI, best resolution"].repetitions
        == [1.0, 1.0]
    )
    assert own.numbers["clusters there"] == len(result.figures["classes"])
    noise = replace(context, vectors=random.normal(size=vectors.shape).astype(np.float32))
    lost = Clustering(config).run(noise)
    assert abs(lost.rows[0].scores["ARI, resolution 1"].mean) < 0.1
    assert lost.rows[1:] == result.rows[1:]  # of cached baselines too
    assert any(v.outcome == "behind" for v in lost.verdicts)
    again = Clustering(config).run(replace(planted, baselines=type(context.baselines)()))
    assert again.to_json() == result.to_json()


Cells = tuple[np.ndarray, np.ndarray, np.ndarray]  # vectors, batches, labels


def cells(apart: float, n: int = 240) -> Cells:
    """Three labels far from each other, three batches `apart` within each."""
    random = np.random.default_rng(0)
    labels = np.arange(n) % 3
    batches = np.arange(n) // 3 % 3
    vectors = random.normal(size=(n, 6))
    vectors[np.arange(n), labels] += 20
    vectors[np.arange(n), 3 + batches] += apart
    return vectors, batches, labels


def measured(of: Cells) -> dict[str, float]:
    vectors, batches, labels = of
    values = Integration(IntegrationConfig(neighbors=30)).measure(
        vectors, np.eye(3)[batches], batches, labels
    )
    return {
        name.partition(": ")[2]: float(np.mean(value))
        for name, value in values.items()
        if value is not None
    }


def test_mixed_batches_score_higher_than_separated_ones() -> None:
    mixed = measured(cells(0))
    separated = measured(cells(15))
    for name, high, low in (("iLISI", 0.6, 1e-6), ("kBET", 0.9, 1e-6), ("BRAS", 0.9, 0.75)):
        assert mixed[name] > high, name
        assert separated[name] <= low, name
    for one in (mixed, separated):
        assert one["cLISI"] == pytest.approx(1)
    assert mixed["graph connectivity"] == 1
    # each label is three components
    assert separated["graph connectivity"] == pytest.approx(27 / 80)
    # of components that have no variance but between batches
    assert mixed["PCR"] > 0.99 > 0.8 > separated["PCR"]
    assert mixed["label ASW"] > 0.9


def test_lisi_has_the_weights_of_its_perplexity() -> None:
    vectors, _, _ = cells(2)
    graph = NeighborGraph.of(vectors, 30)
    weights = mixing.neighbor_weights(graph.distances, 10)
    entropy = -(weights * np.log(weights)).sum(1)
    np.testing.assert_allclose(np.exp(entropy), 10, rtol=1e-4)
    # equal distances: equal weights
    even = NeighborGraph(np.array([[1, 2, 3]] * 4), np.ones((4, 3)))
    assert mixing.lisi(even, np.array([0, 0, 1, 1]), 3) == pytest.approx([1 / (1 / 9 + 4 / 9)] * 4)


def test_kbet_is_the_chi_square_test_of_each_neighbourhood() -> None:
    vectors, batches, _ = cells(2)
    graph = NeighborGraph.of(vectors, 19)
    expected = np.bincount(batches) / len(batches) * 20  # a quarter of a batch's mean size
    for cell, accepted in enumerate(mixing.kbet(vectors, batches, np.zeros(len(batches)))):
        around = np.bincount(batches[[cell, *graph.indices[cell]]], minlength=3)
        assert accepted == pytest.approx(float(chisquare(around, expected).pvalue >= 0.05))


def test_bras_is_a_silhouette_against_all_other_batches() -> None:
    vectors, batches, labels = cells(2, 60)
    batches[labels == 1] = np.arange(20) % 2  # with two batches, it is scikit-learn's
    assert mixing.bras(vectors, np.zeros(60, int), labels) is None
    by_label = []
    for label in range(3):
        of = labels == label
        distances = pairwise_distances(vectors[of], metric="cosine")
        batch = batches[of]
        s = []
        for cell in range(20):
            same = (batch == batch[cell]) & (np.arange(20) != cell)
            a = distances[cell, same].mean()
            b = distances[cell, batch != batch[cell]].mean()
            s.append((b - a) / max(a, b))
        if label == 1:
            np.testing.assert_allclose(
                s, silhouette_samples(vectors[of], batch, metric="cosine"), atol=1e-9
            )
        by_label.append(np.mean(1 - np.abs(s)))
    assert np.mean(mixing.bras(vectors, batches, labels)) == pytest.approx(np.mean(by_label))


def test_batch_variance_is_a_regression_on_all_components() -> None:
    vectors, batches, _ = cells(4)
    components = PCA().fit(vectors)
    values = components.transform(vectors)
    one_hot = np.eye(3)[batches][:, 1:]
    r2 = [LinearRegression().fit(one_hot, column).score(one_hot, column) for column in values.T]
    expected = np.dot(r2, components.explained_variance_ratio_)
    terms = mixing.batch_variance(vectors, batches)
    assert terms.mean() == pytest.approx(expected)
    # without the labels, whose shares of the batches vary from draw to draw
    vectors = vectors[:, 3:]
    terms = mixing.batch_variance(vectors, batches)
    random = np.random.default_rng(2)
    draws = random.integers(0, len(batches), (300, len(batches)))
    bootstrap = np.std([mixing.batch_variance(vectors[of], batches[of]).mean() for of in draws])
    assert terms.std() / len(batches) ** 0.5 == pytest.approx(bootstrap, rel=0.2)


def test_means_weigh_every_label_equally() -> None:
    values = np.array([1.0, 1, 1, 0, np.nan])
    made = mixing.mean_of_labels(values, np.array([0, 0, 0, 1, 2]))
    assert made is not None
    assert made.mean() == 0.5
    assert mixing.mean_of_labels(np.full(3, np.nan), np.zeros(3)) is None
    widths = np.array([0.2, 0.4, 0.9, 0.9])
    batches = np.array([0, 0, 0, 1])
    found = mixing.isolated_labels(widths, batches, np.array([0, 0, 1, 1]))
    assert found is not None
    assert found.mean() == pytest.approx(0.3)
    assert mixing.isolated_labels(widths, np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])) is None


def test_random_vectors_mix_best(
    context: Context,
) -> None:
    pytest.importorskip("harmonypy")
    batch = pd.Series(np.arange(context.reader.n_obs) // 2 % 3, name="batch").astype(str)
    batch[:6] = None
    label = np.unique(context.roles["label"].astype(str), return_inverse=True)[1]
    vectors = 5 * np.eye(16)[label] + 3 * np.eye(16)[[8, 9, 10]][np.arange(len(batch)) // 2 % 3]
    vectors += np.random.default_rng(0).normal(size=vectors.shape)
    with_batch = replace(
        context, roles={**context.roles, "batch": batch}, vectors=vectors.astype(np.float32)
    )
    task = Integration(IntegrationConfig(neighbors=30, harmony=True, min_cells=5))
    result = task.run(with_batch)
    assert result.metric is None  # no total
    rows = {row.method.name: row for row in result.rows}
    assert list(rows) == [
        "embedding",
        "untrained",
        "PCA50 of the training cells",
        "PCA50",
        "PCA50, Harmony",
        "random",
    ]
    own = rows["embedding"].numbers
    random = rows["random"].numbers
    assert all(key.startswith(("batch: ", "bio: ")) for key in own)
    assert random["batch: iLISI"] > own["batch: iLISI"] + 0.3
    assert own["bio: label ASW"] > random["bio: label ASW"] + 0.1
    assert rows["PCA50"].numbers["batch: PCR"] == pytest.approx(0, abs=1e-9)
    assert own["bio: isolated labels"] is None
    assert result.figures["n_without_batch"] == 3
    assert {verdict.against for verdict in result.verdicts} == {"PCA50, Harmony"}
    assert result.to_json() == task.run(with_batch).to_json()
    assert run_task(task, context).skipped == "the dataset has no batch column"
    one = replace(
        with_batch,
        roles={**context.roles, "batch": pd.Series("x", index=batch.index, name="batch")},
    )
    assert run_task(task, one).skipped == "the labelled scored cells have 1 batches, not 2"


@pytest.mark.parametrize("n", [12, 15, 16])
def test_harmony_of_few_cells_is_a_reason_to_skip(context: Context, n: int) -> None:
    pytest.importorskip("harmonypy")
    label = context.roles["label"].astype(str).to_numpy()
    scored = np.flatnonzero(context.scored & np.isin(label, np.unique(label)[:2]))[:n]
    batch = pd.Series(np.arange(context.reader.n_obs) // 2 % 2, name="batch").astype(str)
    few = replace(
        context,
        scored=np.isin(np.arange(context.reader.n_obs), scored),
        roles={**context.roles, "batch": batch},
        vectors=np.random.default_rng(0).normal(size=(context.reader.n_obs, 16)).astype(np.float32),
    )
    result = run_task(Integration(IntegrationConfig(harmony=True, min_cells=2)), few)
    if n > 15:
        assert result.skipped is None
        return
    assert result.skipped == (
        f"harmonypy refuses the {n} scored cells with a batch: nclust must be at least 1; score more cells "
        "(shard.test_frac), or set harmony: false"
    )


def test_the_training_components_see_no_scored_cell(context: Context) -> None:
    cells = np.arange(0, 40, 2)
    batches = np.arange(20) % 2
    task = Integration(IntegrationConfig())
    of_all = task.vectors(context, cells, batches)[OF_TRAINING]
    of_half = task.vectors(context, cells[:10], batches[:10])[OF_TRAINING]
    np.testing.assert_allclose(of_all[:10], of_half, atol=1e-5)


def test_cells_of_a_cluster_stay_together_in_the_picture() -> None:
    random = np.random.default_rng(0)
    of_cell = np.arange(180) % 3
    vectors = (8 * random.normal(size=(3, 16))[of_cell] + random.normal(size=(180, 16))).astype(
        np.float32
    )
    picture = project(vectors, seed=1)
    nearest = NearestNeighbors(n_neighbors=6).fit(picture).kneighbors(return_distance=False)
    assert (of_cell[nearest] == of_cell[:, None]).all()
    np.testing.assert_array_equal(project(vectors, seed=1), picture)
    assert not np.array_equal(project(vectors, seed=2), picture)
    assert "umap" in sys.modules
    assert hasattr(sys.modules.get("pynndescent", np), "__file__"), (
        "no stand-in is left for other packages"
    )


def test_few_or_equal_cells_have_a_picture_too() -> None:
    for n in (1, 3, 4, 5, 17):
        for vectors in (np.random.default_rng(n).normal(size=(n, 4)), np.ones((n, 4))):
            picture = project(vectors.astype(np.float32), seed=0)
            assert picture.shape == (n, 2)
            assert np.isfinite(picture).all()
