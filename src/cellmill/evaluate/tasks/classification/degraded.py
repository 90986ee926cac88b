"""Classifiers of labels on degraded cells, for tasks `low_depth` and `missing_genes`
(docs/evaluation.md).

A *level* is the fraction of the counts, or the number of genes, that degraded cells keep. Classifiers
are tested on the cells of each level. They are fitted in three ways:

- *matched*: on cells of the same level
- *shifted*: on whole cells
- *trained on all levels*: on whole cells and the cells of every level together

A user whose cells come from a panel of genes or a shallow protocol knows the panel or the depth, and
can fit a PCA for it. So some rows have *adapted* features, made for one level: a PCA of the model's
training cells, reduced to the same genes or the same fraction of counts. In rows "of the panel", all
cells are reduced to the genes of the panel, also the whole cells that classifiers are fitted on.
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

MAX_DEGRADED_CELLS = 2_000  # cells used at most: each level is embedded and classified again
DENSE_FIT_S = 4e-4  # seconds per fitted cell of the classifiers on dense features
WHOLE = "whole"
# the cells that classifiers are fitted on; a column is "LEVEL, MATCHED" and so on
MATCHED = "matched"
SHIFTED = "shifted"
ALL_LEVELS = "trained on all levels"
# components of log(1 + counts per 1,000): a lost count changes them less than per 10,000
PER_1K = add_note(TRAINING_COMPONENTS, ", CP1k")

Degradation = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes)`, of the file or of the vocabulary, and a generator -> fewer counts."""
Projection = Callable[[sp.csr_matrix], np.ndarray]
"""Counts `(cells, genes of the file)` -> components `(cells, components)`."""
CountsByLevel = dict[str, sp.csr_matrix]
"""Counts `(cells, genes of the file)` of the same cells whole, and at each level."""
FeaturesByLevel = dict[str, Features]
"""Features of the same cells whole and at each level, or only at some levels."""


@dataclass(frozen=True)
class ComponentFitter:
    """Fits principal components to training cells of the model that are degraded like the evaluated
    cells.
    """

    context: Context
    counts: sp.csr_matrix  # of training cells, `(cells, genes of the vocabulary)`
    project_per_1k: Projection  # of `log_per_1k`, fitted on whole training cells

    @classmethod
    def read(cls, context: Context) -> Self | None:
        """Read the training cells; None if they have sequences or ranks instead of counts."""
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_counts(manifest, PCA_CELLS)
        return cls(context, counts, _fit_components(context, counts, log_per_1k))

    def fit_panel(self, panel: sp.csr_matrix) -> Projection:
        """Components fitted on training cells with the genes of the counts `panel`."""
        genes = self.context.gene_columns.target[np.unique(panel.indices)]
        in_panel = np.isin(np.arange(self.counts.shape[1]), genes[genes >= 0])
        training_panel = keep_columns(self.counts, in_panel)
        return _fit_components(self.context, training_panel, log_normalise)

    def fit_thinned(self, thin: Degradation, generator: np.random.Generator) -> Projection:
        """Components fitted on training cells that `thin` has thinned."""
        return _fit_components(self.context, thin(self.counts, generator), log_normalise)


class Degraded(Task):
    """Base of both tasks: a subclass says how cells are degraded, and which features are adapted to a
    level.
    """

    config: DegradedConfig

    def degradations(self) -> list[Degradation]:
        """The degradation at each of `config.levels()`."""
        raise NotImplementedError

    def absent_levels(self, whole: sp.csr_matrix) -> dict[str, str]:
        """Levels that the counts of whole cells do not reach, with a note on each; raises Skipped if they
        reach none.
        """
        return {}

    def adapt_features(
        self,
        level: str,
        counts: CountsByLevel,
        features: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Features adapted to `level`.

        If they are of the cells at every level, as in low_depth, classifiers are fitted in all three
        ways. If they are of the cells at `level` only, as in missing_genes, all three columns have the
        *matched* prediction.

        `counts` and `features` are of the evaluated cells; `fitter` is None if training cells have no
        counts.
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
        chosen = labelled_cells(
            context, config.name, options.folds, "evaluate.folds", MAX_DEGRADED_CELLS
        )
        whole = read_rows(context.reader, chosen.cells)
        absent = self.absent_levels(whole)
        levels = [level for level in config.levels() if level not in absent]
        predictions = ClassPredictions(
            chosen.labels,
            config.repeats,
            ceiling_labels=predict_ceiling_labels(context)[chosen.cells],
        )
        fitter = ComponentFitter.read(context)
        for repetition in range(config.repeats):
            generator = seeded(options.seed, draws.SCORED_CELL_DEGRADATIONS + repetition)
            counts: CountsByLevel = {WHOLE: whole}
            for level, degrade in zip(config.levels(), self.degradations()):
                if level in levels:
                    counts[level] = degrade(whole, generator)
            features: FeaturesByLevel = {}
            for level, level_counts in counts.items():
                features[level] = compute_features(context, chosen.cells, level_counts)
                if fitter is not None:
                    features[level][PER_1K] = fitter.project_per_1k(level_counts)
            adapted = self._adapt_to_levels(counts, features, fitter, options.seed, repetition)
            for fold in split_by_class(chosen.labels, options.folds, 1, options.seed + repetition):
                predicted = self._predict_fold(context, features, adapted, chosen.labels, fold)
                for column, classes in predicted.items():
                    predictions.record(column, repetition, fold.tested, classes)
        figures = {"folds": options.folds, "repeats": config.repeats, "neighbors": config.neighbors}
        return tabulate(
            predictions.accuracies(),
            chosen.figures | figures,
            metric=f"{levels[-1]}, {SHIFTED}",
            notes=[*absent.values()],
        )

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_DEGRADED_CELLS)
        config = self.config
        n_levels = len(config.levels())
        n_fitted = n - n // sizes.folds
        # in each fold: fits on whole cells and on each level, and one fit on all of them together
        fold_s = 0.0
        for n_fits, n_of_fit in ((n_levels + 1, n_fitted), (1, (n_levels + 1) * n_fitted)):
            genes_s = 2 * sizes.products_s(n_of_fit) + sizes.regressions_s(n_of_fit)
            fold_s += n_fits * (genes_s + DENSE_FIT_S * n_of_fit)
        repetition_s = sizes.folds * fold_s + n_levels * sizes.training_components_s()
        # the trained and the untrained model embed every level
        repetition_s += 2 * (n_levels + 1) * n * sizes.forward_s
        # the ceiling is fitted on all cells that other tasks use
        ceiling_s = sizes.halves_s(sizes.count_cells(MAX_LABELLED_CELLS))
        return sizes.features_s(n) + ceiling_s + config.repeats * repetition_s

    def _adapt_to_levels(
        self,
        counts: CountsByLevel,
        features: FeaturesByLevel,
        fitter: ComponentFitter | None,
        seed: int,
        repetition: int,
    ) -> dict[str, FeaturesByLevel]:
        """The features adapted to each level, by this level; levels without any are left out."""
        adapted = {}
        for number, level in enumerate([*counts][1:]):
            # each level of each repetition has its own draw
            draw = draws.TRAINING_CELL_DEGRADATIONS + MAX_LEVELS * repetition + number
            generator = seeded(seed, draw)
            by_level = self.adapt_features(level, counts, features, fitter, generator)
            if by_level:
                adapted[level] = by_level
        return adapted

    @without_overhead()
    def _predict_fold(
        self,
        context: Context,
        features: FeaturesByLevel,
        adapted: dict[str, FeaturesByLevel],
        labels: np.ndarray,
        fold: Fold,
    ) -> dict[str, ByMethod]:
        """Predicted classes of the tested cells by column, the majority class among them."""
        predicted = self._predict(context, features, labels, fold, [*features])
        for level, by_level in adapted.items():
            # classifiers may be fitted at every level, but predict only the cells at this one
            added = self._predict(context, by_level, labels, fold, [level])
            for column, by_method in added.items():
                predicted[column] |= by_method
        for by_method in predicted.values():
            by_method[MAJORITY] = predict_majority(labels[fold.fitted], len(fold.tested))
        return predicted

    def _predict(
        self,
        context: Context,
        features: FeaturesByLevel,
        labels: np.ndarray,
        fold: Fold,
        tested_levels: Iterable[str],
    ) -> dict[str, ByMethod]:
        """Predicted classes of the tested cells at each of `tested_levels`, by column.

        `features` and `labels` are of all cells. Classifiers are fitted at each level of `features`. If
        this is one level, as of a panel, all three columns have the *matched* prediction.
        """
        neighbors = self.config.neighbors
        fitted_labels = labels[fold.fitted]
        fitted_features = {
            level: select_cells(features_of_level, fold.fitted)
            for level, features_of_level in features.items()
        }
        by_level = {
            level: make_cached_classifiers(features_of_level, fitted_labels, neighbors, context)
            for level, features_of_level in fitted_features.items()
        }
        of_all_levels = make_cached_classifiers(
            stack_cells(fitted_features.values()),
            np.tile(fitted_labels, len(fitted_features)),
            neighbors,
            context,
        )
        predicted = {}
        for level in tested_levels:
            tested = select_cells(features[level], fold.tested)
            if level == WHOLE:
                predicted[WHOLE] = predict_all(by_level[WHOLE], tested)
                continue
            # without whole cells, as of a panel, the cells at this level stand in for them
            of_whole_cells = by_level.get(WHOLE, by_level[level])
            predicted[f"{level}, {MATCHED}"] = predict_all(by_level[level], tested)
            predicted[f"{level}, {SHIFTED}"] = predict_all(of_whole_cells, tested)
            predicted[f"{level}, {ALL_LEVELS}"] = predict_all(of_all_levels, tested)
        return predicted


def log_per_1k(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 1,000 of the cell), float32; a cell without counts stays zero."""
    values = np.log1p(counts_per_10k(counts.data, counts.indptr) / 10).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def _fit_components(
    context: Context, training: sp.csr_matrix, normalise: Callable[[sp.csr_matrix], sp.csr_matrix]
) -> Projection:
    """Fit principal components to `training` counts, `(cells, genes of the vocabulary)`, that `normalise`
    has normalised.
    """
    components = pca(training.shape).fit(normalise(training))

    def project(counts: sp.csr_matrix) -> np.ndarray:
        known = select_columns(counts, context.gene_columns.target, training.shape[1])
        return components.transform(normalise(known))

    return project
