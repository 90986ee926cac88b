"""supervised_contrastive: cells of one label have similar vectors.

Every cell is in turn the anchor, and is compared with all other cells of the global batch. Cells with
the anchor's label are its positives. For each positive the loss is its cross-entropy among all other
cells, with cosine / temperature as logits. An anchor's loss is their mean, or 0 without a positive
(Khosla et al. 2020, equation 2, L_out).

There is no projection head. The published loss has two augmented views of each image; here a cell is
encoded once. In a `sum` with cell_decoding the vector comes from the shown part, which changes from
step to step.

Legend: C cells with a target, E width of a cell's vector, S slots of a global batch: a row per cell
with a target, zeros in the others (`train.batch_rows`), A anchors.
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

ANCHORS_PER_CHUNK = 1024  # anchors whose logits exist at once


class SupervisedContrastive(LabelObjective):
    config: SupervisedContrastiveConfig

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.coupled_widths = (1 + model.vector_width,)
        return ()

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensor:
        (rows,) = self.coupled_rows(model, states, prepared)
        return self.coupled_loss(rows, prepared)

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensors:
        """Make the row [level code of the label, unit vector] of each cell, `(C, 1 + E)` float32."""
        vectors = model.cell_vectors(states, prepared)[prepared.target_cells].float()
        # from 1: the first number of a row may not be 0
        codes = prepared.targets[:, None].to(vectors) + 1
        return (torch.cat([codes, F.normalize(vectors, dim=1)], dim=1),)

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        return tuple(contrastive_loss_sum(table, self.config.temperature) for table in tables)

    def observe(self, model: ObjectiveModel, prepared: TargetBatch) -> Tensors:
        """Return indices of labels, `(C,)` int64, and unit vectors, `(C, E)` float32."""
        (rows,) = self.coupled_rows(model, model.states(prepared), prepared)
        return prepared.targets, rows[:, 1:]

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score the mean loss against the loss if all vectors were equal.

        There is no score if no two cells share a label.
        """
        label_indices, vectors = (torch.from_numpy(array) for array in observed)
        n_cells = len(label_indices)
        has_positive = torch.bincount(label_indices)[label_indices] > 1
        if not has_positive.any():
            return {"n_targets": n_cells}, []
        rows = torch.cat([label_indices[:, None].float() + 1, vectors], dim=1)
        loss = float(contrastive_loss_sum(rows, self.config.temperature)) / n_cells
        # every other cell has the same probability if all vectors are equal
        loss_if_all_equal = float(has_positive.double().mean()) * math.log(n_cells - 1)
        metrics = {
            "n_targets": n_cells,
            "supervised_contrastive": loss,
            "supervised_contrastive_alike": loss_if_all_equal,
        }
        name = f"supervised contrast of {self.config.label_column}"
        return metrics, cross_entropy_verdicts(name, "equal vectors", loss - loss_if_all_equal)


def contrastive_loss_sum(rows: Tensor, temperature: float) -> Tensor:
    """Sum the loss over the cells of a global batch, a float64 scalar.

    Each of the `rows` `(S, 1 + E)` is [level code of the label, unit vector]; a row of zeros is an
    empty slot.
    """
    codes = rows[:, 0].detach()
    vectors = rows[:, 1:]
    loss = rows.new_zeros((), dtype=torch.float64)
    # without rows there is still one chunk, without anchors, so the loss has a gradient
    for anchors in torch.arange(len(rows), device=rows.device).split(ANCHORS_PER_CHUNK):
        # recompute in the backward pass, to hold ANCHORS_PER_CHUNK * S logits at a time, not S * S
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
    """Sum the loss of the cells in slots `anchors` `(A,)` int64, a float64 scalar.

    `codes` are `(S,)`, `vectors` `(S, E)`.
    """
    anchor_codes = codes[anchors, None]  # `(A, 1)`
    slots = torch.arange(len(codes), device=codes.device)
    # `(A, S)` bool: the other cells, and those of them with the anchor's label
    is_other = (codes != 0) & (slots != anchors[:, None])
    is_positive = is_other & (codes == anchor_codes)
    n_positive = is_positive.sum(1)
    cosines = vectors[anchors] @ vectors.T
    logits = (cosines / temperature).masked_fill(~is_other, -torch.inf)
    # anchors without positives add nothing; their logits may all be -inf, so use zeros instead
    log_sum = torch.where(n_positive[:, None] > 0, logits, 0).logsumexp(1)
    mean_positive = torch.where(is_positive, logits, 0).sum(1) / n_positive.clamp(min=1)
    return torch.where(n_positive > 0, log_sum - mean_positive, 0).sum().double()
