"""Base of tasks `low_depth` and `missing_genes`: classifiers of labels, tested on degraded cells.

Degraded cells have lost some of their counts, or all counts of some genes. A *level* says how much they
keep: a fraction of the counts, or a number of genes. Cells that keep all counts are called *whole*.
Classifiers are tested on the cells of each level. They are fitted in three ways:

- *matched*: on cells of the same level
- *shifted*: on whole cells
- *trained on all levels*: on whole cells and the cells of every level together

A user with cells of a gene panel knows which genes the panel has. A user with cells of few counts knows
how many counts they have. Such a user can fit a PCA to other cells that were degraded alike. So some rows
have features that are *adapted* to one level:

- In `low_depth`, they are principal components of the model's training cells, after the training cells
  were reduced to the same fraction of counts.
- In `missing_genes`, the genes that cells keep are called a panel. The features have names that end in
  "of the panel". Among them are principal components of training cells with only these genes. The
  classifiers are also fitted on cells with only these genes.

docs/evaluation.md describes both tasks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import MAX_LEVELS, DegradedConfig
from cellmill.data.arrays import counts_per_10k, log_normalise, select_columns
from cellmill.evaluate import draws
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
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
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
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

# A task uses at most this many cells, because the cells of each level are embedded and classified again.
MAX_DEGRADED_CELLS = 2_000
DENSE_FIT_S = 4e-4  # seconds for each fitted cell to fit the classifiers on dense features
WHOLE = "whole"  # stands for whole cells where a level is expected
# The cells that classifiers are fitted on. The heading of a column is "LEVEL, MATCHED" and so on.
MATCHED = "matched"
SHIFTED = "shifted"
ALL_LEVELS = "trained on all levels"
# Principal components of log(1 + counts per 1,000). A lost count changes log(1 + counts per 10,000) more.
PER_1K = add_note(TRAINING_COMPONENTS, ", CP1k")

Degradation = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Takes counts, `(cells, genes)`, and a generator. Returns fewer counts of the same shape.

The genes are the genes of the file, or the genes of the model's vocabulary.
"""
Projection = Callable[[sp.csr_matrix], np.ndarray]
"""Takes counts, `(cells, genes of the file)`. Returns components, `(cells, components)`."""
CountsByLevel = dict[str, sp.csr_matrix]
"""Counts of the same cells at WHOLE and at each level, `(cells, genes of the file)`."""
FeaturesByLevel = dict[str, Features]
"""Features of the same cells at WHOLE and at each level, or only at some of these levels."""


@dataclass(frozen=True)
class ComponentFitter:
    """Fits principal components to training cells of the model.

    Before a fit, the training cells are degraded in the same way as the evaluated cells.
    """

    context: Context
    counts: sp.csr_matrix  # (training cells, genes of the vocabulary); the cells are whole
    # projects on the components of whole training cells, by `log_normalise_per_1k` of their counts
    project_per_1k: Projection

    @classmethod
    def read(cls, context: Context) -> Self | None:
        """Read the training cells. None if they have sequences or ranks instead of counts."""
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_counts(manifest, PCA_CELLS)
        return cls(context, counts, _fit_components(context, counts, log_normalise_per_1k))

    def fit_panel(self, panel: sp.csr_matrix) -> Projection:
        """Fit components to training cells that keep only the genes of a panel.

        The genes of the panel are those with a count in `panel`, `(cells, genes of the file)`.
        """
        genes = self.context.gene_columns.target[np.unique(panel.indices)]
        in_panel = np.isin(np.arange(self.counts.shape[1]), genes[genes >= 0])
        training_panel = keep_columns(self.counts, in_panel)
        return _fit_components(self.context, training_panel, log_normalise)

    def fit_thinned(self, thin: Degradation, generator: np.random.Generator) -> Projection:
        """Fit components to training cells that lost counts by `thin`."""
        return _fit_components(self.context, thin(self.counts, generator), log_normalise)


class Degraded(Task):
    """Base of both tasks.

    A subclass says how cells are degraded, and which features are adapted to a level.
    """

    config: DegradedConfig

    def make_degradations(self) -> list[Degradation]:
        """Return a function for each of `config.levels()` that degrades cells to this level."""
        raise NotImplementedError

    def explain_absent_levels(self, whole: sp.csr_matrix) -> dict[str, str]:
        """Return a note on each absent level, by level.

        A level is absent if whole cells, with counts `whole`, have less than the level keeps. Raises
        Skipped if every level is absent.
        """
        return {}

    def adapt_features(
        self,
        level: str,
        counts_by_level: CountsByLevel,
        features_by_level: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Make the features of the evaluated cells that are adapted to `level`.

        If the result has features at WHOLE and at every level, as in low_depth, classifiers are fitted in
        all three ways. If the result has features at `level` only, as in missing_genes, classifiers can
        only be fitted at `level`. All three columns then have the *matched* prediction.

        `counts_by_level` and `features_by_level` are counts and usual features of the evaluated cells.
        `fitter` is None if training cells have no counts.
        """
        raise NotImplementedError

    def run(self, context: Context) -> TaskResult:
        """Score each pair of features and classifier, which is a row.

        The columns are whole cells, and each level with each choice of cells that classifiers are fitted
        on. Raises Skipped for a dataset without counts, and in the cases of `labelled_cells` and
        `explain_absent_levels`.
        """
        config = self.config
        options = context.options
        if context.reader.ordered:
            if context.reader.ranked:
                raise Skipped("ranks have no counts to lose")
            raise Skipped("sequences have no counts or genes to lose")
        chosen = labelled_cells(
            context, config.name, options.folds, "evaluate.folds", MAX_DEGRADED_CELLS
        )
        whole = read_rows(context.reader, chosen.cells)
        absent_levels = self.explain_absent_levels(whole)
        levels = [level for level in config.levels() if level not in absent_levels]
        predictions = ClassPredictions(
            chosen.labels,
            config.repeats,
            ceiling_labels=predict_ceiling_labels(context)[chosen.cells],
        )
        fitter = ComponentFitter.read(context)

        for repetition in range(config.repeats):
            # degrade the cells to each level
            generator = seeded(options.seed, draws.SCORED_CELL_DEGRADATIONS + repetition)
            counts_by_level: CountsByLevel = {WHOLE: whole}
            for level, degrade in zip(config.levels(), self.make_degradations()):
                if level in levels:
                    counts_by_level[level] = degrade(whole, generator)

            # compute the usual features at each level, and the adapted features of each level
            features_by_level: FeaturesByLevel = {}
            for level, counts in counts_by_level.items():
                features_by_level[level] = compute_features(context, chosen.cells, counts)
                if fitter is not None:
                    features_by_level[level][PER_1K] = fitter.project_per_1k(counts)
            adapted_by_level = self._adapt_to_levels(
                counts_by_level, features_by_level, fitter, options.seed, repetition
            )

            # classify the tested cells of each fold
            for fold in split_by_class(chosen.labels, options.folds, 1, options.seed + repetition):
                predicted = self._predict_fold(
                    context, features_by_level, adapted_by_level, chosen.labels, fold
                )
                for column, classes in predicted.items():
                    predictions.record(column, repetition, fold.tested, classes)

        figures = {"folds": options.folds, "repeats": config.repeats, "neighbors": config.neighbors}
        return tabulate(
            predictions.accuracies(),
            chosen.figures | figures,
            metric=f"{levels[-1]}, {SHIFTED}",
            notes=[*absent_levels.values()],
        )

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_DEGRADED_CELLS)
        config = self.config
        n_levels = len(config.levels())
        n_fitted = n - n // sizes.folds

        # In each fold, classifiers are fitted at each level and on whole cells. One more fit has the cells
        # of all levels and whole cells together.
        fold_s = 0.0
        for n_fits, n_fit_cells in ((n_levels + 1, n_fitted), (1, (n_levels + 1) * n_fitted)):
            genes_s = 2 * sizes.products_s(n_fit_cells) + sizes.regressions_s(n_fit_cells)
            fold_s += n_fits * (genes_s + DENSE_FIT_S * n_fit_cells)

        repetition_s = sizes.folds * fold_s + n_levels * sizes.training_components_s()
        # the trained and the untrained model embed the cells of every level, and whole cells
        repetition_s += 2 * (n_levels + 1) * n * sizes.forward_s
        # the ceiling is fitted on as many cells as other tasks use, not on MAX_DEGRADED_CELLS
        ceiling_s = sizes.halves_s(sizes.count_cells(MAX_LABELLED_CELLS))
        return sizes.features_s(n) + ceiling_s + config.repeats * repetition_s

    def _adapt_to_levels(
        self,
        counts_by_level: CountsByLevel,
        features_by_level: FeaturesByLevel,
        fitter: ComponentFitter | None,
        seed: int,
        repetition: int,
    ) -> dict[str, FeaturesByLevel]:
        """Call `adapt_features` for each level, and return the features by the level of the call.

        A level without adapted features is left out. The features of one call may themselves be at
        several levels.
        """
        adapted_by_level = {}
        levels = [*counts_by_level][1:]  # without WHOLE, which is the first
        for number, level in enumerate(levels):
            # each level of each repetition has its own random numbers
            key = draws.TRAINING_CELL_DEGRADATIONS + MAX_LEVELS * repetition + number
            features = self.adapt_features(
                level, counts_by_level, features_by_level, fitter, seeded(seed, key)
            )
            if features:
                adapted_by_level[level] = features
        return adapted_by_level

    @without_overhead()
    def _predict_fold(
        self,
        context: Context,
        features_by_level: FeaturesByLevel,
        adapted_by_level: dict[str, FeaturesByLevel],
        labels: np.ndarray,
        fold: Fold,
    ) -> dict[str, ByMethod]:
        """Predict the classes of the tested cells by each method, for each column of the table.

        `adapted_by_level` is what `_adapt_to_levels` returned. `labels`, `(cells,)`, are the classes of all cells.
        MAJORITY is among the methods.
        """
        predicted_by_column = self._predict_levels(
            context, features_by_level, labels, fold, [*features_by_level]
        )
        for level, adapted_features in adapted_by_level.items():
            # classifiers may be fitted at every level, but they predict only the cells at this level
            added = self._predict_levels(context, adapted_features, labels, fold, [level])
            for column, predicted in added.items():
                predicted_by_column[column] |= predicted
        for predicted in predicted_by_column.values():
            predicted[MAJORITY] = predict_majority(labels[fold.fitted], len(fold.tested))
        return predicted_by_column

    def _predict_levels(
        self,
        context: Context,
        features_by_level: FeaturesByLevel,
        labels: np.ndarray,
        fold: Fold,
        tested_levels: Iterable[str],
    ) -> dict[str, ByMethod]:
        """Predict the classes of the tested cells at each of `tested_levels`, by column and method.

        `features_by_level` and `labels` are of all cells. Classifiers are fitted at each level that has
        features. If only one level has features, as in missing_genes, all three columns have the *matched*
        prediction.
        """
        neighbors = self.config.neighbors
        fitted_labels = labels[fold.fitted]
        fitted_features = {
            level: select_cells(features, fold.fitted)
            for level, features in features_by_level.items()
        }

        # classifiers of the cells of each level, and of the cells of all levels together
        level_classifiers = {
            level: make_cached_classifiers(features, fitted_labels, neighbors, context)
            for level, features in fitted_features.items()
        }
        joint_classifiers = make_cached_classifiers(
            stack_cells(fitted_features.values()),
            np.tile(fitted_labels, len(fitted_features)),
            neighbors,
            context,
        )

        predicted = {}
        for level in tested_levels:
            tested = select_cells(features_by_level[level], fold.tested)
            if level == WHOLE:
                predicted[WHOLE] = predict_all(level_classifiers[WHOLE], tested)
                continue
            matched = level_classifiers[level]
            # features of a panel have no whole cells; the cells at this level are used instead
            shifted = level_classifiers.get(WHOLE, matched)
            predicted[f"{level}, {MATCHED}"] = predict_all(matched, tested)
            predicted[f"{level}, {SHIFTED}"] = predict_all(shifted, tested)
            predicted[f"{level}, {ALL_LEVELS}"] = predict_all(joint_classifiers, tested)
        return predicted


def log_normalise_per_1k(counts: sp.csr_matrix) -> sp.csr_matrix:
    """Compute log(1 + counts per 1,000), float32, from `counts`, `(cells, genes)`.

    The 1,000 are the sum over all genes of the cell. A cell without counts stays zero.
    """
    values = np.log1p(counts_per_10k(counts.data, counts.indptr) / 10).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def _fit_components(
    context: Context, training: sp.csr_matrix, normalise: Callable[[sp.csr_matrix], sp.csr_matrix]
) -> Projection:
    """Fit principal components to `training` counts, `(training cells, genes of the vocabulary)`.

    The counts are first normalised by `normalise`. Returns a function that projects cells of the dataset on
    the components. The function normalises their counts too.
    """
    components = pca(training.shape).fit(normalise(training))

    def project(counts: sp.csr_matrix) -> np.ndarray:
        # genes of the file that the vocabulary lacks are left out
        known_counts = select_columns(counts, context.gene_columns.target, training.shape[1])
        return components.transform(normalise(known_counts))

    return project
