"""Seen changes of expression: of each perturbation, mean over its cells minus the mean over controls of their stratum.

Expression is log(1 + counts per 10,000) over the model's genes that the dataset has. A stratum is a batch of a donor,
as far as the dataset has these roles, so that what differs between batches is no change. Controls are divided at random
into two halves: one half is what every prediction starts from, the other what seen changes are measured from. With one
set of controls its noise would be in both, and every prediction would correlate with every change.

Legend: U units (a perturbation, its dose, and a context such as a donor where contexts are held out), G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import IS_CONTROL
from cellmill.data.count_matrix import log_normalise, select_columns
from cellmill.data.genes import match_columns
from cellmill.data.text_columns import text_values
from cellmill.evaluate.classifiers import ROW_BLOCK
from cellmill.evaluate.task import Context

MIN_CONTROLS = 5  # of a stratum, in each half
_NO_STRATUM = -1


@dataclass(frozen=True)
class Profiles:
    """Expression of all cells of a dataset, and their perturbations."""

    expression: sp.csr_matrix  # (cells, G) float32
    genes: np.ndarray  # (G,) int64: rows of the vocabulary
    depth: np.ndarray  # (cells,) int64: counts of these genes
    perturbation: np.ndarray  # (cells,) text; empty for controls and for cells without one
    dose: np.ndarray  # (cells,) text, empty without the role
    stratum: np.ndarray  # (cells,) int64; -1 for cells of a stratum with too few controls
    half: np.ndarray  # (cells,) int8: 0 or 1 of controls, the half that they are in; -1 of other cells

    def control_means(self, half: int) -> np.ndarray:
        """(strata, G) float64: mean of the controls of a half."""
        return _means(self.expression, np.where(self.half == half, self.stratum, _NO_STRATUM), self.stratum.max() + 1)

    def changes(self, unit: np.ndarray, n_units: int, controls: np.ndarray) -> np.ndarray:
        """(U, G) float64: mean over the cells of each unit, (cells,) int64, minus `controls` of their strata.

        Cells of unit -1, and without a stratum, take no part; a unit without cells has NaN.
        """
        unit = np.where(self.stratum == _NO_STRATUM, -1, unit)
        return _means(self.expression, unit, n_units) - self.controls_of(unit, n_units, controls)

    def controls_of(self, unit: np.ndarray, n_units: int, controls: np.ndarray) -> np.ndarray:
        """(U, G) float64: mean of `controls`, (strata, G), over the strata of each unit's cells."""
        shares = self.strata_of(unit, n_units)
        return shares @ np.nan_to_num(controls)  # a stratum without controls has no cells

    def strata_of(self, unit: np.ndarray, n_units: int) -> np.ndarray:
        """(U, strata) float64: share of each stratum in the cells of a unit; NaN for a unit without cells."""
        unit = np.where(self.stratum == _NO_STRATUM, -1, unit)
        shares = np.zeros((n_units, self.stratum.max() + 1))
        np.add.at(shares, (unit[unit >= 0], self.stratum[unit >= 0]), 1)
        n = shares.sum(1, keepdims=True)
        return np.divide(shares, n, out=np.full_like(shares, np.nan), where=n > 0)


def read_profiles(context: Context, roles: Sequence[str]) -> Profiles:
    """Profiles of all cells of the dataset. `roles` divide cells into strata, as far as the dataset has them."""
    reader, vocabulary = context.reader, context.model.vocabulary
    columns = match_columns(reader, vocabulary)
    genes = np.unique(columns.target[columns.target >= 0]).astype(np.int64)
    place = np.full(vocabulary.n_genes, -1, np.int32)
    place[genes] = np.arange(len(genes), dtype=np.int32)
    target = np.where(columns.target >= 0, place[columns.target], -1).astype(np.int32)
    counts = sp.vstack([select_columns(block, target, len(genes)) for block in reader.rows(ROW_BLOCK)], format="csr")
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    strata = _numbered([context.roles[role] for role in roles if role in context.roles], reader.n_obs)
    half = _halves(is_control, strata, context.options.seed)
    few = [number for number in np.unique(strata) if min(_n_controls(half, strata == number)) < MIN_CONTROLS]
    return Profiles(
        log_normalise(counts),
        genes,
        np.asarray(counts.sum(axis=1, dtype=np.int64)).ravel(),
        np.where(is_control, "", _text(context.roles[controlled_role(context)])),
        _text(context.roles["dose"]) if "dose" in context.roles else np.full(reader.n_obs, ""),
        np.where(np.isin(strata, few), _NO_STRATUM, strata),
        half,
    )


def without_changes(context: Context) -> str | None:
    """Reason why a dataset has no changes of expression; None if it has."""
    if controlled_role(context) not in context.roles or IS_CONTROL not in context.roles:
        return "the dataset has no perturbation and control columns"
    return "sequences have no expression" if context.reader.ordered else None


def controlled_role(context: Context) -> str:
    """Role whose values are perturbations: as in the table, the condition of a dataset without perturbations."""
    return "perturbation" if "perturbation" in context.roles else "condition"


def _means(expression: sp.csr_matrix, group: np.ndarray, n_groups: int) -> np.ndarray:
    """(groups, G) float64: mean over the cells of each group; -1 is no group, and an empty group has NaN."""
    cells = np.flatnonzero(group >= 0)
    member = sp.csr_matrix((np.ones(len(cells)), (group[cells], cells)), shape=(n_groups, expression.shape[0]))
    n = np.bincount(group[cells], minlength=n_groups)[:, None]
    sums = (member @ expression).toarray()
    return np.divide(sums, n, out=np.full(sums.shape, np.nan), where=n > 0)


def _halves(is_control: np.ndarray, strata: np.ndarray, seed: int) -> np.ndarray:
    """Half of each control, by a seeded draw within its stratum."""
    half = np.full(len(strata), -1, np.int8)
    generator = np.random.Generator(np.random.Philox(key=[seed, 4]))
    for number in np.unique(strata):
        cells = generator.permutation(np.flatnonzero(is_control & (strata == number)))
        half[cells] = np.arange(len(cells)) % 2
    return half


def _n_controls(half: np.ndarray, among: np.ndarray) -> tuple[int, int]:
    return int((half[among] == 0).sum()), int((half[among] == 1).sum())


def _numbered(columns: Sequence[pd.Series], n_obs: int) -> np.ndarray:
    """(cells,) int64: number of each combination of values; missing values are one value."""
    if not columns:
        return np.zeros(n_obs, np.int64)
    frame = pd.DataFrame({number: _text(column) for number, column in enumerate(columns)})
    return frame.groupby(list(frame), sort=True).ngroup().to_numpy(np.int64)


def _text(column: pd.Series) -> np.ndarray:
    """Values as text; empty where there is none."""
    return text_values(column).astype(str)
