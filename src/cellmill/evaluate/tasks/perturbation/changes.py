"""Changes of expression under perturbations: measured, and predicted by baselines or by the model.

A unit is a perturbation with its dose, and with its context (such as a donor) if contexts are held
out (`held_out.py`).

Expression is log(1 + counts per 10,000) over the model's genes that the dataset has. A measured
change is the mean over a unit's cells minus the mean over controls of the same stratum (a batch of
a donor). Predictions start from one random half of the controls and changes are measured from the
other: otherwise the noise of the controls would be in both.

Legend: U units, G genes, F features of a unit, C controls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import divide, log_normalise, select_columns, text_values
from cellmill.data.genes.names import GeneColumns
from cellmill.data.inputs.reader import CountsReader
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.cell_features import ROW_BLOCK
from cellmill.evaluate.inference.embed import inference
from cellmill.evaluate.methods import KNN, ByMethod
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.expression import ALPHAS, expected_log_expression
from cellmill.models.family import Model
from cellmill.models.objectives.perturbation_response import PerturbationResponse
from cellmill.runs.results import ScoredMethod

# halves of the controls
START = 0  # predictions start from these
MEASURED = 1  # changes are measured from these
MIN_CONTROLS = 5  # controls of a stratum in each half
MAX_CONTROLS = 128  # controls of a stratum that the model predicts from: the first of their half
MIN_FITTED = 3  # training units with features that a linear prediction needs
ChangesByMethod = dict[ScoredMethod, np.ndarray]
"""Predicted changes `(test units, G)` of each method."""
NO_CHANGE = ScoredMethod("no change")
MEAN = ScoredMethod("mean")
SAME_MEAN = ScoredMethod("same perturbation", "mean")
SAME_LINEAR = ScoredMethod("same perturbation", "linear")
SAME_NEAREST = ScoredMethod("same perturbation", "nearest")
CONTEXT_MEAN = ScoredMethod("mean of the context")
ADDITIVE = ScoredMethod("additive")


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
    half: np.ndarray  # (cells,) int8: START or MEASURED for a control; -1 for other cells

    def control_means(self, half: int) -> np.ndarray:
        """(strata, G) float64: mean of the controls of a half, START or MEASURED."""
        stratum = np.where(self.half == half, self.stratum, -1)
        return _average_groups(self.expression, stratum, self.stratum.max() + 1)

    def start_controls(self, stratum: int, has_vector: np.ndarray) -> np.ndarray:
        """Indices of the controls of a stratum that the model predicts from: the first that have an
        embedding (mask `has_vector`).
        """
        is_start = (self.half == START) & (self.stratum == stratum)
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
    """Profiles of all cells of a file, whose `columns` are those of `match_columns`. `roles` are those
    of `Context`; those in `strata` divide the cells.
    """
    genes = columns.known_genes
    counts = _read_counts(reader, columns.target, genes)
    is_control = roles[IS_CONTROL].fillna(False).to_numpy(bool)
    stratum = _number_strata(roles, strata, reader.n_obs)
    half = _halve_controls(stratum, is_control, seed)
    n_in_half = np.bincount(stratum[half == MEASURED], minlength=stratum.max() + 1)
    has_controls = n_in_half[stratum] >= MIN_CONTROLS  # START has as many, or one more
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
    """(cells,) int8: random half, START or MEASURED, of each control of a stratum; -1 for other
    cells.
    """
    half = np.full(len(stratum), -1, np.int8)
    generator = seeded(seed, draws.HALVES_OF_CONTROLS)
    for number in np.unique(stratum):
        controls = generator.permutation(np.flatnonzero(is_control & (stratum == number)))
        half[controls[::2]] = START
        half[controls[1::2]] = MEASURED
    return half


def predict_new_perturbations(
    changes: np.ndarray, train: np.ndarray, test: np.ndarray, features: ByMethod, neighbors: int
) -> ChangesByMethod:
    """Predict changes under perturbations that no training unit has.

    `features` are `(U, F)`. Units with NaN rows have no features and get the mean of the training
    units.
    """
    no_change = np.zeros((len(test), changes.shape[1]))
    mean = no_change + changes[train].mean(0)
    predicted = {NO_CHANGE: no_change, MEAN: mean}
    for source, vectors in features.items():
        has_features = np.isfinite(vectors.sum(1))
        fitted = train[has_features[train]]  # units
        rows = np.flatnonzero(has_features[test])  # rows of the prediction
        linear = mean.copy()
        nearest = mean.copy()
        nearest_few = mean.copy()
        if len(fitted) >= MIN_FITTED and len(rows):
            scaler = StandardScaler().fit(vectors[fitted])
            keys = scaler.transform(vectors[fitted])
            queries = scaler.transform(vectors[test[rows]])
            ridge = RidgeCV(ALPHAS).fit(keys, changes[fitted])
            linear[rows] = ridge.predict(queries)
            # (rows, fitted): fitted units by falling cosine similarity
            cosine = _scale_to_unit(queries) @ _scale_to_unit(keys).T
            similar = fitted[np.argsort(-cosine, axis=1, kind="stable")]
            nearest[rows] = changes[similar[:, 0]]
            nearest_few[rows] = changes[similar[:, :neighbors]].mean(1)
        predicted[replace(source, classifier="linear")] = linear
        predicted[replace(source, classifier="nearest")] = nearest
        predicted[replace(source, classifier=KNN)] = nearest_few
    return predicted


def _scale_to_unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths.clip(1e-12)


def predict_new_contexts(
    changes: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    perturbation: np.ndarray,
    controls: np.ndarray,
) -> ChangesByMethod:
    """Predict changes in contexts, such as donors, that no training unit has.

    `perturbation`, `(U,)`, names each unit's perturbation; `controls`, `(U, G)`, are the mean
    controls of each unit. A perturbation without a training unit gets the mean of the training
    units.
    """
    no_change = np.zeros((len(test), changes.shape[1]))
    mean = no_change + changes[train].mean(0)
    same_mean = mean.copy()
    nearest = mean.copy()
    for row, unit in enumerate(test):
        same = train[perturbation[train] == perturbation[unit]]
        if len(same):
            same_mean[row] = changes[same].mean(0)
            distances = np.abs(controls[same] - controls[unit]).mean(1)
            nearest[row] = changes[same[distances.argmin()]]
    # (U, perturbations of training units)
    names = np.unique(perturbation[train])
    one_hot = (perturbation[:, None] == names).astype(float)
    linear = mean
    if len(train) > 1:
        ridge = RidgeCV(ALPHAS).fit(one_hot[train], changes[train])
        linear = ridge.predict(one_hot[test])
    return {
        NO_CHANGE: no_change,
        MEAN: mean,
        SAME_MEAN: same_mean,
        SAME_LINEAR: linear,
        SAME_NEAREST: nearest,
    }


def add_parts(
    changes: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    perturbation: np.ndarray,
    unit_context: np.ndarray,
    parts: Sequence[Sequence[str]],
) -> np.ndarray:
    """(test units, G): sum of the changes under each part of a combination alone, by training units
    of the same context, or of all contexts if it has none. A part without any adds nothing; a unit
    without such parts is NaN.

    `perturbation` and `unit_context`, `(U,)`, name each unit's perturbation and context, `parts` its
    parts.
    """
    sums = np.full((len(test), changes.shape[1]), np.nan)
    for row, unit in enumerate(test):
        changes_of_parts = []
        for part in parts[unit]:
            alone = train[perturbation[train] == part]
            in_context = alone[unit_context[alone] == unit_context[unit]]
            if len(alone):
                changes_of_parts.append(changes[in_context if len(in_context) else alone].mean(0))
        if changes_of_parts:
            sums[row] = np.sum(changes_of_parts, axis=0)
    return sums


def find_response(network: Model) -> PerturbationResponse | None:
    """The objective, or part of a sum, that predicts responses; None without one."""
    leaves = network.objective.leaves().values()
    return next((leaf for leaf in leaves if isinstance(leaf, PerturbationResponse)), None)


def predict_responses(
    network: Model,
    precision: str,
    vectors: np.ndarray,
    profiles: Profiles,
    stratum_shares: np.ndarray,
    names: Sequence[str],
    genes: Sequence[list[int]],
) -> np.ndarray | None:
    """(U, G) float64: change of each unit by the model's response head; None without such a head.

    `vectors`, (cells, H), may be NaN for cells that are no `start_controls`.
    `stratum_shares`, (U, strata), are the shares of a unit's cells in each stratum. `names` are the
    perturbations of the units, `genes` the vocabulary rows of their genes.
    """
    objective = find_response(network)
    if objective is None:
        return None
    device = next(network.parameters()).device
    genes_of_file = torch.from_numpy(profiles.genes)

    def predict_mean(cells: np.ndarray, name: str | None, rows: list[int]) -> np.ndarray:
        """(G,): mean expected expression of control cells under a perturbation; None is no
        perturbation.
        """
        tokens = [row + len(SPECIAL) for row in rows]
        with inference(device, precision):
            inputs = torch.from_numpy(vectors[cells]).to(device)
            log_shares = objective.log_profile(network, inputs, name, tokens)
            # shares of the genes that the dataset has sum to 1
            shares = log_shares[:, genes_of_file].double().softmax(1).cpu().numpy()
        return expected_log_expression(shares, profiles.depth[cells]).mean(0)

    has_vector = np.isfinite(vectors).all(1)
    changes = np.zeros((len(names), len(profiles.genes)))
    for stratum in np.flatnonzero(stratum_shares.sum(0)).tolist():
        controls = profiles.start_controls(stratum, has_vector)
        unperturbed = predict_mean(controls, None, [])
        # all doses of a perturbation get the same prediction
        change_by_name: dict[str, np.ndarray] = {}
        for unit in np.flatnonzero(stratum_shares[:, stratum]).tolist():
            name = names[unit]
            if name not in change_by_name:
                change_by_name[name] = predict_mean(controls, name, genes[unit]) - unperturbed
            changes[unit] += stratum_shares[unit, stratum] * change_by_name[name]
    return changes
