"""classification: the label of a cell, predicted from its vector by a head.

The loss is the cross-entropy, times the weight of the cell's label, summed over the cells of known label and divided by
their number over all processes. Cells without a label, and those of which nothing is shown, take no part. Validation
has no weights and no dropout: its loss is the cross-entropy.

The vectors are those that `embed` writes, so `evaluate.predict` needs no other forward pass. Rows of the head are the
levels of the label in the order of the corpus; a run that starts from another one takes over those of the same name.

Legend: C cells with a label, K labels, L levels (K, and one for cells without a label where there are any), H width of
a cell's vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.data.obs_levels import MISSING
from cellmill.models.batch import TensorBatch, with_genes
from cellmill.models.calibration_error import error_of_logits
from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.encoder_batch import EncoderBatch, whole
from cellmill.models.initial import with_std
from cellmill.models.objective import GeneStatistics, Objective
from cellmill.models.objectives.batch_terms import Reversed
from cellmill.models.objectives.classification_config import ClassificationConfig
from cellmill.parallel.cpu_matmul import Linear
from cellmill.runs.verdict import Verdict, compare

DROPOUT = -1
"""Key of the head's dropout, which no block has."""


class LabelHead(nn.Module):
    """Logits of the levels of a label, from vectors."""

    def __init__(self, width: int, hidden: int | None, levels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = None if hidden is None else with_std(Linear(width, hidden), width**-0.5)
        self.out = with_std(nn.Linear(hidden or width, levels), (hidden or width) ** -0.5)

    def forward(self, vectors: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        """(C, H) -> (C, L); `keys` (C,) int64 key the dropout, which there is in training alone."""
        x = vectors if self.inner is None else F.gelu(self.inner(vectors))
        if keys is not None and self.training and self.dropout:
            x = keyed_dropout(x, self.dropout, keyed_state(keys, DROPOUT))
        logits: torch.Tensor = self.out(x)
        return logits


@dataclass(frozen=True, kw_only=True)
class LabelledCells(EncoderBatch):
    """Whole cells, and the labels of those that have one."""

    cells: torch.Tensor
    """(C,) int64: indices of the cells of known label with genes."""
    labels: torch.Tensor
    """(C,) int64, from 0."""
    weights: torch.Tensor
    """(C,) float32: factors of the loss."""
    n_targets: torch.Tensor
    """C."""


class Classification(Objective):
    """See the module; needs a model with `cell_vectors`."""

    config: ClassificationConfig
    figure_names = ("accuracy",)
    n_sums = 2

    temperature: float | None = None
    """Fitted temperature of an exported head, with which `judge` measures calibration; set by `evaluate`."""

    def validation_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the share of cells whose likeliest label is theirs."""
        right, n = sums
        return {"accuracy": right / n} if n else {}

    @property
    def labels(self) -> list[str]:
        """The K labels, in the order of the head's rows."""
        return labels_of(self.levels[self.config.label_column])

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `label_head`."""
        config, levels = self.config, len(self.levels[self.config.label_column])
        setattr(model, self._head, LabelHead(model.vector_width, config.head_hidden, levels, config.head_dropout))
        rows = (f"{self._head}.out.weight", f"{self._head}.out.bias")
        model.level_rows = {**model.level_rows, **dict.fromkeys(rows, config.label_column)}
        given = config.class_weights if isinstance(config.class_weights, dict) else {}
        self._weights = [given.get(label, 1.0) for label in self.labels]
        return (self._head,)

    @property
    def _head(self) -> str:
        return f"label_head{self.suffix}"

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> LabelledCells:
        """Find the cells with a label."""
        assert batch.levels is not None, "the batch has no levels"
        labels = batch.levels[:, [*self.levels].index(self.config.label_column)] - 1
        known = (labels >= 0) & (labels < len(self._weights))
        cells = (known & with_genes(batch)).nonzero().flatten()
        weights = torch.tensor(self._weights if self.training else [1.0] * len(self._weights), device=labels.device)
        of_labels: dict[str, Any] = {"cells": cells, "labels": labels[cells], "weights": weights[labels[cells]]}
        keys = (seed, step)
        return LabelledCells(**vars(whole(batch, keys)), **of_labels, n_targets=torch.tensor(len(cells)))

    def loss(self, model: Any, states: torch.Tensor, prepared: LabelledCells) -> torch.Tensor:
        """Return the summed loss of the cells, a float32 scalar."""
        logits = self._logits(model, states, prepared)
        if self.kept_sums is not None:
            right = (logits.argmax(1) == prepared.labels).sum()
            self.kept_sums.append(torch.stack([right, right.new_tensor(len(logits))]).double())
        return (F.cross_entropy(logits, prepared.labels, reduction="none") * prepared.weights).sum()

    def logits(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """(C, H) -> (C, K) float32: logits of the labels of cells with these vectors, without dropout."""
        logits: torch.Tensor = getattr(model, self._head)(vectors)
        return logits[:, : len(self._weights)].float()

    def _logits(self, model: Any, states: torch.Tensor, prepared: LabelledCells) -> torch.Tensor:
        vectors = model.cell_vectors(states, prepared)[prepared.cells].to(states.dtype)
        if self.config.adversarial_scale:
            vectors = Reversed.apply(vectors, self.config.adversarial_scale)
        logits: torch.Tensor = getattr(model, self._head)(vectors, prepared.cell_keys[prepared.cells])
        return logits[:, : len(self._weights)].float()

    def observe(self, model: Any, prepared: LabelledCells) -> tuple[torch.Tensor, ...]:
        """Return the label and the logits of each cell."""
        return prepared.labels, self._logits(model, model.states(prepared), prepared)

    def judged_labels(self) -> dict[str, list[str]]:
        """Return the labels of the head."""
        return {self.config.label_column: self.labels}

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return figures of the cells, and a verdict against the labels' own frequencies."""
        labels, logits = observed
        n = len(labels)
        if not n:
            return {"n_targets": 0}, []
        log_probabilities = torch.from_numpy(logits).double().log_softmax(1).numpy()
        loss = float(-log_probabilities[np.arange(n), labels].mean())
        shares = np.unique(labels, return_counts=True)[1] / n
        by_frequency = float(-(shares * np.log(shares)).sum())
        accuracy = float((log_probabilities.argmax(1) == labels).mean())
        figures = {"n_targets": n, "cross_entropy": loss, "cross_entropy_frequencies": by_frequency}
        figures |= {"accuracy": accuracy, "accuracy_largest_label": float(shares.max())}
        logits = logits.astype(np.float64)
        if self.temperature is not None:
            figures |= {"temperature": self.temperature}
            figures |= {"calibration_error": error_of_logits(logits, labels, self.temperature)}
        figures |= {"calibration_error_uncalibrated": error_of_logits(logits, labels)}
        name = f"classification of {self.config.label_column}"
        return figures, [compare(name, "the frequencies of labels", "nats", loss - by_frequency, lower_is_better=True)]


def labels_of(levels: Sequence[str]) -> list[str]:
    """Return the levels that are labels: all but the one of cells without a value, which is the last."""
    return [level for level in levels if level != MISSING]
