"""distill: predict a teacher model's vector of a cell from this model's vector.

A linear layer predicts the teacher's vector. The loss is the mean squared error over its columns,
which are standardised (`data.shards.index`). This is the hint loss of FitNets (Romero et al. 2015,
equation 3), which regresses on hidden features of a teacher through a learned layer. Cells of
`evaluate` have no teacher's vector, so it has no `judge`: tasks judge the embedding.

Legend: C cells with a target, E width of a cell's vector, D width of the teacher's.
"""

import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import DistillConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.initial import with_std
from cellmill.models.objective import ObjectiveModel
from cellmill.models.objectives.shared.per_cell import CellObjective, TargetBatch


class Distill(CellObjective):
    config: DistillConfig
    teacher_width: int  # set by `attach`

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.head_name = f"teacher_head{self.suffix}"
        width = model.vector_width
        # a plan may be made before the teacher's vectors exist
        self.teacher_width = width if self.config.vectors is None else self.config.vectors.width
        setattr(model, self.head_name, with_std(nn.Linear(width, self.teacher_width), width**-0.5))
        return (self.head_name,)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        vectors = batch.teacher
        if vectors is None:  # outside stage train there is no teacher
            vectors = torch.full((len(batch.lengths), self.teacher_width), torch.nan)
        return vectors, vectors.isfinite().all(1)

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the teacher's vectors, `(C, D)` float32, from `vectors` `(C, E)`."""
        predicted: Tensor = getattr(model, self.head_name)(vectors)
        return predicted.float()

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        return (predicted - prepared.targets).square().mean(1).sum()
