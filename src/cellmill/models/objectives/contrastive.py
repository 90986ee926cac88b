"""supervised_contrastive: cells of one label are close together, and far from cells of other labels.

For each cell of known label the loss is the mean, over the other cells p of its label in the global batch, of the
cross-entropy of p among all other cells of the global batch, whose logits are cosines of vectors over a temperature
(Khosla et al. 2020, equation 2, L_out). Cells of unknown label, and cells of which nothing is shown, take no part. All
others are targets and count once in the mean; one without another cell of its label in the global batch adds 0.

All pairs of cells of a global batch are compared, in every layout (`train.batch_rows`), in training and in validation,
whose loss therefore depends on train.global_batch too. The vectors are what `embed` writes, without a projection head.
The published loss has two augmented views of each image; here a cell is encoded once, in a `sum` with cell_decoding its
shown part, which changes from step to step.

Legend: C cells with a label, H width of a cell's vector, S slots of a global batch.
"""

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cellmill.config.parts.objectives import SupervisedContrastiveConfig
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.labels import LabelObjective, TargetBatch
from cellmill.runs.verdict import Verdict, compare

ANCHORS = 1024  # cells compared with all others at once


class SupervisedContrastive(LabelObjective):
    config: SupervisedContrastiveConfig
    validates_rows = True

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        self.row_widths = (1 + model.vector_width,)
        return ()

    def loss(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        (rows,) = self.rows(model, states, prepared)
        if prepared.shares is None:
            return contrast(rows, self.config.temperature).float()
        (share,) = prepared.shares
        return share.of(rows)

    def rows(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> tuple[torch.Tensor, ...]:
        """(C, 1 + H): label from 1 and vector of length 1."""
        vectors = self.target_vectors(model, states, prepared).float()
        return (torch.cat([prepared.targets[:, None].to(vectors) + 1, F.normalize(vectors, dim=1)], dim=1),)

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(contrast(table, self.config.temperature) for table in tables)

    def observe(self, model: Any, prepared: TargetBatch) -> tuple[torch.Tensor, ...]:
        """Return the label, from 1, and the vector of each cell."""
        (rows,) = self.rows(model, model.states(prepared), prepared)
        return prepared.targets + 1, rows[:, 1:]

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        labels, vectors = (torch.from_numpy(array) for array in observed)
        n = len(labels)
        if n < 2:
            return {"n_targets": n}, []
        loss = float(contrast(torch.cat([labels[:, None].float(), vectors], dim=1), self.config.temperature)) / n
        having = torch.bincount(labels)[labels] > 1
        alike = float(having.double().mean()) * math.log(n - 1)
        metrics = {"n_targets": n, "supervised_contrastive": loss, "supervised_contrastive_alike": alike}
        name = f"supervised contrast of {self.config.label_column}"
        return metrics, [compare(name, "equal vectors", "nats", loss - alike, lower_is_better=True)]


def contrast(table: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the summed loss, a float64 scalar, of rows (S, 1 + H): label, or 0 for no cell, and vector of length 1."""
    labels, vectors = table[:, 0].detach(), table[:, 1:]
    loss = table.new_zeros((), dtype=torch.float64) + 0 * vectors.sum()
    for anchors in torch.arange(len(table), device=table.device).split(ANCHORS):
        given = labels, vectors, anchors, temperature
        # computed again in the backward pass: ANCHORS * S logits at a time, not S * S
        loss = loss + checkpoint(_of_anchors, *given, use_reentrant=False, preserve_rng_state=False)
    return loss


def _of_anchors(labels: torch.Tensor, vectors: torch.Tensor, anchors: torch.Tensor, temperature: float) -> torch.Tensor:
    own, at = labels[anchors, None], torch.arange(len(labels), device=labels.device)
    other = (labels != 0) & (at != anchors[:, None])
    positive = other & (labels == own) & (own != 0)
    n = positive.sum(1)
    logits = (vectors[anchors] @ vectors.T / temperature).masked_fill(~other, -torch.inf)
    # rows without positives, whose logits may all be -inf, have those of zeros and are left out
    below = torch.where(n[:, None] > 0, logits, 0).logsumexp(1)
    mean = torch.where(positive, logits, 0).sum(1) / n.clamp(min=1)
    return torch.where(n > 0, below - mean, 0).sum().double()
