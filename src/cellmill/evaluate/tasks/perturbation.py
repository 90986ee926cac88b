"""Task `perturbation`: predicted changes of expression under unseen perturbations, or in unseen
donors and contexts.

Changes are defined in `evaluate.tasks.changes`, rows and ceilings in docs/evaluation.md. If the
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

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.errors import DataError
from cellmill.evaluate.scores import (
    ScoreColumn,
    divide,
    seeded,
    table_rows,
    tabulate,
)
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.changes import MEAN, NO_CHANGE, check_changes, controlled_role
from cellmill.evaluate.tasks.classify import group_by_features
from cellmill.evaluate.tasks.genes import correlations
from cellmill.evaluate.tasks.held_out import CO_EXPRESSION, Fold, HeldOut, prior_method
from cellmill.runs.results import ScoredMethod, TaskResult

METRICS: Mapping[str, str] = {  # names in words by heading; lower is better for MAE only
    "Pearson": "Pearson of the change",
    "discrimination": "discrimination",
    "direction": "direction of the top genes",
    "MAE": "mean absolute error",
}
HELD_OUT = "perturbation"  # role that stage predict_changes holds out
ABOUT_CHANGES = "cellmill_changes"  # key in uns
GROUPS = ["start control", "measured control", "measured"]
CEILING = ScoredMethod("split halves", kind="ceiling")
# ceiling of methods that copy the change of the most similar training perturbation
BEST_OTHER = ScoredMethod("best other perturbation", kind="ceiling")


def change_scores(
    predicted: np.ndarray, seen: np.ndarray, perturbed: np.ndarray, top_genes: int
) -> dict[str, np.ndarray]:
    """Scores of each unit by metric, (units,) float64; NaN where one is not defined, as Pearson of
    a constant.

    `predicted` and `seen` are changes, `(units, genes)`, of units that are tested together;
    `perturbed` (bool) are the genes that a unit perturbs. Direction is judged on the `top_genes`
    genes with the largest seen change. Discrimination is the share of other units whose seen change
    is farther (in mean absolute difference) from the prediction than the unit's own (Wu et al.
    2024, PerturBench; ties count half).
    """
    scores = {metric: np.full(len(seen), np.nan) for metric in METRICS}
    for unit in range(len(seen)):
        is_scored = ~perturbed[unit]
        x = predicted[unit, is_scored]
        y = seen[unit, is_scored]
        scores["MAE"][unit] = np.abs(x - y).mean()
        if not x.any():
            continue
        if x.std() > 0 and y.std() > 0:
            scores["Pearson"][unit] = np.corrcoef(x, y)[0, 1]
        top = np.argsort(-np.abs(y), kind="stable")[:top_genes]
        scores["direction"][unit] = (np.sign(x[top]) == np.sign(y[top])).mean()
        if len(seen) > 1:
            # (units,): distance of the prediction to the seen change of each unit
            distances = np.abs(seen[:, is_scored] - x).mean(1)
            excess = np.delete(distances, unit) - distances[unit]
            scores["discrimination"][unit] = (excess > 0).mean() + (excess == 0).mean() / 2
    return scores


def write_changes(
    path: Path, context: Context, config: PerturbationConfig, model_digest: str
) -> ad.AnnData:
    """Write the file of stage predict_changes and return its content. Raises DataError if nothing
    can be held out.
    """
    try:
        check_changes(context)
        held = HeldOut.read(context, config, HELD_OUT)
    except Skipped as reason:
        raise DataError(
            f"{context.dataset}: {reason}; expected perturbations, and controls in each batch or donor (columns of the "
            "table of datasets)"
        ) from None
    profiles = held.profiles
    folds = [fold for fold in held.folds() if fold[0] == 0]
    if not folds:
        raise DataError(
            f"{context.dataset}: expected two perturbations of {config.min_cells} cells, and one that the model saw no "
            f"cell of, got {len(held.group)} and {int(held.unseen.sum())}; set shard.split_by: perturbation, or "
            "evaluate.cells: all"
        )
    tested = np.sort(np.concatenate([test for _, _, test in folds]))
    changes: dict[ScoredMethod, np.ndarray] = {}  # (tested units, G)
    for _, test, predicted in held.predictions(folds):
        for method, values in predicted.items():
            if method.network == "trained":
                method = replace(method, supervised=context.supervised or "")
            if method not in changes:
                changes[method] = np.full((len(tested), values.shape[1]), np.nan)
            changes[method][np.searchsorted(tested, test)] = values
    # (cells,): number of the tested unit; -1 for other cells, whose unit -1 indexes the last entry
    position = np.full(len(held.group) + 1, -1, np.int64)
    position[tested] = np.arange(len(tested))
    unit = position[held.scored_unit]
    # doses are empty if the dataset has none
    doses = dict(zip(held.unit_of_cell.tolist(), profiles.dose.tolist()))
    names = []
    for number in tested.tolist():
        name = str(held.perturbation[number])
        names.append(f"{name} | {doses[number]}" if doses[number] else name)
    # (cells,): index in GROUPS; -1 for cells that are not written
    group = np.where(profiles.stratum >= 0, profiles.half, -1)
    group = np.where(unit >= 0, GROUPS.index("measured"), group)
    cells = np.flatnonzero(group >= 0)
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    control = str(context.roles[controlled_role(context)][is_control].iloc[0])
    obs = pd.DataFrame(
        {
            "group": pd.Categorical.from_codes(group[cells], GROUPS),
            # controls have unit -1, the last name
            "perturbation": pd.Categorical(np.array([*names, control], object)[unit[cells]]),
            "stratum": profiles.stratum[cells],
        },
        index=context.reader.obs.index[cells],
    )
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
    symbols = [vocabulary.symbols[row] for row in profiles.genes]
    ids = [vocabulary.gene_ids[row] for row in profiles.genes]
    var = pd.DataFrame({"symbol": symbols}, index=ids)
    adata = ad.AnnData(profiles.expression[cells], obs, var, uns={ABOUT_CHANGES: about})
    with create_h5(path) as file:
        write_anndata(file, adata)
    return adata


class Perturbation(Task):
    config: PerturbationConfig

    def run(self, context: Context) -> TaskResult:
        """Scores for each role that is held out; skipped without perturbations and controls."""
        check_changes(context)
        columns: list[ScoreColumn] = []
        ceilings: list[ScoreColumn] = []
        numbers: dict[str, Any] = {}
        for held_out in self.config.held_out:
            if held_out != "perturbation" and (
                held_out not in context.roles or held_out == controlled_role(context)
            ):
                continue
            try:
                held = HeldOut.read(context, self.config, held_out)
            except Skipped:
                continue
            folds = list(held.folds())
            numbers |= self._numbers(held, folds)
            if not folds:
                continue
            for metric, scores in self._scores(held, folds).items():
                # scores of rows, of their ceilings, and of the trivial rows among them
                defined = {}
                ceiling_scores = {}
                trivial = {}
                for method, values in scores.items():
                    if not np.isfinite(values).any():
                        continue
                    if method.kind == "ceiling":
                        ceiling_scores[method] = values
                        continue
                    defined[method] = values
                    if method in (NO_CHANGE, MEAN):
                        trivial[method] = values
                if not defined or CEILING not in ceiling_scores:
                    continue
                column = ScoreColumn(
                    f"{metric}, new {held_out}",
                    f"{METRICS[metric]}, new {held_out}",
                    defined,
                    trivial=trivial,
                    ceiling=(CEILING, ceiling_scores[CEILING]),
                    lower_is_better=metric == "MAE",
                )
                columns.append(column)
                ceilings.append(ScoreColumn(column.heading, column.metric, ceiling_scores))
        if not columns:
            reasons = [str(value) for key, value in numbers.items() if key.endswith("no_folds")]
            raise Skipped("; ".join(reasons) or "no stratum has enough controls", numbers)
        judged = [column for column in columns if column.select_kind("model")]
        compared = []
        for column in judged:
            compared += column.differences()
        informed = [method.features for method in self._informed()]
        notes = []
        for column in columns:
            groups = group_by_features(
                method for method in column.scores if method.features in informed
            )
            for methods in groups.values():
                compared += [column.difference(method, MEAN) for method in methods]
                notes.append(column.compare(column.best(methods), MEAN).sentence)
        return tabulate(
            columns,
            numbers,
            judged,
            rows=table_rows(columns) + table_rows(ceilings),
            differences=compared,
            notes=notes,
        )

    def _informed(self) -> list[ScoredMethod]:
        """Sources of gene vectors that are compared with the mean: controls and files."""
        return [CO_EXPRESSION, *map(prior_method, self.config.priors)]

    def _numbers(self, held: HeldOut, folds: list[Fold]) -> dict[str, Any]:
        role = held.role
        tested = np.unique(
            np.concatenate([np.array([], np.int64), *(test for _, _, test in folds)])
        )
        genes = dict(zip(held.perturbation, held.genes))
        groups = np.unique(held.group)
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
            reason = seen if not held.unseen.any() and len(held.group) else few
            numbers[f"{role}_no_folds"] = f"held out {role}: {reason}"
        if role == "perturbation":
            for source in self._informed():
                has_vector = np.isfinite(held.features[source]).all(1)
                n = np.unique(held.perturbation[has_vector]).size
                numbers[f"perturbation_perturbations_with_{source.name}"] = n
        return numbers

    def _scores(
        self, held: HeldOut, folds: list[Fold]
    ) -> dict[str, dict[ScoredMethod, np.ndarray]]:
        """(repetitions, perturbations) by metric and method: means over the units of a
        perturbation.
        """
        profiles = held.profiles
        known = held.fitted_changes
        measured = profiles.control_means(1)
        seen = profiles.changes(held.scored_unit, len(held.group), measured)
        perturbed = np.stack([np.isin(profiles.genes, rows) for rows in held.genes])
        n_repetitions = 1 + max(repetition for repetition, _, _ in folds)
        shape = (n_repetitions, len(held.group))
        scores: dict[str, dict[ScoredMethod, np.ndarray]] = {metric: {} for metric in METRICS}
        for (_, train, _), (repetition, test, predicted) in zip(folds, held.predictions(folds)):
            # (cells,): position of each cell when cells are sorted by unit, shuffled in each unit
            generator = seeded(held.context.options.seed + repetition, 5)
            shuffled = generator.permutation(len(held.scored_unit))
            by_scored_unit = np.argsort(held.scored_unit[shuffled], kind="stable")
            position = np.argsort(shuffled[by_scored_unit])
            # changes of two halves of each unit's scored cells, each from its own half of the
            # controls
            halves = []
            for half, controls in enumerate((held.start_means, measured)):
                unit = np.where(position % 2 == half, held.scored_unit, -1)
                halves.append(profiles.changes(unit, len(held.group), controls)[test])
            # predicted and measured changes of the test units
            pairs = {method: (change, seen[test]) for method, change in predicted.items()}
            pairs[CEILING] = (halves[0], halves[1])
            if held.role == "perturbation":
                similar = correlations(halves[0].T, known[train].T)
                pairs[BEST_OTHER] = (known[train[similar.argmax(1)]], halves[1])
            for method, (change, truth) in pairs.items():
                by_metric = change_scores(change, truth, perturbed[test], self.config.top_genes)
                for metric, values in by_metric.items():
                    by_unit = scores[metric].setdefault(method, np.full(shape, np.nan))
                    by_unit[repetition, test] = values
        # (U, perturbations): 1 for the units of a perturbation
        names, number = np.unique(held.perturbation, return_inverse=True)
        member = np.eye(len(names))[number]
        for by_method in scores.values():
            for method, values in by_method.items():
                sums = np.nan_to_num(values) @ member
                by_method[method] = divide(sums, np.isfinite(values) @ member)
        return scores
