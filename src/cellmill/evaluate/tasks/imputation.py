"""Task `imputation`: prediction of genes that are hidden from the model (docs/evaluation.md).

Scores are computed within one fold, so that differences between folds do not count as correlation.

The model's decoder was fitted on the training cells, with the hidden genes as targets. So are the
regressions that it is compared with: on the same cells, the same visible genes and the same
targets. Regressions fitted on folds of the scored cells see other cells, mostly fewer. They have
rows of their own and take part in no verdict against the model.

Legend: C cells, F columns of the file, G hidden genes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import scipy.sparse as sp
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
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells, seeded
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.features.components import COMPONENTS, pca
from cellmill.evaluate.methods import EMBEDDING, KNN, UNTRAINED, ByMethod, add_note, select_cells
from cellmill.evaluate.scores import ScoreColumn, divide, tabulate
from cellmill.evaluate.splits import Fold, split_groups
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.expression import ALPHAS, column_correlations
from cellmill.evaluate.tasks.hidden_genes import HiddenGenes, decode_expression
from cellmill.evaluate.training_shards import read_counts
from cellmill.runs.results import ScoredMethod, TaskResult

METRICS: Mapping[str, str] = {  # names in words by heading; lower is better for MSE only
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}
# scored cells used at most: they are embedded again, and every gene is predicted in each fold
MAX_CELLS = 2_000
# training cells used at most; shards are shuffled, so the first cells are a random sample
MAX_FITTED = 20_000
MIN_CELLS = 4  # cells of a training or test fold, or training cells of one dataset
VISIBLE_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of visible genes")
GENE_MEANS = ScoredMethod("gene means")
# the part of "decoder + ridge" without a network
ALL_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of all genes", classifier="ridge")


@dataclass(frozen=True)
class FoldPrediction:
    """Expression of the test cells of one fold, predicted by one method."""

    method: ScoredMethod
    repetition: int
    n_repetitions: int
    cells: np.ndarray  # indices of the scored cells
    values: np.ndarray  # (cells, G)


@dataclass(frozen=True)
class TrainingCells:
    """Cells that the model was trained on, over the genes that the evaluated dataset measures."""

    model: EvaluatedModel
    hidden: HiddenGenes
    is_from_dataset: np.ndarray  # cells of the evaluated dataset, bool (C,)

    @classmethod
    def read(cls, context: Context, genes: np.ndarray) -> Self | None:
        """The training cells of the model, with `genes` hidden; None if they have no counts, or are
        too few.
        """
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_counts(manifest, MAX_FITTED)
        n_cells = counts.shape[0]
        if n_cells < MIN_CELLS:
            return None
        rows = np.arange(context.model.vocabulary.n_genes)
        is_measured = np.isin(rows, context.measured_genes)
        target = np.where(is_measured, rows, -1).astype(np.int32)
        # names of the first cells, `dataset:cell`, read from as few shards as needed
        names: list[str] = []
        for shard in manifest.splits["train"].shards:
            if len(names) < n_cells:
                names += read_names(manifest.shard_path(shard), "obs").tolist()
        is_from_dataset = [name.startswith(f"{context.dataset}:") for name in names[:n_cells]]
        columns = GeneColumns(target, is_measured)
        trained = HiddenGenes.in_context(context, counts, genes, columns)
        return cls(context.model, trained, np.array(is_from_dataset, bool))

    def groups(self) -> dict[str, np.ndarray]:
        """Indices of the cells to fit on, by the note in a row's name: all cells and, if cells of
        other datasets are among them, the cells of the evaluated dataset.

        Other datasets may lack hidden genes.
        """
        n_cells = len(self.is_from_dataset)
        n_of_dataset = int(self.is_from_dataset.sum())
        groups = {"": np.arange(n_cells)}
        if MIN_CELLS <= n_of_dataset < n_cells:
            groups[", training cells of the dataset"] = np.flatnonzero(self.is_from_dataset)
        return groups

    def predict(self, tested: HiddenGenes, vectors: ByMethod, neighbors: int) -> ByMethod:
        """(C, G) by method: expression of the `tested` cells, whose embeddings are `vectors`."""
        model = self.model
        expression = self.hidden.expression()
        embedded = {
            EMBEDDING: self.hidden.embed(model.network),
            UNTRAINED: self.hidden.embed(model.untrained),
        }
        profiles = self.hidden.profiles
        predicted: ByMethod = {}
        for note, cells in self.groups().items():
            by_method = predict_hidden(
                expression[cells],
                profiles[cells],
                select_cells(embedded, cells),
                tested.profiles,
                vectors,
                neighbors,
            )
            predicted |= {add_note(method, note): values for method, values in by_method.items()}
        return predicted


class Imputation(Task):
    config: ImputationConfig

    def run(self, context: Context) -> TaskResult:
        """Correlations by gene and by cell, and errors. Raises DataError if no listed gene can be
        hidden.
        """
        if context.reader.ordered:
            raise Skipped("sequences and ranks have no expression")
        cells = draw_cells(
            np.flatnonzero(context.scored), MAX_CELLS, context.options.seed, draws.IMPUTED_CELLS
        )
        role, folds = self._split(context, cells)
        if not folds:
            raise Skipped(f"{len(cells)} scored cells make no two folds of {MIN_CELLS} or more")
        counts = read_rows(context.reader, cells)
        genes = self._choose_genes(context, counts)
        if not len(genes):
            limits = f"hidden_frac {self.config.hidden_frac:g}, min_cells {self.config.min_cells}"
            raise Skipped(f"no gene can be hidden ({limits}, {len(cells)} scored cells)")
        n_measured = len(context.measured_genes)
        figures = {
            "n_cells": len(cells),
            "hidden_genes": len(genes),
            "measured_genes": n_measured,
            "folds_of": role,
            "folds": len(folds),
            "neighbors": self.config.neighbors,
        }
        hidden = HiddenGenes.in_context(context, counts, genes)
        trained = TrainingCells.read(context, genes)
        fitted_on = "no training cells with counts"
        if trained is not None:
            figures["training_cells"] = len(trained.is_from_dataset)
            figures["training_cells_of_dataset"] = int(trained.is_from_dataset.sum())
            fitted_on = f"{len(trained.is_from_dataset):,} training cells"
        print(
            f"{context.dataset}: imputation: {len(genes):,} of {n_measured:,} measured genes are hidden, "
            f"{len(cells):,} cells, folds of {role}; fitted on {fitted_on}",
            flush=True,
        )
        columns = self._tabulate(hidden, self._predict(context.model, hidden, trained, folds))
        judged = [
            column
            for column in columns
            if column.heading != "MSE"
            and column.select_kind("model")
            and column.select_kind("baseline")
        ]
        return tabulate(columns, figures, judged)

    def _split(self, context: Context, cells: np.ndarray) -> tuple[str, list[Fold]]:
        """Role whose values are left out, or "cells" for folds of cells, and the folds."""
        folds: list[Fold] = []
        for role in ("donor", "batch"):
            if role not in context.roles:
                continue
            groups = context.roles[role].iloc[cells]
            for train, test in split_groups(groups, self.config.most_folds):
                if min(len(train), len(test)) >= MIN_CELLS:
                    folds.append(Fold(len(folds), train, test))
            if folds:
                return role, folds
        options = context.options
        if len(cells) < MIN_CELLS * options.folds:
            return "cells", []
        for repetition in range(self.config.seeds):
            splitter = KFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for train, test in splitter.split(cells):
                folds.append(Fold(repetition, train, test))
        return "cells", folds

    def _choose_genes(self, context: Context, counts: sp.csr_matrix) -> np.ndarray:
        """Rows of the vocabulary to hide, ascending. Prints the listed genes that are not hidden."""
        config = self.config
        vocabulary = context.model.vocabulary
        known_counts = select_columns(counts, context.gene_columns.target, vocabulary.n_genes)
        n_cells = np.bincount(known_counts.indices, minlength=vocabulary.n_genes)
        is_expressed = n_cells >= config.min_cells
        if config.genes is None:
            expressed = np.flatnonzero(is_expressed)
            n = round(config.hidden_frac * len(expressed))
            n = max(min(n, config.max_genes, len(expressed) - 1), 0)
            drawn = seeded(context.options.seed, draws.HIDDEN_GENES).permutation(expressed)[:n]
            return np.sort(drawn)
        row_of_name = rows_of_names(config.genes, vocabulary)
        rows = []
        left_out = []
        for name, row in row_of_name.items():
            if row >= 0 and is_expressed[row]:
                rows.append(row)
            else:
                left_out.append(name)
        genes = np.unique(rows).astype(np.int64)
        if not 0 < len(genes) < len(context.measured_genes):
            raise DataError(
                f"evaluate.tasks.imputation.genes: {len(genes):,} of {len(row_of_name):,} are genes of the model that "
                f"{config.min_cells} scored cells of {context.dataset} express (min_cells), expected one or more, "
                "and others that are seen; name genes by Ensembl id or current symbol"
            )
        if left_out:
            names = ", ".join(sorted(left_out))
            print(
                f"{context.dataset}: imputation: not hidden, unknown or too rare: {names}",
                flush=True,
            )
        return genes

    def _tabulate(
        self, hidden: HiddenGenes, predictions: Iterable[FoldPrediction]
    ) -> list[ScoreColumn]:
        """A column for each metric: means over the folds of a repetition, for methods that have the
        metric.
        """
        measured = hidden.expression()
        n_cells, n_genes = measured.shape
        # sums and counts of scores, (2, repetitions, cells or genes), by metric and method
        totals: dict[str, ByMethod] = {metric: {} for metric in METRICS}
        for prediction in predictions:
            scores = expression_scores(prediction.values, measured[prediction.cells])
            for metric, unit_scores in scores.items():
                units = prediction.cells
                shape = (2, prediction.n_repetitions, n_cells)
                if metric.endswith("by gene"):
                    units = np.arange(n_genes)
                    shape = (2, prediction.n_repetitions, n_genes)
                total = totals[metric].setdefault(prediction.method, np.zeros(shape))
                total[0, prediction.repetition, units] += np.nan_to_num(unit_scores)
                total[1, prediction.repetition, units] += np.isfinite(unit_scores)
        columns = []
        for metric, metric_name in METRICS.items():
            means = {}
            for method, (sums, n_scores) in totals[metric].items():
                if n_scores.any():
                    means[method] = divide(sums, n_scores)
            if means:
                is_error = metric == "MSE"
                columns.append(ScoreColumn(metric, metric_name, means, lower_is_better=is_error))
        return columns

    def _predict(
        self,
        model: EvaluatedModel,
        hidden: HiddenGenes,
        trained: TrainingCells | None,
        folds: list[Fold],
    ) -> Iterator[FoldPrediction]:
        """Predictions of the test cells of each fold: by the model and methods fitted on training
        cells, then by methods fitted on the other folds.
        """
        n_repetitions = 1 + max(fold.repetition for fold in folds)
        vectors = {EMBEDDING: hidden.embed(model.network), UNTRAINED: hidden.embed(model.untrained)}
        by_method: ByMethod = {}
        decoded = decode_expression(hidden, vectors[EMBEDDING])
        if decoded is not None:
            by_method[replace(EMBEDDING, classifier="decoder")] = decoded
            if model.ridge is not None:
                (by_ridge,) = hidden.predict_by_ridge(model.ridge)
                by_method[replace(EMBEDDING, classifier="decoder + ridge")] = model.ridge.mix(
                    decoded, by_ridge
                )
                by_method[ALL_COMPONENTS] = by_ridge
        if trained is not None:
            by_method |= trained.predict(hidden, vectors, self.config.neighbors)
        for fold in folds:
            for method, values in by_method.items():
                tested_values = values[fold.test]
                yield FoldPrediction(
                    method, fold.repetition, n_repetitions, fold.test, tested_values
                )
        expression = hidden.expression()
        profiles = hidden.profiles
        for fold in folds:
            train = fold.train
            test = fold.test
            by_method = predict_hidden(
                expression[train],
                profiles[train],
                select_cells(vectors, train),
                profiles[test],
                select_cells(vectors, test),
                self.config.neighbors,
            )
            for method, values in by_method.items():
                noted = note_folds(method)
                yield FoldPrediction(noted, fold.repetition, n_repetitions, test, values)


def predict_hidden(
    expression: np.ndarray,
    fitted_profiles: sp.csr_matrix,
    fitted_vectors: ByMethod,
    tested_profiles: sp.csr_matrix,
    tested_vectors: ByMethod,
    neighbors: int,
) -> ByMethod:
    """Expression (tested cells, G) by method: regressions on vectors and on components of the
    visible genes, and the means of `expression`, (fitted cells, G).

    Features are used with and without standardising, which raises the weight of small components
    and so helps or hurts depending on the number of cells.
    """
    components = pca(fitted_profiles.shape).fit(fitted_profiles)
    fitted = fitted_vectors | {VISIBLE_COMPONENTS: components.transform(fitted_profiles)}
    tested = tested_vectors | {VISIBLE_COMPONENTS: components.transform(tested_profiles)}
    n_neighbors = min(neighbors, len(expression))
    predicted: ByMethod = {}
    for method, values in fitted.items():
        for ending, scaler in (("", StandardScaler()), (", unscaled", None)):
            regressors = {"ridge": RidgeCV(ALPHAS), KNN: KNeighborsRegressor(n_neighbors)}
            for name, regressor in regressors.items():
                regression = make_pipeline(scaler, regressor).fit(values, expression)
                classified = replace(method, classifier=f"{name}{ending}")
                predicted[classified] = regression.predict(tested[method])
    n_tested = tested_profiles.shape[0]
    predicted[GENE_MEANS] = np.tile(expression.mean(0), (n_tested, 1))
    return predicted


def note_folds(method: ScoredMethod) -> ScoredMethod:
    """The method fitted on other cells than the model: a row of its own, in no verdict."""
    return replace(add_note(method, ", folds of scored cells"), kind="variant")


def expression_scores(predicted: np.ndarray, measured: np.ndarray) -> dict[str, np.ndarray]:
    """Scores by metric, (G,) or (C,) float64, of expression (C, G); a correlation with a constant
    is NaN.
    """
    predicted = predicted.astype(np.float64)
    measured = measured.astype(np.float64)
    rank_in_gene = rankdata(predicted, axis=0)
    rank_in_cell = rankdata(predicted, axis=1)
    return {
        "Pearson by gene": column_correlations(predicted, measured),
        "Spearman by gene": column_correlations(rank_in_gene, rankdata(measured, axis=0)),
        "Pearson by cell": column_correlations(predicted.T, measured.T),
        "Spearman by cell": column_correlations(rank_in_cell.T, rankdata(measured, axis=1).T),
        "MSE": np.square(predicted - measured).mean(1),
    }
