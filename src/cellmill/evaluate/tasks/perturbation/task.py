"""Task `perturbation`: predicted changes of expression under unseen perturbations, or in unseen
donors and contexts.

Units and changes are defined in `profiles.py`, rows and ceilings in docs/perturbations.md. If the
model saw cells of some perturbations only, the others are tested, once. If it saw none, all are
tested in folds; if it saw all, none is tested. A unit's own perturbed genes are left out of its
scores. Intervals are over perturbations and repetitions.

Legend: U units, G genes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.methods import ByMethod, group_by_features
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.expression import cross_correlations
from cellmill.evaluate.tasks.perturbation.baselines import MEAN, NO_CHANGE, ChangesByMethod
from cellmill.evaluate.tasks.perturbation.change_scores import (
    METRICS,
    average_perturbations,
    change_scores,
)
from cellmill.evaluate.tasks.perturbation.doses import (
    HILL,
    LINEAR,
    describe_linear_doses,
    parse_names,
    tabulate_curves,
)
from cellmill.evaluate.tasks.perturbation.gene_features import CO_EXPRESSION, prior_method
from cellmill.evaluate.tasks.perturbation.held_out import DOSE, NO_CONTROLS, PERTURBATION, HeldOut
from cellmill.evaluate.tasks.perturbation.probes import choose_probed, find_gamed, make_probes
from cellmill.evaluate.tasks.perturbation.profiles import (
    REFERENCE_HALF,
    START_HALF,
    check_changes,
    controlled_role,
)
from cellmill.evaluate.tasks.perturbation.split_file import SPLITS, TEST, TRAIN, SplitFile
from cellmill.runs.results import Difference, ScoredMethod, TaskResult

CEILING = ScoredMethod("split halves", kind="ceiling")
# ceiling of methods that copy the change of the most similar training perturbation
BEST_OTHER = ScoredMethod("best other perturbation", kind="ceiling")

Scores = dict[str, ByMethod]
"""Arrays `(repetitions, perturbations)` by metric and method."""


class ChangePair(NamedTuple):
    """Changes of the tested units, (test units, G) float64 each."""

    predicted: np.ndarray
    measured: np.ndarray


@dataclass
class ScoredRoles:
    """Scores of all roles that are held out, and what the result says about them."""

    columns: list[ScoreColumn] = field(default_factory=list)
    reference_columns: list[ScoreColumn] = field(default_factory=list)  # ceilings and probes
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # why roles cannot be tested


class Perturbation(Task):
    config: PerturbationConfig

    def run(self, context: Context) -> TaskResult:
        """Scores for each role that is held out; skipped without perturbations and controls."""
        check_changes(context)
        scored = ScoredRoles()
        for held in self._hold_out_roles(context):
            self._score_role(held, scored)
        if not scored.columns:
            reasons = scored.reasons or [NO_CONTROLS]
            raise Skipped("; ".join(reasons), scored.figures)
        return self._tabulate(scored)

    def _hold_out_roles(self, context: Context) -> Iterator[HeldOut]:
        """Units of the split file, or of each role of `held_out` that has strata with enough controls,
        and of doses.
        """
        if self.config.split_file is not None:
            yield HeldOut.read(
                context, self.config, PERTURBATION, SplitFile.read(self.config, context)
            )
            return
        doses = [] if self.config.doses is None else [DOSE]
        for role in [*self.config.held_out, *doses]:
            is_context = role in context.roles and role != controlled_role(context.roles)
            if role in (PERTURBATION, DOSE) or is_context:
                try:
                    held = HeldOut.read(context, self.config, role)
                except Skipped:  # a role without controls leaves the others to score
                    continue
                yield held

    def _score_role(self, held: HeldOut, scored: ScoredRoles) -> None:
        """Add the columns, figures, notes and tables of a role to `scored`."""
        folds_by_heading = held.folds_by_heading()
        all_folds = [*chain.from_iterable(folds_by_heading.values())]
        scored.figures |= self._describe_units(held, all_folds)
        if not folds_by_heading:
            scored.reasons.append(held.explain_no_folds())
        if held.split_file is not None:
            scored.figures |= describe_split(held, folds_by_heading)
            scored.notes += check_split(held, held.split_file, folds_by_heading)
        for heading, folds in folds_by_heading.items():
            scores, probed = self._score_with_references(held, folds)
            if held.role == DOSE:
                scored.notes += describe_linear_doses(
                    held.changes_from_start, folds, held.perturbation, held.log_dose
                )
                scored.tables["dose curves"] = self._tabulate_doses(held, scores["MAE"], probed)
            for metric, by_method in scores.items():
                column = make_column(metric, heading, by_method)
                if column is not None:
                    scored.columns.append(column)
                    scored.reference_columns.append(make_reference_column(column, by_method))
                    scored.notes += find_gamed(column, by_method, probed, self.config.probe_noise)

    def _describe_units(self, held: HeldOut, folds: list[Fold]) -> dict[str, Any]:
        """Figures of the units of a role, for metrics.json."""
        role = held.role
        tested = {name for fold in folds for name in held.perturbation[fold.test]}
        genes = dict(zip(held.perturbation, held.genes))
        figures: dict[str, Any] = {
            f"{role}_perturbations_tested": len(tested),
            f"{role}_perturbations_with_a_gene": sum(map(bool, genes.values())),
            f"{role}_groups": len(np.unique(held.group_of_unit)),
            f"{role}_folds": len(folds),
            f"{role}_left_out": ", ".join(held.left_out) or "none",
        }
        if not folds:
            figures[f"{role}_no_folds"] = held.explain_no_folds()
        if role == PERTURBATION:
            for source in self._list_gene_sources():
                has_vector = np.isfinite(held.features[source]).all(1)
                n = np.unique(held.perturbation[has_vector]).size
                figures[f"perturbation_perturbations_with_{source.name}"] = n
        return figures

    def _score_with_references(
        self, held: HeldOut, folds: list[Fold]
    ) -> tuple[Scores, list[ScoredMethod]]:
        """Scores of predictions, ceilings and probes, and the methods that have probes.

        A perturbation's score is the mean over its units. Probes are scored in the first repetition
        only.
        """
        scores = self.score_predictions(held, folds, held.predictions(folds))
        halves = (self._pair_halves(held, fold) for fold in folds)
        ceilings = self._score_pairs(held, folds, halves)
        probed = choose_probed(scores["Pearson"])
        first = [fold for fold in folds if fold.repetition == 0]
        probes = self.score_predictions(held, first, self._predict_probes(held, first, probed))
        for metric, by_method in scores.items():
            by_method.update(ceilings[metric] | probes[metric])
        return scores, probed

    def score_predictions(
        self, held: HeldOut, folds: list[Fold], predictions: Iterable[ChangesByMethod]
    ) -> Scores:
        """Scores of the predicted changes of each fold, `(test units, G)`."""
        n_units = len(held.group_of_unit)
        controls = held.profiles.control_means(REFERENCE_HALF)
        measured = held.profiles.changes(held.scored_unit_of_cell, n_units, controls)
        pairs = (
            {method: ChangePair(change, measured[fold.test]) for method, change in changes.items()}
            for fold, changes in zip(folds, predictions)
        )
        return self._score_pairs(held, folds, pairs)

    def _score_pairs(
        self,
        held: HeldOut,
        folds: list[Fold],
        pairs: Iterable[Mapping[ScoredMethod, ChangePair]],
    ) -> Scores:
        """Scores of the `pairs` of predicted and measured changes of each fold."""
        perturbed = np.stack([np.isin(held.profiles.genes, rows) for rows in held.genes])
        n_repetitions = 1 + max(fold.repetition for fold in folds)
        # (repetitions, U) by metric and method
        by_unit: dict[str, ByMethod] = {metric: {} for metric in METRICS}
        for fold, pair_by_method in zip(folds, pairs):
            for method, pair in pair_by_method.items():
                unit_scores = change_scores(
                    pair.predicted, pair.measured, perturbed[fold.test], self.config.top_genes
                )
                for metric, values in unit_scores.items():
                    empty = np.full((n_repetitions, len(held.group_of_unit)), np.nan)
                    method_scores = by_unit[metric].setdefault(method, empty)
                    method_scores[fold.repetition, fold.test] = values
        scores: Scores = {metric: {} for metric in METRICS}
        for metric, by_method in by_unit.items():
            for method, unit_values in by_method.items():
                scores[metric][method] = average_perturbations(unit_values, held.perturbation)
        return scores

    def _pair_halves(self, held: HeldOut, fold: Fold) -> dict[ScoredMethod, ChangePair]:
        """Ceilings: the change in half of a unit's cells against that in the other half, and the most
        similar change of a training unit against the latter.

        Each half of the cells has its own half of the controls.
        """
        # (cells,): position of each cell when cells are sorted by unit, shuffled in each unit
        generator = seeded(held.context.options.seed + fold.repetition, draws.HALVES_OF_UNITS)
        shuffled = generator.permutation(len(held.scored_unit_of_cell))
        by_scored_unit = np.argsort(held.scored_unit_of_cell[shuffled], kind="stable")
        position = np.argsort(shuffled[by_scored_unit])
        half_of_cell = position % 2  # cells of each unit alternate between the halves
        halves = []
        for half, half_of_controls in enumerate((START_HALF, REFERENCE_HALF)):
            controls = held.profiles.control_means(half_of_controls)
            unit_of_cell = np.where(half_of_cell == half, held.scored_unit_of_cell, -1)
            changes = held.profiles.changes(unit_of_cell, len(held.group_of_unit), controls)
            halves.append(changes[fold.test])
        first, second = halves
        pairs = {CEILING: ChangePair(first, second)}
        if held.role == PERTURBATION:
            training_changes = held.changes_from_start[fold.train]
            nearest = cross_correlations(first.T, training_changes.T).argmax(1)
            pairs[BEST_OTHER] = ChangePair(training_changes[nearest], second)
        return pairs

    def _predict_probes(
        self, held: HeldOut, folds: list[Fold], probed: list[ScoredMethod]
    ) -> Iterator[ChangesByMethod]:
        """Changes that the probes of the methods `probed` predict in each fold."""
        seed = held.context.options.seed
        for fold, predicted in zip(folds, held.predictions(folds)):
            probes: ChangesByMethod = {}
            for method in probed:
                noise = self.config.probe_noise
                probes |= make_probes(method, predicted[method], fold.test, noise, seed)
            yield probes

    def _tabulate_doses(
        self, held: HeldOut, errors: ByMethod, probed: list[ScoredMethod]
    ) -> list[dict[str, Any]]:
        """Row of each compound, with errors of the curves and of the model's best method."""
        unit = str(self.config.dose_unit or "")
        if self.config.doses == "names":
            _, _, unit = parse_names(held.name_in_dataset, self.config.dose_unit)
        methods = [LINEAR, HILL, *(method for method in probed if method.kind == "model")]
        return tabulate_curves(
            held.changes_from_start,
            held.perturbation,
            held.log_dose,
            f" ({unit})" if unit else "",
            {method: errors[method] for method in methods},
        )

    def _tabulate(self, scored: ScoredRoles) -> TaskResult:
        """Result with rows of ceilings and probes below the table, and with the differences of methods that read
        gene vectors.
        """
        columns = scored.columns
        judged = [column for column in columns if column.select_kind("model")]
        differences = []
        for column in judged:
            differences += column.differences()
        source_differences, comparisons = self._compare_gene_sources(columns)
        result = tabulate(
            columns,
            scored.figures,
            judged,
            rows=table_rows(columns) + table_rows(scored.reference_columns),
            differences=differences + source_differences,
            notes=scored.notes + comparisons,
        )
        return replace(result, tables=scored.tables)

    def _compare_gene_sources(
        self, columns: list[ScoreColumn]
    ) -> tuple[list[Difference], list[str]]:
        """Differences to the mean of methods that read gene vectors, and a sentence on the best
        method of each source.
        """
        sources = [method.features for method in self._list_gene_sources()]
        differences = []
        notes = []
        for column in columns:
            groups = group_by_features(
                method for method in column.scores if method.features in sources
            )
            for methods in groups.values():
                differences += [column.difference(method, MEAN) for method in methods]
                notes.append(column.compare(column.best(methods), MEAN).sentence)
        return differences, notes

    def _list_gene_sources(self) -> list[ScoredMethod]:
        """Sources of gene vectors that are compared with the mean: controls and files."""
        return [CO_EXPRESSION, *map(prior_method, self.config.priors)]


def describe_split(held: HeldOut, folds_by_heading: Mapping[str, list[Fold]]) -> dict[str, Any]:
    """Figures of the units of a split file, for metrics.json."""
    n_by_split = {}
    for split in SPLITS:
        n_by_split[f"split_{split}"] = int((held.split_of_unit == split).sum())
    unnamed = held.perturbation[held.split_of_unit == ""]
    figures: dict[str, Any] = {
        **n_by_split,
        "split_unnamed": ", ".join(np.unique(unnamed)) or "none",
    }
    for heading, [fold] in folds_by_heading.items():
        figures[f"tested {heading}"] = len(fold.test)
    return figures


def check_split(
    held: HeldOut, split_file: SplitFile, folds_by_heading: Mapping[str, list[Fold]]
) -> list[str]:
    """Sentences on statements of the file that the dataset or the model contradicts."""
    notes = []
    is_test = held.split_of_unit == TEST
    names = np.array(held.unit_names)
    seen = names[is_test & ~held.unseen]
    if len(seen):
        notes.append(
            f"{len(seen):,} of {is_test.sum():,} tested units of {split_file.path} are left out: the model saw cells "
            f"of them, the first {seen[0]}; hold them out of its corpus (shard.split_by)."
        )
    for heading, [fold] in folds_by_heading.items():
        for stated in sorted({*split_file.stated_novelty.values()} - {heading}):
            others = [
                unit
                for unit in fold.test
                if split_file.stated_novelty.get(held.perturbation[unit]) == stated
            ]
            if others:
                notes.append(
                    f"{len(others):,} perturbations that {split_file.path} counts as {stated}, the first "
                    f"{names[others[0]]}, are scored as {heading}, by the perturbations in {TRAIN}."
                )
    if split_file.undivided:
        notes.append(
            f"{len(split_file.undivided):,} perturbations, the first {split_file.undivided[0]}, have the names of two "
            "others but count as one; if they are combinations, set combination_delimiter."
        )
    return notes


def make_column(metric: str, heading: str, scores: ByMethod) -> ScoreColumn | None:
    """Column of the methods that have the metric; None if none has it, or the ceiling lacks it.

    `heading` has the tested units in words, such as `new perturbation`.
    """
    defined = {method: values for method, values in scores.items() if np.isfinite(values).any()}
    ceiling = defined.get(CEILING)
    methods = {method: values for method, values in defined.items() if is_ranked(method)}
    if not methods or ceiling is None:
        return None
    return ScoreColumn(
        f"{metric}, {heading}",
        f"{METRICS[metric]}, {heading}",
        methods,
        trivial={method: methods[method] for method in (NO_CHANGE, MEAN) if method in methods},
        ceiling=(CEILING, ceiling),
        lower_is_better=metric == "MAE",
    )


def make_reference_column(column: ScoreColumn, scores: ByMethod) -> ScoreColumn:
    """Column of the ceilings and probes that have the metric of `column`."""
    references = {
        method: values
        for method, values in scores.items()
        if not is_ranked(method) and np.isfinite(values).any()
    }
    return replace(column, scores=references)


def is_ranked(method: ScoredMethod) -> bool:
    return method.kind not in ("ceiling", "probe")
