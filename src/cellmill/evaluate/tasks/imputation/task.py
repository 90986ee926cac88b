"""Task `imputation`: prediction of genes that are hidden from the model (docs/evaluation.md).

The model is compared with regressions that are fitted on its own training cells
(`training_cell_regressions.py`). Further regressions are fitted on folds of the scored cells. They are
fitted on other cells than the model, and mostly on fewer cells. So they have rows of kind variant, and no
verdict compares them with the model.

Legend: C scored cells, G hidden genes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import KFold

from cellmill.config.parts.tasks import ImputationConfig
from cellmill.data.arrays import select_columns
from cellmill.data.genes.names import rows_of_names
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells, seeded
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.hidden_genes.decoder import decode_expression
from cellmill.evaluate.hidden_genes.fit_ridge import MAX_TRAINING_CELLS, MIN_REGRESSION_CELLS
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.hidden_genes.ridge import GeneRidge
from cellmill.evaluate.methods import EMBEDDING, ByMethod, add_note
from cellmill.evaluate.scores import ScoreColumn, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import Fold, split_donors
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.imputation.fold_scores import FoldPrediction, make_columns
from cellmill.evaluate.tasks.imputation.regressions import VisibleFeatures, predict_by_regressions
from cellmill.evaluate.tasks.imputation.training_cell_regressions import TrainingCellRegressions
from cellmill.runs.results import ScoredMethod, TaskResult

# At most this many scored cells are used, because they are embedded again, and because all hidden genes
# are predicted in each fold.
MAX_IMPUTED_CELLS = 2_000
REGRESSION_CELL_S = 4e-4  # seconds of all regressions together, for each fitted cell
# The row of the ridge regression in the model's export, without the decoder. Its principal components
# are of all genes, hidden genes too.
EXPORTED_RIDGE = ScoredMethod(f"PCA{COMPONENTS} of all genes", classifier="ridge")


class Imputation(Task):
    config: ImputationConfig

    def run(self, context: Context) -> TaskResult:
        """Correlations by gene and by cell, and squared errors.

        Raises Skipped if the dataset has no counts, too few scored cells, or no gene that can be hidden.
        Raises DataError if option `genes` lists genes, and none or all of the measured genes would be
        hidden.
        """
        if context.reader.ordered:
            raise Skipped("sequences and ranks have no expression")
        scored = draw_cells(
            np.flatnonzero(context.scored),
            MAX_IMPUTED_CELLS,
            context.options.seed,
            draws.IMPUTED_CELLS,
        )
        role, folds = self._split_cells(context, scored)
        counts = read_rows(context.reader, scored)
        hidden_genes = self._choose_genes(context, counts)
        partly_hidden = PartlyHiddenCells.from_context(context, scored, counts, hidden_genes)
        regressions = TrainingCellRegressions.read(context, hidden_genes)

        figures = {
            "n_cells": len(scored),
            "hidden_genes": len(hidden_genes),
            "measured_genes": len(context.measured_genes),
            "folds_of": role,
            "folds": context.options.folds if role == "cells" else len(folds),
            "neighbors": self.config.neighbors,
        }
        if regressions is not None:
            figures["training_cells"] = len(regressions.is_from_dataset)
            figures["training_cells_of_dataset"] = int(regressions.is_from_dataset.sum())
        _print_sizes(context.dataset, figures)

        predictions = self.predict_folds(context.model, partly_hidden, regressions, folds)
        columns = make_columns(predictions, partly_hidden.hidden_expression)
        return tabulate(columns, figures, [column for column in columns if _is_judged(column)])

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_IMPUTED_CELLS)
        n_training = min(sizes.n_training, MAX_TRAINING_CELLS)
        config = self.config
        n_folds = (
            sizes.count_folds(("donor",), config.most_folds)
            or sizes.count_folds(("batch",), config.most_folds)
            or config.seeds * sizes.folds
        )
        # regressions on components and embeddings, for each fold and once on training cells
        fold_s = sizes.components_s(n) + REGRESSION_CELL_S * n
        training_s = sizes.components_s(n_training) + REGRESSION_CELL_S * n_training
        # the model and the untrained model embed the cells, and the decoder predicts
        return 3 * (n + n_training) * sizes.forward_s + training_s + n_folds * fold_s

    def _split_cells(self, context: Context, cells: np.ndarray) -> tuple[str, list[Fold]]:
        """Kind and list of the folds. Folds leave out donors, or else batches, or else cells. The kind is
        `donor`, `batch` or `cells`.

        `cells` are the indices of the scored cells. Raises Skipped if folds of cells would have too few
        cells.
        """
        role, folds = split_donors(
            context.roles, cells, self.config.most_folds, min_cells=MIN_REGRESSION_CELLS
        )
        if folds:
            return role, folds
        options = context.options
        if len(cells) < MIN_REGRESSION_CELLS * options.folds:
            raise Skipped(
                f"{len(cells)} scored cells are too few for {options.folds} folds of {MIN_REGRESSION_CELLS}; "
                "lower evaluate.folds"
            )
        for repetition in range(self.config.seeds):
            splitter = KFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for fitted, tested in splitter.split(cells):
                folds.append(Fold(repetition, fitted, tested))
        return "cells", folds

    def _choose_genes(self, context: Context, counts: sp.csr_matrix) -> np.ndarray:
        """Genes to hide, (G,) int64: rows of the vocabulary, ascending. These are the genes that option
        `genes` lists. Without this option they are drawn at random.

        Only genes that at least `min_cells` of the scored cells express are hidden. `counts`, (C, columns
        of the file), are the counts of the scored cells. Raises Skipped if no gene can be drawn.
        """
        config = self.config
        n_genes = context.model.vocabulary.n_genes
        known_counts = select_columns(counts, context.gene_columns.target, n_genes)
        n_cells = np.bincount(known_counts.indices, minlength=n_genes)
        is_expressed = n_cells >= config.min_cells
        if config.genes is not None:
            return self._find_listed_genes(context, config.genes, is_expressed)
        expressed = np.flatnonzero(is_expressed)
        # at least one of the expressed genes stays visible
        n = round(config.hidden_frac * len(expressed))
        n = max(min(n, config.max_genes, len(expressed) - 1), 0)
        if not n:
            limits = f"hidden_frac {config.hidden_frac:g}, min_cells {config.min_cells}"
            raise Skipped(f"no gene can be hidden ({limits}, {counts.shape[0]} scored cells)")
        drawn = seeded(context.options.seed, draws.HIDDEN_GENES).permutation(expressed)[:n]
        return np.sort(drawn)

    def _find_listed_genes(
        self, context: Context, names: list[str], is_expressed: np.ndarray
    ) -> np.ndarray:
        """Rows of the genes `names` in the vocabulary, ascending. Genes that are unknown or not expressed
        are left out, and printed.

        `is_expressed` is a mask over the vocabulary. Raises DataError if none or all of the measured genes
        would be hidden.
        """
        row_by_name = rows_of_names(names, context.model.vocabulary)
        rows = []
        left_out = []
        for name, row in row_by_name.items():
            if row >= 0 and is_expressed[row]:
                rows.append(row)
            else:
                left_out.append(name)
        genes = np.unique(rows).astype(np.int64)
        option = "evaluate.tasks.imputation.genes"
        if len(genes) == 0:
            raise DataError(
                f"{option}: none of {len(row_by_name):,} named genes is known to the model and expressed in at least "
                f"{self.config.min_cells} scored cells of {context.dataset} (min_cells); name at least one that is"
            )
        if len(genes) == len(context.measured_genes):
            raise DataError(
                f"{option}: all {len(genes):,} measured genes of {context.dataset} would be hidden; leave at least "
                "one out, which the model then sees"
            )
        if left_out:
            listed = ", ".join(sorted(left_out))
            print(
                f"{context.dataset}: imputation: not hidden, unknown or too rare: {listed}",
                flush=True,
            )
        return genes

    def predict_folds(
        self,
        model: EvaluatedModel,
        partly_hidden: PartlyHiddenCells,
        regressions: TrainingCellRegressions | None,
        folds: list[Fold],
    ) -> Iterator[FoldPrediction]:
        """Predicted expression of the tested cells of each fold, by each method.

        First come the predictions by the model and by regressions on its training cells. They are the
        same for all folds. Then come the predictions by regressions on the fitted cells of each fold.
        """
        n_repetitions = 1 + max(fold.repetition for fold in folds)
        neighbors = self.config.neighbors
        features = VisibleFeatures.compute(partly_hidden, model)
        by_method = predict_by_decoder(partly_hidden, features.vectors[EMBEDDING], model.ridge)
        if regressions is not None:
            by_method |= regressions.predict(features, neighbors)
        for fold in folds:
            for method, values in by_method.items():
                yield FoldPrediction(
                    method, fold.repetition, n_repetitions, fold.tested, values[fold.tested]
                )

        expression = partly_hidden.hidden_expression
        for fold in folds:
            by_method = predict_by_regressions(
                expression[fold.fitted],
                features.select(fold.fitted),
                features.select(fold.tested),
                neighbors,
            )
            for method, values in by_method.items():
                # kind variant keeps the row out of verdicts, see the docstring of the module
                noted = replace(add_note(method, ", folds of scored cells"), kind="variant")
                yield FoldPrediction(noted, fold.repetition, n_repetitions, fold.tested, values)


def _print_sizes(dataset: str, figures: Mapping[str, Any]) -> None:
    """Print in one line how many genes are hidden, and how many cells methods are fitted on."""
    fitted_on = "no training cells with counts"
    if "training_cells" in figures:
        fitted_on = f"{figures['training_cells']:,} training cells"
    print(
        f"{dataset}: imputation: {figures['hidden_genes']:,} of {figures['measured_genes']:,} measured genes are "
        f"hidden, {figures['n_cells']:,} cells, folds of {figures['folds_of']}; fitted on {fitted_on}",
        flush=True,
    )


def _is_judged(column: ScoreColumn) -> bool:
    """True for a column that gets verdicts: a correlation that both the model and a baseline have."""
    if column.heading == "MSE":
        return False
    return bool(column.select_kind("model") and column.select_kind("baseline"))


def predict_by_decoder(
    partly_hidden: PartlyHiddenCells, vectors: np.ndarray, ridge: GeneRidge | None
) -> ByMethod:
    """Predicted expression of the hidden genes, (C, G), by the model's decoder, by the ridge regression of
    its export, and by the weighted mean of both. Empty for a model without a decoder.

    `vectors`, (C, hidden width), are the embeddings of the cells. `ridge` is None for an export without a
    ridge regression.
    """
    decoded = decode_expression(partly_hidden, vectors)
    if decoded is None:
        return {}
    by_method = {replace(EMBEDDING, classifier="decoder"): decoded}
    if ridge is not None:
        (by_ridge,) = partly_hidden.predict_by_ridge(ridge)
        by_method[replace(EMBEDDING, classifier="decoder + ridge")] = ridge.mix(decoded, by_ridge)
        by_method[EXPORTED_RIDGE] = by_ridge
    return by_method
