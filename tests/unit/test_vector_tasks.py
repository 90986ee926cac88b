"""Tasks clustering and integration, and the UMAP: measures by hand and against scikit-learn, and
invariants.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
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
from cellmill.evaluate.features import products
from cellmill.evaluate.features.neighbors import NeighborGraph, jaccard_weights
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.inference.umap import project
from cellmill.evaluate.methods import TRAINING_COMPONENTS
from cellmill.evaluate.prediction_cache import PredictionCache
from cellmill.evaluate.task import Context, run_task
from cellmill.evaluate.tasks.clustering import Clustering, compute_ari_terms, compute_nmi_terms
from cellmill.evaluate.tasks.integration import measures
from cellmill.evaluate.tasks.integration.task import Integration

MEASURES = [
    (compute_nmi_terms, normalized_mutual_info_score),
    (compute_ari_terms, adjusted_rand_score),
]


@pytest.mark.parametrize(("scores", "reference"), MEASURES)
def test_the_mean_score_of_cells_is_the_measure(scores: Any, reference: Any) -> None:
    classes, clusters = labelled_clusters()
    of_cells = scores(classes, clusters)
    assert of_cells.mean() == pytest.approx(reference(classes, clusters), abs=1e-12)
    named = np.array(["d", "a", "c", "b"])[classes]
    np.testing.assert_allclose(scores(named, clusters), of_cells, atol=1e-12)
    np.testing.assert_allclose(scores(clusters, classes), of_cells, atol=1e-12)
    one_cluster = np.zeros(400, int)
    assert scores(classes, one_cluster).mean() == pytest.approx(0, abs=1e-12)
    for same in (np.zeros(9, int), np.arange(9)):
        assert scores(same, same).mean() == pytest.approx(1)


@pytest.mark.parametrize(("scores", "reference"), MEASURES)
def test_scores_of_cells_spread_like_a_bootstrap(scores: Any, reference: Any) -> None:
    classes, clusters = labelled_clusters()
    random = np.random.default_rng(1)
    measures = []
    for _ in range(300):
        cells = random.integers(0, 400, 400)
        measures.append(reference(classes[cells], clusters[cells]))
    error = scores(classes, clusters).std() / 400**0.5
    assert error == pytest.approx(np.std(measures), rel=0.15)


def labelled_clusters() -> tuple[np.ndarray, np.ndarray]:
    """Classes of 400 cells, and clusters that equal them for about 70 % of the cells."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 400)
    is_right = random.random(400) < 0.7
    clusters = np.where(is_right, classes, random.integers(0, 6, 400))
    return classes, clusters


@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
def test_neighbours_of_shared_products_match_the_features(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if single:
        monkeypatch.setattr(products, "MAX_DOUBLE", 0)
    random = np.random.default_rng(0)
    genes = sp.csr_matrix(np.log1p(random.poisson(0.7, (90, 200))).astype(np.float32))
    shared = FeatureCache().share(genes)
    cells = random.permutation(90)[:70]
    found = NeighborGraph.build(shared[cells], 12)
    expected = NeighborGraph.build(genes[cells].toarray().astype(np.float64), 12)
    np.testing.assert_array_equal(np.sort(found.indices), np.sort(expected.indices))
    np.testing.assert_allclose(found.distances, expected.distances, rtol=1e-5)
    copies = sp.vstack([genes[:1]] * 4, format="csr")
    same = NeighborGraph.build(FeatureCache().share(copies), 2)
    assert not (same.indices == np.arange(4)[:, None]).any(), "a cell is no neighbour of itself"


def test_the_graph_has_jaccard_weights() -> None:
    line = np.array([[0.0], [1.0], [3.0], [7.0]])
    graph = NeighborGraph.build(line, 2)
    assert graph.indices.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert graph.distances.tolist() == [[1, 3], [1, 2], [2, 3], [4, 6]]
    weights = jaccard_weights(graph).toarray()
    # neighbours with themselves: {0, 1, 2} three times, and {1, 2, 3}, which shares two of four
    assert weights.tolist() == [
        [0, 1, 1, 0],
        [0, 0, 1, 0.5],
        [0, 0, 0, 0.5],
        [0, 0, 0, 0],
    ]
    assert NeighborGraph.build(line, 90).indices.shape == (4, 3)


def test_planted_groups_are_found(context: Context) -> None:
    pytest.importorskip("igraph")
    label = context.roles["label"].astype(str)
    classes = np.unique(label, return_inverse=True)[1]
    random = np.random.default_rng(0)
    noise = random.normal(size=(len(classes), 16))
    vectors = 10 * np.eye(16)[classes] + noise
    planted = replace(context, vectors=vectors.astype(np.float32))
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
    assert own.scores["ARI, best resolution"].repetitions == [1.0, 1.0]
    assert own.scores["NMI, best resolution"].repetitions == [1.0, 1.0]
    assert own.numbers["clusters there"] == len(result.figures["classes"])
    without_groups = random.normal(size=vectors.shape).astype(np.float32)
    lost = Clustering(config).run(replace(context, vectors=without_groups))
    score = lost.rows[0].scores["ARI, resolution 1"]
    assert abs(score.mean) < 0.1
    assert lost.rows[1:] == result.rows[1:]  # of cached baselines too
    assert "behind" in {verdict.outcome for verdict in lost.verdicts}
    without_cache = replace(
        planted, prediction_cache=PredictionCache(), feature_cache=FeatureCache()
    )
    again = Clustering(config).run(without_cache)
    assert again.to_json() == result.to_json()


def test_a_single_resolution_has_no_best_one(context: Context) -> None:
    pytest.importorskip("igraph")
    config = ClusteringConfig(resolutions=[1.0], seeds=1, min_cells=5)
    result = Clustering(config).run(context)
    columns = ["ARI, resolution 1", "NMI, resolution 1"]
    assert result.metric == columns[0]
    assert {verdict.metric for verdict in result.verdicts} == {*columns}
    for row in result.rows:
        assert [*row.scores] == columns
        assert [*row.numbers] == ["clusters, fixed"]
    # a fixed resolution beside a single other one is a second clustering
    config = ClusteringConfig(resolutions=[0.1], seeds=1, min_cells=5)
    both = Clustering(config).run(context).rows[0]
    assert [*both.scores] == ["ARI, best resolution", "NMI, best resolution", *columns]
    assert both.numbers["best resolution"] == 0.1


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


def measured(apart: float) -> dict[str, float]:
    """Mean of each measure over `cells(apart)`."""
    vectors, batches, labels = cells(apart)
    one_hot = np.eye(3)[batches]
    task = Integration(IntegrationConfig(neighbors=30))
    means = {}
    for name, value in task.measure(vectors, one_hot, batches, labels).items():
        if value is not None:
            means[name.partition(": ")[2]] = float(np.mean(value))
    return means


def test_mixed_batches_score_higher_than_separated_ones() -> None:
    mixed = measured(apart=0)
    separated = measured(apart=15)
    assert mixed["iLISI"] > 0.6
    assert separated["iLISI"] <= 1e-6
    assert mixed["kBET"] > 0.9
    assert separated["kBET"] <= 1e-6
    assert mixed["BRAS"] > 0.9
    assert separated["BRAS"] <= 0.75
    assert mixed["PCR"] > 0.99
    assert separated["PCR"] < 0.8
    assert mixed["graph connectivity"] == 1
    # each label is three components
    assert separated["graph connectivity"] == pytest.approx(27 / 80)


def test_separated_labels_score_high() -> None:
    assert measured(apart=0)["cLISI"] == pytest.approx(1)
    assert measured(apart=15)["cLISI"] == pytest.approx(1)
    assert measured(apart=0)["label ASW"] > 0.9


def test_lisi_has_the_weights_of_its_perplexity() -> None:
    vectors, _, _ = cells(2)
    graph = NeighborGraph.build(vectors, 30)
    weights = measures.compute_neighbor_weights(graph.distances, 10)
    entropy = -(weights * np.log(weights)).sum(1)
    np.testing.assert_allclose(np.exp(entropy), 10, rtol=1e-4)
    # three neighbours at equal distances have equal weights: two of one label, one of the other
    even = NeighborGraph(np.array([[1, 2, 3]] * 4), np.ones((4, 3)))
    simpson = (1 / 3) ** 2 + (2 / 3) ** 2
    found = measures.measure_lisi(even, np.array([0, 0, 1, 1]), 3)
    assert found == pytest.approx([1 / simpson] * 4)


def test_kbet_is_the_chi_square_test_of_each_neighbourhood() -> None:
    vectors, batches, _ = cells(2)
    graph = NeighborGraph.build(vectors, 19)
    n_cells = len(batches)
    expected = np.bincount(batches) / n_cells * 20  # a quarter of a batch's mean size
    accepted = measures.measure_kbet(vectors, batches, np.zeros(n_cells))
    for cell in range(n_cells):
        neighbourhood = [cell, *graph.indices[cell]]
        counts = np.bincount(batches[neighbourhood], minlength=3)
        p = chisquare(counts, expected).pvalue
        assert bool(accepted[cell]) == (p >= 0.05)


@pytest.mark.parametrize("block", [7, measures.COMPARED])
@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
def test_label_silhouettes_equal_scikit_learn(
    block: int, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "COMPARED", block)
    if single:  # as of many cells
        monkeypatch.setattr(measures, "MAX_DOUBLE", 0)
    random = np.random.default_rng(0)
    labels = np.append(random.integers(0, 4, 60), 4)  # the last label has one cell
    vectors = (random.normal(size=(61, 5)) + labels[:, None] + 100).astype(np.float32)
    vectors[1] = vectors[0]
    expected = (silhouette_samples(vectors.astype(np.float64), labels) + 1) / 2
    atol = 1e-4 if single else 1e-6
    np.testing.assert_allclose(measures.measure_silhouettes(vectors, labels), expected, atol=atol)


def test_bras_is_a_silhouette_against_all_other_batches() -> None:
    vectors, batches, labels = cells(2, 60)
    batches[labels == 1] = np.arange(20) % 2  # with two batches, it is scikit-learn's
    assert measures.measure_bras(vectors, np.zeros(60, int), labels) is None
    by_label = []
    for label in range(3):
        is_of_label = labels == label
        vectors_of_label = vectors[is_of_label]
        distances = pairwise_distances(vectors_of_label, metric="cosine")
        batch = batches[is_of_label]
        silhouettes = []
        for cell in range(20):
            is_other_batch = batch != batch[cell]
            is_own_batch = ~is_other_batch
            is_own_batch[cell] = False
            within = distances[cell, is_own_batch].mean()
            between = distances[cell, is_other_batch].mean()
            silhouettes.append((between - within) / max(within, between))
        if label == 1:
            expected = silhouette_samples(vectors_of_label, batch, metric="cosine")
            np.testing.assert_allclose(silhouettes, expected, atol=1e-9)
        by_label.append(1 - np.mean(np.abs(silhouettes)))
    found = measures.measure_bras(vectors, batches, labels)
    assert np.mean(found) == pytest.approx(np.mean(by_label))


def test_batch_variance_is_a_regression_on_all_components() -> None:
    vectors, batches, _ = cells(4)
    components = PCA().fit(vectors)
    one_hot = np.eye(3)[batches][:, 1:]
    expected = 0.0
    for values, share in zip(components.transform(vectors).T, components.explained_variance_ratio_):
        regression = LinearRegression().fit(one_hot, values)
        expected += share * regression.score(one_hot, values)
    terms = measures.measure_batch_variance(vectors, batches)
    assert terms.mean() == pytest.approx(expected)


def test_terms_of_batch_variance_spread_like_a_bootstrap() -> None:
    vectors, batches, _ = cells(4)
    # without the labels, whose shares of the batches vary from draw to draw
    vectors = vectors[:, 3:]
    n_cells = len(batches)
    random = np.random.default_rng(2)
    means = []
    for _ in range(300):
        draw = random.integers(0, n_cells, n_cells)
        means.append(measures.measure_batch_variance(vectors[draw], batches[draw]).mean())
    error = measures.measure_batch_variance(vectors, batches).std() / n_cells**0.5
    assert error == pytest.approx(np.std(means), rel=0.2)


def test_means_weigh_every_label_equally() -> None:
    values = np.array([1.0, 1, 1, 0, np.nan])
    labels = np.array([0, 0, 0, 1, 2])
    scores = measures.compute_label_mean_terms(values, labels)
    assert scores is not None
    assert scores.mean() == 0.5
    without_values = np.full(3, np.nan)
    assert measures.compute_label_mean_terms(without_values, np.zeros(3)) is None


def test_labels_of_the_fewest_batches_are_isolated() -> None:
    widths = np.array([0.2, 0.4, 0.9, 0.9])
    labels = np.array([0, 0, 1, 1])
    scores = measures.measure_isolated_labels(widths, np.array([0, 0, 0, 1]), labels)
    assert scores is not None
    assert scores.mean() == pytest.approx(0.3)
    in_all_batches = np.array([0, 1, 0, 1])
    assert measures.measure_isolated_labels(widths, in_all_batches, labels) is None


def test_random_vectors_mix_best(context: Context) -> None:
    pytest.importorskip("harmonypy")
    number = np.arange(context.reader.n_obs) // 2 % 3
    batch = pd.Series(number, name="batch").astype(str)
    batch[:6] = None
    _, label = np.unique(context.roles["label"].astype(str), return_inverse=True)
    directions = np.eye(16)
    vectors = 5 * directions[label] + 3 * directions[8 + number]
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
    batch[:] = "x"
    one = replace(with_batch, roles={**context.roles, "batch": batch})
    assert (
        run_task(task, one).skipped
        == "expected labelled scored cells of two batches or more, got 1"
    )


def test_a_label_needs_enough_cells_with_a_batch(context: Context) -> None:
    names = context.roles["label"].astype(str).to_numpy()
    batch = pd.Series(np.arange(len(names)) // 2 % 2, name="batch").astype(str)
    first = names[context.scored][0]
    of_first = np.flatnonzero(context.scored & (names == first))
    batch[of_first[1:]] = None
    roles = {**context.roles, "batch": batch}
    result = Integration(IntegrationConfig(min_cells=5)).run(replace(context, roles=roles))
    counts = pd.Series(names[context.scored & batch.notna().to_numpy()]).value_counts()
    kept = counts[counts >= 5]
    assert counts[first] == 1
    assert result.figures["classes"] == kept.to_dict()
    assert result.figures["dropped_classes"] == counts[counts < 5].to_dict()
    assert result.figures["n_cells"] == kept.sum()
    assert result.figures["n_without_batch"] == len(of_first) - 1


@pytest.mark.parametrize("n", [12, 15, 16])
def test_harmony_of_few_cells_is_a_reason_to_skip(context: Context, n: int) -> None:
    pytest.importorskip("harmonypy")
    n_obs = context.reader.n_obs
    label = context.roles["label"].astype(str).to_numpy()
    of_two_labels = np.isin(label, np.unique(label)[:2])
    chosen = np.flatnonzero(context.scored & of_two_labels)[:n]
    scored = np.zeros(n_obs, bool)
    scored[chosen] = True
    batch = pd.Series(np.arange(n_obs) // 2 % 2, name="batch").astype(str)
    vectors = np.random.default_rng(0).normal(size=(n_obs, 16))
    few = replace(
        context,
        scored=scored,
        roles={**context.roles, "batch": batch},
        vectors=vectors.astype(np.float32),
    )
    result = run_task(Integration(IntegrationConfig(harmony=True, min_cells=2)), few)
    if n > 15:
        assert result.skipped is None
        return
    assert result.figures["n_batches"] == 2
    assert result.skipped == (
        f"harmonypy refuses the {n} scored cells with a batch: nclust must be at least 1; score more cells "
        "(shard.test_frac), or set harmony: false"
    )


def test_the_training_components_see_no_scored_cell(context: Context) -> None:
    cells = np.arange(0, 40, 2)
    batches = np.arange(20) % 2
    task = Integration(IntegrationConfig())
    of_all = task.collect_vectors(context, cells, batches)[TRAINING_COMPONENTS]
    of_half = task.collect_vectors(context, cells[:10], batches[:10])[TRAINING_COMPONENTS]
    np.testing.assert_allclose(of_all[:10], of_half, atol=1e-5)


def test_cells_of_a_cluster_stay_together_in_the_picture() -> None:
    random = np.random.default_rng(0)
    cluster = np.arange(180) % 3
    centres = 8 * random.normal(size=(3, 16))
    vectors = centres[cluster] + random.normal(size=(180, 16))
    vectors = vectors.astype(np.float32)
    picture = project(vectors, seed=1)
    neighbours = NearestNeighbors(n_neighbors=6).fit(picture)
    nearest = neighbours.kneighbors(return_distance=False)
    assert (cluster[nearest] == cluster[:, None]).all()
    np.testing.assert_array_equal(project(vectors, seed=1), picture)
    assert not np.array_equal(project(vectors, seed=2), picture)
    assert "umap" in sys.modules
    assert hasattr(sys.modules.get("pynndescent", np), "__file__"), (
        "no stand-in is left for other packages"
    )


def test_few_or_equal_cells_have_a_picture_too() -> None:
    for n in (1, 3, 4, 5, 17):
        different = np.random.default_rng(n).normal(size=(n, 4))
        equal = np.ones((n, 4))
        for vectors in (different, equal):
            picture = project(vectors.astype(np.float32), seed=0)
            assert picture.shape == (n, 2)
            assert np.isfinite(picture).all()
