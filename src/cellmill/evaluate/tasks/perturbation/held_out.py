"""Units of perturbed cells that are held out whole, and the predictions of their changes.

Predictions of a tested unit (see `profiles.py`) read its gene, its context and the strata of its
cells, never its expression.

Legend: U units, G genes, F features of a unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold, KFold

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.arrays import text_values
from cellmill.data.genes.names import known_rows
from cellmill.evaluate.methods import EMBEDDING, ByMethod
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.baselines import (
    ADDITIVE,
    CONTEXT_MEAN,
    ChangesByMethod,
    predict_new_contexts,
    predict_new_perturbations,
    sum_changes_of_parts,
)
from cellmill.evaluate.tasks.perturbation.doses import (
    FEWEST_DOSES,
    leave_out_doses,
    log_doses,
    parse_names,
    predict_new_doses,
)
from cellmill.evaluate.tasks.perturbation.gene_features import average_gene_vectors
from cellmill.evaluate.tasks.perturbation.profiles import START_HALF, Profiles, read_profiles
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.evaluate.tasks.perturbation.split_file import TEST, TRAIN, PartNames, SplitFile

PERTURBATION = "perturbation"  # role of new perturbations, and of every split file
DOSE = "dose"  # role of doses that are held out
NO_CONTROLS = "no stratum has enough controls"  # why a dataset or a role is skipped
STRATA = ("batch", "donor")  # roles that divide cells into strata
# a group counts as unseen if this share of its cells is scored; the rest equal training cells or
# have no known gene
UNSEEN_FRAC = 0.9
RESPONSE = replace(EMBEDDING, classifier="response head")


@dataclass(frozen=True)
class HeldOut:
    """Units of a role whose values are held out whole, and what predicts their changes."""

    context: Context
    config: PerturbationConfig
    role: str
    profiles: Profiles
    # (cells,) int64: unit of a cell; -1 for controls, and for units with too few cells
    unit_of_cell: np.ndarray
    name_in_dataset: np.ndarray  # (U,) text: perturbation as the dataset has it
    perturbation: np.ndarray  # (U,) text: the same, or the compound if names have doses
    dose: np.ndarray  # (U,) text, empty for a unit without
    unit_context: np.ndarray  # (U,) text, empty if units have none
    # (U,) text: perturbation, context or both; the units of a group are held out together
    group_of_unit: np.ndarray
    # (U,) bool: at least UNSEEN_FRAC of the group's cells are scored
    unseen: np.ndarray
    # (U,) bool: the model was fitted, not only validated, on cells of the group
    trained: np.ndarray
    # perturbations of units with too few cells, or without the dose that is held out
    left_out: list[str]
    part_names: PartNames
    split_file: SplitFile | None = None

    @classmethod
    def read(
        cls,
        context: Context,
        config: PerturbationConfig,
        role: str,
        split_file: SplitFile | None = None,
    ) -> Self:
        """Units with at least `min_cells` cells. For units that may be tested, only scored cells
        count.

        Raises Skipped if no stratum has enough controls.
        """
        context_role = None if role in (PERTURBATION, DOSE) else role
        if split_file is not None:
            context_role = split_file.context_role
        roles = (*STRATA, context_role) if context_role else STRATA
        profiles = read_profiles(
            context.reader,
            context.gene_columns,
            context.roles,
            dict.fromkeys(roles),
            context.options.seed,
        )
        if profiles.stratum.max() < 0:
            raise Skipped(NO_CONTROLS)
        cells = _tabulate_cells(context, config, profiles, context_role)
        no_dose: list[str] = []
        if split_file is not None:
            cells["group"] = cells["perturbation"] + " | " + cells["context"]
        if role == DOSE:
            no_dose = _group_by_dose(cells)
        usable = cells[cells["is_usable"]]
        groups = usable.groupby("group")
        is_unseen = groups["is_scored"].sum() >= UNSEEN_FRAC * groups.size()
        is_trained = groups["is_trained"].any()
        units = _tabulate_units(usable, is_unseen)
        has_enough = units["n_cells"] >= config.min_cells
        kept = units[has_enough]
        unit_of_cell = kept.index.get_indexer(cells["unit"])
        return cls(
            context,
            config,
            role,
            profiles,
            unit_of_cell=np.where(cells["is_usable"], unit_of_cell, -1),
            name_in_dataset=kept["name_in_dataset"].to_numpy(str),
            perturbation=kept["perturbation"].to_numpy(str),
            dose=kept["dose"].to_numpy(str),
            unit_context=kept["context"].to_numpy(str),
            group_of_unit=kept["group"].to_numpy(str),
            unseen=is_unseen[kept["group"]].to_numpy(bool),
            trained=is_trained[kept["group"]].to_numpy(bool),
            left_out=sorted({*units["perturbation"][~has_enough], *no_dose}),
            part_names=PartNames(context, config.combination_delimiter),
            split_file=split_file,
        )

    def folds_by_heading(self) -> dict[str, list[Fold]]:
        """Folds by what they test, in the words of a heading, such as `new donor`. A split file has
        a heading for each novelty of units. Empty if nothing can be tested.
        """
        if self.split_file is None:
            folds = [*self.folds()]
            return {f"new {self.role}": folds} if folds else {}
        train = np.flatnonzero(self.split_of_unit == TRAIN)
        test = np.flatnonzero((self.split_of_unit == TEST) & self.unseen)
        by_novelty = self.split_file.divide_by_novelty(
            test, train, self.perturbation, self.unit_context
        )
        return {novelty: [Fold(0, train, units)] for novelty, units in by_novelty.items()}

    @cached_property
    def split_of_unit(self) -> np.ndarray:
        """(U,) text: split of each unit in the file; empty for a unit that it does not name."""
        assert self.split_file is not None
        return self.split_file.assign(self.perturbation, self.unit_context)

    @cached_property
    def log_dose(self) -> np.ndarray:
        """(U,) float64: log10 of each unit's dose; NaN for a unit without a dose above 0."""
        return log_doses(self.dose)

    @cached_property
    def unit_names(self) -> list[str]:
        """Perturbation, dose and context of each unit, as far as it has them."""
        texts = zip(self.perturbation.tolist(), self.dose.tolist(), self.unit_context.tolist())
        return [" | ".join(filter(None, unit_texts)) for unit_texts in texts]

    def folds(self) -> Iterator[Fold]:
        """Units to fit on and to test. Empty if the model saw cells of all groups, if there are
        fewer than two groups, or for doses if no compound has FEWEST_DOSES of them.

        If the model saw cells of some groups, the other groups are tested, once. If it saw none,
        all groups are tested in turn.
        """
        n_groups = len(np.unique(self.group_of_unit))
        n_unseen = len(np.unique(self.group_of_unit[self.unseen]))
        if n_groups < 2 or not n_unseen:
            return
        if n_unseen < n_groups:
            yield self._test_unseen()
        elif self.role == DOSE:
            units = np.arange(len(self.group_of_unit))
            for test in leave_out_doses(self.perturbation, self.log_dose):
                yield Fold(0, np.setdiff1d(units, test), test)
        elif self.role == PERTURBATION:
            yield from self._divide_perturbations()
        else:
            yield from self._divide_contexts()

    def _test_unseen(self) -> Fold:
        """The fold that tests the units of unseen groups.

        Baselines are fitted on the groups that the model was fitted on, not on groups that only
        validated it. They are fitted on all other groups if the model was fitted on none.
        """
        fitted = ~self.unseen & self.trained
        if not fitted.any():
            fitted = ~self.unseen
        return Fold(0, np.flatnonzero(fitted), np.flatnonzero(self.unseen))

    def _divide_perturbations(self) -> Iterator[Fold]:
        """Folds of the groups, shuffled anew in each repetition."""
        groups = np.unique(self.group_of_unit)
        options = self.context.options
        n_folds = min(options.folds, len(groups))
        for repetition in range(self.config.seeds):
            splitter = KFold(n_folds, shuffle=True, random_state=options.seed + repetition)
            for _, test in splitter.split(groups):
                is_tested = np.isin(self.group_of_unit, groups[test])
                yield Fold(repetition, np.flatnonzero(~is_tested), np.flatnonzero(is_tested))

    def _divide_contexts(self) -> Iterator[Fold]:
        """Folds of whole contexts, at most `most_folds`."""
        n_folds = min(len(np.unique(self.group_of_unit)), self.config.most_folds)
        splitter = GroupKFold(n_folds)
        for train, test in splitter.split(self.group_of_unit, groups=self.group_of_unit):
            yield Fold(0, train, test)

    def explain_no_folds(self) -> str:
        """Why there are no folds, if there are none."""
        n_groups = len(np.unique(self.group_of_unit))
        enough = f"{self.config.min_cells} cells or more (min_cells)"
        reason = f"{n_groups} values have {enough}; two are needed"
        if n_groups and (self.split_file is not None or not self.unseen.any()):
            reason = "the model saw cells of each of them; hold some out (shard.split_by), or use cells: all"
        elif n_groups > 1 and self.role == DOSE:
            reason = f"no compound has {FEWEST_DOSES} doses of {enough}"
        return f"held out {self.role}: {reason}"

    @cached_property
    def scored_unit_of_cell(self) -> np.ndarray:
        """(cells,) int64: unit of each scored cell, from which changes are measured; -1 for other
        cells.
        """
        return np.where(self.context.scored, self.unit_of_cell, -1)

    @cached_property
    def gene_names(self) -> list[list[str]]:
        """Names of each unit's perturbed genes: the parts of its perturbation."""
        parts = map(self.part_names.divide, self.perturbation.tolist())
        return [[*map(str.strip, names)] for names in parts]

    @cached_property
    def genes(self) -> list[list[int]]:
        """Vocabulary rows of each unit's perturbed genes that the model knows."""
        return known_rows(self.gene_names, self.context.model.vocabulary)

    @cached_property
    def start_means(self) -> np.ndarray:
        """(strata, G) float64: mean of the controls that predictions start from."""
        return self.profiles.control_means(START_HALF)

    @cached_property
    def changes_from_start(self) -> np.ndarray:
        """(U, G) float64: changes from `start_means`, which predictions are fitted on."""
        return self.profiles.changes(self.unit_of_cell, len(self.group_of_unit), self.start_means)

    @cached_property
    def features(self) -> ByMethod:
        """(U, F) by source of gene vectors (`average_gene_vectors`)."""
        return average_gene_vectors(
            self.context.model, self.profiles, self.gene_names, self.genes, self.config.priors
        )

    @cached_property
    def responses(self) -> np.ndarray | None:
        """(U, G) float64: change of each unit by the model's response head, if it has one."""
        context = self.context
        head = ResponseHead.find(context.model.network, context.options.precision)
        if head is None:
            return None
        n_units = len(self.group_of_unit)
        shares = np.nan_to_num(self.profiles.stratum_shares(self.scored_unit_of_cell, n_units))
        names = self.name_in_dataset.tolist()
        return head.predict_changes(context.vectors, self.profiles, shares, names, self.genes)

    def predictions(self, folds: list[Fold]) -> Iterator[ChangesByMethod]:
        """Predicted changes of the test units of each fold."""
        for fold in folds:
            predicted: ChangesByMethod = {}
            if self.role == PERTURBATION:
                predicted |= predict_new_perturbations(
                    self.changes_from_start,
                    fold.train,
                    fold.test,
                    self.features,
                    self.config.neighbors,
                )
            if self.split_file is not None:
                predicted |= self._predict_from_parts(fold)
            if self.role == DOSE:
                predicted |= predict_new_doses(
                    self.changes_from_start, fold.train, fold.test, self.perturbation, self.log_dose
                )
            elif self.role != PERTURBATION or self._is_trained_elsewhere(fold):
                n_units = len(self.group_of_unit)
                controls = self.profiles.unit_controls(self.unit_of_cell, n_units, self.start_means)
                predicted |= predict_new_contexts(
                    self.changes_from_start, fold.train, fold.test, self.perturbation, controls
                )
            if self.responses is not None:
                predicted[RESPONSE] = self.responses[fold.test]
            yield predicted

    def _is_trained_elsewhere(self, fold: Fold) -> bool:
        """True if a training unit has the perturbation of a test unit."""
        return bool(np.isin(self.perturbation[fold.test], self.perturbation[fold.train]).any())

    def _predict_from_parts(self, fold: Fold) -> ChangesByMethod:
        """Means of the units' contexts, and sums over the parts of combinations, each only if all
        test units have it.
        """
        parts = [self.part_names.divide(name) for name in self.perturbation.tolist()]
        predicted: ChangesByMethod = {}
        if any(self.unit_context):
            is_same = self.unit_context[fold.test][:, None] == self.unit_context[fold.train]
            n_same = is_same.sum(1, keepdims=True)
            if n_same.all():
                predicted[CONTEXT_MEAN] = is_same @ self.changes_from_start[fold.train] / n_same
        if max(len(parts[unit]) for unit in fold.test) > 1:
            sums = sum_changes_of_parts(
                self.changes_from_start,
                fold.train,
                fold.test,
                self.perturbation,
                self.unit_context,
                parts,
            )
            if np.isfinite(sums).all():
                predicted[ADDITIVE] = sums
        return predicted


def _tabulate_cells(
    context: Context, config: PerturbationConfig, profiles: Profiles, context_role: str | None
) -> pd.DataFrame:
    """A row for each cell: its unit and the values that name it, and whether the cell is usable,
    scored, and in the model's training.

    A cell is usable if it is perturbed, has a stratum, and has a value of `context_role`, the role of
    contexts. Units are held out by their context if they have one, else by their perturbation.
    """
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    contexts = np.full(len(is_usable), "")
    compound = profiles.perturbation
    dose = profiles.dose
    if config.doses == "names":
        compound, dose, _ = parse_names(compound, config.dose_unit)
    if context_role is not None:
        contexts = text_values(context.roles[context_role]).astype(str)
        is_usable &= context.roles[context_role].notna().to_numpy()
    cells = pd.DataFrame(
        {
            "name_in_dataset": profiles.perturbation,
            "perturbation": compound,
            "dose": dose,
            "context": contexts,
            "group": compound if context_role is None else contexts,
            "is_usable": is_usable,
            "is_scored": context.scored,
            "is_trained": context.model.is_training_cell(context.dataset, context.reader.obs_names),
        }
    )
    # one sortable name for each unit
    cells["unit"] = cells["perturbation"] + " | " + cells["dose"] + " | " + cells["context"]
    return cells


def _group_by_dose(cells: pd.DataFrame) -> list[str]:
    """Hold out each dose of a perturbation by itself. Cells without a dose become unusable; return
    their perturbations.
    """
    cells["group"] = cells["perturbation"] + " | " + cells["dose"]
    has_dose = np.isfinite(log_doses(cells["dose"].to_numpy(str)))
    no_dose: list[str] = cells["perturbation"][cells["is_usable"] & ~has_dose].unique().tolist()
    cells["is_usable"] &= has_dose
    return no_dose


def _tabulate_units(usable: pd.DataFrame, is_unseen: pd.Series) -> pd.DataFrame:
    """Perturbation, dose, context, group and `n_cells` of each unit, by its name.

    Cells of a unit that may be tested, whose group `is_unseen`, count if they are scored, others
    always.
    """
    is_counted = usable["is_scored"] | ~is_unseen[usable["group"]].to_numpy(bool)
    units = usable.assign(is_counted=is_counted).groupby("unit")
    return units.agg(
        name_in_dataset=("name_in_dataset", "first"),
        perturbation=("perturbation", "first"),
        dose=("dose", "first"),
        context=("context", "first"),
        group=("group", "first"),
        n_cells=("is_counted", "sum"),
    )
