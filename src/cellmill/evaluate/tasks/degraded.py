"""Tasks `low_depth` and `missing_genes`: classifiers of labels on cells that lost counts or genes
(docs/evaluation.md).

Classifiers are fitted on whole cells (shifted), on cells of the level (matched), and on cells of
all levels. Whoever has new cells of a panel or a shallow protocol knows the panel and the depth, so
a PCA can be fitted for them: its components are those of the model's training cells with the same
genes or the same share of counts. Rows "of the panel" read the labelled whole cells over its genes,
for the model as for the baselines.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import LowDepthConfig, MissingGenesConfig
from cellmill.data.arrays import counts_per_10k, log_normalise, select_columns
from cellmill.evaluate.classifiers import (
    Features,
    fit_all,
    predict_all,
    select_cells,
    small_problems,
)
from cellmill.evaluate.components import COMPONENTS, pca
from cellmill.evaluate.evaluated import PCA_CELLS, read_training_counts
from cellmill.evaluate.features import features_of_counts, keep_columns, read_rows
from cellmill.evaluate.labels import labelled_cells, predict_halves
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, MAJORITY, OF_TRAINING, add_note
from cellmill.evaluate.scores import Predictions, seeded, tabulate
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.classify import Split, majority, stratified
from cellmill.runs.results import ScoredMethod, TaskResult

MAX_CELLS = 2_000  # cells used at most: each level is embedded and classified again
WHOLE = "whole"
WAYS = MATCHED, SHIFTED, ALL_LEVELS = "matched", "shifted", "trained on all levels"
PER_1K = add_note(OF_TRAINING, ", CP1k")
"""Components of log(1 + counts per 1,000), in which a lost count weighs less than with 10,000."""
OF_THINNED = ScoredMethod(f"PCA{COMPONENTS} of thinned cells")
EMBEDDING_OF_PANEL = replace(EMBEDDING, features="embedding of the panel")
OF_PANEL = ScoredMethod(f"PCA{COMPONENTS} of the panel")
ALL_OF_PANEL = ScoredMethod("all genes of the panel")

Degrade = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes of the file)` and a generator -> fewer counts."""
Classes = dict[ScoredMethod, np.ndarray]
"""Predicted classes, text `(cells,)`, by method."""
Project = Callable[[sp.csr_matrix], np.ndarray]
"""Counts `(cells, genes of the file)` -> components `(cells, components)`."""


@dataclass(frozen=True)
class LevelFeatures:
    """Features of all cells as one level needs them: with nothing lost, and with what each level
    loses.
    """

    by_level: dict[str, dict[ScoredMethod, Any]]  # the level, WHOLE and perhaps other levels
    knows_panel: bool
    """Whole cells are restricted to the genes of the level, so matched and shifted classifiers are
    the same.
    """


@dataclass(frozen=True)
class TrainingCounts:
    """Counts of the model's training cells, on which components for degraded cells are fitted."""

    context: Context
    counts: sp.csr_matrix  # `(cells, genes of the vocabulary)`
    per_1k: Project

    @classmethod
    def of(cls, context: Context) -> Self | None:
        """None where the training cells have no counts, but sequences or ranks."""
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_training_counts(manifest, PCA_CELLS)[:PCA_CELLS]
        return cls(context, counts, _components(context, counts, log_per_1k))

    def over_panel(self, panel: sp.csr_matrix) -> np.ndarray:
        """Components of the genes of a panel, of cells `panel` that have counts of no others."""
        rows = self.context.columns.target[np.unique(panel.indices)]
        kept = np.isin(np.arange(self.counts.shape[1]), rows[rows >= 0])
        return _components(self.context, keep_columns(self.counts, kept), log_normalise)(panel)

    def thinned(self, degrade: Degrade, generator: np.random.Generator) -> Project:
        """Components of training cells that lost counts."""
        return _components(self.context, degrade(self.counts, generator), log_normalise)


def _components(
    context: Context, fitted: sp.csr_matrix, normalise: Callable[[sp.csr_matrix], sp.csr_matrix]
) -> Project:
    """Principal components of the normalised counts `fitted`, `(cells, genes of the vocabulary)`."""
    components = pca(fitted.shape).fit(normalise(fitted))

    def project(counts: sp.csr_matrix) -> np.ndarray:
        known = select_columns(counts, context.columns.target, fitted.shape[1])
        return components.transform(normalise(known))

    return project


class Degraded(Task):
    """Tasks `low_depth` and `missing_genes`."""

    config: LowDepthConfig | MissingGenesConfig

    def levels(self) -> dict[str, Degrade]:
        """What cells lose, by name."""
        if isinstance(self.config, LowDepthConfig):
            return {
                self.config.level(frac): partial(thin, frac) for frac in self.config.count_fracs
            }
        return {f"{n:,} genes": partial(keep_genes, n) for n in self.config.genes}

    def run(self, context: Context) -> TaskResult:
        """A row for each features and classifier; columns for whole cells, and for each level and
        way of training.
        """
        config = self.config
        options = context.options
        levels = self.levels()
        if context.reader.ordered:
            kind = (
                "ranks have no counts"
                if context.reader.ranked
                else "sequences have no counts or genes"
            )
            raise Skipped(f"{kind} to lose")
        chosen = labelled_cells(context, config.name, options.folds, "evaluate.folds", MAX_CELLS)
        whole = read_rows(context.reader, chosen.cells)
        predictions = Predictions(
            chosen.labels, config.repeats, halves=predict_halves(context)[chosen.cells]
        )
        training = TrainingCounts.of(context)
        for repeat in range(config.repeats):
            generator = seeded(options.seed, 1000 + repeat)
            counts = {WHOLE: whole} | {
                level: degrade(whole, generator) for level, degrade in levels.items()
            }
            cells = {level: features_of_counts(context, values) for level, values in counts.items()}
            fitted_to: dict[str, LevelFeatures] = {}
            if training is not None:
                for level, values in counts.items():
                    cells[level][PER_1K] = training.per_1k(values)
                for number, level in enumerate(levels):
                    draw = seeded(options.seed, 2000 + 100 * repeat + number)
                    fitted_to[level] = self._fitted_to(level, counts, cells, training, draw)
            for split in stratified(chosen.labels, options.folds, 1, options.seed + repeat):
                _, train, test = split
                with small_problems():
                    predicted = self._predicted(context, cells, chosen.labels, split)
                    for level, features in fitted_to.items():
                        more = self._predicted_with(context, level, features, chosen.labels, split)
                        for way, classes in more.items():
                            predicted[f"{level}, {way}"] |= classes
                largest = {MAJORITY: majority(chosen.labels[train], len(test))}
                for column, classes in predicted.items():
                    predictions.record(column, repeat, test, classes | largest)
        numbers = {"folds": options.folds, "repeats": config.repeats, "neighbors": config.neighbors}
        metric = f"{list(levels)[-1]}, {SHIFTED}"
        return tabulate(predictions.accuracies(), chosen.numbers | numbers, metric=metric)

    def _fitted_to(
        self,
        level: str,
        counts: Mapping[str, sp.csr_matrix],
        cells: Mapping[str, Features],
        training: TrainingCounts,
        generator: np.random.Generator,
    ) -> LevelFeatures:
        """Features that are made for the genes or the depth of `level`: of baselines and, for a
        panel, of the model.
        """
        if isinstance(self.config, MissingGenesConfig):
            of_panel = {
                EMBEDDING_OF_PANEL: cells[level][EMBEDDING],
                OF_PANEL: training.over_panel(counts[level]),
                ALL_OF_PANEL: cells[level][ALL_GENES],
            }
            return LevelFeatures({level: of_panel}, knows_panel=True)
        components = training.thinned(self.levels()[level], generator)
        return LevelFeatures(
            {name: {OF_THINNED: components(values)} for name, values in counts.items()}, False
        )

    def _predicted(
        self, context: Context, cells: Mapping[str, Features], labels: np.ndarray, split: Split
    ) -> dict[str, Classes]:
        """Classes of the test cells by column; `cells` are features of all cells by level."""
        neighbors = self.config.neighbors
        _, train, test = split
        seen = {level: select_cells(features, train) for level, features in cells.items()}
        fitted = {
            level: fit_all(features, labels[train], neighbors, context)
            for level, features in seen.items()
        }
        on_all = fit_all(
            together(seen.values()), np.tile(labels[train], len(cells)), neighbors, context
        )
        predicted = {WHOLE: predict_all(fitted[WHOLE], select_cells(cells[WHOLE], test))}
        for level in [*cells][1:]:
            tested = select_cells(cells[level], test)
            ways = {MATCHED: fitted[level], SHIFTED: fitted[WHOLE], ALL_LEVELS: on_all}
            predicted |= {
                f"{level}, {way}": predict_all(trained, tested) for way, trained in ways.items()
            }
        return predicted

    def _predicted_with(
        self,
        context: Context,
        level: str,
        features: LevelFeatures,
        labels: np.ndarray,
        split: Split,
    ) -> dict[str, Classes]:
        """Classes of the test cells by way of training, from features that are made for `level`."""
        neighbors = self.config.neighbors
        _, train, test = split
        tested = select_cells(features.by_level[level], test)
        seen = {name: select_cells(values, train) for name, values in features.by_level.items()}
        matched = predict_all(fit_all(seen[level], labels[train], neighbors, context), tested)
        if features.knows_panel:
            return dict.fromkeys(WAYS, matched)
        shifted = predict_all(fit_all(seen[WHOLE], labels[train], neighbors, context), tested)
        on_all = fit_all(
            together(seen.values()), np.tile(labels[train], len(seen)), neighbors, context
        )
        return {MATCHED: matched, SHIFTED: shifted, ALL_LEVELS: predict_all(on_all, tested)}


def together(levels: Iterable[Features]) -> Features:
    """Features of the cells of all levels, one level after another."""
    parts = [*levels]
    stacked: dict[ScoredMethod, Any] = {}
    for kind, first in parts[0].items():
        of_kind = [features[kind] for features in parts]
        stacked[kind] = sp.vstack(of_kind, "csr") if sp.issparse(first) else np.vstack(of_kind)
    return stacked


def log_per_1k(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 1,000 of the cell), float32; a cell without counts stays zero."""
    values = np.log1p(counts_per_10k(counts.data, counts.indptr) / 10).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    thinned = counts.copy()
    thinned.data = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned.eliminate_zeros()
    return thinned


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count."""
    drawn = generator.permutation(np.unique(counts.indices))[:n]
    return keep_columns(counts, np.isin(np.arange(counts.shape[1]), drawn))
