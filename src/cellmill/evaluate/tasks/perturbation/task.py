"""Task `perturbation`: predicted changes of expression under held-out perturbations, or in held-out
contexts such as donors (docs/perturbations.md).

The task runs for each kind of value that is held out. Its steps are, in this order:

- `profiles.py` reads the expression of the cells, and defines units and changes;
- `units.py` gathers the cells into units, and the units into groups that are held out together;
- `folds.py` divides the groups into groups to fit on and groups to test, or takes them from
  `split_file.py`;
- `predictions.py` predicts the changes of the tested units: by the model's head (`response.py`), from
  features of genes (`gene_features.py`), and by `baselines.py` and `doses.py`;
- `scoring.py` scores the predictions (`change_scores.py`), and the ceilings and `probes.py`.

The genes that a unit perturbs are left out of its scores. Intervals are over perturbations and
repetitions. `changes_file.py` writes the same predictions for other packages.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.evaluate.methods import ByMethod, group_by_features
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.perturbation.baselines import MEAN, NO_CHANGE
from cellmill.evaluate.tasks.perturbation.change_scores import METRICS
from cellmill.evaluate.tasks.perturbation.doses import (
    HILL,
    LINEAR,
    note_linear_fallbacks,
    parse_names,
    tabulate_curves,
)
from cellmill.evaluate.tasks.perturbation.folds import divide_by_novelty, explain_no_folds
from cellmill.evaluate.tasks.perturbation.gene_features import CO_EXPRESSION, prior_method
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.probes import describe_better_probes
from cellmill.evaluate.tasks.perturbation.profiles import require_changes
from cellmill.evaluate.tasks.perturbation.scoring import (
    CEILING,
    PerturbationScores,
    score_folds,
)
from cellmill.evaluate.tasks.perturbation.split_file import SPLITS, TEST, TRAIN, SplitFile
from cellmill.evaluate.tasks.perturbation.units import DOSE, PERTURBATION, PerturbedUnits
from cellmill.runs.results import Difference, ScoredMethod, TaskResult

FITS_S = 0.8  # seconds for fits and scores; there are so few units that their number hardly matters


@dataclass
class HeldOutResult:
    """Scores with one kind of value held out, such as donors, and the figures, notes and tables for them."""

    figures: dict[str, Any]  # by key of metrics.json
    reason_unscored: str | None  # None if some unit is tested
    columns: list[ScoreColumn] = field(default_factory=list)  # of predictions
    reference_columns: list[ScoreColumn] = field(default_factory=list)  # of ceilings and probes
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rows by title


class Perturbation(Task):
    config: PerturbationConfig

    def run(self, context: Context) -> TaskResult:
        """Scores of held-out units. A split file says which units are held out. Without a split file, the
        roles in option `held_out` are held out one after another, and then doses if option `doses` is set.

        Raises Skipped if no unit can be scored.
        """
        require_changes(context)
        held_out_names: list[str] = [*self.config.held_out]
        if self.config.doses is not None:
            held_out_names.append(DOSE)
        split_file = None
        if self.config.split_file is not None:
            split_file = SplitFile.read(self.config, context)
            held_out_names = [PERTURBATION]
        results = []
        figures: dict[str, Any] = {}
        reasons = []  # for each kind of value that is not scored, the reason
        for held_out in held_out_names:
            try:
                units = PerturbedUnits.read(context, self.config, held_out, split_file)
            except Skipped as skipped:  # other kinds of values can still be scored
                reason = f"held out {held_out}: {skipped}"
                reasons.append(reason)
                figures |= skipped.figures | {f"{held_out}_no_folds": reason}
                continue
            scored = self._score(units)
            results.append(scored)
            figures |= scored.figures
            if scored.reason_unscored is not None:
                reasons.append(scored.reason_unscored)
        if not any(scored.columns for scored in results):
            raise Skipped("; ".join(reasons) or "no metric is defined", figures)
        return self._tabulate(results, figures)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        return FITS_S + sizes.read_s() + sizes.training_components_s()

    def _score(self, units: PerturbedUnits) -> HeldOutResult:
        """Scores of the tested units: a column for each novelty and metric."""
        predictor = ChangePredictor(units)
        folds_by_novelty = divide_by_novelty(units)
        scored = self._describe_units(predictor, [*chain.from_iterable(folds_by_novelty.values())])
        if units.split_file is not None:
            scored.figures |= describe_split(units, folds_by_novelty)
            scored.notes += note_contradictions(units, units.split_file, folds_by_novelty)
        for novelty, folds in folds_by_novelty.items():
            scores = score_folds(predictor, folds)
            if units.held_out == DOSE:
                scored.notes += note_linear_fallbacks(
                    predictor.changes_from_start, folds, units.perturbation, units.log_dose
                )
                scored.tables["dose curves"] = self._tabulate_doses(
                    predictor, scores.predictions["MAE"], scores.best_methods
                )
            self._add_columns(scored, novelty, scores)
        return scored

    def _add_columns(self, scored: HeldOutResult, novelty: str, scores: PerturbationScores) -> None:
        """Add a column for each metric to `scored`, a column of its ceilings and probes, and notes on
        probes that are better than the prediction.
        """
        for metric, predictions in scores.predictions.items():
            ceilings = scores.ceilings[metric]
            probes = scores.probes[metric]
            column = make_column(metric, novelty, predictions, ceilings)
            if column is None:
                continue
            scored.columns.append(column)
            references = drop_all_nan(ceilings | probes)
            scored.reference_columns.append(replace(column, scores=references))
            scored.notes += describe_better_probes(
                column, probes, scores.best_methods, self.config.probe_noise
            )

    def _describe_units(self, predictor: ChangePredictor, folds: list[Fold]) -> HeldOutResult:
        """A result with the figures of the units, for metrics.json. It has no scores yet."""
        units = predictor.units
        held_out = units.held_out
        tested = {name for fold in folds for name in units.perturbation[fold.tested]}
        genes = dict(zip(units.perturbation, units.genes))
        figures: dict[str, Any] = {
            f"{held_out}_perturbations_tested": len(tested),
            f"{held_out}_perturbations_with_a_gene": sum(map(bool, genes.values())),
            f"{held_out}_groups": len(np.unique(units.group_of_unit)),
            f"{held_out}_folds": len(folds),
            f"{held_out}_left_out": ", ".join(units.left_out) or "none",
        }
        reason_unscored = None if folds else explain_no_folds(units)
        if reason_unscored is not None:
            figures[f"{held_out}_no_folds"] = reason_unscored
        if held_out == PERTURBATION:
            for source in self._list_gene_sources():
                has_vector = np.isfinite(predictor.features[source]).all(1)
                n = np.unique(units.perturbation[has_vector]).size
                figures[f"perturbation_perturbations_with_{source.name}"] = n
        return HeldOutResult(figures, reason_unscored)

    def _tabulate_doses(
        self, predictor: ChangePredictor, errors: ByMethod, best_methods: list[ScoredMethod]
    ) -> list[dict[str, Any]]:
        """A row for each compound: its dose curve, and the errors of LINEAR, HILL and the model's best
        method. `errors` are (repetitions, compounds) by method.
        """
        units = predictor.units
        unit = str(self.config.dose_unit or "")
        if self.config.doses == "names":
            unit = parse_names(units.name_in_dataset, self.config.dose_unit).unit
        methods = [LINEAR, HILL, *(method for method in best_methods if method.kind == "model")]
        return tabulate_curves(
            predictor.changes_from_start,
            units.perturbation,
            units.log_dose,
            f" ({unit})" if unit else "",
            {method: errors[method] for method in methods},
        )

    def _tabulate(self, results: list[HeldOutResult], figures: dict[str, Any]) -> TaskResult:
        """The results for all kinds of values as one result. The rows of ceilings and probes are the last
        ones of its table. Its differences are of the model, and of methods that read gene vectors of
        controls or files.
        """
        columns = []
        reference_columns = []
        notes = []
        tables: dict[str, list[dict[str, Any]]] = {}
        for scored in results:
            columns += scored.columns
            reference_columns += scored.reference_columns
            notes += scored.notes
            tables |= scored.tables
        judged = [column for column in columns if column.select_kind("model")]
        source_differences, comparisons = self._compare_gene_sources(columns)
        result = tabulate(
            columns,
            figures,
            judged,
            rows=table_rows(columns) + table_rows(reference_columns),
            notes=notes + comparisons,
        )
        return replace(result, tables=tables, differences=result.differences + source_differences)

    def _compare_gene_sources(
        self, columns: list[ScoreColumn]
    ) -> tuple[list[Difference], list[str]]:
        """Differences to MEAN of each method that reads gene vectors of controls or files. For each of
        these sources also a sentence on the difference of its best method.
        """
        sources = [method.features for method in self._list_gene_sources()]
        differences = []
        notes = []
        for column in columns:
            by_source = group_by_features(
                method for method in column.scores if method.features in sources
            )
            for methods in by_source.values():
                differences += [column.difference(method, MEAN) for method in methods]
                notes.append(column.verdict(column.best(methods), MEAN).sentence)
        return differences, notes

    def _list_gene_sources(self) -> list[ScoredMethod]:
        """Sources of gene vectors that are compared with MEAN: controls, and the files of option
        `priors`.
        """
        return [CO_EXPRESSION, *map(prior_method, self.config.priors)]


def describe_split(
    units: PerturbedUnits, folds_by_novelty: Mapping[str, list[Fold]]
) -> dict[str, Any]:
    """Numbers of units by split and by novelty, and perturbations that the split file does not name, as
    figures for metrics.json.
    """
    figures: dict[str, Any] = {}
    for split in SPLITS:
        figures[f"split_{split}"] = int((units.split_of_unit == split).sum())
    unnamed = units.perturbation[units.split_of_unit == ""]
    figures["split_unnamed"] = ", ".join(np.unique(unnamed)) or "none"
    for novelty, [fold] in folds_by_novelty.items():  # a split file has one fold for each
        figures["tested_" + re.sub(r"\W", "_", novelty)] = len(fold.tested)
    return figures


def note_contradictions(
    units: PerturbedUnits, split_file: SplitFile, folds_by_novelty: Mapping[str, list[Fold]]
) -> list[str]:
    """Notes on units that the task treats otherwise than the split file says."""
    notes = []
    names = np.array(units.unit_names)
    # units of split test of which the model saw cells
    is_test = units.split_of_unit == TEST
    seen = names[is_test & ~units.is_testable]
    if len(seen):
        notes.append(
            f"{len(seen):,} of {is_test.sum():,} units that {split_file.path} tests are not tested, the first "
            f"{seen[0]}, because the model saw cells of them; hold them out of its corpus (shard.split_by)."
        )
    # units whose novelty in the file is not the novelty that they are scored as
    for novelty, [fold] in folds_by_novelty.items():
        for file_novelty in sorted({*split_file.novelty_in_file.values()} - {novelty}):
            differing = [
                unit
                for unit in fold.tested
                if split_file.novelty_in_file.get(units.perturbation[unit]) == file_novelty
            ]
            if differing:
                notes.append(
                    f"{len(differing):,} units that {split_file.path} counts as {file_novelty}, the first "
                    f"{names[differing[0]]}, are scored as {novelty}, by the perturbations in {TRAIN}."
                )
    # perturbations that may be combinations
    combinations = split_file.possible_combinations
    if combinations:
        notes.append(
            f"{len(combinations):,} perturbations, the first {combinations[0]}, have the names of two others but count "
            "as one; if they are combinations, set combination_delimiter."
        )
    return notes


def make_column(
    metric: str, novelty: str, predictions: ByMethod, ceilings: ByMethod
) -> ScoreColumn | None:
    """A column with the scores by one metric, of all methods that have a score. None if no method has a
    score, or if the ceiling has none.

    `novelty` says in words how the tested units are new, such as `new perturbation`. The heading of
    the column ends in it.
    """
    methods = drop_all_nan(predictions)
    ceiling = drop_all_nan(ceilings).get(CEILING)
    if not methods or ceiling is None:
        return None
    return ScoreColumn(
        f"{metric}, {novelty}",
        f"{METRICS[metric]}, {novelty}",
        methods,
        trivial={method: methods[method] for method in (NO_CHANGE, MEAN) if method in methods},
        ceiling=(CEILING, ceiling),
        lower_is_better=metric == "MAE",
    )


def drop_all_nan(scores: ByMethod) -> ByMethod:
    """The scores, without methods that have only NaN."""
    return {method: values for method, values in scores.items() if np.isfinite(values).any()}
