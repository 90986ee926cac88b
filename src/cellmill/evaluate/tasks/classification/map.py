"""Task `map`: cells of left-out donors, mapped to an atlas of the cells of the other donors.

Each fold leaves out one donor or several. The cells of these donors are the tested cells. The cells of the
other donors are the fitted cells: an atlas is made of them, and logistic regressions are fitted on them. If
donors make no folds, batches take the place of donors.

Each method gives a tested cell a label and a novelty. The novelty of the atlas is the distance of the cell
to its neighbours in the atlas. The novelty of a regression is 1 minus its highest probability. A method
refuses a cell, and gives it no label, if the novelty is in the top `refuse_frac` of usual novelty. Usual
novelty is the novelty of fitted cells, each of which is predicted without the cells of its own donor. If
all fitted cells have one donor, the atlas leaves out only the cell itself, and regressions refuse no cell.

Scores of all tested cells:

- *accuracy*: a refused cell is wrong, and so is a cell of a type that no fitted cell has
- *credit*, if all labels are terms of the Cell Ontology: a superclass of the right term gets a part of
  the credit (`evaluate/atlas/ontology.py`)

Then one cell type at a time is also left out of the fitted cells. Scores of the tested cells of this type,
the *new type*:

- *refused, new type*: the share that is refused
- *novelty AUROC*: whether their novelty is higher than the novelty of the other tested cells

Figure `refused_of_known_types` is the share of tested cells that are refused although fitted cells have
their type.

In an interval, each fold is a repetition. Folds are independent units, and so are new types.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

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

VOTE = "vote of donors"  # name of the atlas's classifier
NONE = "none of these"  # stands in for the label of a cell without a label, such as a refused cell
INNER_FOLDS = 5  # at most this many folds of the fitted cells tell what novelty is usual
# Novelty of a cell without neighbours in the atlas. Such a cell is more novel than any other, and AUROC
# needs finite numbers.
MAX_NOVELTY = float(np.finfo(np.float32).max)
# In a fold, a type is left out only if at least this many tested cells have the type, and at least this
# many have another type.
MIN_TESTED = 5
# Seconds to map the tested cells of a fold once, by one kind of features, for each tested or fitted cell.
# Making the atlas and fitting the regressions are included.
MAP_CELL_S = 1e-4


@dataclass(frozen=True)
class MappedCells:
    """Some cells as one method maps them."""

    labels: np.ndarray  # (cells,) text; NONE for a cell without a label
    is_refused: np.ndarray  # (cells,) bool
    novelty: np.ndarray  # (cells,) float64
    can_refuse: bool = True  # False if no fitted cell tells what novelty is usual


@dataclass(frozen=True)
class LabelledVectors:
    """Features of labelled cells by one method, and the labels and donors of the cells."""

    features_method: ScoredMethod  # names the features; has no classifier
    vectors: np.ndarray  # (cells, width) float32
    labels: np.ndarray  # (cells,) text
    donors: np.ndarray  # (cells,) text

    def fit_probabilities(
        self, fitted: np.ndarray, tested: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fit a logistic regression on the cells `fitted`, and predict the cells `tested` (both indices).

        Returns the classes, (classes,) text, and their probabilities, (tested cells, classes) float64.
        """
        model = LogisticRegression(standardised=True).fit(self.vectors[fitted], self.labels[fitted])
        logits = self.vectors[tested].astype(np.float64) @ model.coefficients + model.intercepts
        return model.classes, softmax(logits)

    def measure_usual_novelty(self, fitted: np.ndarray) -> np.ndarray:
        """Measure the novelty of fitted cells by regressions, `(fitted cells,)` float64.

        Each regression is fitted without the donors of the cells that it measures. NaN for a cell that no
        such regression measures, for example because there is only one donor. `fitted` are indices.
        """
        novelty = np.full(len(fitted), np.nan)
        donors = pd.Series(self.donors[fitted])
        for inner in split_groups(donors, INNER_FOLDS, self.labels[fitted]):
            _, probabilities = self.fit_probabilities(fitted[inner.fitted], fitted[inner.tested])
            novelty[inner.tested] = 1 - probabilities.max(axis=1)
        return novelty


class NewTypeScores:
    """Scores of the cells of left-out types.

    Each score is `(folds, types)` by method, with NaN for a type that a fold does not test.
    """

    def __init__(self, n_folds: int, types: list[str]) -> None:
        self.types = types
        self.shape = n_folds, len(types)
        self.refused_shares: ByMethod = {}
        self.aurocs: ByMethod = {}

    def record(
        self,
        fold: int,
        new_type: str,
        method: ScoredMethod,
        is_new: np.ndarray,
        mapped: MappedCells,
    ) -> None:
        """Score the tested cells of a fold, which `method` mapped without the type `new_type`.

        `is_new`, (tested cells,) bool, marks the cells of that type.
        """
        column = self.types.index(new_type)
        recorded = [(self.aurocs, roc_auc_score(is_new, mapped.novelty))]
        if mapped.can_refuse:
            recorded.append((self.refused_shares, mapped.is_refused[is_new].mean()))
        for scores, score in recorded:
            scores.setdefault(method, np.full(self.shape, np.nan))[fold, column] = score

    def make_columns(self) -> list[ScoreColumn]:
        """Make the columns of the AUROC and of the refused share; none if no type was tested."""
        columns = [
            ScoreColumn("novelty AUROC", "AUROC of types not seen", self.aurocs),
            ScoreColumn(
                "refused, new type", "share refused of types not seen", self.refused_shares
            ),
        ]
        return [
            replace(column, n_units=_count_units(column.scores))
            for column in columns
            if column.scores
        ]


def _count_units(scores: ByMethod) -> int:
    """Count the folds that have a score, and the types that have a score; return the smaller number."""
    is_tested = np.isfinite(np.stack([*scores.values()])).any(axis=0)  # (folds, types)
    return int(min(is_tested.any(axis=0).sum(), is_tested.any(axis=1).sum()))


class MapCells(Task):
    config: MapConfig

    def run(self, context: Context) -> TaskResult:
        """Score the atlas and a regression on each kind of features.

        Raises Skipped without a label, with too few classes, or without two donors or batches.
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

        new_types = [*chosen.classes][: config.max_types]
        new_type_scores = NewTypeScores(len(folds), new_types)
        predictions = ClassPredictions(labels, len(folds), _list_other_classes(labels, folds))
        # numbers of tested cells with a type that fitted cells have: all, and the refused cells among them
        n_known: Counter[ScoredMethod] = Counter()
        n_known_refused: Counter[ScoredMethod] = Counter()
        with without_overhead():
            for (repetition, fitted, tested), (features_method, values) in product(
                folds, features.items()
            ):
                vectors = np.asarray(values, np.float32)
                cells = LabelledVectors(features_method, vectors, labels, donors)

                # map the tested cells to all fitted cells
                is_known = np.isin(labels[tested], labels[fitted])
                for method, mapped in self._map_cells(cells, fitted, tested).items():
                    predictions.record("", repetition, tested, {method: mapped.labels})
                    if mapped.can_refuse:
                        n_known[method] += int(is_known.sum())
                        n_known_refused[method] += int(mapped.is_refused[is_known].sum())

                # map the tested cells again, without the fitted cells of one type at a time
                for new_type in new_types:
                    is_new = labels[tested] == new_type
                    mapped_by_method = self._map_new_type(cells, fitted, tested, new_type)
                    for method, mapped in mapped_by_method.items():
                        new_type_scores.record(repetition, new_type, method, is_new, mapped)

        metric = f"accuracy, {PLURALS[role]} not seen"
        columns = [predictions.column("", "accuracy", "accuracy", metric)]
        if find_terms(sorted(chosen.classes)) is not None:
            columns.append(_make_credit_column(predictions))
        # the cells of a donor are not independent of each other
        columns = [replace(column, n_units=len(folds)) for column in columns]
        columns += new_type_scores.make_columns()
        figures = chosen.figures | {
            "folds": len(folds),
            "types_left_out": ", ".join(new_types),
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
        # `cell_features` returns three features without ALL_GENES, and one more for each external model
        n_maps = n_folds * (1 + n_types) * (3 + sizes.n_external)
        return sizes.features_s(n) + n_maps * MAP_CELL_S * n

    def _map_new_type(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray, new_type: str
    ) -> dict[ScoredMethod, MappedCells]:
        """Map the cells `tested` without the fitted cells of type `new_type`, by each method.

        Returns no method if too few tested cells have this type or another type, or if the remaining fitted
        cells have a single class.
        """
        is_new = cells.labels[tested] == new_type
        is_kept = cells.labels[fitted] != new_type
        n_fewest = min(is_new.sum(), (~is_new).sum())
        if n_fewest < MIN_TESTED or len(np.unique(cells.labels[fitted[is_kept]])) < 2:
            return {}
        return self._map_cells(cells, fitted[is_kept], tested)

    def _map_cells(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray
    ) -> dict[ScoredMethod, MappedCells]:
        """Map the cells `tested` by an atlas of the cells `fitted`, and by a regression fitted on them.

        `fitted` and `tested` are indices of `cells`.
        """
        by_vote = replace(cells.features_method, classifier=VOTE)
        by_regression = replace(cells.features_method, classifier=REGRESSION)
        return {
            by_vote: self._map_by_vote(cells, fitted, tested),
            by_regression: self._map_by_regression(cells, fitted, tested),
        }

    def _map_by_vote(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray
    ) -> MappedCells:
        """Make an atlas of the cells `fitted`, and map the cells `tested` to it (both indices)."""
        embedded = EmbeddedCells(
            dataset="",
            label_column="",
            vectors=cells.vectors[fitted],
            rows=fitted,
            labels=cells.labels[fitted].astype(object),
            donors=cells.donors[fitted],
        )
        atlas_options = Atlas.model_validate({"neighbors": self.config.neighbors})
        atlas = make_atlas([embedded], "", atlas_options)
        map_options = Map.model_validate({"refuse_frac": self.config.refuse_frac})
        mapping = map_vectors(atlas, cells.vectors[tested], Seen(None, ""), map_options)
        labels = pd.Series(mapping.labels).astype(object)
        distances = mapping.obs[DISTANCE].astype(np.float64)
        return MappedCells(
            labels.fillna(NONE).to_numpy(str),
            np.asarray(mapping.obs[REFUSED]),
            np.nan_to_num(distances, nan=MAX_NOVELTY),
        )

    def _map_by_regression(
        self, cells: LabelledVectors, fitted: np.ndarray, tested: np.ndarray
    ) -> MappedCells:
        """Predict the cells `tested` by a logistic regression on the cells `fitted` (both indices)."""
        classes, probabilities = cells.fit_probabilities(fitted, tested)
        novelty = 1 - probabilities.max(axis=1)

        # refuse cells by their percentile among the usual novelty
        usual = cells.measure_usual_novelty(fitted)
        usual = usual[np.isfinite(usual)]
        percentiles = find_percentiles(usual, novelty)
        is_refused = find_refused(percentiles, self.config.refuse_frac)

        labels = classes[probabilities.argmax(axis=1)].astype(object)
        labels[is_refused] = NONE
        return MappedCells(labels.astype(str), is_refused, novelty, can_refuse=len(usual) > 0)


def _list_other_classes(labels: np.ndarray, folds: list[Fold]) -> tuple[str, ...]:
    """List the classes that methods may predict besides `labels`: NONE, and terms of the Cell Ontology.

    The atlas of a fold may predict superclasses of its labels. Whether the atlas writes superclasses as ids
    or as names depends on the labels of its fitted cells. So the terms of all folds are listed.
    """
    others = {NONE}
    for fold in folds:
        terms = find_terms(sorted({*labels[fold.fitted].tolist()}))
        others.update(terms.names if terms is not None else ())
    return tuple(others)


def _make_credit_column(predictions: ClassPredictions) -> ScoreColumn:
    """Make the column of partial credit for predicted terms of the Cell Ontology."""
    credit = credit_labels(predictions.class_names.tolist())  # (predicted classes, true classes)
    scores = predictions.look_up("", credit.T)
    return ScoreColumn("credit", "credit in the Cell Ontology", scores)
