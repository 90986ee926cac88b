"""Baselines of task `imputation` that are fitted on the model's training cells.

The model's decoder was trained on these cells to predict the genes that are hidden here. The baselines
are fitted on the same cells, to predict the same genes.

Legend: C training cells, G hidden genes.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from cellmill.data.genes.names import GeneColumns
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.reader import read_names
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.hidden_genes.fit_ridge import MAX_TRAINING_CELLS, MIN_REGRESSION_CELLS
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.methods import ByMethod, add_note
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.imputation.regressions import VisibleFeatures, predict_by_regressions
from cellmill.evaluate.training_shards import read_counts


@dataclass(frozen=True)
class TrainingCellRegressions:
    """Regressions on training cells. They read the visible genes that the evaluated dataset measures."""

    model: EvaluatedModel
    training_cells: PartlyHiddenCells
    is_from_dataset: np.ndarray  # (C,) bool: True for training cells of the evaluated dataset

    @classmethod
    def read(cls, context: Context, hidden_genes: np.ndarray) -> Self | None:
        """Read training cells, and hide genes in them. None if the training cells have no counts, or if
        there are fewer than MIN_REGRESSION_CELLS of them.
        """
        manifest = context.model.manifest
        if manifest.ordered:
            return None
        counts = read_counts(manifest, MAX_TRAINING_CELLS)
        n_cells = counts.shape[0]
        if n_cells < MIN_REGRESSION_CELLS:
            return None
        # training counts have a column for each gene of the vocabulary; genes that the evaluated dataset
        # does not measure get row -1, as if the model did not know them
        rows = np.arange(context.model.vocabulary.n_genes)
        is_measured = np.isin(rows, context.measured_genes)
        columns = GeneColumns(np.where(is_measured, rows, -1).astype(np.int32), is_measured)
        training_cells = PartlyHiddenCells(
            context.model.network,
            context.model.vocabulary,
            context.model.tokens,
            context.options.precision,
            columns,
            counts,
            hidden_genes,
            _read_levels(context.model, n_cells),
        )
        # names of the training cells, such as `dataset:cell`, from as few shards as possible
        names: list[str] = []
        for shard in manifest.splits["train"].shards:
            if len(names) < n_cells:
                names += read_names(manifest.shard_path(shard), "obs").tolist()
        is_from_dataset = [name.startswith(f"{context.dataset}:") for name in names[:n_cells]]
        return cls(context.model, training_cells, np.array(is_from_dataset, bool))

    def groups_by_note(self) -> dict[str, np.ndarray]:
        """Groups of training cells (indices) that regressions are fitted on, by the note in the name of a
        row.

        The first group is all training cells. The second group is the training cells of the evaluated
        dataset, because other datasets may lack hidden genes. It is absent if all training cells, or
        fewer than MIN_REGRESSION_CELLS, are of the evaluated dataset.
        """
        n_cells = len(self.is_from_dataset)
        n_of_dataset = int(self.is_from_dataset.sum())
        groups = {"": np.arange(n_cells)}
        if MIN_REGRESSION_CELLS <= n_of_dataset < n_cells:
            groups[", training cells of the dataset"] = np.flatnonzero(self.is_from_dataset)
        return groups

    def predict(self, tested: VisibleFeatures, neighbors: int) -> ByMethod:
        """Predicted expression of the hidden genes in the tested cells, (tested cells, G) by method, by
        regressions that are fitted on each group of training cells.
        """
        expression = self.training_cells.hidden_expression
        features = VisibleFeatures.compute(self.training_cells, self.model)
        predicted: ByMethod = {}
        for note, group in self.groups_by_note().items():
            by_method = predict_by_regressions(
                expression[group], features.select(group), tested, neighbors
            )
            predicted |= {add_note(method, note): values for method, values in by_method.items()}
        return predicted


def _read_levels(model: EvaluatedModel, n_cells: int) -> np.ndarray | None:
    """(C, obs columns) int32: level codes of the first `n_cells` training cells. None if the model reads
    no obs columns.
    """
    if not model.tokens.covariates:
        return None
    option = "tokens.covariates"
    columns = model.manifest.levels(dict.fromkeys(model.network.objective.levels, option))
    return CellColumns(model.manifest, "train", "levels", columns)[:n_cells]
