"""Task `map`: cells of left-out donors, mapped to an atlas of the other donors' cells.

Known types are scored by accuracy, in which a refused cell is wrong. Then one type at a time is
left out of the atlas, too: how often are its cells refused, and how well does novelty (the
distance; of a regression 1 minus the highest probability) tell them from other cells (AUROC)?
A regression refuses from the same quantile of the novelty of its own training cells, predicted
without their donors. Terms of the Cell Ontology have a column `credit`: a superclass of the right term
counts as the share of its information (`evaluate/atlas/ontology.py`).

Left-out donors are the repetitions of an interval; its units are cells, or types that are left out.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from cellmill.config.parts.tasks import MapConfig
from cellmill.config.run import Atlas, Map
from cellmill.data.arrays import text_values
from cellmill.evaluate.atlas.build import EmbeddedCells, make_atlas
from cellmill.evaluate.atlas.mapping import DISTANCE, REFUSED, map_vectors
from cellmill.evaluate.atlas.ontology import credit_labels, find_terms
from cellmill.evaluate.classifiers.fitted import small_problems
from cellmill.evaluate.classifiers.logistic import LogisticRegression
from cellmill.evaluate.features import cell_features
from cellmill.evaluate.inference.seen import Seen
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.methods import ALL_GENES, REGRESSION, Arrays
from cellmill.evaluate.scores import ClassPredictions, ScoreColumn, tabulate
from cellmill.evaluate.splits import split_groups
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.models.objectives.shared.calibration import softmax
from cellmill.runs.results import TaskResult

VOTE = "vote of donors"
NONE = "none of these"
INNER_FOLDS = 5
LARGEST = float(np.finfo(np.float32).max)  # novelty of a cell without neighbours
MIN_TESTED = 5  # cells of a left-out type, and other cells, in a fold


@dataclass(frozen=True)
class MappedCells:
    """Results of one method for some cells."""

    labels: np.ndarray  # (cells,) text; NONE for a refused cell
    refused: np.ndarray  # (cells,) bool
    novelty: np.ndarray  # (cells,) float64


class MapCells(Task):
    config: MapConfig

    def run(self, context: Context) -> TaskResult:
        """Scores of the atlas and of regressions by features; skipped without two donors or
        batches.
        """
        config = self.config
        needed_by = "evaluate.tasks.map.min_cells"
        chosen = labelled_cells(context, "map", config.min_cells, needed_by)
        labels = chosen.labels
        folds: list[tuple[np.ndarray, np.ndarray]] = []
        donors = np.zeros(0, object)
        for role in ("donor", "batch"):
            if role in context.roles and not folds:
                groups = context.roles[role].iloc[chosen.cells]
                donors = text_values(groups)
                for train, test in split_groups(groups, config.most_folds):
                    if len(np.unique(labels[train])) > 1:
                        folds.append((train, test))
        if not folds:
            raise Skipped("the scored cells have no two donors or batches", chosen.figures)
        features = cell_features(context, chosen.cells)
        del features[ALL_GENES]  # distances among all genes are those of depth
        types = [*chosen.classes][: config.max_types]
        terms = find_terms(sorted(chosen.classes))
        others = (NONE, *(terms.names if terms is not None else ()))
        predictions = ClassPredictions(labels, len(folds), others)
        shape = (len(folds), len(types))
        refused: Arrays = {}
        auroc: Arrays = {}
        n_known = 0
        n_refused: dict[Any, float] = {}
        with small_problems():
            for number, (train, test) in enumerate(folds):
                n_known += len(test)
                for method, values in features.items():
                    vectors = np.asarray(values, np.float32)
                    by_vote = replace(method, classifier=VOTE)
                    by_regression = replace(method, classifier=REGRESSION)
                    inner = _predict_inner(vectors, labels, donors, train)
                    for one, mapped in (
                        (by_vote, self._vote(vectors, labels, donors, train, test)),
                        (by_regression, self._regress(vectors, labels, train, test, inner)),
                    ):
                        predictions.record("", number, test, {one: mapped.labels})
                        n_refused[one] = n_refused.get(one, 0) + int(mapped.refused.sum())
                    for column, name in enumerate(types):
                        is_new = labels[test] == name
                        kept = train[labels[train] != name]
                        n_fewest = min(is_new.sum(), (~is_new).sum())
                        if n_fewest < MIN_TESTED or len(np.unique(labels[kept])) < 2:
                            continue
                        left = inner[labels[train] != name]
                        for one, mapped in (
                            (by_vote, self._vote(vectors, labels, donors, kept, test)),
                            (by_regression, self._regress(vectors, labels, kept, test, left)),
                        ):
                            for scores, value in (
                                (refused, mapped.refused[is_new].mean()),
                                (auroc, roc_auc_score(is_new, mapped.novelty)),
                            ):
                                table = scores.setdefault(one, np.full(shape, np.nan))
                                table[number, column] = value
        columns = [
            predictions.column("", "accuracy", "accuracy", "accuracy, donors not seen"),
        ]
        if terms is not None:
            columns.append(_credit_column(predictions))
        if refused:
            columns += [
                ScoreColumn("novelty AUROC", "AUROC of types not seen", auroc),
                ScoreColumn("refused, new type", "share refused of types not seen", refused),
            ]
        figures = chosen.figures | {
            "folds": len(folds),
            "types_left_out": ", ".join(types),
            "refuse_frac": config.refuse_frac,
            "refused_of_known_types": {method.name: n / n_known for method, n in n_refused.items()},
        }
        return tabulate(columns, figures)

    def _vote(
        self,
        vectors: np.ndarray,
        labels: np.ndarray,
        donors: np.ndarray,
        train: np.ndarray,
        test: np.ndarray,
    ) -> MappedCells:
        """The cells `test` mapped to an atlas of the cells `train`, both indices of cells."""
        texts = labels[train].astype(object)
        cells = EmbeddedCells("", "", vectors[train], train, texts, donors[train])
        section = Atlas.model_validate({"neighbors": self.config.neighbors})
        atlas = make_atlas([cells], "", section)
        how = Map.model_validate({"refuse_frac": self.config.refuse_frac})
        mapped = map_vectors(atlas, vectors[test], Seen(None, ""), how)
        names = pd.Series(mapped.labels).astype(object)
        novelty = np.nan_to_num(mapped.obs[DISTANCE].astype(np.float64), nan=LARGEST)
        return MappedCells(
            names.fillna(NONE).to_numpy(str), np.asarray(mapped.obs[REFUSED]), novelty
        )

    def _regress(
        self,
        vectors: np.ndarray,
        labels: np.ndarray,
        train: np.ndarray,
        test: np.ndarray,
        inner: np.ndarray,
    ) -> MappedCells:
        """The same by a logistic regression; `inner` is the novelty of training cells."""
        classes, probabilities = _fit_probabilities(vectors, labels, train, test)
        novelty = 1 - probabilities.max(axis=1)
        known = np.sort(inner[np.isfinite(inner)])
        percentile = np.searchsorted(known, novelty) / (len(known) + 1)
        refused = percentile >= 1 - self.config.refuse_frac - 1e-9
        names = classes[probabilities.argmax(axis=1)].astype(object)
        names[refused] = NONE
        return MappedCells(names.astype(str), refused, novelty)


def _predict_inner(
    vectors: np.ndarray, labels: np.ndarray, donors: np.ndarray, train: np.ndarray
) -> np.ndarray:
    """Novelty of training cells by regressions without their donors, `(len(train),)`; NaN where
    there is none.
    """
    novelty = np.full(len(train), np.nan)
    for inner_train, inner_test in split_groups(pd.Series(donors[train]), INNER_FOLDS):
        fitted = train[inner_train]
        if len(np.unique(labels[fitted])) > 1:
            _, probabilities = _fit_probabilities(vectors, labels, fitted, train[inner_test])
            novelty[inner_test] = 1 - probabilities.max(axis=1)
    return novelty


def _fit_probabilities(
    vectors: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Classes, and their probabilities for the cells `test`, `(len(test), classes)`."""
    model = LogisticRegression(standardised=True).fit(vectors[train], labels[train])
    logits = vectors[test].astype(np.float64) @ model.coefficients + model.intercepts
    return model.classes, softmax(logits)


def _credit_column(predictions: ClassPredictions) -> ScoreColumn:
    """Partial credit of predicted terms (`credit_labels`)."""
    table = credit_labels(predictions.classes.tolist())
    scores = {}
    for method, class_ids in predictions.by_condition[""].items():
        credit = table[class_ids, predictions.truth]
        scores[method] = np.where(class_ids < 0, np.nan, credit)
    return ScoreColumn("credit", "credit in the Cell Ontology", scores)
