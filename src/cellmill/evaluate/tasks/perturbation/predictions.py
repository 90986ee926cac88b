"""Predicted changes of units, by the model and by baselines.

A prediction reads the perturbation, dose and context of a tested unit, the genes that the unit perturbs,
and the strata of its cells. A prediction never reads the expression of these cells.

Legend: U units (see `profiles.py`), G genes, F features of a unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cellmill.evaluate.methods import EMBEDDING, ByMethod
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.perturbation.baselines import (
    ADDITIVE,
    CONTEXT_MEAN,
    ChangesByMethod,
    predict_new_contexts,
    predict_new_perturbations,
    sum_changes_of_parts,
)
from cellmill.evaluate.tasks.perturbation.doses import predict_new_doses
from cellmill.evaluate.tasks.perturbation.gene_features import average_gene_vectors
from cellmill.evaluate.tasks.perturbation.profiles import START_HALF
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.evaluate.tasks.perturbation.units import DOSE, PERTURBATION, PerturbedUnits

RESPONSE_HEAD = replace(EMBEDDING, classifier="response head")


@dataclass(frozen=True)
class ChangePredictor:
    """Predicts the changes of units, by the model and by baselines."""

    units: PerturbedUnits

    @cached_property
    def start_means(self) -> np.ndarray:
        """(strata, G) float64: mean expression of the controls that predictions start from."""
        return self.units.profiles.average_controls(START_HALF)

    @cached_property
    def changes_from_start(self) -> np.ndarray:
        """(U, G) float64: changes of the units' cells from `start_means`. Predictions are fitted on these
        changes.
        """
        units = self.units
        return units.profiles.measure_changes(units.unit_of_cell, units.n_units, self.start_means)

    @cached_property
    def features(self) -> ByMethod:
        """(U, F) by source of gene vectors: the mean vector of each unit's perturbed genes."""
        units = self.units
        return average_gene_vectors(
            units.context.model, units.profiles, units.gene_names, units.genes, units.config.priors
        )

    @cached_property
    def responses(self) -> np.ndarray | None:
        """(U, G) float64: change of each unit that the model's response head predicts; None for a model
        without such a head.
        """
        units = self.units
        context = units.context
        head = ResponseHead.find(context.model.network, context.options.precision)
        if head is None:
            return None
        shares = units.profiles.compute_stratum_shares(units.scored_unit_of_cell, units.n_units)
        names = units.name_in_dataset.tolist()
        return head.predict_changes(
            context.vectors, units.profiles, np.nan_to_num(shares), names, units.genes
        )

    def predict(self, folds: list[Fold]) -> Iterator[ChangesByMethod]:
        """Predicted changes of the units that each fold tests, (tested units, G) by method."""
        for fold in folds:
            predicted = self._predict_from_fitted(fold)
            if self.responses is not None:
                predicted[RESPONSE_HEAD] = self.responses[fold.tested]
            yield predicted

    def _predict_from_fitted(self, fold: Fold) -> ChangesByMethod:
        """Predictions of all methods that are fitted on the changes of the fold's fitted units. Some of
        these methods read gene vectors of the model.
        """
        units = self.units
        changes = self.changes_from_start
        fitted = fold.fitted
        tested = fold.tested
        predicted: ChangesByMethod = {}
        if units.held_out == PERTURBATION:
            predicted |= predict_new_perturbations(
                changes, fitted, tested, self.features, units.config.neighbors
            )
        if units.split_file is not None:
            predicted |= self._predict_from_parts(fold)
        # True for a tested unit whose perturbation was fitted, at another dose or in another context
        is_fitted = np.isin(units.perturbation[tested], units.perturbation[fitted])
        if units.held_out == DOSE:
            predicted |= predict_new_doses(
                changes, fitted, tested, units.perturbation, units.log_dose
            )
        elif units.held_out != PERTURBATION or is_fitted.any():
            controls = units.profiles.average_controls_of_units(
                units.unit_of_cell, units.n_units, self.start_means
            )
            predicted |= predict_new_contexts(
                changes, fitted, tested, units.perturbation, units.dose, controls
            )
        return predicted

    def _predict_from_parts(self, fold: Fold) -> ChangesByMethod:
        """Two predictions for a split file: the mean change of the fitted units of the same context, and
        the sum of the changes under the parts of a combination. Each is left out if it is not defined
        for all tested units.
        """
        units = self.units
        changes = self.changes_from_start
        parts = [units.name_divider.divide_or_keep(name) for name in units.perturbation.tolist()]
        predicted: ChangesByMethod = {}
        if any(units.unit_context):
            # (tested units, fitted units): True if both are of the same context
            is_same = units.unit_context[fold.tested][:, None] == units.unit_context[fold.fitted]
            n_same = is_same.sum(1, keepdims=True)
            if n_same.all():
                predicted[CONTEXT_MEAN] = is_same @ changes[fold.fitted] / n_same
        # if combinations are among the tested units
        if max(len(parts[unit]) for unit in fold.tested) > 1:
            sums = sum_changes_of_parts(
                changes,
                fold.fitted,
                fold.tested,
                units.perturbation,
                units.dose,
                units.unit_context,
                parts,
            )
            if np.isfinite(sums).all():
                predicted[ADDITIVE] = sums
        return predicted
