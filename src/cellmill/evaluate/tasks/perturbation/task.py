"""Task `perturbation`: predicted changes of expression under unseen perturbations, or in unseen
donors and contexts.

Units and changes are defined in `profiles.py`, rows and ceilings in docs/perturbations.md. If the
model saw cells of some perturbations only, the others are tested, once. If it saw none, all are
tested in folds; if it saw all, none is tested. A unit's own perturbed genes are left out of its
scores. Intervals are over perturbations and repetitions.
"""

from collections.abc import Iterator, Mapping
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
    describe_linear_doses,
    parse_names,
    tabulate_curves,
)
from cellmill.evaluate.tasks.perturbation.folds import explain_no_folds, folds_by_heading
from cellmill.evaluate.tasks.perturbation.gene_features import CO_EXPRESSION, prior_method
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.probes import describe_better_probes
from cellmill.evaluate.tasks.perturbation.profiles import check_changes, controlled_role
from cellmill.evaluate.tasks.perturbation.scoring import CEILING, score_role
from cellmill.evaluate.tasks.perturbation.split_file import SPLITS, TEST, TRAIN, SplitFile
from cellmill.evaluate.tasks.perturbation.units import (
    DOSE,
    NO_CONTROLS,
    PERTURBATION,
    RoleUnits,
)
from cellmill.runs.results import Difference, ScoredMethod, TaskResult


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
        for units in self._hold_out_roles(context):
            self._score_role(units, scored)
        if not scored.columns:
            reasons = scored.reasons or [NO_CONTROLS]
            raise Skipped("; ".join(reasons), scored.figures)
        return self._tabulate(scored)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        return 0.8 + sizes.read_s() + sizes.components_s(sizes.n_training)

    def _hold_out_roles(self, context: Context) -> Iterator[RoleUnits]:
        """Units of the split file, or of each role of `held_out` that has strata with enough controls,
        and of doses.
        """
        if self.config.split_file is not None:
            yield RoleUnits.read(
                context, self.config, PERTURBATION, SplitFile.read(self.config, context)
            )
            return
        doses = [] if self.config.doses is None else [DOSE]
        for role in [*self.config.held_out, *doses]:
            is_context = role in context.roles and role != controlled_role(context.roles)
            if role in (PERTURBATION, DOSE) or is_context:
                try:
                    units = RoleUnits.read(context, self.config, role)
                except Skipped:  # a role without controls leaves the others to score
                    continue
                yield units

    def _score_role(self, units: RoleUnits, scored: ScoredRoles) -> None:
        """Add the columns, figures, notes and tables of a role to `scored`."""
        predictor = ChangePredictor(units)
        by_heading = folds_by_heading(units)
        all_folds = [*chain.from_iterable(by_heading.values())]
        scored.figures |= self._describe_units(predictor, all_folds)
        if not by_heading:
            scored.reasons.append(explain_no_folds(units))
        if units.split_file is not None:
            scored.figures |= describe_split(units, by_heading)
            scored.notes += check_split(units, units.split_file, by_heading)
        for heading, folds in by_heading.items():
            scores = score_role(predictor, folds)
            if units.role == DOSE:
                scored.notes += describe_linear_doses(
                    predictor.changes_from_start, folds, units.perturbation, units.log_dose
                )
                scored.tables["dose curves"] = self._tabulate_doses(
                    predictor, scores.predictions["MAE"], scores.probed
                )
            for metric, predictions in scores.predictions.items():
                ceilings = scores.ceilings[metric]
                probes = scores.probes[metric]
                column = make_column(metric, heading, predictions, ceilings)
                if column is not None:
                    scored.columns.append(column)
                    references = find_defined(ceilings | probes)
                    scored.reference_columns.append(replace(column, scores=references))
                    scored.notes += describe_better_probes(
                        column, probes, scores.probed, self.config.probe_noise
                    )

    def _describe_units(self, predictor: ChangePredictor, folds: list[Fold]) -> dict[str, Any]:
        """Figures of the units of a role, for metrics.json."""
        units = predictor.units
        role = units.role
        tested = {name for fold in folds for name in units.perturbation[fold.test]}
        genes = dict(zip(units.perturbation, units.genes))
        figures: dict[str, Any] = {
            f"{role}_perturbations_tested": len(tested),
            f"{role}_perturbations_with_a_gene": sum(map(bool, genes.values())),
            f"{role}_groups": len(np.unique(units.group_of_unit)),
            f"{role}_folds": len(folds),
            f"{role}_left_out": ", ".join(units.left_out) or "none",
        }
        if not folds:
            figures[f"{role}_no_folds"] = explain_no_folds(units)
        if role == PERTURBATION:
            for source in self._list_gene_sources():
                has_vector = np.isfinite(predictor.features[source]).all(1)
                n = np.unique(units.perturbation[has_vector]).size
                figures[f"perturbation_perturbations_with_{source.name}"] = n
        return figures

    def _tabulate_doses(
        self, predictor: ChangePredictor, errors: ByMethod, probed: list[ScoredMethod]
    ) -> list[dict[str, Any]]:
        """Row of each compound, with errors of the curves and of the model's best method."""
        units = predictor.units
        unit = str(self.config.dose_unit or "")
        if self.config.doses == "names":
            _, _, unit = parse_names(units.name_in_dataset, self.config.dose_unit)
        methods = [LINEAR, HILL, *(method for method in probed if method.kind == "model")]
        return tabulate_curves(
            predictor.changes_from_start,
            units.perturbation,
            units.log_dose,
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


def describe_split(units: RoleUnits, by_heading: Mapping[str, list[Fold]]) -> dict[str, Any]:
    """Figures of the units of a split file, for metrics.json."""
    n_by_split = {}
    for split in SPLITS:
        n_by_split[f"split_{split}"] = int((units.split_of_unit == split).sum())
    unnamed = units.perturbation[units.split_of_unit == ""]
    figures: dict[str, Any] = {
        **n_by_split,
        "split_unnamed": ", ".join(np.unique(unnamed)) or "none",
    }
    for heading, [fold] in by_heading.items():
        figures[f"tested {heading}"] = len(fold.test)
    return figures


def check_split(
    units: RoleUnits, split_file: SplitFile, by_heading: Mapping[str, list[Fold]]
) -> list[str]:
    """Sentences on statements of the file that the dataset or the model contradicts."""
    notes = []
    is_test = units.split_of_unit == TEST
    names = np.array(units.unit_names)
    seen = names[is_test & ~units.unseen]
    if len(seen):
        notes.append(
            f"{len(seen):,} of {is_test.sum():,} tested units of {split_file.path} are left out: the model saw cells "
            f"of them, the first {seen[0]}; hold them out of its corpus (shard.split_by)."
        )
    for heading, [fold] in by_heading.items():
        for stated in sorted({*split_file.stated_novelty.values()} - {heading}):
            others = [
                unit
                for unit in fold.test
                if split_file.stated_novelty.get(units.perturbation[unit]) == stated
            ]
            if others:
                notes.append(
                    f"{len(others):,} units that {split_file.path} counts as {stated}, the first "
                    f"{names[others[0]]}, are scored as {heading}, by the perturbations in {TRAIN}."
                )
    if split_file.undivided:
        notes.append(
            f"{len(split_file.undivided):,} perturbations, the first {split_file.undivided[0]}, have the names of two "
            "others but count as one; if they are combinations, set combination_delimiter."
        )
    return notes


def make_column(
    metric: str, heading: str, predictions: ByMethod, ceilings: ByMethod
) -> ScoreColumn | None:
    """Column of the methods that have the metric; None if none has it, or the ceiling lacks it.

    `heading` has the tested units in words, such as `new perturbation`.
    """
    methods = find_defined(predictions)
    ceiling = find_defined(ceilings).get(CEILING)
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


def find_defined(scores: ByMethod) -> ByMethod:
    """Scores of the methods that have any."""
    return {method: values for method, values in scores.items() if np.isfinite(values).any()}
