"""Task `imputation`: prediction of genes that are hidden from the model, in cells that it was not trained on.

The same genes are hidden in all cells: a seeded share of those that enough scored cells express, or a list. All methods
see only the counts of the other genes (`evaluate.tasks.hidden_genes`). The predicted quantity is log(1 + counts per
10,000 of all the model's genes).

The model's own prediction (`own_expression`) is not fitted to anything here. All other methods are fitted on training
folds, which are whole donors or batches where the dataset has them: a ridge and the mean of the nearest cells, from
both models' embeddings and from principal components of the visible genes; and each gene's mean.

Scores are computed within one fold, so that differences between folds do not count as correlation. Intervals are over
genes or cells, and over repetitions, or the donors or batches that are left out (`evaluate.scores`).

Legend: C cells, G genes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import ImputationConfig
from cellmill.data.arrays import log_normalise, select_columns
from cellmill.data.genes.names import rows_of_names
from cellmill.errors import DataError
from cellmill.evaluate.features import read_rows
from cellmill.evaluate.scores import EMBEDDING, UNTRAINED, ScoreColumn, against_best, divide, draw_cells
from cellmill.evaluate.task import COMPONENTS, Context, Task, TaskResult, pca
from cellmill.evaluate.tasks.changes import ALPHAS
from cellmill.evaluate.tasks.classify import Split, splits_of
from cellmill.evaluate.tasks.hidden_genes import HiddenGenes, own_expression

METRICS: Mapping[str, str] = {  # headings, and names in words; of MSE alone, lower is better
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}
BY_GENE = ("Pearson by gene", "Spearman by gene")  # metrics with one score a gene; the others have one a cell


def expression_scores(predicted: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Scores, (G,) or (C,) float64, of (C, G) each; a correlation with a constant is NaN."""
    predicted, seen = predicted.astype(np.float64), seen.astype(np.float64)
    return {
        "Pearson by gene": correlation(predicted, seen),
        "Spearman by gene": correlation(rankdata(predicted, axis=0), rankdata(seen, axis=0)),
        "Pearson by cell": correlation(predicted.T, seen.T),
        "Spearman by cell": correlation(rankdata(predicted, axis=1).T, rankdata(seen, axis=1).T),
        "MSE": np.square(predicted - seen).mean(1),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson of each column of two arrays, NaN where one is constant."""
    x, y = first - first.mean(0), second - second.mean(0)
    lengths = np.linalg.norm(x, axis=0), np.linalg.norm(y, axis=0)
    # columns of equal numbers have sums of rounding errors
    varies = (lengths[0] > 1e-9 * np.abs(first).max(0)) & (lengths[1] > 1e-9 * np.abs(second).max(0))
    return divide((x * y).sum(0), np.where(varies, lengths[0] * lengths[1], 0))


MAX_CELLS = 2_000  # cells used at most: they are embedded again, and every gene is predicted in each fold
FEWEST_CELLS = 4  # of a training or test fold
OWN = f"{EMBEDDING} + decoder"
MEANS = "gene means"
COMPONENTS_OF_VISIBLE = f"PCA{COMPONENTS} of visible genes"


class Imputation(Task):
    config: ImputationConfig

    def run(self, context: Context) -> TaskResult:
        """Correlations by gene and by cell, and errors. Raises DataError if no listed gene can be hidden."""
        if context.reader.ordered:
            return TaskResult(skipped="sequences and ranks have no expression")
        cells = draw_cells(np.flatnonzero(context.scored), MAX_CELLS, context.options.seed, 9)
        role, folds = self._folds(context, cells)
        if not folds:
            return TaskResult(skipped=f"{len(cells)} scored cells make no two folds of {FEWEST_CELLS} or more")
        counts = read_rows(context.reader, cells)
        genes = self._hidden(context, counts)
        if not len(genes):
            return TaskResult(skipped=f"{self.config.min_cells} scored cells express no gene (min_cells)")
        n_measured = len(context.measured_genes)
        numbers = {
            "n_cells": len(cells),
            "hidden_genes": len(genes),
            "measured_genes": n_measured,
            "folds_of": role,
            "folds": len(folds),
            "neighbors": self.config.neighbors,
        }
        line = f"{len(genes):,} of {n_measured:,} measured genes are hidden, {len(cells):,} cells, folds of {role}"
        print(f"{context.dataset}: imputation: {line}", flush=True)
        with threadpool_limits(1):  # sums in one order: the same scores on any number of cores
            columns = self._columns(HiddenGenes(context, counts, genes), folds)
        verdicts = against_best(column for column in columns if column.heading != "MSE")
        return TaskResult.from_columns(columns, numbers, verdicts=verdicts)

    def _folds(self, context: Context, cells: np.ndarray) -> tuple[str, list[Split]]:
        """Role that is left out by value, or cells, and the folds."""
        for role in ("donor", "batch"):
            if role in context.roles:
                pairs = splits_of(context.roles[role].iloc[cells], self.config.most_folds)
                if large := [pair for pair in pairs if min(map(len, pair)) >= FEWEST_CELLS]:
                    return role, [(number, *pair) for number, pair in enumerate(large)]
        options = context.options
        if len(cells) < FEWEST_CELLS * options.folds:
            return "cells", []
        seeds = range(self.config.seeds)
        folded = [KFold(options.folds, shuffle=True, random_state=options.seed + repetition) for repetition in seeds]
        return "cells", [(number, *pair) for number, folds in enumerate(folded) for pair in folds.split(cells)]

    def _hidden(self, context: Context, counts: Any) -> np.ndarray:
        """Rows of the vocabulary to hide, ascending."""
        vocabulary = context.model.vocabulary
        known_counts = select_columns(counts, context.columns.target, vocabulary.n_genes)
        expressed = np.bincount(known_counts.indices, minlength=vocabulary.n_genes) >= self.config.min_cells
        if self.config.genes is None:
            known = np.flatnonzero(expressed)
            n = min(round(self.config.hidden_frac * len(known)), self.config.max_genes, len(known) - 1)
            generator = np.random.Generator(np.random.Philox(key=[context.options.seed, 10]))
            return np.sort(generator.permutation(known)[: max(n, 0)])
        rows = rows_of_names(self.config.genes, vocabulary)
        known = np.unique([row for row in rows.values() if row >= 0 and expressed[row]]).astype(np.int64)
        if not 0 < len(known) < len(context.measured_genes):
            raise DataError(
                f"evaluate.tasks.imputation.genes: {len(known):,} of {len(rows):,} are genes of the model that "
                f"{self.config.min_cells} scored cells of {context.dataset} express (min_cells), expected one or more, "
                "and others that are seen; name genes by Ensembl id or current symbol"
            )
        if left_out := sorted(name for name, row in rows.items() if row < 0 or not expressed[row]):
            print(f"{context.dataset}: imputation: not hidden, unknown or too rare: {', '.join(left_out)}", flush=True)
        return known

    def _columns(self, hidden: HiddenGenes, folds: list[Split]) -> list[ScoreColumn]:
        """A column for each metric: means over the folds of a repetition, of the methods that have the metric."""
        seen, model = hidden.expression(), hidden.context.model
        vectors, profiles = hidden.embedded(model.network), log_normalise(hidden.visible)
        own = own_expression(hidden, vectors)
        features = {EMBEDDING: vectors, UNTRAINED: hidden.embedded(model.untrained)}
        n_repetitions = 1 + max(repetition for repetition, _, _ in folds)
        # sum and number of scores, by metric and method
        sums: dict[str, dict[str, np.ndarray]] = {metric: {} for metric in METRICS}
        for repetition, train, test in folds:
            components = pca((len(train), profiles.shape[1])).fit(profiles[train])
            features[COMPONENTS_OF_VISIBLE] = np.asarray(components.transform(profiles), np.float64)
            predicted = {} if own is None else {OWN: own[test]}
            for name, values in (predicted | fitted(features, seen, train, test, self.config.neighbors)).items():
                for metric, scores in expression_scores(values, seen[test]).items():
                    by_gene = metric in BY_GENE
                    at, total = slice(None) if by_gene else test, np.zeros((2, n_repetitions, seen.shape[by_gene]))
                    sums[metric].setdefault(name, total)[:, repetition, at] += (
                        np.nan_to_num(scores),
                        np.isfinite(scores),
                    )
        means = {metric: {name: divide(*of) for name, of in sums[metric].items() if of[1].any()} for metric in METRICS}
        return [ScoreColumn(metric, words, means[metric]) for metric, words in METRICS.items() if means[metric]]


def fitted(
    features: Mapping[str, np.ndarray], seen: np.ndarray, train: np.ndarray, test: np.ndarray, neighbors: int
) -> dict[str, np.ndarray]:
    """Expression (test cells, G) by method, of what is fitted on the training cells alone.

    `features` by name are (C, width), `seen` (C, G), of which the rows of training cells are read.
    """
    predicted = {}
    for kind, values in features.items():
        ridge = make_pipeline(StandardScaler(), RidgeCV(ALPHAS)).fit(values[train], seen[train])
        nearest = KNeighborsRegressor(min(neighbors, len(train))).fit(values[train], seen[train])
        predicted[f"{kind} + ridge"] = ridge.predict(values[test])
        predicted[f"{kind} + kNN"] = nearest.predict(values[test])
    return predicted | {MEANS: np.tile(seen[train].mean(0), (len(test), 1))}
