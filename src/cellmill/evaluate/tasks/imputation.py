"""Task `imputation`: prediction of genes that are hidden from the model (docs/evaluation.md).

A hidden gene is treated as one that was not measured: its counts are removed before anything is
computed from a cell, and a model whose tokens include zeros (`tokens.zero_frac`) does not see it as
a zero. Scores are computed within one fold, so that differences between folds do not count as
correlation.

The model's decoder was fitted on the training cells, with the hidden genes as targets. So are the
regressions that it is compared with: on the same cells, the same visible genes and the same
targets. Regressions fitted on folds of the scored cells see other cells, mostly fewer; they are
rows of their own, in no verdict against the model.

Legend: C cells, F columns of the file, V genes of the vocabulary, M measured genes, G hidden genes, H hidden width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.stats import rankdata
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import ImputationConfig
from cellmill.data.arrays import select_columns
from cellmill.data.genes.names import GeneColumns, rows_of_names
from cellmill.data.shards.reader import read_names
from cellmill.errors import DataError
from cellmill.evaluate.components import COMPONENTS, pca
from cellmill.evaluate.evaluated import read_training_counts
from cellmill.evaluate.features import read_rows
from cellmill.evaluate.methods import EMBEDDING, KNN, UNTRAINED, add_note
from cellmill.evaluate.scores import ScoreColumn, divide, draw_cells, seeded, tabulate
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.changes import ALPHAS
from cellmill.evaluate.tasks.classify import Split, splits_of
from cellmill.evaluate.tasks.hidden_genes import HiddenGenes, decode_expression
from cellmill.runs.results import ScoredMethod, TaskResult

METRICS: Mapping[str, str] = {  # headings, and names in words; of MSE alone, lower is better
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}
# scored cells used at most: they are embedded again, and every gene is predicted in each fold
MAX_CELLS = 2_000
# training cells used at most; shards are shuffled, so the first ones are a random sample
MAX_FITTED = 20_000
FEWEST_CELLS = 4  # of a training or test fold, and of the training cells of one dataset
COMPONENTS_OF_VISIBLE = ScoredMethod(f"PCA{COMPONENTS} of visible genes")
GENE_MEANS = ScoredMethod("gene means")


def expression_scores(predicted: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Scores, (G,) or (C,) float64, of (C, G) each; a correlation with a constant is NaN."""
    predicted = predicted.astype(np.float64)
    seen = seen.astype(np.float64)
    return {
        "Pearson by gene": correlation(predicted, seen),
        "Spearman by gene": correlation(rankdata(predicted, axis=0), rankdata(seen, axis=0)),
        "Pearson by cell": correlation(predicted.T, seen.T),
        "Spearman by cell": correlation(rankdata(predicted, axis=1).T, rankdata(seen, axis=1).T),
        "MSE": np.square(predicted - seen).mean(1),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson of each column of two arrays, NaN where one is constant."""
    x = first - first.mean(0)
    y = second - second.mean(0)
    lengths = np.linalg.norm(x, axis=0), np.linalg.norm(y, axis=0)
    # columns of equal numbers have sums of rounding errors
    varies = (lengths[0] > 1e-9 * np.abs(first).max(0)) & (
        lengths[1] > 1e-9 * np.abs(second).max(0)
    )
    return divide((x * y).sum(0), np.where(varies, lengths[0] * lengths[1], 0))


@dataclass(frozen=True)
class Prediction:
    """Expression of test cells of one fold by one method."""

    method: ScoredMethod
    repetition: int
    n_repetitions: int
    cells: np.ndarray  # indices of the scored cells
    values: np.ndarray  # (cells, G)


@dataclass(frozen=True)
class TrainingCells:
    """Cells that the model was trained on, over the genes that the evaluated dataset measures."""

    hidden: HiddenGenes
    of_dataset: np.ndarray  # cells of the evaluated dataset, bool (C,)

    @classmethod
    def of(cls, hidden: HiddenGenes) -> Self | None:
        """The training cells of the model; None where they have no counts, or are too few."""
        context = hidden.context
        manifest = context.model.manifest
        n_genes = context.model.vocabulary.n_genes
        if manifest.ordered:
            return None
        counts = read_training_counts(manifest, MAX_FITTED)[:MAX_FITTED]
        if counts.shape[0] < FEWEST_CELLS:
            return None
        measured = np.isin(np.arange(n_genes), context.measured_genes)
        columns = GeneColumns(np.where(measured, np.arange(n_genes), -1).astype(np.int32), measured)
        names: list[str] = []
        for shard in manifest.splits["train"].shards:
            if len(names) < counts.shape[0]:
                names += read_names(manifest.shard_path(shard), "obs").tolist()
        own = [name.startswith(f"{context.dataset}:") for name in names[: counts.shape[0]]]
        return cls(HiddenGenes(context, counts, hidden.genes, columns), np.array(own, bool))

    def groups(self) -> dict[str, np.ndarray]:
        """Indices of the cells to fit on, by an ending of the rows' names: all cells and, if other
        datasets are among them, which may lack hidden genes, those of the evaluated dataset.
        """
        n_own = int(self.of_dataset.sum())
        found = {"": np.arange(len(self.of_dataset))}
        if FEWEST_CELLS <= n_own < len(self.of_dataset):
            found[", training cells of the dataset"] = np.flatnonzero(self.of_dataset)
        return found

    def predict(
        self, tested: HiddenGenes, vectors: Mapping[ScoredMethod, np.ndarray], neighbors: int
    ) -> dict[ScoredMethod, np.ndarray]:
        """(C, G) by method: expression of the `tested` cells, whose embeddings are `vectors`."""
        model = self.hidden.context.model
        expression = self.hidden.expression()
        embedded = {
            EMBEDDING: self.hidden.embedded(model.network),
            UNTRAINED: self.hidden.embedded(model.untrained),
        }
        predicted: dict[ScoredMethod, np.ndarray] = {}
        for note, cells in self.groups().items():
            profiles = self.hidden.profiles[cells]
            components = pca((len(cells), self.hidden.profiles.shape[1])).fit(profiles)
            fitted = {add_note(method, note): values[cells] for method, values in embedded.items()}
            given = {add_note(method, note): values for method, values in vectors.items()}
            of_visible = add_note(COMPONENTS_OF_VISIBLE, note)
            fitted[of_visible] = components.transform(profiles)
            given[of_visible] = components.transform(tested.profiles)
            predicted |= regressions(fitted, expression[cells], given, neighbors)
            means = np.tile(expression[cells].mean(0), (tested.counts.shape[0], 1))
            predicted[add_note(GENE_MEANS, note)] = means
        return predicted


def regressions(
    fitted: Mapping[ScoredMethod, np.ndarray],
    expression: np.ndarray,
    tested: Mapping[ScoredMethod, np.ndarray],
    neighbors: int,
) -> dict[ScoredMethod, np.ndarray]:
    """Expression (tested cells, G) by method, of regressions on `expression`, (fitted cells, G).

    `fitted` and `tested` are features, (cells, width). Both scalings: standardising raises the
    weight of small components, which helps or hurts depending on the number of cells.
    """
    n_neighbors = min(neighbors, len(expression))
    predicted: dict[ScoredMethod, np.ndarray] = {}
    for method, values in fitted.items():
        for ending, scaler in (("", StandardScaler()), (", unscaled", None)):
            ridge = make_pipeline(scaler, RidgeCV(ALPHAS)).fit(values, expression)
            nearest = make_pipeline(scaler, KNeighborsRegressor(n_neighbors)).fit(
                values, expression
            )
            for name, regression in ((f"ridge{ending}", ridge), (f"{KNN}{ending}", nearest)):
                predicted[replace(method, classifier=name)] = regression.predict(tested[method])
    return predicted


class Imputation(Task):
    config: ImputationConfig

    def run(self, context: Context) -> TaskResult:
        """Correlations by gene and by cell, and errors. Raises DataError if no listed gene can be
        hidden.
        """
        if context.reader.ordered:
            raise Skipped("sequences and ranks have no expression")
        cells = draw_cells(np.flatnonzero(context.scored), MAX_CELLS, context.options.seed, 9)
        role, folds = self._folds(context, cells)
        if not folds:
            raise Skipped(f"{len(cells)} scored cells make no two folds of {FEWEST_CELLS} or more")
        counts = read_rows(context.reader, cells)
        genes = self._hidden(context, counts)
        if not len(genes):
            wanted = f"hidden_frac {self.config.hidden_frac:g}, min_cells {self.config.min_cells}"
            raise Skipped(f"no gene can be hidden ({wanted}, {len(cells)} scored cells)")
        n_measured = len(context.measured_genes)
        numbers = {
            "n_cells": len(cells),
            "hidden_genes": len(genes),
            "measured_genes": n_measured,
            "folds_of": role,
            "folds": len(folds),
            "neighbors": self.config.neighbors,
        }
        hidden = HiddenGenes(context, counts, genes)
        trained = TrainingCells.of(hidden)
        if trained is not None:
            numbers["training_cells"] = len(trained.of_dataset)
            numbers["training_cells_of_dataset"] = int(trained.of_dataset.sum())
        line = f"{len(genes):,} of {n_measured:,} measured genes are hidden, {len(cells):,} cells, folds of {role}"
        n_fitted = (
            "no training cells with counts"
            if trained is None
            else f"{len(trained.of_dataset):,} training cells"
        )
        print(f"{context.dataset}: imputation: {line}; fitted on {n_fitted}", flush=True)
        columns = self._columns(hidden, self._predictions(hidden, trained, folds))
        judged = [
            column
            for column in columns
            if column.heading != "MSE" and column.of_kind("model") and column.of_kind("baseline")
        ]
        return tabulate(columns, numbers, judged)

    def _folds(self, context: Context, cells: np.ndarray) -> tuple[str, list[Split]]:
        """Role that is left out by value, or cells, and the folds."""
        for role in ("donor", "batch"):
            if role in context.roles:
                pairs = splits_of(context.roles[role].iloc[cells], self.config.most_folds)
                large = [pair for pair in pairs if min(map(len, pair)) >= FEWEST_CELLS]
                if large:
                    return role, [(number, *pair) for number, pair in enumerate(large)]
        options = context.options
        if len(cells) < FEWEST_CELLS * options.folds:
            return "cells", []
        seeds = range(self.config.seeds)
        folded = [
            KFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for repetition in seeds
        ]
        return "cells", [
            (number, *pair) for number, folds in enumerate(folded) for pair in folds.split(cells)
        ]

    def _hidden(self, context: Context, counts: Any) -> np.ndarray:
        """Rows of the vocabulary to hide, ascending."""
        vocabulary = context.model.vocabulary
        known_counts = select_columns(counts, context.columns.target, vocabulary.n_genes)
        expressed = (
            np.bincount(known_counts.indices, minlength=vocabulary.n_genes) >= self.config.min_cells
        )
        if self.config.genes is None:
            known = np.flatnonzero(expressed)
            n = min(
                round(self.config.hidden_frac * len(known)), self.config.max_genes, len(known) - 1
            )
            return np.sort(seeded(context.options.seed, 10).permutation(known)[: max(n, 0)])
        rows = rows_of_names(self.config.genes, vocabulary)
        known = np.unique([row for row in rows.values() if row >= 0 and expressed[row]]).astype(
            np.int64
        )
        if not 0 < len(known) < len(context.measured_genes):
            raise DataError(
                f"evaluate.tasks.imputation.genes: {len(known):,} of {len(rows):,} are genes of the model that "
                f"{self.config.min_cells} scored cells of {context.dataset} express (min_cells), expected one or more, "
                "and others that are seen; name genes by Ensembl id or current symbol"
            )
        left_out = sorted(name for name, row in rows.items() if row < 0 or not expressed[row])
        if left_out:
            print(
                f"{context.dataset}: imputation: not hidden, unknown or too rare: {', '.join(left_out)}",
                flush=True,
            )
        return known

    def _columns(self, hidden: HiddenGenes, predictions: Iterator[Prediction]) -> list[ScoreColumn]:
        """A column for each metric: means over the folds of a repetition, of the methods that have
        the metric.
        """
        seen = hidden.expression()
        n_units = {
            metric: seen.shape[1] if metric.endswith("by gene") else len(seen) for metric in METRICS
        }
        # sums and numbers of scores, (2, repetitions, units), by metric and method
        sums: dict[str, dict[ScoredMethod, np.ndarray]] = {metric: {} for metric in METRICS}
        for one in predictions:
            for metric, scores in expression_scores(one.values, seen[one.cells]).items():
                if one.method not in sums[metric]:
                    sums[metric][one.method] = np.zeros((2, one.n_repetitions, n_units[metric]))
                units = slice(None) if metric.endswith("by gene") else one.cells
                found = sums[metric][one.method][:, one.repetition]
                found[0, units] += np.nan_to_num(scores)
                found[1, units] += np.isfinite(scores)
        means = {
            metric: {name: divide(*of) for name, of in sums[metric].items() if of[1].any()}
            for metric in METRICS
        }
        return [
            ScoreColumn(metric, words, means[metric])
            for metric, words in METRICS.items()
            if means[metric]
        ]

    def _predictions(
        self, hidden: HiddenGenes, trained: TrainingCells | None, folds: list[Split]
    ) -> Iterator[Prediction]:
        """Predictions of the test cells of each fold: by the model and what is fitted on training
        cells, then by what is fitted on the other folds.
        """
        model = hidden.context.model
        n_repetitions = 1 + max(repetition for repetition, _, _ in folds)
        vectors = {
            EMBEDDING: hidden.embedded(model.network),
            UNTRAINED: hidden.embedded(model.untrained),
        }
        of_training_cells: dict[ScoredMethod, np.ndarray] = {}
        decoded = decode_expression(hidden, vectors[EMBEDDING])
        if decoded is not None:
            of_training_cells[replace(EMBEDDING, classifier="decoder")] = decoded
        if trained is not None:
            of_training_cells |= trained.predict(hidden, vectors, self.config.neighbors)
        for repetition, _, test in folds:
            for method, values in of_training_cells.items():
                yield Prediction(method, repetition, n_repetitions, test, values[test])
        expression = hidden.expression()
        profiles = hidden.profiles
        for repetition, train, test in folds:
            components = pca((len(train), profiles.shape[1])).fit(profiles[train])
            features = vectors | {COMPONENTS_OF_VISIBLE: components.transform(profiles)}
            fitted = {fitted_in_folds(method): values[train] for method, values in features.items()}
            tested = {fitted_in_folds(method): values[test] for method, values in features.items()}
            predicted = regressions(fitted, expression[train], tested, self.config.neighbors)
            means = np.tile(expression[train].mean(0), (len(test), 1))
            predicted[fitted_in_folds(GENE_MEANS)] = means
            for method, values in predicted.items():
                yield Prediction(method, repetition, n_repetitions, test, values)


def fitted_in_folds(method: ScoredMethod) -> ScoredMethod:
    """The method fitted on other cells than the model: a row of its own, in no verdict."""
    return replace(add_note(method, ", folds of scored cells"), kind="variant")
