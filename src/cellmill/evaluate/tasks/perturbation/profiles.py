"""Expression of perturbed cells and their controls, and the measured changes between them.

A unit is a perturbation with its dose, and with its context (such as a donor) if contexts are held
out or a split file has them.

Expression is log(1 + counts per 10,000) over the model's genes that the dataset has. A measured
change is the mean over a unit's cells minus the mean over controls of the same stratum (a batch of
a donor). Predictions start from one random half of the controls and changes are measured from the
other: otherwise the noise of the controls would be in both.

Legend: U units, G genes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import IS_CONTROL
from cellmill.data.arrays import divide, log_normalise, select_columns, text_values
from cellmill.data.genes.names import GeneColumns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.cell_features import ROW_BLOCK
from cellmill.evaluate.task import Context, Skipped

# halves of the controls
START_HALF = 0  # predictions start from these
REFERENCE_HALF = 1  # changes are measured from these
STRATA = ("batch", "donor")  # roles that divide cells into strata
MIN_CONTROLS = 5  # controls of a stratum in each half
MAX_CONTROLS = 128  # controls of a stratum that the model predicts from: the first of their half


def check_changes(context: Context) -> None:
    """Raise Skipped for a dataset without changes of expression."""
    if controlled_role(context.roles) not in context.roles or IS_CONTROL not in context.roles:
        raise Skipped("the dataset has no perturbation and control columns")
    if context.reader.ordered:
        raise Skipped("sequences have no expression")
    values = context.roles[IS_CONTROL].dropna()
    if not values.isin([True, False]).all():
        raise DataError(
            f"{context.dataset}: obs column {IS_CONTROL!r}: expected True or False, got {values.iloc[0]!r}"
        )


def controlled_role(roles: Iterable[str]) -> str:
    """Role whose values are perturbations: the condition, for a dataset without the role
    perturbation.
    """
    return "perturbation" if "perturbation" in roles else "condition"


@dataclass(frozen=True)
class Profiles:
    """Expression of all cells of a dataset, and their perturbations."""

    expression: sp.csr_matrix  # (cells, G) float32
    genes: np.ndarray  # (G,) int64: rows of the vocabulary
    depth: np.ndarray  # (cells,) int64: total count of these genes
    perturbation: np.ndarray  # (cells,) text; empty for controls and for cells without one
    dose: np.ndarray  # (cells,) text, empty without the role
    stratum: np.ndarray  # (cells,) int64; -1 for cells of a stratum with too few controls
    # (cells,) int8: START_HALF or REFERENCE_HALF for a control; -1 for other cells
    half: np.ndarray

    def describe_genes(self, vocabulary: Vocabulary) -> pd.DataFrame:
        """Symbols of the genes, by Ensembl id."""
        symbols = [vocabulary.symbols[row] for row in self.genes]
        ids = [vocabulary.gene_ids[row] for row in self.genes]
        return pd.DataFrame({"symbol": symbols}, index=ids)

    def control_means(self, half: int) -> np.ndarray:
        """(strata, G) float64: mean of the controls of a half, START_HALF or REFERENCE_HALF."""
        stratum = np.where(self.half == half, self.stratum, -1)
        return _average_groups(self.expression, stratum, self.stratum.max() + 1)

    def start_controls(self, stratum: int, has_vector: np.ndarray) -> np.ndarray:
        """Indices of the controls of a stratum that the model predicts from: the first that have an
        embedding (mask `has_vector`).
        """
        is_start = (self.half == START_HALF) & (self.stratum == stratum)
        return np.flatnonzero(is_start & has_vector)[:MAX_CONTROLS]

    def changes(self, unit_of_cell: np.ndarray, n_units: int, controls: np.ndarray) -> np.ndarray:
        """(U, G) float64: mean over each unit's cells minus the mean of `controls`, (strata, G), over
        the strata of these cells; NaN for a unit without cells.

        `unit_of_cell` is (cells,) int64; cells with unit -1 or without a stratum are left out.
        """
        unit_of_cell = np.where(self.stratum == -1, -1, unit_of_cell)
        unit_means = _average_groups(self.expression, unit_of_cell, n_units)
        return unit_means - self.unit_controls(unit_of_cell, n_units, controls)

    def unit_controls(
        self, unit_of_cell: np.ndarray, n_units: int, controls: np.ndarray
    ) -> np.ndarray:
        """(U, G) float64: mean of `controls`, (strata, G), over the strata of each unit's cells."""
        # NaN marks a stratum without controls, in which no unit has cells
        return self.stratum_shares(unit_of_cell, n_units) @ np.nan_to_num(controls)

    def stratum_shares(self, unit_of_cell: np.ndarray, n_units: int) -> np.ndarray:
        """(U, strata) float64: share of a unit's cells in each stratum; NaN for a unit without
        cells.
        """
        cells = np.flatnonzero((unit_of_cell >= 0) & (self.stratum != -1))
        n_cells = np.zeros((n_units, self.stratum.max() + 1))
        np.add.at(n_cells, (unit_of_cell[cells], self.stratum[cells]), 1)
        return divide(n_cells, n_cells.sum(1, keepdims=True))


def _average_groups(
    expression: sp.csr_matrix, group_of_cell: np.ndarray, n_groups: int
) -> np.ndarray:
    """(groups, G) float64: mean over the cells of each group, NaN for an empty one. Cells with
    group -1 are left out.
    """
    cells = np.flatnonzero(group_of_cell >= 0)
    ones = np.ones(len(cells))
    # (groups, cells): 1 for the cells of a group
    members = sp.csr_matrix(
        (ones, (group_of_cell[cells], cells)), shape=(n_groups, expression.shape[0])
    )
    sums = (members @ expression).toarray()
    n_cells = np.bincount(group_of_cell[cells], minlength=n_groups)
    return divide(sums, n_cells[:, None])


def read_profiles(
    reader: CountsReader,
    columns: GeneColumns,
    roles: Mapping[str, pd.Series],
    strata: Iterable[str],
    seed: int,
) -> Profiles:
    """Profiles of all cells of a file. `columns` are the result of `match_columns`, and `roles` are as in
    `Context`; the roles in `strata` divide the cells.
    """
    genes = columns.known_genes
    counts = _read_counts(reader, columns.target, genes)
    is_control = roles[IS_CONTROL].fillna(False).to_numpy(bool)
    stratum = _number_strata(roles, strata, reader.n_obs)
    half = _halve_controls(stratum, is_control, seed)
    n_in_half = np.bincount(stratum[half == REFERENCE_HALF], minlength=stratum.max() + 1)
    has_controls = n_in_half[stratum] >= MIN_CONTROLS  # the other half has as many, or one more
    perturbation = text_values(roles[controlled_role(roles)]).astype(str)
    dose = np.full(len(stratum), "")
    if "dose" in roles:
        dose = text_values(roles["dose"]).astype(str)
    return Profiles(
        expression=log_normalise(counts),
        genes=genes,
        depth=np.asarray(counts.sum(axis=1, dtype=np.int64)).ravel(),
        perturbation=np.where(is_control, "", perturbation),
        dose=dose,
        stratum=np.where(has_controls, stratum, -1),
        half=half,
    )


def _read_counts(
    reader: CountsReader, vocabulary_row: np.ndarray, genes: np.ndarray
) -> sp.csr_matrix:
    """(cells, G): counts of the model's genes that the file has; `vocabulary_row`, (genes of the
    file,), is the row of each, -1 for none.
    """
    # (genes of the file,): index in `genes`, -1 for genes that the model does not know
    column = np.where(vocabulary_row >= 0, np.searchsorted(genes, vocabulary_row), -1)
    column = column.astype(np.int32)
    blocks = reader.rows(ROW_BLOCK)
    return sp.vstack([select_columns(block, column, len(genes)) for block in blocks], format="csr")


def _number_strata(
    roles: Mapping[str, pd.Series], strata: Iterable[str], n_cells: int
) -> np.ndarray:
    """(cells,) int64: a number for each combination of values of the roles in `strata`; missing
    values are one value.
    """
    columns = {}
    for role in strata:
        if role in roles:
            columns[role] = text_values(roles[role]).astype(str)
    if not columns:
        return np.zeros(n_cells, np.int64)
    combinations = pd.DataFrame(columns).groupby([*columns], sort=True)
    return combinations.ngroup().to_numpy(np.int64)


def _halve_controls(stratum: np.ndarray, is_control: np.ndarray, seed: int) -> np.ndarray:
    """(cells,) int8: random half, START_HALF or REFERENCE_HALF, of each control of a stratum; -1 for other
    cells.
    """
    half = np.full(len(stratum), -1, np.int8)
    generator = seeded(seed, draws.HALVES_OF_CONTROLS)
    for number in np.unique(stratum):
        controls = generator.permutation(np.flatnonzero(is_control & (stratum == number)))
        half[controls[::2]] = START_HALF
        half[controls[1::2]] = REFERENCE_HALF
    return half
