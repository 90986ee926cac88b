"""distill: predict a teacher model's vector of a cell from this model's vector of the cell.

A linear layer predicts the teacher's vector. The columns of the teacher's vectors are standardised
(`data.shards.index`). The loss of a cell is the mean squared error over these columns. It is the hint
loss of FitNets (Romero et al. 2015, equation 3): a regression on a teacher's hidden features through
a learned layer.

The cells of `evaluate` have no teacher's vector. So this objective has no `judge`, and only the tasks
of `evaluate` judge the embedding.
"""

import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import DistillConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.initial import with_std
from cellmill.models.objective import ObjectiveModel
from cellmill.models.objectives.shared.per_cell import CellObjective, TargetBatch


class Distill(CellObjective):
    """Predict a teacher's vector of a cell from this model's vector of the cell."""

    config: DistillConfig
    teacher_width: int  # number of columns of the teacher's vectors; `attach` sets it

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.head_name = f"teacher_head{self.suffix}"
        width = model.vector_width
        # `plan` may run before the teacher's vectors exist: it then assumes the width of this
        # model's own vectors
        self.teacher_width = width if self.config.vectors is None else self.config.vectors.width
        setattr(model, self.head_name, with_std(nn.Linear(width, self.teacher_width), width**-0.5))
        return (self.head_name,)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        vectors = batch.teacher
        if vectors is None:  # only stage train reads a teacher's vectors
            vectors = torch.full((len(batch.lengths), self.teacher_width), torch.nan)
        return vectors, vectors.isfinite().all(1)

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the teacher's vectors, (cells, teacher width) float32.

        `vectors` (cells, vector width) are this model's vectors of the cells.
        """
        predicted: Tensor = getattr(model, self.head_name)(vectors)
        return predicted.float()

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        return (predicted - prepared.targets).square().mean(1).sum()
