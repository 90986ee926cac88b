"""classification: predict a cell's label from its vector.

The loss is the cross-entropy, in training times the weight of the cell's label. The head has one
output per level, so that `init_from` can match its rows by the level's name. If some cells have no
value, the last level is MISSING. It is not a label, and its logit is left out.

With `adversarial_scale` the encoder gets the reversed gradient, times this number: the head learns the
label, and the encoder hides it (Ganin & Lempitsky 2015). Such a loss is left out of the validation
loss, and `judge` gives no verdict on it.

Legend: C cells with a target, L levels, E width of a cell's vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cellmill.config.parts.objectives import ClassificationConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.blocks import ReverseGradient
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    ObjectiveModel,
    cross_entropy_verdicts,
)
from cellmill.models.objectives.shared.calibration import calibration_error_of_logits
from cellmill.models.objectives.shared.per_cell import CellHead, LabelObjective, TargetBatch


@dataclass(frozen=True, kw_only=True)
class WeightedLabelBatch(TargetBatch):
    """The shown tokens, the labels of the cells that have one, and their weights."""

    cell_weights: Tensor  # `(C,)` float32: weight of each cell's label in the loss


class Classification(LabelObjective):
    config: ClassificationConfig
    metric_names = ("accuracy",)
    n_sums = 2
    temperature: float | None = None
    """Fitted temperature of an exported head, for the calibration in `judge`; set by `evaluate`."""

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        config = self.config
        # the validation loss chooses the checkpoint: a model that hides the label must not look worse
        self.in_validation_loss = config.adversarial_scale is None
        self.head_name = f"label_head{self.suffix}"
        n_levels = len(self.levels[config.label_column])
        head = CellHead(model.vector_width, config.head_hidden, n_levels, config.head_dropout)
        setattr(model, self.head_name, head)
        last = f"{self.head_name}.out"
        model.add_level_rows(config.label_column, f"{last}.weight", f"{last}.bias")
        return (self.head_name,)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> WeightedLabelBatch:
        prepared = super().prepare(batch, seed=seed, step=step)
        targets = prepared.targets
        weight_by_label = self.config.weight_by_label if self.training else {}
        weights = [weight_by_label.get(name, 1.0) for name in self.label_names]
        label_weights = torch.tensor(weights, device=targets.device)
        return WeightedLabelBatch.extend(prepared, cell_weights=label_weights[targets])

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        assert isinstance(prepared, WeightedLabelBatch), "expected a batch with weights"
        losses = F.cross_entropy(predicted, prepared.targets, reduction="none")
        return (losses * prepared.cell_weights).sum()

    def validation_sums(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        targets = prepared.targets
        n_correct = (predicted.argmax(1) == targets).sum()
        n_cells = n_correct.new_tensor(len(targets))
        return torch.stack([n_correct, n_cells]).double()

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        n_correct, n_cells = sums
        return {"accuracy": n_correct / n_cells} if n_cells else {}

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the logits of the labels, `(C, L - 1)` float32, or `(C, L)` if every cell has one."""
        if self.config.adversarial_scale:  # the encoder gets the reversed gradient
            vectors = ReverseGradient.apply(vectors, self.config.adversarial_scale)
        logits: Tensor = getattr(model, self.head_name)(vectors, cell_keys)
        return logits[:, : len(self.label_names)].float()

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score logits against the frequencies of the labels in the same cells.

        A label that the model hides has no verdict.
        """
        label_indices, logits = observed
        logits = logits.astype(np.float64)
        n_cells = len(label_indices)
        log_probabilities = torch.from_numpy(logits).log_softmax(1).numpy()
        loss = float(-log_probabilities[np.arange(n_cells), label_indices].mean())
        is_correct = log_probabilities.argmax(1) == label_indices
        _, counts = np.unique(label_indices, return_counts=True)
        frequencies = counts / n_cells
        entropy = float((frequencies * np.log(1 / frequencies)).sum())
        metrics = {
            "n_targets": n_cells,
            "cross_entropy": loss,
            "cross_entropy_frequencies": entropy,
            "accuracy": float(is_correct.mean()),
            "accuracy_largest_label": float(frequencies.max()),
        }
        if self.temperature is not None:
            metrics["temperature"] = self.temperature
            metrics["calibration_error"] = calibration_error_of_logits(
                logits, label_indices, self.temperature
            )
        metrics["calibration_error_uncalibrated"] = calibration_error_of_logits(
            logits, label_indices
        )
        if self.config.adversarial_scale:
            return metrics, []
        name = f"classification of {self.config.label_column}"
        return metrics, cross_entropy_verdicts(name, "the frequencies of labels", loss - entropy)
