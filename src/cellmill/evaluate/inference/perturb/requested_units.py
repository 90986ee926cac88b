"""Units for which a response is predicted, and the measured changes of these units.

A unit is a perturbation. If option `by` is set, a unit is a perturbation with a value of that column.

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
    """Units to predict: each perturbation with every value of option `by`."""

    names: list[str]  # perturbation of each unit
    by_values: list[str]  # value of each unit; empty texts without option `by`
    genes: list[list[int]]  # rows of each unit's perturbed genes in the vocabulary
    trained: np.ndarray  # (U,) bool: True if the model was trained on the perturbation

    @property
    def texts(self) -> list[str]:
        """Name of each unit in obs: its perturbation, and its value of option `by`."""
        return [" | ".join(filter(None, pair)) for pair in zip(self.names, self.by_values)]


@dataclass(frozen=True)
class MeasuredUnits:
    """Measured changes of the units that have enough perturbed cells in the file."""

    unit_of_cell: np.ndarray  # (cells,) int64: unit of each compared cell, -1 for other cells
    n_cells: np.ndarray  # (U,) int64: number of compared cells
    changes: np.ndarray  # (U, G) float64: measured changes; NaN for a unit with too few cells

    @cached_property
    def is_measured(self) -> np.ndarray:
        """(U,) bool: True for units with enough cells."""
        return self.n_cells >= TASK_DEFAULTS.min_cells

    @classmethod
    def read(
        cls, screen: PerturbationScreen, units: RequestedUnits, is_compared: np.ndarray
    ) -> Self:
        """Measure the changes of the units, over the cells in the mask `is_compared`, (cells,) bool."""
        profiles = screen.profiles
        # a unit is found by its perturbation and its value of option `by`
        unit_by_pair = {pair: unit for unit, pair in enumerate(zip(units.names, units.by_values))}
        pairs = zip(profiles.perturbation.tolist(), screen.by_values.tolist())
        unit_of_cell = np.array([unit_by_pair.get(pair, -1) for pair in pairs])
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
    """List the units of the named perturbations; None stands for all that the model was `trained` on.

    `control` is the name of the control in training, which is no unit. Raises ConfigError for a
    perturbation for which the model would predict the same response as for others.
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
    """Return the names of the perturbations to predict, each once, as stage preprocess writes names.

    `controls` are the control of the model and the control of the file, in this order. Raises ConfigError
    for a control, an empty name, or a value that is not a name.
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
    """Raise ConfigError if the model knows neither a perturbation nor all of its genes.

    The model would predict the same response to any such perturbation. `genes` are the known genes of the
    perturbation `name`.
    """
    parts = [part.strip() for part in name.split(SEPARATOR)]
    if name in trained or len(genes) == len(parts):
        return
    # the model may have been trained on other doses of the same compound
    with_dose = NAME_WITH_DOSE.fullmatch(name)
    compound = with_dose["compound"] if with_dose else name
    trained_doses = []
    for level in trained:
        match = NAME_WITH_DOSE.fullmatch(level)
        if level == compound or (match is not None and match["compound"] == compound):
            trained_doses.append(level)
    if trained_doses:
        raise ConfigError(
            f"perturbations: {name!r}: the model was trained on {list_first(trained_doses, MAX_NAMES)} and predicts "
            "no other dose; name one of them"
        )
    unknown = [part for part in parts if not perturbed_genes([part], vocabulary)[part]]
    hint = did_you_mean(unknown[0], [*trained, *vocabulary.symbols])
    if unknown[0] in trained:  # the model knows this perturbation on its own, but it is no gene
        hint = f"name {unknown[0]} without other genes, on which it was trained"
    raise ConfigError(
        f"perturbations: the model was not trained on {name!r} and has no gene {', '.join(unknown)}, so it cannot "
        f"tell it from others; {hint}"
    )
