"""Predict a number of each cell from its vector."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cellmill.data.stream.batch import Batch
from cellmill.models.objective import GeneStatistics, ObjectiveModel
from cellmill.models.objectives.shared.per_cell import CellHead, CellObjective, TargetBatch
from cellmill.runs.results import Verdict, compare


class Number(CellObjective):
    """See the module."""

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add a linear head."""
        self.head_name = f"toy_number_head{self.suffix}"
        setattr(model, self.head_name, CellHead(model.vector_width, None, 1, dropout=0.0))
        return (self.head_name,)

    def find_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the numbers; cells without one have no target."""
        numbers = batch.numbers[:, self.number_columns.index(self.config.number_column)]
        return numbers.float(), numbers.isfinite()

    def predict(
        self, model: ObjectiveModel, vectors: torch.Tensor, cell_keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the head."""
        return getattr(model, self.head_name)(vectors, cell_keys)[:, 0].float()

    def target_loss(self, predicted: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        """Summed squared error."""
        return functional.mse_loss(predicted, prepared.targets, reduction="sum")

    def judge(
        self, *observed: np.ndarray, statistics: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        """R² beside the mean of the cells."""
        targets, predicted = observed
        r2 = float(1 - np.square(targets - predicted).mean() / targets.var())
        figures = {"n_targets": len(targets), "r2": r2}
        return figures, [compare("toy number", "the mean of the cells", "R²", r2)]
