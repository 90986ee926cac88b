"""Reads a file for which responses to perturbations are predicted, and divides its controls into strata."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.objectives import PerturbationResponseConfig
from cellmill.config.section import shown
from cellmill.data.arrays import text_values
from cellmill.data.genes.names import match_columns, organisms_of
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.perturbations import TargetNames, merge_names
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.tasks.perturbation.profiles import (
    MIN_CONTROLS,
    START_HALF,
    STRATA,
    Profiles,
    read_profiles,
)

# seed of the division of controls into halves, the default seed of task perturbation
SEED = Evaluate.model_validate({}).seed
OUTPUT_COLUMNS = ("perturbation", "trained", "n_cells")  # obs columns that every result has


class PerturbRequest(NamedTuple):
    """Arguments of `cellmill perturb`."""

    perturbations: Sequence[str] | None = None  # None for all that the model was trained on
    # None for the column of the model's training; if a file lacks that column, all cells are controls
    perturbation_column: str | None = None
    control: str | None = None  # None for the control of the model's training
    by: str | None = None  # obs column with values that are predicted separately


@dataclass(frozen=True)
class PerturbationScreen:
    """Controls of a file, and its perturbed cells if there are any."""

    profiles: Profiles
    control: str  # name of the control
    is_control: np.ndarray  # (cells,) bool
    by_values: np.ndarray  # (cells,) text: value in the column of option `by`; empty without it
    strata: list[str]  # obs columns that divide cells into strata
    notes: list[str]  # sentences on cells that are left out, and on what the file lacks
    has_doses: bool  # True if the file has an obs column of doses

    @cached_property
    def has_genes(self) -> np.ndarray:
        """(cells,) bool: True for cells with counts of the model's genes."""
        return self.profiles.depth > 0

    @cached_property
    def is_start(self) -> np.ndarray:
        """(cells,) bool: True for the controls that the model predicts from."""
        is_start = np.zeros(len(self.is_control), bool)
        for stratum in range(self.profiles.stratum.max() + 1):
            is_start[self.profiles.find_start_controls(stratum, self.has_genes)] = True
        return is_start


def check_request(request: PerturbRequest) -> None:
    """Raise ConfigError for an argument that is not a name, such as a number or an empty text."""
    for field in ("perturbation_column", "control", "by"):
        value = getattr(request, field)
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"--{field.replace('_', '-')}: expected a name, got {shown(value)}")


def read_screen(
    reader: CountsReader,
    vocabulary: Vocabulary,
    config: PerturbationResponseConfig,
    request: PerturbRequest,
) -> PerturbationScreen:
    """Read the controls of a file, and its perturbed cells if there are any.

    `config` has the perturbation column and the control of the model's training. Raises ConfigError if
    option `by` names a column that the result has anyway. Raises DataError for a file without counts,
    without a named column, or with too few controls.
    """
    columns = match_columns(reader, vocabulary)
    if columns.ordered:
        raise DataError(
            f"{reader.path}: its genes are ordered and have no counts; perturb predicts expression from counts"
        )
    column = request.perturbation_column or config.perturbation_column
    control = request.control or config.control
    if request.by in (column, *OUTPUT_COLUMNS):
        raise ConfigError(
            f"--by: expected an obs column other than {column!r} and the output's {', '.join(OUTPUT_COLUMNS)}, "
            f"got {request.by!r}; rename yours"
        )

    # profiles of the cells, divided into strata
    roles, notes = _read_roles(reader, vocabulary, column, control, request)
    divided_by = [role for role in STRATA if role in roles]
    by_values = np.full(reader.n_obs, "")
    if request.by:
        divided_by.append("by")
        by_values = text_values(roles["by"]).astype(str)
    strata = list(dict.fromkeys(str(roles[role].name) for role in divided_by))
    profiles = read_profiles(reader, columns, roles, divided_by, SEED)
    has_genes = profiles.depth > 0
    is_control = roles[IS_CONTROL].to_numpy()
    if not (is_control & has_genes).any():
        raise DataError(
            f"{reader.path}: none of its {int(is_control.sum()):,} controls has a count on a gene that the model "
            "knows; name other controls (--control)"
        )

    # keep only strata with a control that the model can predict from
    strata_with_start = np.unique(profiles.stratum[(profiles.half == START_HALF) & has_genes])
    has_start = np.isin(profiles.stratum, strata_with_start)
    profiles = replace(profiles, stratum=np.where(has_start, profiles.stratum, -1))
    if profiles.stratum.max() < 0:
        raise DataError(
            f"{reader.path}: expected {2 * MIN_CONTROLS} controls in a group of {' and '.join(strata) or 'cells'}, "
            f"got {int(is_control.sum()):,} controls in all; name other controls (--control)"
        )
    n_left_out = int((is_control & (profiles.stratum < 0)).sum())
    if n_left_out:
        notes.append(
            f"{n_left_out:,} controls are left out: their group of {' and '.join(strata)} has fewer than "
            f"{2 * MIN_CONTROLS}, or none with counts"
        )
    return PerturbationScreen(
        profiles, control, is_control, by_values, strata, notes, has_doses="dose" in roles
    )


def _read_roles(
    reader: CountsReader,
    vocabulary: Vocabulary,
    column: str,
    control: str,
    request: PerturbRequest,
) -> tuple[dict[str, pd.Series], list[str]]:
    """Read the obs columns by role, and return sentences about the columns too.

    `Context.roles` describes the roles. Role `by` is the column of option `by`. Perturbations have the names
    that stage preprocess gives them. Raises DataError if a named column is missing, or if no cell is a
    control.
    """
    obs = reader.read_obs([*STRATA, "dose", column])
    roles = {role: obs[role] for role in (*STRATA, "dose") if role in obs}
    if request.by is not None:
        roles["by"] = reader.obs_column(request.by, "--by")
    if column not in obs and request.perturbation_column is None and request.control is None:
        roles["perturbation"] = pd.Series(np.full(len(obs), control), obs.index)
        roles[IS_CONTROL] = pd.Series(np.ones(len(obs), bool), obs.index)
        return roles, [
            f"warning: it has no obs column {column!r}: all cells are taken as controls; name the column of "
            "perturbations (--perturbation-column) if some are perturbed"
        ]
    texts = text_values(reader.obs_column(column, "--perturbation-column")).astype(str)
    organism = next(iter(organisms_of(vocabulary)), None)
    merged = merge_names({*texts.tolist()}, [control], TargetNames.read(reader, organism)).names
    names = np.array([merged[text] for text in texts.tolist()], object)
    is_control = names == control
    if not is_control.any():
        values = list_first([name for name in sorted({*merged}) if name], MAX_NAMES) or "no value"
        raise DataError(
            f"{reader.path}: expected controls named {control!r} in obs column {column!r}, got {values}; name the "
            "control (--control)"
        )
    roles["perturbation"] = pd.Series(names, obs.index)
    roles[IS_CONTROL] = pd.Series(is_control, obs.index)
    return roles, []
