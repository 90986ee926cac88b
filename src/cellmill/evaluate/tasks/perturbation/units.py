"""Units of perturbed cells, and groups of units that are held out together.

A unit is a perturbation at one dose, and in one context if units have contexts (see `profiles.py`).

Legend: U units, G genes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pandas as pd

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.arrays import text_values
from cellmill.data.genes.names import known_rows
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.doses import compute_log_doses, parse_names
from cellmill.evaluate.tasks.perturbation.profiles import (
    STRATA,
    Profiles,
    controlled_role,
    read_profiles,
)
from cellmill.evaluate.tasks.perturbation.split_file import NameDivider, SplitFile

# What is held out. Instead of these two it may be a role of contexts, such as `donor`.
PERTURBATION = "perturbation"  # also if a split file says what is tested
DOSE = "dose"
# A group can be tested if at least this share of its cells is scored. The other cells may be equal to
# training cells, or may have no gene that the model knows.
TESTABLE_FRAC = 0.9


@dataclass(frozen=True)
class PerturbedUnits:
    """The units of a dataset, and the groups that are held out together."""

    context: Context
    config: PerturbationConfig
    held_out: str  # PERTURBATION, DOSE, or the role of contexts, such as `donor`
    profiles: Profiles
    # (cells,) int64: unit of a cell; -1 for controls, and for cells of units with too few cells
    unit_of_cell: np.ndarray

    name_in_dataset: np.ndarray  # (U,) text: perturbation as the dataset has it
    perturbation: np.ndarray  # (U,) text: the compound if names have doses, otherwise the same name
    dose: np.ndarray  # (U,) text; empty for a unit without a dose
    unit_context: np.ndarray  # (U,) text; empty if units have no contexts

    group_of_unit: np.ndarray  # (U,) text: name of the unit's group, which is held out together
    # (U,) bool: True if at least TESTABLE_FRAC of the cells of the unit's group are scored
    is_testable: np.ndarray
    # (U,) bool: True if the model was trained, and not only validated, on cells of the unit's group
    in_trained_group: np.ndarray
    # perturbations of units that are left out: units with too few cells, and, if doses are held out,
    # units without a dose
    left_out: list[str]
    name_divider: NameDivider
    split_file: SplitFile | None

    @classmethod
    def read(
        cls,
        context: Context,
        config: PerturbationConfig,
        held_out: str,
        split_file: SplitFile | None = None,
    ) -> Self:
        """Gather the perturbed cells of a dataset into units, and the units into groups.

        Units with fewer than `min_cells` cells are left out. If a unit can be tested, only its scored
        cells count. Raises Skipped if the dataset has nothing to hold out, or if no stratum has enough
        controls.
        """
        context_role = _find_context_role(context, held_out, split_file)
        profiles = read_profiles(
            context.reader,
            context.gene_columns,
            context.roles,
            (*STRATA, context_role) if context_role else STRATA,
            context.options.seed,
        )
        if profiles.stratum.max() < 0:
            raise Skipped("no stratum has enough controls")

        # cells, with the names of their units and groups
        cells = _tabulate_cells(context, config, profiles, context_role)
        cells["group"] = _name_groups(cells, held_out, context_role, split_file)
        without_dose: list[str] = []
        if held_out == DOSE:
            has_dose = np.isfinite(compute_log_doses(cells["dose"].to_numpy(str)))
            without_dose = cells["perturbation"][cells["is_usable"] & ~has_dose].unique().tolist()
            cells["is_usable"] &= has_dose

        # groups: whether they can be tested, and whether the model was trained on them
        usable = cells[cells["is_usable"]]
        groups = usable.groupby("group")
        is_testable = groups["is_scored"].sum() >= TESTABLE_FRAC * groups.size()
        in_training = groups["in_training"].any()

        # units with enough cells; -1 in `unit_of_cell` is for cells of other units
        units = _tabulate_units(usable, is_testable)
        has_enough = units["n_cells"] >= config.min_cells
        kept = units[has_enough]
        unit_of_cell = kept.index.get_indexer(cells["unit"])
        delimiter = config.combination_delimiter
        return cls(
            context,
            config,
            held_out,
            profiles,
            unit_of_cell=np.where(cells["is_usable"], unit_of_cell, -1),
            name_in_dataset=kept["name_in_dataset"].to_numpy(str),
            perturbation=kept["perturbation"].to_numpy(str),
            dose=kept["dose"].to_numpy(str),
            unit_context=kept["context"].to_numpy(str),
            group_of_unit=kept["group"].to_numpy(str),
            is_testable=is_testable[kept["group"]].to_numpy(bool),
            in_trained_group=in_training[kept["group"]].to_numpy(bool),
            left_out=sorted({*units["perturbation"][~has_enough], *without_dose}),
            name_divider=split_file.name_divider if split_file else NameDivider(context, delimiter),
            split_file=split_file,
        )

    @property
    def n_units(self) -> int:
        """Number of the units."""
        return len(self.perturbation)

    @cached_property
    def unit_names(self) -> list[str]:
        """Name of each unit: its perturbation, and its dose and its context if the unit has them."""
        texts = zip(self.perturbation.tolist(), self.dose.tolist(), self.unit_context.tolist())
        return [" | ".join(filter(None, unit_texts)) for unit_texts in texts]

    @cached_property
    def split_of_unit(self) -> np.ndarray:
        """(U,) text: split of each unit in the split file; empty for a unit that the file does not name."""
        assert self.split_file is not None
        return self.split_file.assign_splits(self.perturbation, self.unit_context)

    @cached_property
    def log_dose(self) -> np.ndarray:
        """(U,) float64: log10 of each unit's dose; NaN for a unit without a dose above 0."""
        return compute_log_doses(self.dose)

    @cached_property
    def scored_unit_of_cell(self) -> np.ndarray:
        """(cells,) int64: unit of each scored cell, and -1 for other cells. Scores compare predictions with
        the changes of these cells.
        """
        return np.where(self.context.scored, self.unit_of_cell, -1)

    @cached_property
    def gene_names(self) -> list[list[str]]:
        """Names of the genes that each unit perturbs, which are the parts of its perturbation."""
        parts = map(self.name_divider.divide_or_keep, self.perturbation.tolist())
        return [[*map(str.strip, names)] for names in parts]

    @cached_property
    def genes(self) -> list[list[int]]:
        """Vocabulary rows of the genes that each unit perturbs, without genes that the model does not
        know.
        """
        return known_rows(self.gene_names, self.context.model.vocabulary)


def _find_context_role(context: Context, held_out: str, split_file: SplitFile | None) -> str | None:
    """Role whose values are the contexts of units; None if units have no contexts. Raises Skipped if the
    dataset lacks the role that is held out.
    """
    if split_file is not None:
        return split_file.context_role
    if held_out in (PERTURBATION, DOSE):
        return None
    if held_out not in context.roles:
        raise Skipped(f"the dataset has no {held_out} column")
    if held_out == controlled_role(context.roles):
        raise Skipped("its values are the perturbations; hold out perturbation")
    return held_out


def _tabulate_cells(
    context: Context, config: PerturbationConfig, profiles: Profiles, context_role: str | None
) -> pd.DataFrame:
    """A row for each cell: the name of its unit, the values that make this name, and three flags.

    `is_usable` is True for perturbed cells that have a stratum, and a value of `context_role` if units
    have contexts. `is_scored` is True for scored cells. `in_training` is True for cells that the model
    was trained on.
    """
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    compound = profiles.perturbation
    dose = profiles.dose
    if config.doses == "names":
        parsed = parse_names(profiles.perturbation, config.dose_unit)
        compound = parsed.compounds
        dose = parsed.doses
    contexts = np.full(len(is_usable), "")
    if context_role is not None:
        contexts = text_values(context.roles[context_role]).astype(str)
        is_usable &= context.roles[context_role].notna().to_numpy()
    cells = pd.DataFrame(
        {
            "name_in_dataset": profiles.perturbation,
            "perturbation": compound,
            "dose": dose,
            "context": contexts,
            "is_usable": is_usable,
            "is_scored": context.scored,
            "in_training": context.model.is_training_cell(
                context.dataset, context.reader.obs_names
            ),
        }
    )
    # one sortable name for each unit
    cells["unit"] = cells["perturbation"] + " | " + cells["dose"] + " | " + cells["context"]
    return cells


def _name_groups(
    cells: pd.DataFrame, held_out: str, context_role: str | None, split_file: SplitFile | None
) -> pd.Series:
    """Name of the group of each cell. The group is the perturbation of the cell, its context, both of
    them, or its perturbation and dose.
    """
    if split_file is not None:
        return cells["perturbation"] + " | " + cells["context"]
    if held_out == DOSE:
        return cells["perturbation"] + " | " + cells["dose"]
    return cells["perturbation" if context_role is None else "context"]


def _tabulate_units(usable: pd.DataFrame, is_testable: pd.Series) -> pd.DataFrame:
    """A row for each unit, by the name of the unit: its perturbation, dose, context, group and number of
    cells `n_cells`.

    `is_testable` says for each group whether it can be tested. If it can, only scored cells count in
    `n_cells`. If it cannot, all usable cells count.
    """
    is_counted = usable["is_scored"] | ~is_testable[usable["group"]].to_numpy(bool)
    units = usable.assign(is_counted=is_counted).groupby("unit")
    return units.agg(
        name_in_dataset=("name_in_dataset", "first"),
        perturbation=("perturbation", "first"),
        dose=("dose", "first"),
        context=("context", "first"),
        group=("group", "first"),
        n_cells=("is_counted", "sum"),
    )
