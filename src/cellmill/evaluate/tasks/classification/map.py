"""Task `map`: cells of left-out donors, mapped to an atlas of the other donors' cells.

All tested cells are scored by accuracy, in which a refused cell is wrong. So is a cell of a type that
the atlas lacks, but `refused_of_known_types` does not count it. Then one type at a time is left out of
the atlas, too. Two columns score its cells: the share that is refused, and the AUROC of
their novelty against the novelty of other cells. Novelty is the distance to the atlas, or for a regression
1 minus the highest probability. A cell is refused if its novelty is in the top `refuse_frac` of the
novelty of fitted cells, each predicted without its donor. Labels that are terms of the Cell Ontology have
a column `credit`: a superclass of the right term counts as its share of the information
(`evaluate/atlas/ontology.py`).

Left-out donors are the repetitions of an interval, and its independent units, as left-out types are.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from cellmill.config.parts.tasks import MapConfig
from cellmill.config.run import Atlas, Map
from cellmill.data.arrays import text_values
from cellmill.evaluate.atlas.build import EmbeddedCells, make_atlas
from cellmill.evaluate.atlas.mapping import find_percentiles, find_refused, map_vectors
from cellmill.evaluate.atlas.ontology import credit_labels, find_terms
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.classifiers.fitted import without_overhead
from cellmill.evaluate.classifiers.logistic import LogisticRegression
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.inference.annotations import DISTANCE, REFUSED
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.methods import ALL_GENES, REGRESSION, ByMethod
from cellmill.evaluate.scores import ScoreColumn, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.evaluate.splits import (
    PLURALS,
    Fold,
    explain_no_groups,
    split_donors,
    split_groups,
)
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.models.objectives.shared.calibration import softmax
from cellmill.runs.results import ScoredMethod, TaskResult

VOTE = "vote of donors"
NONE = "none of these"
INNER_FOLDS = 5
MAX_NOVELTY = float(np.finfo(np.float32).max)  # novelty of a cell without neighbours
MIN_TESTED = 5  # cells of a left-out type, and other cells, in a fold


@dataclass(frozen=True)
class MethodResult:
    """Results of one method for some cells."""

    labels: np.ndarray  # (cells,) text; NONE for a refused cell
    is_refused: np.ndarray  # (cells,) bool
    novelty: np.ndarray  # (cells,) float64
    can_refuse: bool = True  # False if no fitted cell tells what novelty is usual


@dataclass(frozen=True)
class LabelledVectors:
    """Labelled cells with their features and donors."""

    features_method: ScoredMethod  # names the features, without a classifier
    vectors: np.ndarray  # (cells, width) float32
    labels: np.ndarray  # (cells,) text
    donors: np.ndarray  # (cells,) text

    def fit_probabilities(
        self, fitted: np.ndarray, tested: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Classes of a regression fitted on cells `fitted`, and their probabilities for cells `tested`
        (both indices), `(len(tested), classes)`.
        """
        model = LogisticRegression(standardised=True).fit(self.vectors[fitted], self.labels[fitted])
        logits = self.vectors[tested].astype(np.float64) @ model.coefficients + model.intercepts
        return model.classes, softmax(logits)

    def novelty_without_donors(self, fitted: np.ndarray) -> np.ndarray:
        """Novelty of the cells `fitted` (indices) by regressions without their donors,
        `(len(fitted),)` float64; NaN for a cell without such a regression.
        """
        novelty = np.full(len(fitted), np.nan)
        donors = pd.Series(self.donors[fitted])
        for inner in split_groups(donors, INNER_FOLDS, self.labels[fitted]):
            _, probabilities = self.fit_probabilities(fitted[inner.fitted], fitted[inner.tested])
            novelty[inner.tested] = 1 - probabilities.max(axis=1)
        return novelty


class NewTypeScores:
    """Scores of the cells of left-out types, `(folds, types)` by method; NaN for a type that a fold
    does not test.
    """

    def __init__(self, n_folds: int, types: list[str]) -> None:
        self.types = types
        self.shape = n_folds, len(types)
        self.refused: ByMethod = {}
        self.auroc: ByMethod = {}

    def record(
        self, fold: int, name: str, method: ScoredMethod, is_new: np.ndarray, result: MethodResult
    ) -> None:
        """Score the tested cells of a fold; `is_new`, (cells,) bool, marks the cells of type `name`."""
        column = self.types.index(name)
        values = [(self.auroc, roc_auc_score(is_new, result.novelty))]
        if result.can_refuse:
            values.append((self.refused, result.is_refused[is_new].mean()))
        for scores, value in values:
            scores.setdefault(method, np.full(self.shape, np.nan))[fold, column] = value

    def columns(self) -> list[ScoreColumn]:
        """Columns of the AUROC and of the refused share; empty if no type was tested."""
        columns = [
            ScoreColumn("novelty AUROC", "AUROC of types not seen", self.auroc),
            ScoreColumn("refused, new type", "share refused of types not seen", self.refused),
        ]
        return [
            replace(column, n_units=_count_tested(column.scores))
            for column in columns
            if column.scores
        ]


def _count_tested(scores: ByMethod) -> int:
    """Count the folds and the types that have a score; return the smaller number."""
    is_tested = np.isfinite(np.stack([*scores.values()])).any(axis=0)
    return int(min(is_tested.any(axis=0).sum(), is_tested.any(axis=1).sum()))


class MapCells(Task):
    config: MapConfig

    def run(self, context: Context) -> TaskResult:
        """Scores of the atlas and of regressions by features; skipped without two donors or
        batches.
        """
        config = self.config
        chosen = labelled_cells(context, "map", config.min_cells, "evaluate.tasks.map.min_cells")
        labels = chosen.labels
        role, folds = split_donors(context.roles, chosen.cells, config.most_folds, labels)
        if not folds:
            raise Skipped(explain_no_groups(context.roles, chosen.cells), chosen.figures)
        donors = text_values(context.roles[role].iloc[chosen.cells])
        features = cell_features(context, chosen.cells)
        # distances over all genes mostly tell how deeply cells were sequenced
        del features[ALL_GENES]
        types = [*chosen.classes][: config.max_types]
        terms = find_terms(sorted(chosen.classes))
        predictions = ClassPredictions(labels, len(folds), _list_other_classes(labels, folds))
        new_types = NewTypeScores(len(folds), types)
        # tested cells of types in the atlas, by a method that can refuse
        n_known: Counter[ScoredMethod] = Counter()
        n_known_refused: Counter[ScoredMethod] = Counter()
        with without_overhead():
            for repetition, fitted, tested in folds:
                is_known = np.isin(labels[tested], labels[fitted])
                for features_method, values in features.items():
                    cells = LabelledVectors(
                        features_method, np.asarray(values, np.float32), labels, donors
                    )
                    mapped = self._map_cells(cells, fitted, tested)
                    for method, result in mapped.items():
                        predictions.record("", repetition, tested, {method: result.labels})
                        if result.can_refuse:
                            n_known[method] += int(is_known.sum())
                            n_known_refused[method] += int(result.is_refused[is_known].sum())
                    for name in types:
                        mapped = self._map_new_type(cells, fitted, tested, name)
                        for method, result in mapped.items():
                            new_types.record(
                                repetition, name, method, labels[tested] == name, result
                            )
        metric = f"accuracy, {PLURALS[role]} not seen"
        columns = [predictions.column("", "accuracy", "accuracy", metric)]
        if terms is not None:
            columns.append(_make_credit_column(predictions))
        # cells of a donor are not independent
        columns = [replace(column, n_units=len(folds)) for column in columns]
        columns += new_types.columns()
        figures = chosen.figures | {
            "folds": len(folds),
            "types_left_out": ", ".join(types),
            "refuse_frac": config.refuse_frac,
            "refused_of_known_types": {
                method.name: n_known_refused[method] / n for method, n in n_known.items() if n
            },
        }
        return tabulate(columns, figures)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_types = min(self.config.max_types, sizes.n_values["label"])
        most_folds = self.config.most_folds
        n_folds = sizes.count_folds(("donor",), most_folds) or sizes.count_folds(
            ("batch",), most_folds
        )
        n_maps = n_folds * (1 + n_types) * (3 + sizes.n_external)
        # each maps all cells: the atlas, the vote and the regressions
        return sizes.features_s(n) + n_maps * 1e-4 * n

    def _map_new_type(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray, name: str
    ) -> dict[ScoredMethod, MethodResult]:
        """As `_map_cells`, without the fitted cells of type `name`; empty if too few cells remain
        on either side.
        """
        is_new = cells.labels[tested] == name
        is_kept = cells.labels[fitted] != name
        n_fewest = min(is_new.sum(), (~is_new).sum())
        if n_fewest < MIN_TESTED or len(np.unique(cells.labels[fitted[is_kept]])) < 2:
            return {}
        return self._map_cells(cells, fitted[is_kept], tested)

    def _map_cells(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray
    ) -> dict[ScoredMethod, MethodResult]:
        """The cells `tested` mapped by the vote of an atlas of the cells `fitted`, and by a regression
        fitted on these.
        """
        return {
            replace(cells.features_method, classifier=VOTE): self._vote(cells, fitted, tested),
            replace(cells.features_method, classifier=REGRESSION): self._regress(
                cells, fitted, tested
            ),
        }

    def _vote(self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray) -> MethodResult:
        """The cells `tested` mapped to an atlas of the cells `fitted`, both indices of cells."""
        texts = cells.labels[fitted].astype(object)
        embedded = EmbeddedCells(
            dataset="",
            label_column="",
            vectors=cells.vectors[fitted],
            rows=fitted,
            labels=texts,
            donors=cells.donors[fitted],
        )
        section = Atlas.model_validate({"neighbors": self.config.neighbors})
        atlas = make_atlas([embedded], "", section)
        map_options = Map.model_validate({"refuse_frac": self.config.refuse_frac})
        mapped = map_vectors(atlas, cells.vectors[tested], Seen(None, ""), map_options)
        names = pd.Series(mapped.labels).astype(object)
        novelty = np.nan_to_num(mapped.obs[DISTANCE].astype(np.float64), nan=MAX_NOVELTY)
        return MethodResult(
            names.fillna(NONE).to_numpy(str), np.asarray(mapped.obs[REFUSED]), novelty
        )

    def _regress(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray
    ) -> MethodResult:
        """Classes of the cells `tested` by a logistic regression fitted on the cells `fitted`."""
        classes, probabilities = cells.fit_probabilities(fitted, tested)
        novelty = 1 - probabilities.max(axis=1)
        reference = cells.novelty_without_donors(fitted)
        reference = reference[np.isfinite(reference)]
        percentile = find_percentiles(reference, novelty)
        is_refused = find_refused(percentile, self.config.refuse_frac)
        names = classes[probabilities.argmax(axis=1)].astype(object)
        names[is_refused] = NONE
        return MethodResult(names.astype(str), is_refused, novelty, can_refuse=len(reference) > 0)


def _list_other_classes(labels: np.ndarray, folds: list[Fold]) -> tuple[str, ...]:
    """NONE, and the terms that the atlas of any fold may predict. The labels of a fold's atlas decide whether
    superclasses appear as ids or as names.
    """
    others = {NONE}
    for fold in folds:
        terms = find_terms(sorted({*labels[fold.fitted].tolist()}))
        others.update(terms.names if terms is not None else ())
    return tuple(others)


def _make_credit_column(predictions: ClassPredictions) -> ScoreColumn:
    """Partial credit of predicted terms (`credit_labels`)."""
    table = credit_labels(predictions.class_names.tolist())
    scores = predictions.look_up("", table.T)
    return ScoreColumn("credit", "credit in the Cell Ontology", scores)
