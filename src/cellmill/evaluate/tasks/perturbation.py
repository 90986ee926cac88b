"""Task `perturbation`: predicted changes of expression under perturbations, donors or other contexts not seen before.

A change is the mean over the cells of a perturbation minus the mean over controls of the same batch and donor
(`evaluate.perturbed`). Whole perturbations are held out, and whole values of the other roles: cells of a donor, and all
perturbations in them, while its controls are what predictions start from.

What the model was trained on decides the folds. If it saw cells of some perturbations, those that it saw none of are
tested, once; with a corpus that is divided by `shard.split_by: perturbation` and keeps the controls for training these
are the test split. If it saw none of the dataset's perturbed cells, perturbations are tested in folds, repeated with
other folds (`seeds`). All predictions are fitted on the other perturbations: of a tested one no cell is used.

Rows are `no change`; `mean`, that of all other changes; from features of the perturbed gene (loadings of principal
components of the model's training cells, embeddings of the model and of the model untrained) `linear`, a ridge, and
`nearest`, the change of the perturbation whose gene is most like it. A perturbation without a gene of the model has the
mean in all of them. A model trained with objective perturbation_response has a row of its own. Of new contexts, the
same perturbation in other contexts is the baseline: its mean, a ridge between it and the mean of all, and its change in
the context whose controls are most like. `split halves` is no prediction but a ceiling: the change of one half of a
perturbation's cells as the prediction of that of the other, which is noisier than what the others are compared with.

Intervals are over perturbations and repetitions (`evaluate.paired`): contexts of one perturbation are one draw.
"""

from typing import Any

import numpy as np

from cellmill.config.evaluate import PerturbationConfig
from cellmill.evaluate.change_scores import METRICS, change_scores
from cellmill.evaluate.held_out_units import (
    Fold,
    Units,
    find_units,
    folds_of,
    genes_of,
    predictions,
    scored_units,
    strata_of,
)
from cellmill.evaluate.perturbed import Profiles, controlled_role, read_profiles, without_changes
from cellmill.evaluate.score_table import ScoreColumn, against_best, differences, is_own, table_rows
from cellmill.evaluate.task import Context, TaskResult

CEILING = "split halves"


class Perturbation:
    def __init__(self, config: PerturbationConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Scores for each role that is held out; skipped without perturbations and controls."""
        if (reason := without_changes(context)) is not None:
            return TaskResult(skipped=reason)
        columns: list[ScoreColumn] = []
        ceilings: list[ScoreColumn] = []
        figures: dict[str, Any] = {}
        for held_out in self.config.held_out:
            if held_out != "perturbation" and (held_out not in context.roles or held_out == controlled_role(context)):
                continue
            profiles = read_profiles(context, strata_of(held_out))
            if profiles.stratum.max() < 0:
                continue
            units = find_units(context, profiles, held_out, self.config.min_cells)
            folds = list(folds_of(context, self.config, units, held_out))
            figures |= self._figures(context, held_out, units, folds)
            if folds:
                found = self._scores(context, profiles, units, folds, held_out)
                columns += (of_role := _columns(found, held_out))
                ceilings += [ScoreColumn(c.heading, c.metric, {CEILING: c.scores.pop(CEILING)}) for c in of_role]
        if not columns:
            reasons = "; ".join(str(value) for key, value in figures.items() if key.endswith("no_folds"))
            return TaskResult(figures=figures, skipped=reasons or "no stratum has enough controls")
        rows = table_rows(columns) + [row | {"kind": "ceiling"} for row in table_rows(ceilings)]
        compared = [column for column in columns if any(map(is_own, column.scores))]
        return TaskResult(
            rows, columns[0].heading, against_best(compared), figures, differences=differences(compared)
        )  # fmt: skip

    def _figures(self, context: Context, held_out: str, units: Units, folds: list[Fold]) -> dict[str, Any]:
        tested = np.unique(np.concatenate([test for _, _, test in folds])) if folds else np.array([], np.int64)
        figures: dict[str, Any] = {
            f"{held_out}_perturbations_tested": len(np.unique(units.perturbation[tested])),
            f"{held_out}_perturbations_with_a_gene": sum(
                map(bool, dict(zip(units.perturbation, genes_of(context, units.perturbation))).values())
            ),
            f"{held_out}_groups": len(np.unique(units.group)),
            f"{held_out}_folds": len(folds),
            f"{held_out}_left_out": ", ".join(units.left_out) or "none",
        }
        if not folds:
            seen = "the model saw cells of each of them; divide its corpus by it (shard.split_by), or use cells: all"
            few = f"{len(np.unique(units.group))} values have {self.config.min_cells} cells (min_cells); two are needed"
            figures[f"{held_out}_no_folds"] = (
                f"held out {held_out}: {seen if not units.unseen.any() and len(units) else few}"
            )
        return figures

    def _scores(
        self, context: Context, profiles: Profiles, units: Units, folds: list[Fold], held_out: str
    ) -> dict[str, dict[str, np.ndarray]]:
        """(repetitions, units) by metric and method."""
        given, measured = profiles.control_means(0), profiles.control_means(1)
        scored = scored_units(context, units)
        seen = profiles.changes(scored, len(units), measured)
        place = {int(row): at for at, row in enumerate(profiles.genes)}
        perturbed = np.zeros(seen.shape, bool)
        for unit, rows in enumerate(genes_of(context, units.perturbation)):
            perturbed[unit, [place[row] for row in rows if row in place]] = True
        n_repetitions = 1 + max(repetition for repetition, _, _ in folds)
        scores: dict[str, dict[str, np.ndarray]] = {metric: {} for metric in METRICS}
        for repetition, test, predicted in predictions(context, profiles, units, folds, held_out):
            for name, change in predicted.items():
                of_method = change_scores(change, seen[test], perturbed[test], self.config.top_genes)
                _record(scores, name, of_method, test, (n_repetitions, len(units)), repetition)
            first, second = _halves(scored, units, profiles, (given, measured), context.options.seed + repetition)
            ceiling = change_scores(first[test], second[test], perturbed[test], self.config.top_genes)
            _record(scores, CEILING, ceiling, test, (n_repetitions, len(units)), repetition)
        return {metric: {name: _by_perturbation(v, units) for name, v in of.items()} for metric, of in scores.items()}


def _halves(
    scored: np.ndarray, units: Units, profiles: Profiles, controls: tuple[np.ndarray, np.ndarray], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Changes of two halves of each unit's scored cells, each from its own half of the controls."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 5]))
    order = generator.permutation(len(scored))
    order = order[np.argsort(scored[order], kind="stable")]
    place = np.empty(len(scored), np.int64)
    place[order] = np.arange(len(scored))
    parts = [np.where(place % 2 == half, scored, -1) for half in (0, 1)]
    first, second = (profiles.changes(part, len(units), mean) for part, mean in zip(parts, controls))
    return first, second


def _record(
    scores: dict[str, dict[str, np.ndarray]],
    name: str,
    of_units: dict[str, np.ndarray],
    test: np.ndarray,
    shape: tuple[int, int],
    repetition: int,
) -> None:
    """Put the scores of the tested units into those of all, (repetitions, units) with NaN where not tested."""
    for metric, values in of_units.items():
        scores[metric].setdefault(name, np.full(shape, np.nan))[repetition, test] = values


def _by_perturbation(values: np.ndarray, units: Units) -> np.ndarray:
    """(repetitions, perturbations): means over the units of a perturbation."""
    names, number = np.unique(units.perturbation, return_inverse=True)
    member = np.eye(len(names))[number]
    n = np.isfinite(values) @ member
    return np.divide(np.nan_to_num(values) @ member, n, out=np.full(n.shape, np.nan), where=n > 0)


def _columns(scores: dict[str, dict[str, np.ndarray]], held_out: str) -> list[ScoreColumn]:
    """A column for each metric that is defined for more than the ceiling."""
    columns = []
    for metric, words in METRICS.items():
        of_methods = {name: values for name, values in scores[metric].items() if np.isfinite(values).any()}
        if CEILING in of_methods and len(of_methods) > 1:
            named = f"{metric}, new {held_out}", f"{words}, new {held_out}"
            columns.append(ScoreColumn(*named, of_methods, lower_is_better=metric == "MAE"))
    return columns
