"""Expression of perturbed cells and their controls, and the measured changes between them.

A unit is a perturbation at one dose. If contexts (such as donors) are held out, or if a split file
names contexts, a unit is a perturbation at one dose in one context.

Expression is log(1 + counts per 10,000) over the model's genes that the dataset has. A stratum is a
batch of a donor, and of a context if units have contexts. A measured change is the mean expression of
a unit's cells minus the mean expression of controls of the same strata.

The controls are divided at random into two halves. Predictions start from one half, and changes are
measured from the other half. With a single set of controls, predicted and measured changes would have
the noise of these controls in common.

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

START_HALF = 0  # the half of the controls that predictions start from
REFERENCE_HALF = 1  # the half of the controls that changes are measured from
STRATA = ("batch", "donor")  # roles that divide cells into strata
MIN_CONTROLS = 5  # fewest controls of a stratum in each half; a stratum with fewer is not used
# most controls of a stratum that the model predicts from: the first controls of START_HALF in the file
MAX_CONTROLS = 128


def require_changes(context: Context) -> None:
    """Raise Skipped for a dataset in which no change of expression can be measured.

    Raises DataError if the column of controls has another value than True and False.
    """
    if controlled_role(context.roles) not in context.roles or IS_CONTROL not in context.roles:
        raise Skipped(
            "the dataset lacks a column of perturbations (or conditions), or a column of controls"
        )
    if context.reader.ordered:
        raise Skipped("sequences have no expression")
    values = context.roles[IS_CONTROL].dropna()
    wrong = values[~values.isin([True, False])].tolist()
    if wrong:
        raise DataError(
            f"{context.dataset}: obs column {IS_CONTROL!r}: expected True or False, got {wrong[0]!r}"
        )


def controlled_role(roles: Iterable[str]) -> str:
    """The role of the column of perturbations: `perturbation` if the dataset has this role, and
    otherwise `condition`.
    """
    return "perturbation" if "perturbation" in roles else "condition"


@dataclass(frozen=True)
class Profiles:
    """Expression of all cells of a dataset, and their perturbations."""

    expression: sp.csr_matrix  # (cells, G) float32
    genes: np.ndarray  # (G,) int64: vocabulary rows of the genes, ascending
    depth: np.ndarray  # (cells,) int64: total count of these genes in a cell
    # (cells,) text; empty for controls and for cells whose perturbation is missing
    perturbation: np.ndarray
    dose: np.ndarray  # (cells,) text; empty if the dataset has no column of doses
    stratum: np.ndarray  # (cells,) int64; -1 for cells of a stratum with too few controls
    # (cells,) int8: START_HALF or REFERENCE_HALF for a control, and -1 for other cells
    half: np.ndarray

    def describe_genes(self, vocabulary: Vocabulary) -> pd.DataFrame:
        """Table of the symbols of the genes, with Ensembl ids as its index."""
        symbols = [vocabulary.symbols[row] for row in self.genes]
        ids = [vocabulary.gene_ids[row] for row in self.genes]
        return pd.DataFrame({"symbol": symbols}, index=ids)

    def average_controls(self, half: int) -> np.ndarray:
        """(strata, G) float64: mean expression of the controls of a stratum that are in `half`, which
        is START_HALF or REFERENCE_HALF. NaN for a stratum without such controls.
        """
        stratum = np.where(self.half == half, self.stratum, -1)
        return _average_groups(self.expression, stratum, self.stratum.max() + 1)

    def find_start_controls(self, stratum: int, has_vector: np.ndarray) -> np.ndarray:
        """Indices of the controls of a stratum that the model predicts from: the first MAX_CONTROLS
        controls of START_HALF that have an embedding.

        `has_vector` is (cells,) bool: True for cells with an embedding.
        """
        is_start = (self.half == START_HALF) & (self.stratum == stratum)
        return np.flatnonzero(is_start & has_vector)[:MAX_CONTROLS]

    def measure_changes(
        self, unit_of_cell: np.ndarray, n_units: int, controls: np.ndarray
    ) -> np.ndarray:
        """(U, G) float64: mean expression of each unit's cells, minus the mean of the controls of their
        strata. NaN for a unit without cells.

        `unit_of_cell` is (cells,) int64. Cells whose unit or stratum is -1 are left out. `controls`
        are (strata, G) means, as `average_controls` returns them.
        """
        unit_of_cell = np.where(self.stratum == -1, -1, unit_of_cell)
        unit_means = _average_groups(self.expression, unit_of_cell, n_units)
        return unit_means - self.average_controls_of_units(unit_of_cell, n_units, controls)

    def average_controls_of_units(
        self, unit_of_cell: np.ndarray, n_units: int, controls: np.ndarray
    ) -> np.ndarray:
        """(U, G) float64: mean of `controls`, (strata, G), over the strata of a unit's cells. A stratum
        counts as often as the unit has cells in the stratum. NaN for a unit without cells.
        """
        # a row of `controls` is NaN if its stratum has no controls; then no unit has cells in it
        return self.compute_stratum_shares(unit_of_cell, n_units) @ np.nan_to_num(controls)

    def compute_stratum_shares(self, unit_of_cell: np.ndarray, n_units: int) -> np.ndarray:
        """(U, strata) float64: share of a unit's cells that is in each stratum. NaN for a unit without
        cells.
        """
        cells = np.flatnonzero((unit_of_cell >= 0) & (self.stratum != -1))
        n_cells = np.zeros((n_units, self.stratum.max() + 1))
        np.add.at(n_cells, (unit_of_cell[cells], self.stratum[cells]), 1)
        return divide(n_cells, n_cells.sum(1, keepdims=True))


def _average_groups(
    expression: sp.csr_matrix, group_of_cell: np.ndarray, n_groups: int
) -> np.ndarray:
    """(groups, G) float64: mean expression of the cells of each group. NaN for a group without cells.
    Cells whose group is -1 are left out.
    """
    cells = np.flatnonzero(group_of_cell >= 0)
    ones = np.ones(len(cells))
    # (groups, cells): 1 where the cell is in the group, so that a product sums the cells of a group
    is_member = sp.csr_matrix(
        (ones, (group_of_cell[cells], cells)), shape=(n_groups, expression.shape[0])
    )
    sums = (is_member @ expression).toarray()
    n_cells = np.bincount(group_of_cell[cells], minlength=n_groups)
    return divide(sums, n_cells[:, None])


def read_profiles(
    reader: CountsReader,
    columns: GeneColumns,
    roles: Mapping[str, pd.Series],
    strata: Iterable[str],
    seed: int,
) -> Profiles:
    """Profiles of all cells of a file.

    `columns` are the file's genes as rows of the vocabulary. `roles` are obs columns by role, and must
    have the roles that `require_changes` requires. The roles in `strata` divide the cells into strata.
    `seed` seeds the halves of the controls.
    """
    genes = columns.known_genes
    counts = _read_counts(reader, columns.target, genes)
    is_control = roles[IS_CONTROL].fillna(False).to_numpy(bool)
    stratum = _number_strata(roles, strata, reader.n_obs)
    half = _halve_controls(stratum, is_control, seed)
    n_reference = np.bincount(stratum[half == REFERENCE_HALF], minlength=stratum.max() + 1)
    # (cells,): START_HALF has as many controls of the stratum as REFERENCE_HALF, or one more
    has_controls = n_reference[stratum] >= MIN_CONTROLS
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
    """(cells, G): counts of the model's genes that the file has.

    `vocabulary_row`, (genes of the file,), is the vocabulary row of each gene of the file, and -1 for
    a gene that the model does not know. `genes`, (G,), are the rows to read, ascending.
    """
    # (genes of the file,): index in `genes`, and -1 for a gene that the model does not know
    column = np.where(vocabulary_row >= 0, np.searchsorted(genes, vocabulary_row), -1)
    column = column.astype(np.int32)
    blocks = reader.rows(ROW_BLOCK)
    return sp.vstack([select_columns(block, column, len(genes)) for block in blocks], format="csr")


def _number_strata(
    roles: Mapping[str, pd.Series], strata: Iterable[str], n_cells: int
) -> np.ndarray:
    """(cells,) int64: the stratum of each cell. Each combination of values of the roles in `strata` has
    its own number. Missing values of a role count as one value. Roles that the dataset lacks divide
    nothing.
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
    """(cells,) int8: START_HALF or REFERENCE_HALF for a control, and -1 for other cells. The controls
    of each stratum are divided evenly and at random.
    """
    half = np.full(len(stratum), -1, np.int8)
    generator = seeded(seed, draws.HALVES_OF_CONTROLS)
    for number in np.unique(stratum):
        controls = generator.permutation(np.flatnonzero(is_control & (stratum == number)))
        half[controls[::2]] = START_HALF
        half[controls[1::2]] = REFERENCE_HALF
    return half
