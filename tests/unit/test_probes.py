"""Probes of the metrics of changes: their rows by a slow reference, never ranked, and what they reveal."""

import json

import numpy as np
import pytest

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.evaluate.intervals import estimate_difference
from cellmill.evaluate.scores import ScoreColumn
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.perturbation.change_scores import score_changes
from cellmill.evaluate.tasks.perturbation.folds import make_folds
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.probes import (
    describe_better_probes,
    make_probes,
    name_probes,
)
from cellmill.evaluate.tasks.perturbation.profiles import REFERENCE_HALF
from cellmill.evaluate.tasks.perturbation.task import Perturbation
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits
from cellmill.runs.results import ScoredMethod
from tests.unit.test_split_file import screen  # noqa: F401, a fixture

ENTRY = ScoredMethod("f", "linear")


def test_a_probe_is_scaled_or_has_noise_of_its_unit() -> None:
    generator = np.random.default_rng(0)
    predicted = generator.normal(size=(3, 4000)) * [[1.0], [0.1], [0.0]]
    probes = make_probes(ENTRY, predicted, np.array([4, 7, 9]), 0.5, 0)
    half, double, noisy = probes.values()
    assert [method.name for method in probes] == [
        "probe: f x 0.5 + linear",
        "probe: f x 2 + linear",
        "probe: f with noise 0.5 + linear",
    ]
    np.testing.assert_array_equal(half, predicted / 2)
    np.testing.assert_array_equal(double, predicted * 2)
    deviation = (noisy - predicted).std(1)
    assert deviation == pytest.approx([0.5, 0.05, 0], rel=0.05)
    # whatever units are tested together
    again = make_probes(ENTRY, predicted[1:2], np.array([7]), 0.5, 0)
    np.testing.assert_array_equal([*again.values()][2][0], noisy[1])
    other = make_probes(ENTRY, predicted, np.array([4, 7, 9]), 0.5, 1)
    assert not np.allclose([*other.values()][2][:2], noisy[:2])


def test_rows_of_probes_are_scores_of_the_changed_entry(screen: Context) -> None:  # noqa: F811
    config = PerturbationConfig(
        held_out=["perturbation"], min_cells=4, top_genes=5, seeds=2, probe_noise=0.7
    )
    result = Perturbation(config).run(screen)
    json.dumps(result.to_json(), allow_nan=False)
    probes = [row for row in result.rows if row.method.kind == "probe"]
    assert len(probes) == 6  # of the best row of the model, and of the best baseline
    assert not {row.method.name for row in probes} & {row.method.name for row in result.ranked_rows}
    named = {verdict.compared for verdict in result.verdicts}
    named |= {verdict.against for verdict in result.verdicts}
    named |= {difference.compared for difference in result.differences}
    named |= {difference.against for difference in result.differences}
    assert not any(name.startswith("probe") for name in named)
    column = "MAE, new perturbation"
    held = PerturbedUnits.read(screen, config, "perturbation")
    n_units = len(held.unit_names)
    controls = held.profiles.average_controls(REFERENCE_HALF)
    measured = held.profiles.measure_changes(held.unit_of_cell, n_units, controls)
    folds = [fold for fold in make_folds(held) if fold.repetition == 0]
    for kind in ("model", "baseline"):
        rows = [row for row in result.ranked_rows if row.method.kind == kind]
        rank = "Pearson, new perturbation"
        best = max(rows, key=lambda row: row.scores[rank].repetitions[0])
        names = name_probes(best.method, 0.7)
        of_best = {row.method: row for row in probes if row.method in names}
        errors = []
        for fold, predicted in zip(folds, ChangePredictor(held).predict(folds)):
            no_genes = np.zeros((len(fold.tested), measured.shape[1]), bool)
            scaled = 2 * predicted[best.method]
            errors += score_changes(scaled, measured[fold.tested], no_genes, 5)["MAE"].tolist()
        [error] = of_best[names[1]].scores[column].repetitions
        assert error == pytest.approx(np.mean(errors))
        pearson = of_best[names[0]].scores[rank].repetitions
        assert pearson == pytest.approx(best.scores[rank].repetitions[:1])


def test_a_column_that_rewards_small_changes_is_named() -> None:
    generator = np.random.default_rng(1)
    true = generator.normal(size=(8, 500)) * 0.1
    # right in direction, three times too large
    predicted = 3 * true + generator.normal(size=true.shape) * 0.1
    no_genes = np.zeros(true.shape, bool)
    scores = score_changes(predicted, true, no_genes, 20)
    changed = make_probes(ENTRY, predicted, np.arange(8), 0.5, 0)
    sentences = []
    for metric in ("MAE", "Pearson"):
        column = ScoreColumn(
            f"{metric}, new perturbation",
            metric,
            {ENTRY: np.tile(scores[metric], (2, 1))},
            lower_is_better=metric == "MAE",
        )
        probes = {}
        for method, change in changed.items():
            probes[method] = score_changes(change, true, no_genes, 20)[metric][None]
        sentences += describe_better_probes(column, probes, [ENTRY], 0.5)
        if metric == "MAE":
            half = probes[name_probes(ENTRY, 0.5)[0]]
            gain = estimate_difference(half, scores["MAE"][None])
    assert sentences == [
        f"MAE, new perturbation: better than the prediction itself: probe: f x 0.5 + linear {gain.mean:+.4f} "
        f"({gain.low:+.4f} to {gain.high:+.4f}): this column can be improved without a better prediction."
    ]
    # of two perturbations, or if the interval contains 0, nothing follows
    probes = {name_probes(ENTRY, 0.5)[0]: np.array([[0.5, 0.7, 0.1, 0.6]])}
    for n, scores in ((4, np.array([[0.4, 0.8, 0.0, 0.6]])), (2, np.array([[0.4, 0.6]]))):
        column = ScoreColumn("direction, new perturbation", "direction", {ENTRY: scores})
        few = {method: values[:, :n] for method, values in probes.items()}
        [sentence] = describe_better_probes(column, few, [ENTRY], 0.5)
        assert sentence.endswith("): this may be chance.")
