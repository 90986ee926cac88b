"""Classifiers of labels on cells that lost counts or genes, for tasks `low_depth` and `missing_genes`
(docs/evaluation.md).

Classifiers are fitted on whole cells (shifted), on cells of the level (matched), and on cells of
all levels. A user with cells of a panel or a shallow protocol knows the panel or the depth, and can
fit a PCA for it. So there are rows with a PCA of the model's training cells, over the same genes or
with the same share of counts. Rows "of the panel" have features of its genes only, also of whole
cells, for the model and the baselines.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import DegradedConfig
from cellmill.data.arrays import counts_per_10k, log_normalise, select_columns
from cellmill.evaluate import draws
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.classifiers.fitted import (
    make_cached_classifiers,
    predict_all,
    predict_majority,
    without_overhead,
)
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.evaluated_model import PCA_CELLS
from cellmill.evaluate.features.cell_features import compute_features, keep_columns, read_rows
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.labels import labelled_cells, predict_from_other_half
from cellmill.evaluate.methods import (
    MAJORITY,
    TRAINING_COMPONENTS,
    ByMethod,
    Features,
    add_note,
    select_cells,
    stack_cells,
)
from cellmill.evaluate.scores import tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import Fold, split_by_class
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.training_shards import read_counts
from cellmill.runs.results import TaskResult

MAX_CELLS = 2_000  # cells used at most: each level is embedded and classified again
WHOLE = "whole"
# cells that a classifier is fitted on: cells of the level, whole cells, cells of all levels
MATCHED = "matched"
SHIFTED = "shifted"
ALL_LEVELS = "trained on all levels"
# components of log(1 + counts per 1,000), in which a lost count weighs less than with 10,000
PER_1K = add_note(TRAINING_COMPONENTS, ", CP1k")

Degrade = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes)`, of the file or of the vocabulary, and a generator -> fewer counts."""
Project = Callable[[sp.csr_matrix], np.ndarray]
"""Counts `(cells, genes of the file)` -> components `(cells, components)`."""


@dataclass(frozen=True)
class ComponentFitter:
    """Fits principal components of the model's training cells to the genes or the depth of degraded
    cells.
    """

    context: Context
    counts: sp.csr_matrix  # of training cells, `(cells, genes of the vocabulary)`
    per_1k: Project

    @classmethod
    def read(cls, context: Context) -> Self | None:
        """Read the training cells; None if they have sequences or ranks instead of counts."""
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_counts(manifest, PCA_CELLS)
        return cls(context, counts, _fit_components(context, counts, log_per_1k))

    def project_panel(self, panel: sp.csr_matrix) -> np.ndarray:
        """Components of the cells with counts `panel`, fitted to their genes."""
        rows = self.context.gene_columns.target[np.unique(panel.indices)]
        in_panel = np.isin(np.arange(self.counts.shape[1]), rows[rows >= 0])
        training_panel = keep_columns(self.counts, in_panel)
        return _fit_components(self.context, training_panel, log_normalise)(panel)

    def fit_thinned(self, degrade: Degrade, generator: np.random.Generator) -> Project:
        """Components fitted on training cells after `degrade`."""
        return _fit_components(self.context, degrade(self.counts, generator), log_normalise)


class Degraded(Task):
    """Base of the tasks; a subclass says what cells lose, and which features are fitted to the loss."""

    config: DegradedConfig

    def losses(self) -> list[Degrade]:
        """The loss of counts or genes at each of `config.levels()`."""
        raise NotImplementedError

    def fit_to_level(
        self,
        level: str,
        counts: Mapping[str, sp.csr_matrix],
        by_level: Mapping[str, Features],
        fitter: ComponentFitter,
        generator: np.random.Generator,
    ) -> dict[str, Features]:
        """Features fitted for `level`, keyed by the level of the cells they describe: low_depth returns
        every level, missing_genes only this one.

        `counts` and `by_level` are the counts and the other features of the cells at every level.
        """
        raise NotImplementedError

    def run(self, context: Context) -> TaskResult:
        """A row for each pair of features and classifier. Columns are whole cells, and each level with
        each choice of cells that classifiers are fitted on.
        """
        config = self.config
        options = context.options
        if context.reader.ordered:
            if context.reader.ranked:
                raise Skipped("ranks have no counts to lose")
            raise Skipped("sequences have no counts or genes to lose")
        chosen = labelled_cells(context, config.name, options.folds, "evaluate.folds", MAX_CELLS)
        whole = read_rows(context.reader, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.repeats,
            ceiling_labels=predict_from_other_half(context)[chosen.cells],
        )
        fitter = ComponentFitter.read(context)
        for repetition in range(config.repeats):
            generator = seeded(options.seed, draws.SCORED_CELL_LOSSES + repetition)
            counts = {WHOLE: whole}
            for level, degrade in zip(config.levels(), self.losses()):
                counts[level] = degrade(whole, generator)
            by_level = {
                level: compute_features(context, chosen.cells, cell_counts)
                for level, cell_counts in counts.items()
            }
            by_fitted_level: dict[str, dict[str, Features]] = {}
            if fitter is not None:
                for level, cells in counts.items():
                    by_level[level][PER_1K] = fitter.per_1k(cells)
                by_fitted_level = self._fit_to_levels(counts, by_level, fitter, repetition)
            for fold in split_by_class(chosen.labels, options.folds, 1, options.seed + repetition):
                with without_overhead():
                    predicted = self._predict(context, by_level, chosen.labels, fold, [*by_level])
                    # features fitted for a level predict only its cells
                    for level, fitted in by_fitted_level.items():
                        added = self._predict(context, fitted, chosen.labels, fold, [level])
                        for column, classes in added.items():
                            predicted[column] |= classes
                majority = {MAJORITY: predict_majority(chosen.labels[fold.train], len(fold.test))}
                for column, classes in predicted.items():
                    predictions.record(column, repetition, fold.test, classes | majority)
        figures = {"folds": options.folds, "repeats": config.repeats, "neighbors": config.neighbors}
        metric = f"{config.levels()[-1]}, {SHIFTED}"
        return tabulate(predictions.accuracies(), chosen.figures | figures, metric=metric)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_CELLS)
        config = self.config
        n_levels = len(config.levels())
        n_fitted = n - n // sizes.folds
        fold_s = 0.0
        for n_fits, n_of_fit in ((n_levels + 1, n_fitted), (1, (n_levels + 1) * n_fitted)):
            products_s = 2 * sizes.products_s(n_of_fit)
            fold_s += n_fits * (products_s + sizes.regressions_s(n_of_fit) + 4e-4 * n_of_fit)
        repetition_s = sizes.folds * fold_s + n_levels * sizes.training_components_s()
        repetition_s += 2 * (n_levels + 1) * n * sizes.forward_s
        return sizes.features_s(n) + sizes.halves_s(n) + config.repeats * repetition_s

    def _fit_to_levels(
        self,
        counts: Mapping[str, sp.csr_matrix],
        by_level: Mapping[str, Features],
        fitter: ComponentFitter,
        repetition: int,
    ) -> dict[str, dict[str, Features]]:
        """Result of `fit_to_level` for each level."""
        seed = fitter.context.options.seed
        fitted = {}
        for number, level in enumerate(self.config.levels()):
            # a draw for each level, of at most 100 levels a repetition
            generator = seeded(seed, draws.TRAINING_CELL_LOSSES + 100 * repetition + number)
            fitted[level] = self.fit_to_level(level, counts, by_level, fitter, generator)
        return fitted

    def _predict(
        self,
        context: Context,
        by_level: Mapping[str, Features],
        labels: np.ndarray,
        fold: Fold,
        tested_levels: Iterable[str],
    ) -> dict[str, ByMethod]:
        """Predicted classes of the tested cells at each of `tested_levels`, by column.

        `by_level` has the features of all cells. A level has a column for each choice of fitted cells:
        of the same level, whole, and of all levels. Features that whole cells lack, such as those of a
        panel, get the *matched* score in the other columns too.
        """
        neighbors = self.config.neighbors
        train_labels = labels[fold.train]
        train_features = {
            name: select_cells(features, fold.train) for name, features in by_level.items()
        }
        classifiers = {}
        for name, features in train_features.items():
            classifiers[name] = make_cached_classifiers(features, train_labels, neighbors, context)
        all_levels = make_cached_classifiers(
            stack_cells(train_features.values()),
            np.tile(train_labels, len(train_features)),
            neighbors,
            context,
        )
        predicted = {}
        for level in tested_levels:
            tested = select_cells(by_level[level], fold.test)
            if level == WHOLE:
                predicted[WHOLE] = predict_all(classifiers[WHOLE], tested)
                continue
            fitted_on_whole = classifiers.get(WHOLE, classifiers[level])
            predicted[f"{level}, {MATCHED}"] = predict_all(classifiers[level], tested)
            predicted[f"{level}, {SHIFTED}"] = predict_all(fitted_on_whole, tested)
            predicted[f"{level}, {ALL_LEVELS}"] = predict_all(all_levels, tested)
        return predicted


def log_per_1k(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 1,000 of the cell), float32; a cell without counts stays zero."""
    values = np.log1p(counts_per_10k(counts.data, counts.indptr) / 10).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def _fit_components(
    context: Context, training: sp.csr_matrix, normalise: Callable[[sp.csr_matrix], sp.csr_matrix]
) -> Project:
    """Principal components of normalised `training` counts, `(cells, genes of the vocabulary)`."""
    components = pca(training.shape).fit(normalise(training))

    def project(counts: sp.csr_matrix) -> np.ndarray:
        known = select_columns(counts, context.gene_columns.target, training.shape[1])
        return components.transform(normalise(known))

    return project
