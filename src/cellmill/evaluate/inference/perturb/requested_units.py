"""Units that a response is predicted for, and their measured changes.

A unit is a perturbation, with a value of option `by` if it is set.

Legend: U units, G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.section import shown
from cellmill.data.genes.names import SEPARATOR, organisms_of, perturbed_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.prepare.perturbations import TargetNames, merge_names
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, did_you_mean
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.inference.perturb.screen import PerturbationScreen
from cellmill.evaluate.tasks.perturbation.doses import NAME_WITH_DOSE
from cellmill.evaluate.tasks.perturbation.profiles import REFERENCE_HALF

TASK_DEFAULTS = PerturbationConfig.model_validate({})  # options of task perturbation


class RequestedUnits(NamedTuple):
    """Perturbations to predict, each with every value of option `by`."""

    names: list[str]
    by_values: list[str]  # empty texts without the option
    genes: list[list[int]]  # vocabulary rows of the perturbed genes
    trained: np.ndarray  # (U,) bool: True if the model was trained on the perturbation

    @property
    def texts(self) -> list[str]:
        """Perturbation and value of each unit, its name in obs."""
        return [" | ".join(filter(None, pair)) for pair in zip(self.names, self.by_values)]


@dataclass(frozen=True)
class MeasuredUnits:
    """Changes of the units that have enough perturbed cells in the file."""

    unit_of_cell: np.ndarray  # (cells,) int64: unit of each compared cell, -1 for other cells
    n_cells: np.ndarray  # (U,) int64
    changes: np.ndarray  # (U, G) float64; NaN for a unit with too few cells

    @cached_property
    def is_measured(self) -> np.ndarray:
        """(U,) bool: True for units with enough cells."""
        return self.n_cells >= TASK_DEFAULTS.min_cells

    @classmethod
    def read(
        cls, screen: PerturbationScreen, units: RequestedUnits, is_compared: np.ndarray
    ) -> Self:
        """Measure the units over the cells of the mask `is_compared`, bool (cells,)."""
        profiles = screen.profiles
        number = {pair: unit for unit, pair in enumerate(zip(units.names, units.by_values))}
        pairs = zip(profiles.perturbation.tolist(), screen.by_values.tolist())
        unit_of_cell = np.array([number.get(pair, -1) for pair in pairs])
        unit_of_cell[~is_compared | (profiles.stratum < 0)] = -1
        n_cells = np.bincount(unit_of_cell[unit_of_cell >= 0], minlength=len(units.names))
        controls = profiles.average_controls(REFERENCE_HALF)
        changes = profiles.measure_changes(unit_of_cell, len(n_cells), controls)
        changes[n_cells < TASK_DEFAULTS.min_cells] = np.nan
        return cls(unit_of_cell, n_cells, changes)


def list_units(
    perturbations: Sequence[str] | None,
    screen: PerturbationScreen,
    vocabulary: Vocabulary,
    trained: Sequence[str],
    control: str,
) -> RequestedUnits:
    """Units of the named perturbations, or of all that the model was `trained` on with the control
    `control`.

    Raises ConfigError for a perturbation that the model cannot tell from others.
    """
    names = _choose_names(perturbations, vocabulary, trained, [control, screen.control])
    genes = perturbed_genes(names, vocabulary)
    for name in names:
        _check_known(name, genes[name], vocabulary, trained)
    has_stratum = screen.profiles.stratum >= 0
    values = np.unique(screen.by_values[screen.is_control & has_stratum]).tolist()
    return RequestedUnits(
        names=[name for name in names for _ in values],
        by_values=len(names) * values,
        genes=[genes[name] for name in names for _ in values],
        trained=np.repeat(np.isin(names, trained), len(values)),
    )


def _choose_names(
    requested: Sequence[str] | None,
    vocabulary: Vocabulary,
    trained: Sequence[str],
    controls: Sequence[str],
) -> list[str]:
    """Names of the perturbations to predict, as stage preprocess writes them, each once. `controls` are
    the model's and the file's.
    """
    if requested is None:
        return [name for name in trained if name not in controls]
    organism = next(iter(organisms_of(vocabulary)), None)
    targets = TargetNames([*vocabulary.symbols, *vocabulary.gene_ids], organism)
    requested = [requested] if isinstance(requested, str) else list(requested)
    for name in requested:
        if not isinstance(name, str):
            raise ConfigError(f"perturbations: expected names, got {shown(name)}")
    stripped = [name if name in trained else name.strip() for name in requested]
    if not all(stripped):
        raise ConfigError("perturbations: expected names, got an empty one; leave it out")
    merged = merge_names(stripped, controls[:1], targets).names
    names = [name if name in trained else merged[name] for name in stripped]
    for text, name in zip(stripped, names):
        if name in controls:
            raise ConfigError(
                f"perturbations: {text!r} is the control, which has no response; leave it out"
            )
    if not names:
        raise ConfigError("perturbations: expected names, got none")
    return list(dict.fromkeys(names))


def _check_known(
    name: str, genes: list[int], vocabulary: Vocabulary, trained: Sequence[str]
) -> None:
    """Raise ConfigError for a perturbation that was not trained on, and whose `genes` are not all
    known: the model would predict the same response to any such perturbation.
    """
    parts = [part.strip() for part in name.split(SEPARATOR)]
    if name in trained or len(genes) == len(parts):
        return
    with_dose = NAME_WITH_DOSE.fullmatch(name)
    compound = with_dose["compound"] if with_dose else name
    doses = []
    for level in trained:
        match = NAME_WITH_DOSE.fullmatch(level)
        if level == compound or (match is not None and match["compound"] == compound):
            doses.append(level)
    if doses:
        raise ConfigError(
            f"perturbations: {name!r}: the model was trained on {list_first(doses, MAX_NAMES)} and predicts no other "
            "dose; name one of them"
        )
    unknown = [part for part in parts if not perturbed_genes([part], vocabulary)[part]]
    hint = did_you_mean(unknown[0], [*trained, *vocabulary.symbols])
    if unknown[0] in trained:  # by a vector of its own
        hint = f"name {unknown[0]} without other genes, on which it was trained"
    raise ConfigError(
        f"perturbations: the model was not trained on {name!r} and has no gene {', '.join(unknown)}, so it cannot "
        f"tell it from others; {hint}"
    )
