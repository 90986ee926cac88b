"""Scores of predicted changes over folds, and the ceilings and probes that they are
compared with.

Legend: U units, G genes.
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

CEILING = ScoredMethod("split halves", kind="ceiling")
# ceiling of methods that copy the change of the most similar fitted perturbation
BEST_OTHER = ScoredMethod("best other perturbation", kind="ceiling")

Scores = dict[str, ByMethod]
"""Arrays `(repetitions, perturbations)` by metric and method."""


class ChangePair(NamedTuple):
    """Changes of the tested units, (test units, G) float64 each."""

    predicted: np.ndarray
    measured: np.ndarray


class PerturbationScores(NamedTuple):
    """Scores of the tested perturbations, each the mean over a perturbation's units."""

    predictions: Scores
    ceilings: Scores
    probes: Scores  # the first repetition only
    best_methods: list[ScoredMethod]  # the model's and the best baseline, which have probes


def score_folds(predictor: ChangePredictor, folds: list[Fold]) -> PerturbationScores:
    """Scores of what the predictor predicts in `folds`, and of its ceilings and probes."""
    units = predictor.units
    predictions = score_predictions(units, folds, predictor.predict(folds))
    halves = (pair_halves(predictor, fold) for fold in folds)
    ceilings = score_pairs(units, folds, halves)
    best_methods = choose_best_methods(predictions["Pearson"])
    first = [fold for fold in folds if fold.repetition == 0]
    probes = score_predictions(units, first, predict_probes(predictor, first, best_methods))
    return PerturbationScores(predictions, ceilings, probes, best_methods)


def score_predictions(
    units: PerturbedUnits, folds: list[Fold], predictions: Iterable[ChangesByMethod]
) -> Scores:
    """Scores of the predicted changes of each fold, `(test units, G)`."""
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
    """Scores of the `pairs` of predicted and measured changes of each fold."""
    perturbed = np.stack([np.isin(units.profiles.genes, rows) for rows in units.genes])
    n_repetitions = 1 + max(fold.repetition for fold in folds)
    # (repetitions, U) by metric and method
    by_unit: dict[str, ByMethod] = {metric: {} for metric in METRICS}
    for fold, pair_by_method in zip(folds, pairs):
        for method, pair in pair_by_method.items():
            unit_scores = score_changes(
                pair.predicted, pair.measured, perturbed[fold.tested], units.config.top_genes
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
    """Ceilings: the change in half of a unit's cells against that in the other half, and the most
    similar change of a fitted unit against the latter.

    Each half of the cells has its own half of the controls.
    """
    units = predictor.units
    # (cells,): position of each cell when cells are sorted by unit, shuffled in each unit
    generator = seeded(units.context.options.seed + fold.repetition, draws.HALVES_OF_UNITS)
    shuffled = generator.permutation(len(units.scored_unit_of_cell))
    by_scored_unit = np.argsort(units.scored_unit_of_cell[shuffled], kind="stable")
    position = np.argsort(shuffled[by_scored_unit])
    half_of_cell = position % 2  # cells of each unit alternate between the halves
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


def predict_probes(
    predictor: ChangePredictor, folds: list[Fold], methods: list[ScoredMethod]
) -> Iterator[ChangesByMethod]:
    """Changes that the probes of `methods` predict in each fold."""
    noise = predictor.units.config.probe_noise
    seed = predictor.units.context.options.seed
    for fold, predicted in zip(folds, predictor.predict(folds)):
        probes: ChangesByMethod = {}
        for method in methods:
            probes |= make_probes(method, predicted[method], fold.tested, noise, seed)
        yield probes
