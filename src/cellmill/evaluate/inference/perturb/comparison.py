"""Compares predicted responses with measured changes, by the scores of task perturbation.

Legend: U units, G genes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cellmill.evaluate.inference.perturb.requested_units import (
    TASK_DEFAULTS,
    MeasuredUnits,
    RequestedUnits,
)
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.evaluate.tasks.perturbation.baselines import NO_CHANGE, ChangesByMethod
from cellmill.evaluate.tasks.perturbation.change_scores import (
    METRICS,
    average_perturbations,
    score_changes,
)
from cellmill.evaluate.tasks.perturbation.profiles import START_HALF, Profiles
from cellmill.runs.results import ScoredMethod

PRINTED = ("Pearson", "MAE")  # metrics that are printed
RESPONSE = ScoredMethod("the response")  # the prediction of the model
OTHERS_MEAN = ScoredMethod("the mean of other perturbations")  # a baseline


class FileChanges(NamedTuple):
    """Perturbations of the file that have enough cells, and their changes."""

    names: np.ndarray  # (perturbations,) text
    # (perturbations, G) float64: difference from the controls that predictions start from
    changes: np.ndarray


def compare_responses(
    profiles: Profiles,
    units: RequestedUnits,
    predicted: np.ndarray,
    measured: MeasuredUnits,
    trained: Sequence[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Compare the changes `predicted`, (U, G), with measured changes and with two baselines.

    The baselines are no change, and the mean change of other perturbations. Returns obs columns with the
    scores of each unit, (U,) float64 by name, and sentences with mean scores and verdicts. Both are empty if
    no unit is measured.

    `trained` are the perturbations that the model was trained on. They are compared separately from other
    perturbations. Their changes are measured on cells that the model has not seen.
    """
    is_measured = np.isfinite(measured.changes).all(1)
    names = np.array(units.names)
    # (U, G): True for the genes that a unit perturbs
    perturbed = np.array([np.isin(profiles.genes, rows) for rows in units.genes])
    in_file = _measure_perturbations(profiles)
    columns: dict[str, np.ndarray] = {}
    sentences = []
    for is_trained in (False, True):
        chosen = np.flatnonzero(is_measured & (units.trained == is_trained))
        if not len(chosen):
            continue

        # score the response and the baselines
        predictions = {RESPONSE: predicted[chosen], NO_CHANGE: np.zeros_like(predicted[chosen])}
        predictions |= _average_others(in_file, names[chosen], [] if is_trained else trained)
        by_metric: dict[str, ByMethod] = {metric: {} for metric in METRICS}
        for method, changes in predictions.items():
            scores = score_changes(
                changes, measured.changes[chosen], perturbed[chosen], TASK_DEFAULTS.top_genes
            )
            for metric, unit_scores in scores.items():
                if not np.isfinite(unit_scores).any():
                    continue
                column = columns.setdefault(f"{metric}, {method.name}", np.full(len(names), np.nan))
                column[chosen] = unit_scores
                by_metric[metric][method] = average_perturbations(unit_scores[None], names[chosen])

        # describe the scores
        n_perturbations = len({*names[chosen]})
        training = "also trained on, by other cells" if is_trained else "not trained on"
        heading = f"{n_perturbations:,} measured perturbations that the model was {training}"
        for metric in PRINTED:
            sentences += _describe_scores(metric, heading, by_metric[metric])
    return columns, sentences


def _average_others(
    in_file: FileChanges, names: np.ndarray, trained: Sequence[str]
) -> ChangesByMethod:
    """Average the changes of other perturbations for each unit: a baseline, (units, G).

    `names`, (units,), are the perturbations of the units. The other perturbations of a unit are all
    perturbations of the file that the model was `trained` on. If the file has no such perturbation, they are
    all perturbations of the file except the one of the unit. The result is empty if a unit has no other
    perturbation.
    """
    is_trained = np.isin(in_file.names, trained)
    masks_of_others = [in_file.names != name for name in names]
    if is_trained.any():
        masks_of_others = len(names) * [is_trained]
    if not all(is_other.any() for is_other in masks_of_others):
        return {}
    means = [in_file.changes[is_other].mean(0) for is_other in masks_of_others]
    return {OTHERS_MEAN: np.array(means)}


def _measure_perturbations(profiles: Profiles) -> FileChanges:
    """Measure the changes of all perturbations of a file that have enough cells."""
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    names, number = np.unique(np.where(is_usable, profiles.perturbation, ""), return_inverse=True)
    changes = profiles.measure_changes(
        np.where(is_usable, number, -1), len(names), profiles.average_controls(START_HALF)
    )
    has_enough = np.bincount(number[is_usable], minlength=len(names)) >= TASK_DEFAULTS.min_cells
    return FileChanges(names[has_enough], changes[has_enough])


def _describe_scores(metric: str, heading: str, scores: ByMethod) -> list[str]:
    """Describe the mean scores by a metric, and the verdict on the response against each baseline.

    Returns one line, or none if the response has no score.
    """
    if RESPONSE not in scores:
        return []
    column = ScoreColumn(heading, METRICS[metric], scores, lower_is_better=metric == "MAE")
    means = [f"{method.name} {column.mean(method):.3f}" for method in scores]
    verdicts = [column.verdict(RESPONSE, other).sentence for other in scores if other != RESPONSE]
    return [f"{heading}: {METRICS[metric]}: {', '.join(means)}. {' '.join(verdicts)}".strip()]
