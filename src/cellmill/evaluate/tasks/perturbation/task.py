"""Task `perturbation`: predicted changes of expression under unseen perturbations, or in unseen
donors and contexts.

Changes are defined in `changes.py`, rows and ceilings in docs/evaluation.md. If the
model saw cells of some perturbations, those it never saw are tested, once; else all are tested in
folds. A unit's own perturbed genes are left out of its scores. Intervals are over perturbations and
repetitions.

Stage `predict_changes` writes predictions and measured cells to one .h5ad file, for metrics of
other packages:

X       log(1 + counts per 10,000) over the model's genes that the dataset has, CSR float32
obs     `group`: `start control` (the half of the controls that predictions start from), `measured control` (the other
        half) or `measured` (a scored cell of a held-out perturbation); `perturbation`: the control's name, or one of
        those below; `stratum`: number of the batch of a donor that has controls of its own
var     Ensembl ids, and `symbol`
uns["cellmill_changes"]
        perturbations, followed by ` | ` and the dose if there is one; methods and kinds (model or baseline);
        changes, float32 (methods, perturbations, genes); control; seed; model_digest; n_folds

A predicted profile is the mean of the start controls, weighted by the strata of the measured cells,
plus the change.

Legend: U units (a perturbation and its dose), G genes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.errors import DataError
from cellmill.evaluate.methods import Arrays
from cellmill.evaluate.scores import ScoreColumn, divide, seeded, table_rows, tabulate
from cellmill.evaluate.splits import Split
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.classify import group_by_features
from cellmill.evaluate.tasks.genes import correlations
from cellmill.evaluate.tasks.perturbation.changes import (
    MEAN,
    MEASURED,
    NO_CHANGE,
    START,
    ChangesByMethod,
    check_changes,
    controlled_role,
)
from cellmill.evaluate.tasks.perturbation.held_out import CO_EXPRESSION, HeldOut, prior_method
from cellmill.runs.results import Difference, ScoredMethod, TaskResult

HELD_OUT = "perturbation"  # role that stage predict_changes holds out
ABOUT_CHANGES = "cellmill_changes"  # key in uns
# obs column `group`; a control's kind is at the number of its half, START or MEASURED
CELL_KINDS = ["start control", "measured control", "measured"]
METRICS: Mapping[str, str] = {  # names in words by heading; lower is better for MAE only
    "Pearson": "Pearson of the change",
    "discrimination": "discrimination",
    "direction": "direction of the top genes",
    "MAE": "mean absolute error",
}
CEILING = ScoredMethod("split halves", kind="ceiling")
# ceiling of methods that copy the change of the most similar training perturbation
BEST_OTHER = ScoredMethod("best other perturbation", kind="ceiling")

Scores = dict[str, Arrays]
"""Arrays by metric and method."""


class Compared(NamedTuple):
    """Changes of the tested units, (units, G) each."""

    predicted: np.ndarray
    measured: np.ndarray


def change_scores(
    predicted: np.ndarray, measured: np.ndarray, perturbed: np.ndarray, top_genes: int
) -> dict[str, np.ndarray]:
    """Scores of each unit by metric, (units,) float64; NaN where one is not defined, as Pearson of
    a constant.

    `predicted` and `measured` are changes, `(units, genes)`, of units that are tested together.
    `perturbed`, bool of the same shape, marks the genes that a unit perturbs; they are not scored.
    Direction is judged on the `top_genes` genes with the largest measured change. Discrimination is
    the share of other units whose measured change is farther (in mean absolute difference) from the
    prediction than the unit's own (Wu et al. 2024, PerturBench; ties count half).
    """
    scores = {metric: np.full(len(measured), np.nan) for metric in METRICS}
    for unit in range(len(measured)):
        is_scored = ~perturbed[unit]
        x = predicted[unit, is_scored]
        y = measured[unit, is_scored]
        scores["MAE"][unit] = np.abs(x - y).mean()
        if not x.any():
            continue
        if x.std() > 0 and y.std() > 0:
            scores["Pearson"][unit] = np.corrcoef(x, y)[0, 1]
        top = np.argsort(-np.abs(y), kind="stable")[:top_genes]
        scores["direction"][unit] = (np.sign(x[top]) == np.sign(y[top])).mean()
        if len(measured) > 1:
            # (units,): distance of the prediction to the measured change of each unit
            distances = np.abs(measured[:, is_scored] - x).mean(1)
            excess = np.delete(distances, unit) - distances[unit]
            scores["discrimination"][unit] = (excess > 0).mean() + (excess == 0).mean() / 2
    return scores


def make_column(metric: str, role: str, scores: Arrays) -> ScoreColumn | None:
    """Column of the methods that have the metric; None if none has it, or the ceiling lacks it."""
    defined = {method: values for method, values in scores.items() if np.isfinite(values).any()}
    ceiling = defined.get(CEILING)
    methods = {method: values for method, values in defined.items() if method.kind != "ceiling"}
    if not methods or ceiling is None:
        return None
    return ScoreColumn(
        f"{metric}, new {role}",
        f"{METRICS[metric]}, new {role}",
        methods,
        trivial={method: methods[method] for method in (NO_CHANGE, MEAN) if method in methods},
        ceiling=(CEILING, ceiling),
        lower_is_better=metric == "MAE",
    )


def make_ceiling_column(column: ScoreColumn, scores: Arrays) -> ScoreColumn:
    """Column of the ceilings that have the metric of `column`."""
    ceilings = {
        method: values
        for method, values in scores.items()
        if method.kind == "ceiling" and np.isfinite(values).any()
    }
    return ScoreColumn(column.heading, column.metric_name, ceilings)


class Perturbation(Task):
    config: PerturbationConfig

    def run(self, context: Context) -> TaskResult:
        """Scores for each role that is held out; skipped without perturbations and controls."""
        check_changes(context)
        columns: list[ScoreColumn] = []
        ceilings: list[ScoreColumn] = []
        numbers: dict[str, Any] = {}
        for held in self._hold_out_roles(context):
            folds = list(held.folds())
            numbers |= self._describe_units(held, folds)
            if not folds:
                continue
            for metric, scores in self._score(held, folds).items():
                column = make_column(metric, held.role, scores)
                if column is not None:
                    columns.append(column)
                    ceilings.append(make_ceiling_column(column, scores))
        if not columns:
            reasons = [str(value) for key, value in numbers.items() if key.endswith("no_folds")]
            raise Skipped("; ".join(reasons) or "no stratum has enough controls", numbers)
        return self._tabulate(columns, ceilings, numbers)

    def _hold_out_roles(self, context: Context) -> Iterator[HeldOut]:
        """Units of each usable role of `held_out`: skips those without strata of enough controls."""
        for role in self.config.held_out:
            is_context = role in context.roles and role != controlled_role(context)
            if role == "perturbation" or is_context:
                try:
                    held = HeldOut.read(context, self.config, role)
                except Skipped:
                    continue
                yield held

    def _tabulate(
        self, columns: list[ScoreColumn], ceilings: list[ScoreColumn], numbers: dict[str, Any]
    ) -> TaskResult:
        """The table, with rows of the ceilings, and the differences of the model and of methods
        with informed sources.
        """
        judged = [column for column in columns if column.select_kind("model")]
        differences = []
        for column in judged:
            differences += column.differences()
        informed_differences, notes = self._compare_informed(columns)
        return tabulate(
            columns,
            numbers,
            judged,
            rows=table_rows(columns) + table_rows(ceilings),
            differences=differences + informed_differences,
            notes=notes,
        )

    def _compare_informed(self, columns: list[ScoreColumn]) -> tuple[list[Difference], list[str]]:
        """Differences of methods with informed sources to the mean, and a sentence on the best
        method of each source.
        """
        informed = [method.features for method in self._list_informed()]
        differences = []
        notes = []
        for column in columns:
            groups = group_by_features(
                method for method in column.scores if method.features in informed
            )
            for methods in groups.values():
                differences += [column.difference(method, MEAN) for method in methods]
                notes.append(column.compare(column.best(methods), MEAN).sentence)
        return differences, notes

    def _list_informed(self) -> list[ScoredMethod]:
        """Sources of gene vectors that are compared with the mean: controls and files."""
        return [CO_EXPRESSION, *map(prior_method, self.config.priors)]

    def _describe_units(self, held: HeldOut, folds: list[Split]) -> dict[str, Any]:
        role = held.role
        tested = np.unique(np.concatenate([np.array([], np.int64), *(fold.test for fold in folds)]))
        genes = dict(zip(held.perturbation, held.genes))
        groups = np.unique(held.fold_key)
        numbers: dict[str, Any] = {
            f"{role}_perturbations_tested": len(np.unique(held.perturbation[tested])),
            f"{role}_perturbations_with_a_gene": sum(map(bool, genes.values())),
            f"{role}_groups": len(groups),
            f"{role}_folds": len(folds),
            f"{role}_left_out": ", ".join(held.left_out) or "none",
        }
        if not folds:
            seen = "the model saw cells of each of them; divide its corpus by it (shard.split_by), or use cells: all"
            few = f"{len(groups)} values have {self.config.min_cells} cells (min_cells); two are needed"
            reason = seen if not held.unseen.any() and len(held.fold_key) else few
            numbers[f"{role}_no_folds"] = f"held out {role}: {reason}"
        if role == "perturbation":
            for source in self._list_informed():
                has_vector = np.isfinite(held.features[source]).all(1)
                n = np.unique(held.perturbation[has_vector]).size
                numbers[f"perturbation_perturbations_with_{source.name}"] = n
        return numbers

    def _score(self, held: HeldOut, folds: list[Split]) -> Scores:
        """(repetitions, perturbations) by metric and method: means over the units of a
        perturbation.
        """
        profiles = held.profiles
        n_units = len(held.fold_key)
        measured_controls = profiles.control_means(MEASURED)
        measured = profiles.changes(held.scored_unit_of_cell, n_units, measured_controls)
        perturbed = np.stack([np.isin(profiles.genes, rows) for rows in held.genes])
        n_repetitions = 1 + max(fold.repetition for fold in folds)
        scores: Scores = {metric: {} for metric in METRICS}
        for fold, prediction in zip(folds, held.predictions(folds)):
            test = fold.test
            compared = {
                method: Compared(change, measured[test]) for method, change in prediction.items()
            }
            compared |= self._compare_halves(held, fold, measured_controls)
            for method, pair in compared.items():
                by_metric = change_scores(
                    pair.predicted, pair.measured, perturbed[test], self.config.top_genes
                )
                for metric, values in by_metric.items():
                    empty = np.full((n_repetitions, n_units), np.nan)
                    by_unit = scores[metric].setdefault(method, empty)
                    by_unit[fold.repetition, test] = values
        for by_method in scores.values():
            for method, by_unit in by_method.items():
                by_method[method] = average_perturbations(by_unit, held.perturbation)
        return scores

    def _compare_halves(
        self, held: HeldOut, fold: Split, measured_controls: np.ndarray
    ) -> dict[ScoredMethod, Compared]:
        """Ceilings: a change measured in half of a unit's cells, and the most similar change of a
        training unit, against the change in the other half.

        Each half of the cells has its own half of the controls.
        """
        # (cells,): position of each cell when cells are sorted by unit, shuffled in each unit
        generator = seeded(held.context.options.seed + fold.repetition, 5)
        shuffled = generator.permutation(len(held.scored_unit_of_cell))
        by_scored_unit = np.argsort(held.scored_unit_of_cell[shuffled], kind="stable")
        position = np.argsort(shuffled[by_scored_unit])
        halves = []
        for half, controls in ((START, held.start_means), (MEASURED, measured_controls)):
            unit_of_cell = np.where(position % 2 == half, held.scored_unit_of_cell, -1)
            changes = held.profiles.changes(unit_of_cell, len(held.fold_key), controls)
            halves.append(changes[fold.test])
        first, second = halves
        compared = {CEILING: Compared(first, second)}
        if held.role == "perturbation":
            known = held.fitted_changes[fold.train]
            most_similar = correlations(first.T, known.T).argmax(1)
            compared[BEST_OTHER] = Compared(known[most_similar], second)
        return compared


def average_perturbations(by_unit: np.ndarray, perturbation: np.ndarray) -> np.ndarray:
    """(repetitions, perturbations): means of `by_unit`, (repetitions, U), over the units of each
    perturbation; `perturbation`, (U,), names that of a unit.
    """
    names, number = np.unique(perturbation, return_inverse=True)
    is_member = np.eye(len(names))[number]  # (U, perturbations)
    sums = np.nan_to_num(by_unit) @ is_member
    return divide(sums, np.isfinite(by_unit) @ is_member)


def write_changes(
    path: Path, context: Context, config: PerturbationConfig, model_digest: str
) -> ad.AnnData:
    """Write the file of stage predict_changes and return its content. Raises DataError if nothing
    can be held out.
    """
    held, folds = _hold_out(context, config)
    tested = np.sort(np.concatenate([fold.test for fold in folds]))
    changes = _collect_changes(held, folds, tested)
    # doses are empty if the dataset has none
    doses = dict(zip(held.unit_of_cell.tolist(), held.profiles.dose.tolist()))
    names = []
    for unit in tested.tolist():
        name = str(held.perturbation[unit])
        names.append(f"{name} | {doses[unit]}" if doses[unit] else name)
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    control = str(context.roles[controlled_role(context)][is_control].iloc[0])
    obs = _describe_cells(held, tested, [*names, control])
    cells = np.flatnonzero(obs["group"].notna())
    about = {
        "perturbations": np.array(names, object),
        "methods": np.array([method.name for method in changes], object),
        "kinds": np.array([method.kind for method in changes], object),
        "changes": np.stack([*changes.values()]).astype(np.float32),
        "control": control,
        "seed": context.options.seed,
        "model_digest": model_digest,
        "n_folds": len(folds),
    }
    vocabulary = context.model.vocabulary
    genes = held.profiles.genes
    symbols = [vocabulary.symbols[row] for row in genes]
    var = pd.DataFrame({"symbol": symbols}, index=[vocabulary.gene_ids[row] for row in genes])
    expression = held.profiles.expression[cells]
    adata = ad.AnnData(expression, obs.iloc[cells], var, uns={ABOUT_CHANGES: about})
    with create_h5(path) as file:
        write_anndata(file, adata)
    return adata


def _hold_out(context: Context, config: PerturbationConfig) -> tuple[HeldOut, list[Split]]:
    """Units, and the folds of the first repetition. Raises DataError if there are none."""
    try:
        check_changes(context)
        held = HeldOut.read(context, config, HELD_OUT)
    except Skipped as reason:
        raise DataError(
            f"{context.dataset}: {reason}; expected perturbations, and controls in each batch or donor (columns of the "
            "table of datasets)"
        ) from None
    folds = [fold for fold in held.folds() if fold.repetition == 0]
    if not folds:
        raise DataError(
            f"{context.dataset}: expected two perturbations of {config.min_cells} cells, and one that the model saw no "
            f"cell of, got {len(held.fold_key)} and {int(held.unseen.sum())}; set shard.split_by: perturbation, or "
            "evaluate.cells: all"
        )
    return held, folds


def _collect_changes(held: HeldOut, folds: list[Split], tested: np.ndarray) -> ChangesByMethod:
    """(tested units, G) by method: predicted changes of all folds, NaN without a prediction."""
    changes: ChangesByMethod = {}
    for fold, by_method in zip(folds, held.predictions(folds)):
        rows = np.searchsorted(tested, fold.test)
        for method, values in by_method.items():
            if method.network == "trained":
                method = replace(method, supervised=held.context.supervised or "")
            if method not in changes:
                changes[method] = np.full((len(tested), values.shape[1]), np.nan)
            changes[method][rows] = values
    return changes


def _describe_cells(held: HeldOut, tested: np.ndarray, names: list[str]) -> pd.DataFrame:
    """obs of all cells; those without a `group` are not written. `names` are those of the tested
    units, then the control's.
    """
    profiles = held.profiles
    # (cells,): number of the tested unit; -1 for other cells, whose unit -1 indexes the last entry
    position = np.full(len(held.fold_key) + 1, -1, np.int64)
    position[tested] = np.arange(len(tested))
    tested_unit_of_cell = position[held.scored_unit_of_cell]
    # (cells,): index in CELL_KINDS; -1 for cells that are not written
    kind = np.where(profiles.stratum >= 0, profiles.half, -1)
    kind = np.where(tested_unit_of_cell >= 0, CELL_KINDS.index("measured"), kind)
    return pd.DataFrame(
        {
            "group": pd.Categorical.from_codes(kind, CELL_KINDS),
            # controls have unit -1, the last name
            "perturbation": pd.Categorical(np.array(names, object)[tested_unit_of_cell]),
            "stratum": profiles.stratum,
        },
        index=held.context.reader.obs.index,
    )
