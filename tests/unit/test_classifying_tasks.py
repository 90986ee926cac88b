"""Tasks probe, few_shot and leave_out: scores against scikit-learn, nothing fitted on tested cells,
and verdicts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import rankdata
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.feature_selection import SelectKBest, f_classif
from sklearn.metrics import confusion_matrix, f1_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import FewShotConfig, LeaveOutConfig, LowDepthConfig, ProbeConfig
from cellmill.config.run import Embed
from cellmill.data.arrays import log_normalise, select_columns
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import CLASS_METRICS, ClassPredictions
from cellmill.evaluate.features import cell_features as features_module
from cellmill.evaluate.features import chosen_genes
from cellmill.evaluate.features.cell_features import cell_features, compute_features, read_rows
from cellmill.evaluate.features.chosen_genes import RankScores, choose_variable_genes
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.inference.embed import InferenceModel, embed_cells
from cellmill.evaluate.labels import choose_cells, labelled_cells
from cellmill.evaluate.methods import (
    ALL_GENES,
    EMBEDDING,
    MAJORITY,
    TRAINING_COMPONENTS,
    UNTRAINED,
    WITH_COMPONENTS,
)
from cellmill.evaluate.prediction_cache import PredictionCache
from cellmill.evaluate.scores import ScoreColumn, table_rows
from cellmill.evaluate.splits import draw_shots, split_by_class, split_donors, split_groups
from cellmill.evaluate.task import Context, Skipped, run_task
from cellmill.evaluate.tasks.classification import fold_predictions
from cellmill.evaluate.tasks.classification.few_shot import MIN_TESTED, FewShot
from cellmill.evaluate.tasks.classification.fold_predictions import predict_folds
from cellmill.evaluate.tasks.classification.leave_out import LeaveOut
from cellmill.evaluate.tasks.classification.low_depth import LowDepth
from cellmill.evaluate.tasks.classification.probe import Probe, compare_features
from cellmill.evaluate.training_shards import read_counts
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import regression


def _chosen(context: Context, min_cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and labels of the scored cells of classes with `min_cells` cells."""
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], min_cells, seed=4)
    return scored[chosen.cells], chosen.labels


def test_classes_too_small_in_a_draw_need_no_larger_test_split(context: Context) -> None:
    message = (
        "expected at least two classes of cell_type with 50 or more of the 60 drawn cells each "
        "(evaluate.folds), got 0; lower evaluate.folds"
    )
    assert labelled_cells(context, "probe", 50, "evaluate.folds").n_left_out == 0
    with pytest.raises(Skipped) as skipped:
        labelled_cells(context, "probe", 50, "evaluate.folds", max_cells=60)
    assert str(skipped.value) == message
    assert skipped.value.figures["n_left_out"] == context.scored.sum() - 60


def test_few_shot_says_how_many_cells_it_fits_and_tests(context: Context) -> None:
    option = "evaluate.tasks.few_shot.shots"
    with pytest.raises(Skipped) as skipped:
        FewShot(FewShotConfig(shots=[5000, 10_000])).run(context)
    assert (
        f"with 5005 or more scored cells each (5000 to fit on, the least of {option}, and 5 to test)"
    ) in str(skipped.value)


def _problem(n: int = 120) -> tuple[np.ndarray, np.ndarray, sp.csr_matrix, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.array(["a", "b", "c"])[np.arange(n) % 3]
    centres = random.normal(size=(3, 8))
    embedding = (centres[np.arange(n) % 3] + random.normal(size=(n, 8))).astype(np.float32)
    noise = random.normal(size=(n, 8)).astype(np.float32)
    counts = random.poisson(np.exp(random.normal(size=(3, 30)))[np.arange(n) % 3])
    return embedding, noise, log_normalise(sp.csr_matrix(counts.astype(np.uint32))), labels


def _predicted(
    features: dict[ScoredMethod, Any],
    labels: np.ndarray,
    *,
    seeds: int = 1,
    seed: int = 0,
    neighbors: int,
    components: int,
) -> ClassPredictions:
    """Predictions in five folds."""
    predictions = ClassPredictions(labels, seeds)
    splits = split_by_class(labels, 5, seeds, seed)
    context: Any = SimpleNamespace(
        prediction_cache=PredictionCache(), feature_cache=FeatureCache(), options=Evaluate()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_predictions, "COMPONENTS", components)
        predict_folds(predictions, features, splits, neighbors, context, with_fitted_features=True)
    return predictions


def _columns(predictions: ClassPredictions) -> list[ScoreColumn]:
    return predictions.metric_columns("")


def _rank_z(genes: sp.csr_matrix) -> np.ndarray:
    centred = rankdata(genes.toarray(), axis=1) - (genes.shape[1] + 1) / 2
    return np.asarray(centred / np.maximum(centred.std(1, keepdims=True), 1e-9))


def test_rows_equal_scikit_learn_pipelines_over_the_same_folds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chosen_genes, "RANKED_GENES", 20)
    embedding, noise, genes, labels = _problem()
    given = np.random.default_rng(1).normal(size=(len(labels), 4)) + (labels == "b")[:, None]
    features = {
        EMBEDDING: embedding,
        UNTRAINED: noise,
        ALL_GENES: genes,
        TRAINING_COMPONENTS: given,
    }
    predictions = _predicted(features, labels, seeds=2, seed=3, neighbors=7, components=5)
    rows = {row.method.name: row for row in table_rows(_columns(predictions))}
    methods = {name: row.method for name, row in rows.items()}
    pca = PCA(5, svd_solver="arpack", random_state=0)
    dense = StandardScaler()
    sparse = StandardScaler(with_mean=False)
    expected = {"majority": (DummyClassifier(strategy="most_frequent"), embedding)}
    standardised = ColumnTransformer(
        [("embedding", StandardScaler(), slice(8))], remainder="passthrough"
    )
    for kind, values, first, scaler in (
        ("embedding", embedding, (), dense),
        ("untrained", noise, (), dense),
        ("all genes", genes, (), sparse),
        ("PCA5", genes, (pca,), dense),
        ("PCA50 of the training cells", given, (), dense),
        ("embedding with PCA50", np.hstack([embedding, given]), (standardised,), dense),
    ):
        linear = regression(sparse=kind == "all genes")
        expected[f"{kind} + logistic regression"] = (make_pipeline(*first, scaler, linear), values)
        expected[f"{kind} + logistic regression, unscaled"] = (
            make_pipeline(*first, linear),
            values,
        )
        expected[f"{kind} + kNN"] = (make_pipeline(*first, KNeighborsClassifier(7)), values)
    ranked = make_pipeline(SelectKBest(f_classif, k=20), dense, regression(sparse=False))
    expected["rank-z genes, ANOVA + logistic regression"] = ranked, _rank_z(genes)
    assert set(rows) == set(expected)
    for name, (pipeline, values) in expected.items():
        confusion = np.zeros((3, 3), np.int64)
        for repetition in range(2):
            folds = StratifiedKFold(5, shuffle=True, random_state=3 + repetition)
            predicted = cross_val_predict(pipeline, values, labels, cv=folds)
            of_row = {key: rows[name].scores[key].repetitions[repetition] for key in CLASS_METRICS}
            f1 = {
                kind: f1_score(labels, predicted, average=kind, zero_division=0)
                for kind in ("macro", "weighted")
            }
            assert of_row["accuracy"] == pytest.approx((predicted == labels).mean()), name
            assert of_row["macro_f1"] == pytest.approx(f1["macro"]), name
            assert of_row["weighted_f1"] == pytest.approx(f1["weighted"]), name
            confusion += confusion_matrix(labels, predicted)
        assert predictions.confusion("", methods[name]).counts == confusion.tolist(), name
    assert rows["majority"].scores["accuracy"].mean == pytest.approx(1 / 3)
    kinds = sorted(row.method.kind for row in rows.values())
    assert kinds == 14 * ["baseline"] + 3 * ["model"] + 3 * ["variant"]


def test_tied_genes_share_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(2)
    values = random.poisson(0.7, (40, 300))
    values[7], values[8] = 0, 3  # a cell without a count, and one of equal counts
    counts = sp.csr_matrix(values)
    counts.data[:20] = 0  # stored
    labels = np.array(["a", "b"] * 20)
    expected = _rank_z(log_normalise(counts))
    ranked = RankScores(log_normalise(counts))
    np.testing.assert_allclose(ranked.select(np.arange(40), labels), expected, atol=1e-9)
    monkeypatch.setattr(chosen_genes, "RANKED_GENES", 25)
    train = np.arange(4, 30)
    f, _ = f_classif(expected[train], labels[train])
    largest = np.sort(np.argsort(-f)[:25])
    np.testing.assert_allclose(ranked.select(train, labels[train]), expected[:, largest], atol=1e-9)


def test_variable_genes_are_chosen_on_training_cells() -> None:
    random = np.random.default_rng(3)
    labels = np.array(["a", "b"] * 30)
    mean = np.exp(random.normal(size=2100))
    noisy = random.poisson(mean, (60, 2100))
    noisy[:, ::7] *= 10 * (random.random((60, 300)) < 0.2)  # bursts
    noisy[:, 5] = 0
    genes = log_normalise(sp.csr_matrix(noisy.astype(np.uint32)))
    train = np.arange(40)
    chosen = choose_variable_genes(genes[train])
    assert len(chosen) == 2000
    assert 5 not in chosen
    values = np.expm1(genes[train].toarray().astype(np.float64))
    table = pd.DataFrame({"mean": values.mean(0), "variance": values.var(0)}).query("variance > 0")
    table["dispersion"] = np.log(table["variance"] / table["mean"])
    table["bin"] = pd.cut(np.log1p(table["mean"]), 20)
    scores = (
        table.groupby("bin", observed=True)["dispersion"]
        .transform(lambda of: (of - of.mean()) / of.std())
        .fillna(1)
    )
    assert chosen.tolist() == sorted(
        scores.sort_values(ascending=False, kind="stable").index[:2000]
    )
    vectors = genes[:, :8].toarray()
    features = {EMBEDDING: vectors, ALL_GENES: genes, TRAINING_COMPONENTS: vectors}
    predictions = _predicted(features, labels, neighbors=3, components=4)
    pipeline = make_pipeline(PCA(4, svd_solver="arpack", random_state=0), KNeighborsClassifier(3))
    method = ScoredMethod("PCA4 of variable genes", "kNN")
    [right] = predictions.column("", "accuracy", "accuracy", "accuracy").scores[method]
    for fitted, test in StratifiedKFold(5, shuffle=True, random_state=0).split(labels, labels):
        panel = genes[:, choose_variable_genes(genes[fitted])]
        predicted = pipeline.fit(panel[fitted], labels[fitted]).predict(panel[test])
        np.testing.assert_array_equal(right[test], predicted == labels[test])


def test_verdicts_compare_the_best_rows() -> None:
    labels = np.array(["a", "b"] * 10)
    wrong = {
        (EMBEDDING, "logistic regression"): 4,
        (EMBEDDING, "logistic regression, unscaled"): 2,
        (EMBEDDING, "kNN"): 3,
        (ALL_GENES, "logistic regression"): 1,
        (ALL_GENES, "logistic regression, unscaled"): 2,
        (ALL_GENES, "kNN"): 3,
        (UNTRAINED, "logistic regression"): 20,
        (UNTRAINED, "kNN"): 8,
        (MAJORITY, ""): 10,
        (WITH_COMPONENTS, "kNN"): 0,  # better than the model's own rows
        (WITH_COMPONENTS, "logistic regression"): 3,
        (TRAINING_COMPONENTS, "kNN"): 9,
        (TRAINING_COMPONENTS, "logistic regression, unscaled"): 5,
    }
    predictions = ClassPredictions(labels, 1)
    for (features, classifier), n in wrong.items():
        predicted = np.where(np.arange(20) < n, np.roll(labels, 1), labels)
        method = replace(features, classifier=classifier)
        predictions.record("", 0, np.arange(20), {method: predicted})
    verdicts = compare_features(_columns(predictions))
    linear = "embedding + logistic regression, unscaled"
    beside = "PCA50 of the training cells + "
    assert [
        (verdict.compared, verdict.against, verdict.metric, verdict.outcome) for verdict in verdicts
    ] == [
        (linear, "all genes + logistic regression", "accuracy", "level"),
        (linear, "all genes + logistic regression", "macro-F1", "level"),
        (linear, "all genes + logistic regression", "weighted F1", "level"),
        (linear, "untrained + logistic regression", "accuracy", "ahead"),
        (linear, f"{beside}logistic regression, unscaled", "accuracy", "level"),
        ("embedding + kNN", "all genes + kNN", "accuracy", "undecided"),  # the same
        ("embedding + kNN", "untrained + kNN", "accuracy", "ahead"),
        ("embedding + kNN", f"{beside}kNN", "accuracy", "ahead"),
        (
            "embedding with PCA50 + kNN",
            f"{beside}logistic regression, unscaled",
            "accuracy",
            "ahead",
        ),
    ]
    found = [verdict.difference for verdict in verdicts][3:]
    assert found == pytest.approx([0.9, 0.15, 0.0, 0.25, 0.3, 0.25])


def test_each_class_gives_its_shots() -> None:
    labels = np.array(["a"] * 12 + ["b"] * 9 + ["rare"] * 3)
    (_, train, test), (number, other, _) = draw_shots(
        labels, ["a", "b"], 4, n_repetitions=2, seed=0
    )
    assert number == 1
    assert sorted(labels[train]) == ["a"] * 4 + ["b"] * 4
    assert sorted([*train, *test]) == list(range(21))
    assert set(other) != set(train)


@pytest.mark.parametrize(("most", "folds"), [(10, 4), (3, 3)])
def test_a_donor_is_never_trained_on_while_tested(most: int, folds: int) -> None:
    groups = pd.Series(["a", "b", None, "c", "d", "a", "b", "c", "d", "d"])
    splits = split_groups(groups, most)
    assert [fold.repetition for fold in splits] == [*range(folds)]
    assert sorted(np.concatenate([fold.tested for fold in splits])) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    for _, train, test in splits:
        assert set(groups[train]) | set(groups[test]) == {"a", "b", "c", "d"}
        assert not set(groups[train]) & set(groups[test])
    assert split_groups(pd.Series(["a", "a", None]), most) == []


def test_folds_that_fit_nothing_are_left_out() -> None:
    groups = pd.Series(["a", "a", "b", "c"])
    labels = np.array(["x", "y", "x", "x"])
    tested = [groups[fold.tested].tolist() for fold in split_groups(groups, 9, labels)]
    assert sorted(tested) == [["b"], ["c"]]
    assert [groups[fold.tested].tolist() for fold in split_groups(groups, 9, None, 2)] == [
        ["a", "a"]
    ]
    roles = {"donor": groups, "batch": pd.Series(["q", "p", "q", "p"])}
    cells = np.arange(4)
    assert split_donors(roles, cells, 9, labels)[0] == "donor"
    role, folds = split_donors(roles, cells, 9, labels, min_cells=2)
    assert (role, len(folds)) == ("batch", 1)
    assert split_donors(roles, cells, 9, min_cells=3) == ("", [])


def _accuracies(
    context: Context,
    fewest: int,
    classifier: Any,
    features: ScoredMethod,
    splits: Callable[..., Iterator[Any]],
) -> list[float]:
    """Accuracy of a classifier that is fitted on the training cells of each split alone."""
    cells, labels = _chosen(context, fewest)
    counts = read_rows(context.reader, cells)
    values = compute_features(context, cells, counts, context.vectors[cells])[features]
    return [
        float(
            (
                classifier.fit(values[train], labels[train]).predict(values[test]) == labels[test]
            ).mean()
        )
        for *_, train, test in splits(cells, labels)
    ]


def test_features_are_shared_by_the_same_cells_and_vectors(context: Context) -> None:
    context = replace(context, prediction_cache=PredictionCache(), feature_cache=FeatureCache())
    cells = np.flatnonzero(context.scored)
    first = cell_features(context, cells)
    assert cell_features(context, cells)[UNTRAINED] is first[UNTRAINED], "computed once"
    changed = replace(context, vectors=context.vectors + 1)
    found = cell_features(changed, cells)[EMBEDDING]
    np.testing.assert_array_equal(found, context.vectors[cells] + 1)
    fewer = cell_features(changed, cells[1:])
    for method, values in fewer.items():
        expected = found if method == EMBEDDING else first[method]
        dense = [part.toarray() if sp.issparse(part) else part for part in (values, expected[1:])]
        np.testing.assert_allclose(*dense, rtol=1e-4, atol=1e-5)


def test_the_ceiling_is_predicted_from_the_other_half_of_labels(
    context: Context,
) -> None:
    cells, labels = _chosen(context, 3)
    order = np.random.Generator(np.random.Philox(key=[4, 6])).permutation(len(labels))
    first = np.ones(len(labels), bool)
    first[order[np.argsort(labels[order], kind="stable")][1::2]] = False
    for name in np.unique(labels):
        assert abs(int(first[labels == name].sum()) - int((~first)[labels == name].sum())) <= 1
    genes = log_normalise(read_rows(context.reader, cells))
    expected = np.full(context.reader.n_obs, "", labels.dtype)
    for tested in (first, ~first):
        pipeline = make_pipeline(StandardScaler(with_mean=False), regression(sparse=True))
        expected[cells[tested]] = pipeline.fit(genes[~tested], labels[~tested]).predict(
            genes[tested]
        )
    context = replace(context, prediction_cache=PredictionCache(), feature_cache=FeatureCache())
    np.testing.assert_array_equal(predict_ceiling_labels(context), expected)
    assert len(context.prediction_cache.predictions) == 2
    accuracy = (expected[cells] == labels).mean()
    assert 0.5 < accuracy < 1
    # few_shot fits equally many cells of every class, so it has no row "majority"
    for task, zero in (
        (FewShot(FewShotConfig(shots=[3])), "largest class"),
        (LowDepth(LowDepthConfig(repeats=1)), "majority"),
    ):
        result = task.run(context)
        gaps = result.gaps
        assert [gap.column for gap in gaps] == [*result.rows[0].scores]
        assert {gap.ceiling[0] for gap in gaps} == {"all genes with half of the labels"}
        assert {gap.zero[0] for gap in gaps} == {zero}
    assert [gap.ceiling[1] for gap in gaps] == pytest.approx(7 * [accuracy])
    largest = max((labels == name).mean() for name in labels)
    assert [gap.zero[1] for gap in gaps] == pytest.approx(7 * [largest])
    assert gaps[0].model is not None
    line = f"{gaps[0].column}: {gaps[0].model.name} {gaps[0].words}."
    assert line in result.sentences


def test_few_shot_scores_come_from_classifiers_of_those_shots(context: Context) -> None:
    _, labels = _chosen(context, 8)
    classes, sizes = np.unique(labels, return_counts=True)
    classes = classes[np.lexsort((classes, -sizes))].tolist()  # the largest first
    most = min(sizes) - MIN_TESTED  # of which every class keeps just enough for the test
    vectors = np.random.default_rng(0).normal(size=context.vectors.shape).astype(np.float32)
    context = replace(context, vectors=vectors)
    config = FewShotConfig(shots=[3, most, most + 1, 500], draws=2, neighbors=15)
    result = FewShot(config).run(context)
    rows = {row.method.name: row for row in result.rows}
    linear = regression(sparse=True)
    expected = _accuracies(
        context, 8, linear, ALL_GENES, lambda _, own: draw_shots(own, classes, 3, 2, seed=4)
    )
    unscaled = rows["all genes + logistic regression, unscaled"]
    assert unscaled.scores["3 per class"].repetitions == pytest.approx(expected)
    nearest = KNeighborsClassifier(3)  # no more than there are shots
    expected = _accuracies(
        context, 8, nearest, EMBEDDING, lambda _, own: draw_shots(own, classes, 3, 2, seed=4)
    )
    assert rows["embedding + kNN"].scores["3 per class"].repetitions == pytest.approx(expected)
    n_classes = result.figures["n_classes"]
    left_out = result.figures["classes_left_out"]
    assert (n_classes["3"], n_classes[str(most)], n_classes["500"]) == (
        len(classes),
        len(classes),
        0,
    )
    assert n_classes[str(most + 1)] < len(classes)
    assert (left_out["3"], left_out[str(most)], left_out["500"]) == (
        "none",
        "none",
        ", ".join(classes),
    )
    assert (result.metric, len(rows)) == ("3 per class", 4 * 3 + 1)
    assert result.verdicts[0].metric == "accuracy, 3 per class"


def test_new_donors_are_scored_by_classifiers_without_them(
    context: Context,
) -> None:
    donors = pd.Series(np.arange(context.reader.n_obs) // 7 % 3, name="donor").astype(str)
    roles = {**context.roles, "donor": donors}
    result = LeaveOut(LeaveOutConfig(neighbors=5)).run(replace(context, roles=roles))

    def by_donor(cells: np.ndarray, _: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        of_cells = donors.iloc[cells].to_numpy()
        return (
            (np.flatnonzero(of_cells != one), np.flatnonzero(of_cells == one))
            for one in sorted(set(donors))
        )

    expected = _accuracies(context, 3, regression(sparse=True), ALL_GENES, by_donor)
    [row] = [
        row for row in result.rows if row.method.name == "all genes + logistic regression, unscaled"
    ]
    assert sorted(row.scores["accuracy, new donor"].repetitions) == pytest.approx(sorted(expected))
    assert result.figures["donors"] == result.figures["donor_folds"] == 3
    assert result.metric == "accuracy, new donor"
    assert (
        run_task(LeaveOut(LeaveOutConfig()), context).skipped
        == "the dataset has no donor or batch column"
    )


def test_donors_that_leave_nothing_to_fit_are_told(context: Context) -> None:
    donors = pd.Series(np.arange(context.reader.n_obs) // 2 % 2, name="donor").astype(str)
    for labels, reason in (
        (
            donors,
            "whichever fold of the 2 donors is left out, the other scored cells have one class",
        ),
        (context.roles["label"], "the scored cells have no two donors or batches"),
    ):
        donor = donors if labels is donors else donors.where(donors == "0")
        roles = {"label": labels, "donor": donor, "batch": donor.where(donor == "2")}
        result = run_task(LeaveOut(LeaveOutConfig()), replace(context, roles=roles))
        assert result.skipped == reason


def test_a_larger_test_split_is_no_remedy_for_all_cells(context: Context) -> None:
    for cells, remedy in (("heldout", "raise shard.test_frac or lower x"), ("all", "lower x")):
        options = context.options.model_copy(update={"cells": cells})
        with pytest.raises(Skipped, match=f"got 0; {remedy}$"):
            labelled_cells(replace(context, options=options), "probe", 5000, "x")


def test_features_equal_those_of_the_embed_command(context: Context) -> None:
    model = context.model
    cells = np.arange(30)
    counts = read_rows(context.reader, cells)
    found = compute_features(context, cells, counts)
    loaded = InferenceModel(model.network, model.vocabulary, model.tokens, model.config)
    whole = embed_cells(context.reader, loaded, Embed()).vectors
    np.testing.assert_array_equal(found[EMBEDDING], whole[:30])
    assert (found[ALL_GENES] != log_normalise(counts)).nnz == 0
    training = read_counts(model.manifest, 10_000)
    assert training.shape == (model.manifest.splits["train"].n_obs, model.vocabulary.n_genes)
    profiles = log_normalise(training).toarray()
    centred = found[TRAINING_COMPONENTS]
    basis = np.linalg.svd(profiles - profiles.mean(0), full_matrices=False)[2][: centred.shape[1]]
    columns = select_columns(counts, context.gene_columns.target, model.vocabulary.n_genes)
    expected = (log_normalise(columns).toarray() - profiles.mean(0)) @ basis.T
    np.testing.assert_allclose(
        np.abs(centred[:, :5]), np.abs(expected[:, :5]), rtol=1e-3, atol=1e-3
    )
    without_genes = sp.csr_matrix((5, context.reader.n_vars), dtype=np.uint32)
    assert not compute_features(context, cells[:5], without_genes)[EMBEDDING].any()


@pytest.mark.parametrize(
    "task",
    [
        Probe(ProbeConfig(neighbors=5, seeds=1)),
        FewShot(FewShotConfig(shots=[3], draws=2)),
        LeaveOut(LeaveOutConfig(roles=["batch"], neighbors=5)),
    ],
    ids=lambda task: task.config.name,
)
def test_a_model_that_copies_a_baseline_is_level_with_it(
    context: Context, monkeypatch: pytest.MonkeyPatch, task: Any
) -> None:
    def copied(context: Context, cells: np.ndarray, counts: sp.csr_matrix, *_: Any) -> np.ndarray:
        known = select_columns(
            counts, context.gene_columns.target, context.model.vocabulary.n_genes
        )
        return context.model.components.transform(log_normalise(known))

    monkeypatch.setattr(features_module, "embed_counts", copied)
    every_cell = np.arange(context.reader.n_obs)
    vectors = copied(context, every_cell, read_rows(context.reader, every_cell))
    batch = pd.Series(np.arange(context.reader.n_obs) // 2 % 4, name="batch").astype(str)
    result = task.run(replace(context, vectors=vectors, roles={**context.roles, "batch": batch}))
    table = {row.method.name: row for row in result.rows}
    for classifier in ("logistic regression", "logistic regression, unscaled", "kNN"):
        copy, baseline = (
            table[f"{kind} + {classifier}"] for kind in ("embedding", "PCA50 of the training cells")
        )
        for column in copy.scores:
            assert copy.value(column) == pytest.approx(baseline.value(column), abs=0.02)
    assert all(
        verdict.outcome != "ahead" for verdict in result.verdicts if "PCA50" in verdict.against
    )
