"""Scores of the predicted changes in all folds, and of the ceilings and probes that the predictions are
compared with.

Legend: U units (see `profiles.py`), G genes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.expression import cross_correlations
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.perturbation.baselines import ChangesByMethod
from cellmill.evaluate.tasks.perturbation.change_scores import (
    METRICS,
    average_perturbations,
    score_changes,
)
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.probes import choose_best_methods, make_probes
from cellmill.evaluate.tasks.perturbation.profiles import REFERENCE_HALF, START_HALF
from cellmill.evaluate.tasks.perturbation.units import PERTURBATION, PerturbedUnits
from cellmill.runs.results import ScoredMethod

# ceiling of all methods: the change in one half of a unit's cells as prediction for the other half
CEILING = ScoredMethod("split halves", kind="ceiling")
# ceiling of methods that copy the change of a fitted perturbation: the most similar one is copied
BEST_OTHER = ScoredMethod("best other perturbation", kind="ceiling")

Scores = dict[str, ByMethod]
"""Scores of perturbations, (repetitions, perturbations) float64, by metric and method."""


class ChangePair(NamedTuple):
    """Predicted and measured changes of the tested units, (tested units, G) float64 each."""

    predicted: np.ndarray
    measured: np.ndarray


class PerturbationScores(NamedTuple):
    """Scores of the tested perturbations. The score of a perturbation is the mean over its units."""

    predictions: Scores
    ceilings: Scores
    probes: Scores  # in the first repetition only
    # the best method of the model and the best baseline: the methods that have probes
    best_methods: list[ScoredMethod]


def score_folds(predictor: ChangePredictor, folds: list[Fold]) -> PerturbationScores:
    """Scores of the predictions in `folds`, of the ceilings, and of the probes of the best methods."""
    units = predictor.units
    predictions = score_predictions(units, folds, predictor.predict(folds))
    halves = (pair_halves(predictor, fold) for fold in folds)
    ceilings = score_pairs(units, folds, halves)
    best_methods = choose_best_methods(predictions["Pearson"])
    first_folds = [fold for fold in folds if fold.repetition == 0]
    probe_predictions = predict_probes(predictor, first_folds, best_methods)
    probes = score_predictions(units, first_folds, probe_predictions)
    return PerturbationScores(predictions, ceilings, probes, best_methods)


def score_predictions(
    units: PerturbedUnits, folds: list[Fold], predictions: Iterable[ChangesByMethod]
) -> Scores:
    """Scores of predicted changes. `predictions` are, for each fold, (tested units, G) by method.

    The changes are measured in the scored cells, from the half of the controls that predictions do not
    start from.
    """
    controls = units.profiles.average_controls(REFERENCE_HALF)
    measured = units.profiles.measure_changes(units.scored_unit_of_cell, units.n_units, controls)
    pairs = (
        {method: ChangePair(change, measured[fold.tested]) for method, change in changes.items()}
        for fold, changes in zip(folds, predictions)
    )
    return score_pairs(units, folds, pairs)


def score_pairs(
    units: PerturbedUnits,
    folds: list[Fold],
    pairs: Iterable[Mapping[ScoredMethod, ChangePair]],
) -> Scores:
    """Scores of predicted against measured changes. `pairs` are, for each fold, pairs by method."""
    # (U, G) bool: True for the genes that a unit perturbs, which are not scored
    is_perturbed = np.stack([np.isin(units.profiles.genes, rows) for rows in units.genes])
    n_repetitions = 1 + max(fold.repetition for fold in folds)
    # (repetitions, U) by metric and method
    by_unit: dict[str, ByMethod] = {metric: {} for metric in METRICS}
    for fold, pair_by_method in zip(folds, pairs):
        for method, pair in pair_by_method.items():
            unit_scores = score_changes(
                pair.predicted, pair.measured, is_perturbed[fold.tested], units.config.top_genes
            )
            for metric, values in unit_scores.items():
                empty = np.full((n_repetitions, units.n_units), np.nan)
                method_scores = by_unit[metric].setdefault(method, empty)
                method_scores[fold.repetition, fold.tested] = values
    scores: Scores = {metric: {} for metric in METRICS}
    for metric, by_method in by_unit.items():
        for method, unit_values in by_method.items():
            scores[metric][method] = average_perturbations(unit_values, units.perturbation)
    return scores


def pair_halves(predictor: ChangePredictor, fold: Fold) -> dict[ScoredMethod, ChangePair]:
    """Predicted and measured changes for the ceilings, by ceiling.

    The cells of each tested unit are divided into two halves, and each half has its own half of the
    controls. The measured change is the change in the second half. CEILING predicts the change in the
    first half. BEST_OTHER predicts the change of the fitted unit that is most similar to the change in
    the first half; it exists only if perturbations are held out.
    """
    units = predictor.units
    half_of_cell = _halve_cells(units, fold.repetition)
    halves = []
    for half, half_of_controls in enumerate((START_HALF, REFERENCE_HALF)):
        controls = units.profiles.average_controls(half_of_controls)
        unit_of_cell = np.where(half_of_cell == half, units.scored_unit_of_cell, -1)
        changes = units.profiles.measure_changes(unit_of_cell, units.n_units, controls)
        halves.append(changes[fold.tested])
    first, second = halves
    pairs = {CEILING: ChangePair(first, second)}
    if units.held_out == PERTURBATION:
        fitted_changes = predictor.changes_from_start[fold.fitted]
        nearest = cross_correlations(first.T, fitted_changes.T).argmax(1)
        pairs[BEST_OTHER] = ChangePair(fitted_changes[nearest], second)
    return pairs


def _halve_cells(units: PerturbedUnits, repetition: int) -> np.ndarray:
    """(cells,) int64: half of each cell, 0 or 1. The cells of each unit are divided evenly and at
    random, anew in each repetition.
    """
    unit_of_cell = units.scored_unit_of_cell
    generator = seeded(units.context.options.seed + repetition, draws.HALVES_OF_UNITS)
    shuffled = generator.permutation(len(unit_of_cell))
    # cells sorted by unit, in random order within a unit, and the place of each cell in this order
    by_unit = shuffled[np.argsort(unit_of_cell[shuffled], kind="stable")]
    place = np.argsort(by_unit)
    return place % 2  # the cells of a unit alternate between the halves


def predict_probes(
    predictor: ChangePredictor, folds: list[Fold], methods: list[ScoredMethod]
) -> Iterator[ChangesByMethod]:
    """Predicted changes of the probes of `methods`: for each fold, (tested units, G) by probe."""
    noise = predictor.units.config.probe_noise
    seed = predictor.units.context.options.seed
    for fold, predicted in zip(folds, predictor.predict(folds)):
        probes: ChangesByMethod = {}
        for method in methods:
            probes |= make_probes(method, predicted[method], fold.tested, noise, seed)
        yield probes
