"""Scores of cells, and intervals of paired differences: against scikit-learn and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from cellmill.evaluate.classifiers.class_predictions import (
    LARGEST_CLASS,
    NOT_TESTED,
    ClassPredictions,
    score_cells,
)
from cellmill.evaluate.intervals import Estimate, estimate_closed_share, estimate_difference
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, MAJORITY
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.tasks.perturbation.baselines import MEAN, NO_CHANGE
from cellmill.evaluate.tasks.perturbation.task import CEILING
from cellmill.runs.results import Closed, Gap, ScoredMethod, compare

OWN = replace(EMBEDDING, classifier="kNN")
OTHER = ScoredMethod("PCA", "kNN")
METRICS = {"accuracy": (accuracy_score, {}), "macro_f1": (f1_score, {"average": "macro"})}
METRICS |= {"weighted_f1": (f1_score, {"average": "weighted"})}


def _predicted(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.choice(4, 60, p=[0.5, 0.25, 0.15, 0.1])
    is_right = random.random((3, 60)) < 0.7
    guesses = random.integers(0, 4, (3, 60))
    predicted = np.where(is_right, labels, guesses)
    predicted[1, 10:20] = NOT_TESTED
    return labels, predicted


@pytest.mark.parametrize("metric", METRICS)
def test_mean_scores_equal_the_metric(metric: str) -> None:
    labels, predicted = _predicted()
    scores = score_cells(metric, labels, predicted)
    function, options = METRICS[metric]
    for row, classes in zip(scores, predicted):
        tested = classes != NOT_TESTED
        assert (np.isfinite(row) == tested).all()
        seen = labels[tested]
        guessed = classes[tested]
        value = function(seen, guessed, **options)
        assert row[tested].mean() == pytest.approx(value)
        for cell in range(0, tested.sum(), 7):
            weights = np.ones(len(seen))
            weights[cell] += 1e-6
            weighted = function(seen, guessed, sample_weight=weights, **options)
            slope = (weighted - value) / 1e-6
            influence = (row[tested][cell] - value) / len(seen)
            assert influence == pytest.approx(slope, abs=1e-6)


def test_identical_predictions_differ_by_nothing() -> None:
    labels, predicted = _predicted()
    for metric in METRICS:
        scores = score_cells(metric, labels, predicted)
        assert estimate_difference(scores, scores) == Estimate(0.0, 0.0, 0.0, 0.0)
    ones = np.ones((2, 9))
    assert estimate_difference(ones, 0 * ones) == Estimate(1.0, 1.0, 1.0, 0.0)


def test_the_interval_equals_a_calculation_by_hand() -> None:
    own = np.array([[1.0, 1, 1, 0], [1, 0, 1, 0]])
    found = estimate_difference(own, np.zeros((2, 4)))
    # mean 5/8; means of cells 1, 1/2, 1, 0 and of repetitions 3/4, 1/2
    cells = np.var([1, 0.5, 1, 0], ddof=1) / 4
    repetitions = np.var([0.75, 0.5], ddof=1) / 2
    freedom = (cells + repetitions) ** 2 / (cells**2 / 3 + repetitions**2 / 1)
    assert found.mean == pytest.approx(0.625)
    assert found.units_se == pytest.approx(cells**0.5)
    # quantiles of Student's distribution with 3 and 4 degrees of freedom enclose the one with 3.7
    assert 3 < freedom < 4
    assert 2.776 < (found.high - found.mean) / (cells + repetitions) ** 0.5 < 3.182
    assert found.high - found.mean == pytest.approx(found.mean - found.low)


def test_the_table_has_means_over_repetitions() -> None:
    labels = np.array(["a", "b", "b", "a"])
    made = ClassPredictions(labels, 2)
    for repetition, (own, other) in enumerate([("abba", "bbba"), ("abbb", "aaba")]):
        predicted = {OWN: np.array([*own]), OTHER: np.array([*other])}
        made.record("x", repetition, np.arange(4), predicted)
        made.record("y", repetition, np.arange(2), {OTHER: labels[2 * repetition :][:2]})
    x, y = made.accuracies()
    rows = table_rows([x, y])
    assert [(row.method.name, row.method.kind) for row in rows] == [
        ("embedding + kNN", "model"),
        ("PCA + kNN", "baseline"),
    ]
    assert rows[0].scores["x"].repetitions == [1.0, 0.75]
    assert rows[0].scores["x"].mean == 0.875
    assert rows[1].scores["x"].mean == 0.75
    assert rows[0].scores["x"].sd == pytest.approx(np.std([1, 0.75], ddof=1))
    assert rows[0].value("y") is None
    assert rows[1].scores["y"].repetitions == [1.0, 0.0]
    [entry] = x.differences()
    assert (entry.column, entry.compared, entry.against) == (
        "x",
        "embedding + kNN",
        "PCA + kNN",
    )
    assert entry.mean == 0.125


def test_a_single_repetition_has_no_standard_deviation() -> None:
    [row] = table_rows([ScoreColumn("x", "accuracy", {OWN: np.array([[0.5, 1.0, 0.25]])})])
    assert row.scores["x"].sd is None
    assert row.sd("x") is None


def test_a_repetition_without_a_tested_unit_counts_nowhere() -> None:
    scores = np.array([[0.5, np.nan], [np.nan, np.nan], [0.7, 1.0]])
    untested = np.full((3, 2), np.nan)
    [row] = table_rows([ScoreColumn("new types", "AUROC", {OWN: scores, OTHER: untested})])
    assert row.scores["new types"].repetitions == [0.5, None, 0.85]
    baseline = np.array([[0.4, 0.4], [0.9, 0.9], [0.3, 0.4]])
    tested = [0, 2]
    assert estimate_difference(scores, baseline) == estimate_difference(
        scores[tested], baseline[tested]
    )
    assert row.scores["new types"].sd == pytest.approx(np.std([0.5, 0.85], ddof=1))
    assert row.scores["new types"].mean == pytest.approx(2.2 / 3)


SAME = "own is the same as other to three decimals of accuracy: undecided."


@pytest.mark.parametrize(
    ("difference", "interval", "n", "text"),
    [
        (0.05, (0.01, 0.09), None, "own is ahead of other by 0.050 accuracy (+0.010 to +0.090)."),
        (-0.05, (-0.09, -0.01), None, "own is behind other by 0.050 accuracy (-0.090 to -0.010)."),
        (0.05, (-0.01, 0.11), None, "own is level with other: +0.050 accuracy (-0.010 to +0.110)."),
        (
            -0.05,
            (-0.11, 0.01),
            None,
            "own is level with other: -0.050 accuracy (-0.110 to +0.010).",
        ),
        (0.0, (0.0, 0.0), 1, SAME),
        (0.0, (0.0, 0.0), None, SAME),
        (-0.00001, (-0.00002, 0.000004), 900, SAME),
        (0.0003, (0.0002, 0.0004), 900, SAME),
        (
            0.0,
            (-0.1, 0.1),
            2,
            "own against other: +0.000 accuracy (-0.100 to +0.100), undecided, n = 2.",
        ),
        (0.0, (-0.001, 0.0), 9, "own is level with other: +0.000 accuracy (-0.001 to +0.000)."),
        (
            0.0004,
            (0.0003, 0.0005),
            None,
            "own is level with other: +0.000 accuracy (+0.000 to +0.001).",
        ),
        (-0.05, None, None, "own is behind other by 0.050 accuracy (no interval)."),
        (0.0, None, None, "own is level with other: +0.000 accuracy (no interval)."),
        (-0.025, (-0.025, -0.025), 1, "own against other: -0.025 accuracy, undecided, n = 1."),
        (
            0.3,
            (0.1, 0.5),
            2,
            "own against other: +0.300 accuracy (+0.100 to +0.500), undecided, n = 2.",
        ),
        (
            0.3,
            (0.3, 0.3),
            1200,
            "own against other: +0.300 accuracy, undecided, all 1,200 differ by the same.",
        ),
        (math.nan, None, None, "own against other: +nan accuracy, undecided, no number."),
        (0.3, (0.1, 0.5), 3, "own is ahead of other by 0.300 accuracy (+0.100 to +0.500)."),
    ],
)
def test_a_verdict_is_level_if_the_interval_contains_zero(
    difference: float, interval: tuple[float, float] | None, n: int | None, text: str
) -> None:
    verdict = compare("own", "other", "accuracy", difference, interval, n=n)
    assert (verdict.sentence, verdict.outcome in text) == (text, True)


def test_a_column_chooses_the_better_of_two_errors() -> None:
    a = ScoredMethod("a")
    b = ScoredMethod("b")
    scores = {
        EMBEDDING: np.array([[0.2]]),
        a: np.array([[0.5]]),
        b: np.array([[0.4]]),
    }
    one = ScoreColumn("x", "error", scores, lower_is_better=True)
    assert one.best(one.select_kind("baseline")) == b
    assert one.verdict(EMBEDDING, b).n == 1
    own = np.array([[0.2, 0.3, 0.1, 0.25]])
    other = np.array([[0.4, 0.6, 0.3, 0.5]])
    column = ScoreColumn("x", "error", {EMBEDDING: own, a: other}, lower_is_better=True)
    assert column.verdict(EMBEDDING, a).outcome == "ahead"
    assert replace(column, n_units=2).verdict(EMBEDDING, a).outcome == "undecided"


def test_the_share_of_a_gap_equals_a_calculation_by_hand() -> None:
    zero = np.array([[0.0, 1, 0, 0, 1, 0, 0, 0]])
    ceiling = np.array([[1.0, 1, 1, 0, 1, 1, 1, 1]])
    own = np.array([[1.0, 1, 0, 0, 1, 0, 0, 0]])
    found = estimate_closed_share(own, zero, ceiling)
    assert found is not None
    # means 2/8, 7/8 and 3/8: a fifth of a gap of 5/8
    deviations = own - 0.2 * ceiling - 0.8 * zero
    error = (np.var(deviations, ddof=1) / 8) ** 0.5 / 0.625
    half = 2.364624 * error  # the quantile with 7 degrees of freedom
    assert found == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-6)
    # cells that one of the three does not test count for none
    more = [np.append(scores, [[1, 1]], axis=1) for scores in (own, zero, ceiling)]
    more[0][0, -1] = np.nan
    more[2][0, -2] = np.nan
    assert estimate_closed_share(*more) == pytest.approx(found)
    assert estimate_closed_share(own, ceiling, zero) is None
    assert estimate_closed_share(own, zero, zero) is None
    # exact, and so without a width
    assert estimate_closed_share(zero, zero, ceiling) == pytest.approx((0, 0, 0), abs=1e-12)
    assert estimate_closed_share(ceiling, zero, ceiling) == pytest.approx((1, 1, 1), abs=1e-12)


def test_a_column_defines_what_0_and_100_percent_are() -> None:
    random = np.random.default_rng(0)
    errors = {
        replace(EMBEDDING, classifier="ridge"): 0.4,
        OWN: 0.6,
        ALL_GENES: 0.5,
        MEAN: 0.9,
        NO_CHANGE: 0.8,
    }
    scores = {name: value + 0.05 * random.random((1, 40)) for name, value in errors.items()}
    trivial = {name: scores[name] for name in (MEAN, NO_CHANGE)}
    column = ScoreColumn("MAE", "error", scores, lower_is_better=True, trivial=trivial)
    assert column.gap() is None
    ceiling = 0.3 + 0.05 * random.random((1, 40))
    gap = replace(column, ceiling=(CEILING, ceiling)).gap()
    assert gap is not None
    assert gap.zero == ("no change", pytest.approx(scores[NO_CHANGE].mean()))
    assert gap.ceiling == ("split halves", pytest.approx(ceiling.mean()))
    assert gap.model is not None
    assert gap.baseline is not None
    assert (gap.model.name, gap.baseline.name) == ("embedding + ridge", "all genes")
    assert gap.model.percent == pytest.approx(80, abs=2)
    assert gap.baseline.percent == pytest.approx(60, abs=2)
    assert gap.model.low < gap.model.percent < gap.model.high
    unknown = np.where(np.arange(40) < 38, np.nan, ceiling)  # of all but two cells
    for other in (
        trivial[NO_CHANGE],
        trivial[MEAN],
        scores[NO_CHANGE] + random.normal(size=(1, 40)),
        unknown,
    ):
        none = replace(column, ceiling=(CEILING, other)).gap()
        assert none is not None
        assert (none.model, none.baseline) == (None, None)
    few = replace(column, ceiling=(CEILING, ceiling), n_units=2).gap()
    assert few == replace(gap, model=None, baseline=None, n=2)


def test_a_gap_names_no_baseline_that_the_model_has_beaten() -> None:
    random = np.random.default_rng(1)
    untrained = ScoredMethod("untrained", "kNN", network="untrained")
    means = {OWN: 0.9, untrained: 0.7, OTHER: 0.6, MAJORITY: 0.2}
    scores = {method: mean + 0.05 * random.random((3, 40)) for method, mean in means.items()}
    ceiling = (CEILING, 0.95 + 0.05 * random.random((3, 40)))
    trivial = {MAJORITY: scores[MAJORITY]}
    column = ScoreColumn("x", "accuracy", scores, trivial=trivial, ceiling=ceiling)
    gap = column.gap()
    assert gap is not None
    assert gap.baseline is not None
    assert gap.baseline.name == OTHER.name
    result = tabulate([column], {})
    best = result.best_baseline("x")
    assert best is not None
    assert best.method == OTHER
    close = scores | {untrained: scores[OWN] - 1e-3 * random.normal(size=40)}
    level = replace(column, scores=close).gap()
    assert level is not None
    assert level.baseline is not None
    assert level.baseline.name == untrained.name


def test_a_verdict_knows_its_column_among_equal_differences() -> None:
    """In both columns the model is behind OTHER by the same, but in one another baseline is best."""
    random = np.random.default_rng(1)
    own = random.random((3, 40))
    best = ScoredMethod("best baseline")
    scores = {OWN: own, OTHER: own + 0.1, best: own}
    x = ScoreColumn("x", "accuracy of x", scores)
    y = ScoreColumn("y", "accuracy of y", scores | {best: own + 0.2})
    result = tabulate([x, y], {})
    found = [result.best_baseline(column) for column in ("x", "y")]
    assert [row and row.method for row in found] == [OTHER, best]


def test_an_earlier_verdict_is_of_each_column_with_its_value() -> None:
    """Earlier versions stored no columns, and these two have equal differences."""
    scores = {OWN: np.full((3, 40), 0.9), OTHER: np.full((3, 40), 0.8)}
    result = tabulate([ScoreColumn(name, name.upper(), scores) for name in ("x", "y")], {})
    verdicts = [replace(verdict, column=None) for verdict in result.verdicts]
    earlier = replace(result, verdicts=verdicts)
    assert [earlier.find_verdict(column) is not None for column in ("x", "y")] == [True, True]


def test_a_gap_in_words() -> None:
    gap = Gap("accuracy", ("majority", 0.3527), ("all genes with half of the labels", 0.8101))
    closed = replace(
        gap,
        model=Closed("embedding + kNN", 87.4, 79.6, 94.2),
        baseline=Closed("all genes", 101.4, 90, 110),
    )
    assert closed.words == (
        "closes 87 % (80 to 94) of the gap from majority (0.353) to all genes with half of the labels (0.810); "
        "the best baseline, all genes, closes 101 %"
    )
    assert gap.words == (
        "no scale: all genes with half of the labels (0.810) is not clearly better than majority (0.353)"
    )
    assert replace(gap, n=2).words == (
        "no scale from majority (0.353) to all genes with half of the labels (0.810): n = 2, expected 3 or more"
    )


def test_the_scale_runs_from_the_largest_class_to_the_halves() -> None:
    labels = np.array(list("aaabbc"))
    ceiling_labels = np.array(list("aabbbx"))
    made = ClassPredictions(labels, 2, ceiling_labels=ceiling_labels)
    for repetition, cells in enumerate(([0, 1, 3, 5], [0, 1, 2, 3, 4])):
        predicted = {
            name: np.array(list(text))[cells]
            for name, text in ((EMBEDDING, "abaabc"), (OTHER, "bbbbbb"))
        }
        made.record("x", repetition, np.array(cells), predicted)
    column = made.column("x", "accuracy", "x", "accuracy")
    assert column.ceiling is not None
    np.testing.assert_array_equal(column.trivial[LARGEST_CLASS][0], [1, 1, np.nan, 0, np.nan, 0])
    np.testing.assert_array_equal(column.trivial[LARGEST_CLASS][1], [1, 1, 1, 0, 0, np.nan])
    np.testing.assert_array_equal(column.ceiling[1][0], [1, 1, np.nan, 1, np.nan, 0])
    np.testing.assert_array_equal(column.ceiling[1][1], [1, 1, 0, 1, 1, np.nan])
    ceiling_labels[5] = ""  # a class of too few cells for halves
    assert np.isnan(made.column("x", "accuracy", "x", "accuracy").ceiling[1][0, 5])  # type: ignore[index]
    assert made.column("x", "macro_f1", "x", "macro-F1").ceiling is None
    ceiling_labels[:] = ""
    assert made.column("x", "accuracy", "x", "accuracy").gap() is None


def test_unknown_classes_of_the_ceiling_count_separately() -> None:
    labels = np.array(list("aaabbb"))
    ceiling_labels = np.array(list("aaxbby"))
    made = ClassPredictions(labels, 1, ceiling_labels=ceiling_labels)
    made.record("x", 0, np.arange(6), {EMBEDDING: labels})
    column = made.column("x", "macro_f1", "x", "macro-F1")
    assert column.ceiling is not None
    expected = f1_score(labels, ceiling_labels, average="macro", zero_division=0)
    assert column.ceiling[1][0].mean() == pytest.approx(expected)


def test_the_scale_begins_at_the_largest_class_of_tested_cells() -> None:
    labels = np.array(list("XXXXXXAAAB"))
    made = ClassPredictions(labels, 1, ceiling_labels=labels)
    known = np.arange(6, 10)
    predicted = {EMBEDDING: labels[known], OTHER: labels[known], MAJORITY: np.full(4, "B")}
    made.record("known", 0, known, predicted)
    gap = made.column("known", "accuracy", "known", "accuracy").gap()
    assert gap is not None
    assert gap.zero == ("largest class", 0.75)


def test_a_column_of_errors_cannot_rank_the_rows() -> None:
    scores = {OWN: np.ones((1, 9)), OTHER: np.zeros((1, 9))}
    errors = ScoreColumn("error", "error", scores, lower_is_better=True)
    ranking = ScoreColumn("score", "score", scores)
    with pytest.raises(AssertionError, match="error ranks rows by the highest"):
        tabulate([errors, ranking], {})
    assert tabulate([ranking, errors], {}).metric == "score"
