"""supervised_contrastive: train cells with the same label to have similar vectors.

Each cell is the anchor once, and is compared with all other cells of the global batch. The positives of
an anchor are the other cells with the anchor's label. The logit of a cell is the cosine of the cell's
vector and the anchor's vector, divided by the temperature. The loss of an anchor is the mean, over the
anchor's positives, of the cross-entropy of picking that positive among all other cells. An anchor without
a positive has loss 0 (Khosla et al. 2020, equation 2, L_out).

There is no projection head. The published loss compares two augmented views of each image. Here each
cell is encoded once. In a `sum` with cell_decoding the vector comes from the shown part of the cell, and
the shown part changes from step to step.

In the shapes below, "slots" are the slots of a global batch. Each slot has the row of one cell with a
label, or only zeros if it is empty (`train.batch_rows`).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cellmill.config.parts.objectives import SupervisedContrastiveConfig
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    ObjectiveModel,
    Tensors,
    cross_entropy_verdicts,
)
from cellmill.models.objectives.shared.per_cell import LabelObjective, TargetBatch

ANCHORS_PER_CHUNK = 1024  # at most this number of anchors have their logits in memory at once


class SupervisedContrastive(LabelObjective):
    """Train cells with the same label to have similar vectors."""

    config: SupervisedContrastiveConfig

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.coupled_widths = (1 + model.vector_width,)
        return ()

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensor:
        (rows,) = self.coupled_rows(model, states, prepared)
        return self.coupled_loss(rows, prepared)

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensors:
        """Make the row [level code of the label, unit vector] of each cell with a label.

        The rows are (target cells, 1 + vector width) float32.
        """
        vectors = model.cell_vectors(states, prepared)[prepared.target_cells].float()
        # level codes begin at 1, because the first number of a row must not be 0
        codes = prepared.targets[:, None].to(vectors) + 1
        return (torch.cat([codes, F.normalize(vectors, dim=1)], dim=1),)

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        return tuple(contrastive_loss_sum(table, self.config.temperature) for table in tables)

    def observe(self, model: ObjectiveModel, prepared: TargetBatch) -> Tensors:
        """Return the index of each cell's label, int64, and the cell's unit vector, float32.

        The shapes are (target cells,) and (target cells, vector width).
        """
        (rows,) = self.coupled_rows(model, model.states(prepared), prepared)
        return prepared.targets, rows[:, 1:]

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare the mean loss with the loss that equal vectors of all cells would have.

        If no two cells have the same label, there is nothing to compare. Then the only metric is the number
        of cells, without a verdict.
        """
        label_indices, vectors = (torch.from_numpy(array) for array in observed)
        n_cells = len(label_indices)
        has_positive = torch.bincount(label_indices)[label_indices] > 1
        if not has_positive.any():
            return {"n_targets": n_cells}, []

        rows = torch.cat([label_indices[:, None].float() + 1, vectors], dim=1)
        loss = float(contrastive_loss_sum(rows, self.config.temperature)) / n_cells
        # if all vectors are equal, an anchor picks each of the other cells with the same probability
        equal_vectors_loss = float(has_positive.double().mean()) * math.log(n_cells - 1)

        metrics = {
            "n_targets": n_cells,
            "supervised_contrastive": loss,
            "supervised_contrastive_alike": equal_vectors_loss,
        }
        name = f"supervised contrast of {self.config.label_column}"
        return metrics, cross_entropy_verdicts(name, "equal vectors", loss - equal_vectors_loss)


def contrastive_loss_sum(rows: Tensor, temperature: float) -> Tensor:
    """Sum the loss over the cells of a global batch, a float64 scalar.

    `rows` are (slots, 1 + vector width). The row of a cell is [level code of the label, unit vector],
    and the row of an empty slot is zeros.
    """
    codes = rows[:, 0].detach()
    vectors = rows[:, 1:]
    loss = rows.new_zeros((), dtype=torch.float64)
    # Without rows, `split` still yields one chunk, which is empty. So the loss always depends on `rows`,
    # and always has a gradient
    for anchors in torch.arange(len(rows), device=rows.device).split(ANCHORS_PER_CHUNK):
        # The backward pass computes the logits of a chunk once more. So only the logits of one chunk,
        # (ANCHORS_PER_CHUNK, slots), are in memory, and never all (slots, slots)
        loss = loss + checkpoint(
            _anchor_loss_sum,
            codes,
            vectors,
            anchors,
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return loss


def _anchor_loss_sum(codes: Tensor, vectors: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """Sum the loss over some anchors, a float64 scalar.

    `codes` (slots,) are the level codes of the labels, and `vectors` (slots, vector width) the unit
    vectors, of all slots. `anchors` (anchors,) int64 are the slots of the anchors.
    """
    # (anchors, slots) bool: the other cells of the global batch, and the positives among them. An empty
    # slot is never an other cell, and as an anchor it has no positives
    anchor_codes = codes[anchors, None]
    slots = torch.arange(len(codes), device=codes.device)
    is_other = (codes != 0) & (slots != anchors[:, None])
    is_positive = is_other & (codes == anchor_codes)
    n_positives = is_positive.sum(1)

    cosines = vectors[anchors] @ vectors.T
    logits = (cosines / temperature).masked_fill(~is_other, -torch.inf)
    # An anchor without positives adds 0 to the loss. All of its logits may be -inf, and their
    # log-sum-exp then has no gradient, so zeros take the place of its logits
    usable_logits = torch.where(n_positives[:, None] > 0, logits, 0)

    # the mean cross-entropy of an anchor's positives
    log_sum_exp = usable_logits.logsumexp(1)
    mean_positive_logit = torch.where(is_positive, logits, 0).sum(1) / n_positives.clamp(min=1)
    return torch.where(n_positives > 0, log_sum_exp - mean_positive_logit, 0).sum().double()
