"""Predicted responses compared with measured changes, as task perturbation scores them.

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

PRINTED = ("Pearson", "MAE")  # metrics of the printed comparison
RESPONSE = ScoredMethod("the response")
OTHERS_MEAN = ScoredMethod("the mean of other perturbations")


class FileChanges(NamedTuple):
    """Perturbations of the file with enough cells, and their changes."""

    names: np.ndarray  # (perturbations,) text
    changes: np.ndarray  # (perturbations, G) float64, from the controls that predictions start from


def compare_responses(
    profiles: Profiles,
    units: RequestedUnits,
    predicted: np.ndarray,
    measured: MeasuredUnits,
    trained: Sequence[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """obs columns with the scores of each unit, (U,) float64, and sentences on the changes `predicted`,
    (U, G), against no change and the mean of other perturbations. Both are empty without measured
    units.

    `trained` are the perturbations that the model was trained on. Their units, measured on other
    cells, are compared separately.
    """
    is_measured = np.isfinite(measured.changes).all(1)
    names = np.array(units.names)
    perturbed = np.array([np.isin(profiles.genes, rows) for rows in units.genes])
    in_file = _measure_perturbations(profiles)
    columns: dict[str, np.ndarray] = {}
    sentences = []
    for is_trained in (False, True):
        chosen = np.flatnonzero(is_measured & (units.trained == is_trained))
        if not len(chosen):
            continue
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
        n = len({*names[chosen]})
        training = "also trained on, by other cells" if is_trained else "not trained on"
        heading = f"{n:,} measured perturbations that the model was {training}"
        for metric in PRINTED:
            sentences += _describe_scores(metric, heading, by_metric[metric])
    return columns, sentences


def _average_others(
    in_file: FileChanges, names: np.ndarray, trained: Sequence[str]
) -> ChangesByMethod:
    """Mean change of other perturbations for each unit, whose perturbations are `names`, (units,).

    Others are the file's perturbations in `trained`. If there are none, they are all perturbations
    but the unit's. Empty if a unit has no others.
    """
    is_trained = np.isin(in_file.names, trained)
    others = [in_file.names != name for name in names]
    if is_trained.any():
        others = len(names) * [is_trained]
    if not all(is_other.any() for is_other in others):
        return {}
    return {OTHERS_MEAN: np.array([in_file.changes[is_other].mean(0) for is_other in others])}


def _measure_perturbations(profiles: Profiles) -> FileChanges:
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    names, number = np.unique(np.where(is_usable, profiles.perturbation, ""), return_inverse=True)
    changes = profiles.measure_changes(
        np.where(is_usable, number, -1), len(names), profiles.average_controls(START_HALF)
    )
    has_enough = np.bincount(number[is_usable], minlength=len(names)) >= TASK_DEFAULTS.min_cells
    return FileChanges(names[has_enough], changes[has_enough])


def _describe_scores(metric: str, heading: str, scores: ByMethod) -> list[str]:
    """Sentence with the means of a metric, and the verdict on the response against each baseline."""
    column = ScoreColumn(heading, METRICS[metric], scores, lower_is_better=metric == "MAE")
    if RESPONSE not in scores:
        return []
    means = [f"{method.name} {column.mean(method):.3f}" for method in scores]
    verdicts = [column.verdict(RESPONSE, other).sentence for other in scores if other != RESPONSE]
    return [f"{heading}: {METRICS[metric]}: {', '.join(means)}. {' '.join(verdicts)}".strip()]
