"""classification: predict a cell's label from the cell's vector.

The loss of a cell is the cross-entropy. Training multiplies the loss by the weight of the cell's label.
The head has one output for each level of the label column, so that `init_from` can match the rows of
the head by the name of the level. If some cells have no value, the last level is MISSING. MISSING is
not a label, and its logit is left out.

With `adversarial_scale` the head learns the label, but the encoder learns to hide the label: the encoder
receives the gradient reversed and multiplied by `adversarial_scale` (Ganin & Lempitsky 2015). The
validation loss leaves such a loss out, and `judge` gives no verdict on it.
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
    """The shown tokens of all cells, and the labels of the cells that have a label, with weights."""

    cell_weights: Tensor
    """(target cells,) float32: the weight of each cell's loss, which depends on the cell's label."""


class Classification(LabelObjective):
    """Predict the label of a cell from the cell's vector."""

    config: ClassificationConfig
    metric_names = ("accuracy",)
    n_sums = 2
    calibrated_temperature: float | None = None
    """Temperature that an exported head was calibrated with; None if it was not calibrated.

    Task `reconstruct` sets it before it calls `judge`.
    """

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        config = self.config
        # An adversarial loss rises while the encoder learns to hide the label. In the validation loss,
        # by which training chooses the best checkpoint, this loss would make a better encoder look worse
        self.in_validation_loss = config.adversarial_scale is None
        self.head_name = f"label_head{self.suffix}"
        n_levels = len(self.levels[config.label_column])
        head = CellHead(model.vector_width, config.head_hidden, n_levels, config.head_dropout)
        setattr(model, self.head_name, head)
        last_layer = f"{self.head_name}.out"
        model.add_level_rows(config.label_column, f"{last_layer}.weight", f"{last_layer}.bias")
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
        """Predict the logits of the labels, (cells, labels) float32, without the logit of MISSING."""
        if self.config.adversarial_scale:  # reverse the gradient that the encoder receives
            vectors = ReverseGradient.apply(vectors, self.config.adversarial_scale)
        logits: Tensor = getattr(model, self.head_name)(vectors, cell_keys)
        return logits[:, : len(self.label_names)].float()

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare the logits with the frequencies of the labels in the same cells.

        A label that the encoder hides gets metrics, but no verdict.
        """
        label_indices, logits = observed
        logits = logits.astype(np.float64)
        n_cells = len(label_indices)

        # the model
        log_probabilities = torch.from_numpy(logits).log_softmax(1).numpy()
        loss = float(-log_probabilities[np.arange(n_cells), label_indices].mean())
        is_correct = log_probabilities.argmax(1) == label_indices

        # the baseline predicts the frequencies of the labels: its cross-entropy is their entropy
        _, counts = np.unique(label_indices, return_counts=True)
        frequencies = counts / n_cells
        entropy = float((frequencies * np.log(1 / frequencies)).sum())

        metrics = {
            "n_targets": n_cells,
            "cross_entropy": loss,
            "cross_entropy_frequencies": entropy,
            "accuracy": float(is_correct.mean()),
            "accuracy_largest_label": float(frequencies.max()),  # of the most frequent label
        }

        # the calibration with the fitted temperature, if there is one, and without a temperature
        if self.calibrated_temperature is not None:
            metrics["temperature"] = self.calibrated_temperature
            metrics["calibration_error"] = calibration_error_of_logits(
                logits, label_indices, self.calibrated_temperature
            )
        metrics["calibration_error_uncalibrated"] = calibration_error_of_logits(
            logits, label_indices
        )

        if self.config.adversarial_scale:
            return metrics, []
        name = f"classification of {self.config.label_column}"
        return metrics, cross_entropy_verdicts(name, "the frequencies of labels", loss - entropy)
