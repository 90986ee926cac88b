"""Units of perturbed cells (see `profiles.py`), and the groups of them that are held out together.

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
from cellmill.evaluate.tasks.perturbation.split_file import PartNames, SplitFile

# what is held out, if it is not contexts: perturbations (also by every split file), or doses
PERTURBATION = "perturbation"
DOSE = "dose"
# a group may be tested if at least this share of its cells is scored; the others equal training cells
# or have no known gene
TESTABLE_FRAC = 0.9


@dataclass(frozen=True)
class PerturbedUnits:
    """Units that are fitted on or held out, in groups that are held out together."""

    context: Context
    config: PerturbationConfig
    held_out: str  # PERTURBATION, DOSE, or the role of contexts, such as `donor`
    profiles: Profiles
    # (cells,) int64: unit of a cell; -1 for controls, and for units with too few cells
    unit_of_cell: np.ndarray
    name_in_dataset: np.ndarray  # (U,) text: perturbation as the dataset has it
    perturbation: np.ndarray  # (U,) text: the same, or the compound if names have doses
    dose: np.ndarray  # (U,) text, empty for a unit without
    unit_context: np.ndarray  # (U,) text, empty if units have none
    group_of_unit: np.ndarray  # (U,) text: the values that are held out together
    # (U,) bool: at least TESTABLE_FRAC of the group's cells are scored, so it may be tested
    is_testable: np.ndarray
    # (U,) bool: the model was trained, not only validated, on cells of the group
    in_trained_group: np.ndarray
    # perturbations of units with too few cells, or without the dose that is held out
    left_out: list[str]
    part_names: PartNames
    split_file: SplitFile | None

    @classmethod
    def read(
        cls,
        context: Context,
        config: PerturbationConfig,
        held_out: str,
        split_file: SplitFile | None = None,
    ) -> Self:
        """Units with at least `min_cells` cells. For units that may be tested, only scored cells
        count.

        Raises Skipped if the dataset has nothing to hold out, or if no stratum has enough controls.
        """
        # the role of contexts, if units have any
        context_role = None if held_out in (PERTURBATION, DOSE) else held_out
        if split_file is not None:
            context_role = split_file.context_role
        elif context_role is not None:
            if context_role not in context.roles:
                raise Skipped(f"the dataset has no {context_role} column")
            if context_role == controlled_role(context.roles):
                raise Skipped("its values are the perturbations; hold out perturbation")
        roles = (*STRATA, context_role) if context_role else STRATA
        profiles = read_profiles(
            context.reader,
            context.gene_columns,
            context.roles,
            roles,
            context.options.seed,
        )
        if profiles.stratum.max() < 0:
            raise Skipped("no stratum has enough controls")
        # cells, their groups, and their units
        cells = _tabulate_cells(context, config, profiles, context_role)
        cells["group"] = _name_groups(cells, held_out, context_role, split_file)
        no_dose: list[str] = []
        if held_out == DOSE:
            has_dose = np.isfinite(compute_log_doses(cells["dose"].to_numpy(str)))
            no_dose = cells["perturbation"][cells["is_usable"] & ~has_dose].unique().tolist()
            cells["is_usable"] &= has_dose
        usable = cells[cells["is_usable"]]
        groups = usable.groupby("group")
        is_testable = groups["is_scored"].sum() >= TESTABLE_FRAC * groups.size()
        in_training = groups["in_training"].any()
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
            left_out=sorted({*units["perturbation"][~has_enough], *no_dose}),
            part_names=split_file.names if split_file else PartNames(context, delimiter),
            split_file=split_file,
        )

    @property
    def n_units(self) -> int:
        """Number of the units."""
        return len(self.perturbation)

    @cached_property
    def unit_names(self) -> list[str]:
        """Perturbation of each unit, with its dose and context if it has them."""
        texts = zip(self.perturbation.tolist(), self.dose.tolist(), self.unit_context.tolist())
        return [" | ".join(filter(None, unit_texts)) for unit_texts in texts]

    @cached_property
    def split_of_unit(self) -> np.ndarray:
        """(U,) text: split of each unit in the file; empty for a unit that it does not name."""
        assert self.split_file is not None
        return self.split_file.assign(self.perturbation, self.unit_context)

    @cached_property
    def log_dose(self) -> np.ndarray:
        """(U,) float64: log10 of each unit's dose; NaN for a unit without a dose above 0."""
        return compute_log_doses(self.dose)

    @cached_property
    def scored_unit_of_cell(self) -> np.ndarray:
        """(cells,) int64: unit of each scored cell, from which changes are measured; -1 for other
        cells.
        """
        return np.where(self.context.scored, self.unit_of_cell, -1)

    @cached_property
    def gene_names(self) -> list[list[str]]:
        """Names of each unit's perturbed genes: the parts of its perturbation."""
        parts = map(self.part_names.parts_or_whole, self.perturbation.tolist())
        return [[*map(str.strip, names)] for names in parts]

    @cached_property
    def genes(self) -> list[list[int]]:
        """Vocabulary rows of each unit's perturbed genes that the model knows."""
        return known_rows(self.gene_names, self.context.model.vocabulary)


def _tabulate_cells(
    context: Context, config: PerturbationConfig, profiles: Profiles, context_role: str | None
) -> pd.DataFrame:
    """A row for each cell: its unit, the values that name the unit, and three flags. They say whether
    the cell is usable, is scored, and was in the model's training.

    A cell is usable if it is perturbed, has a stratum, and has a value of `context_role` if units have
    contexts.
    """
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    compound = profiles.perturbation
    dose = profiles.dose
    if config.doses == "names":
        compound, dose, _ = parse_names(compound, config.dose_unit)
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
    """Group of each cell: its perturbation, context, or both, or its perturbation and dose."""
    if split_file is not None:
        return cells["perturbation"] + " | " + cells["context"]
    if held_out == DOSE:
        return cells["perturbation"] + " | " + cells["dose"]
    return cells["perturbation" if context_role is None else "context"]


def _tabulate_units(usable: pd.DataFrame, is_testable: pd.Series) -> pd.DataFrame:
    """Perturbation, dose, context, group and `n_cells` of each unit, by its name.

    `is_testable` is by group. Of units that may be tested only the scored cells count, of other units
    all cells.
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
