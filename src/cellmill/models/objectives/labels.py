"""Targets per cell, from its own vector: a label, a number, another model's vector, or the cells of
its label.

The vectors are what `embed` writes, so `evaluate.predict` needs no other forward pass. The loss is
divided by the number of cells with a target, over all processes. Cells without one, and cells of
which nothing is shown, take no part. Validation has no dropout.

`classification`: the cross-entropy, times the weight of the cell's label in training. Rows of the
head are the levels of the label in the order of the corpus; a run that starts from another one
takes over rows of the same name.

`regression`: the head predicts the standardised number. Loss pearson is 1 - r, with r the
correlation over the cells of the global batch; its predictions have neither scale nor offset, and
are judged by r alone.

`distill`: the mean squared error of a linear layer over the columns of the teacher's vector, which
are standardised (`data.shards.index`). Regression on hidden features of a teacher through a learned
layer is the hint of FitNets (Romero et al. 2015, equation 3). Cells of `evaluate` have no vector:
the embedding is judged by its tasks.

`supervised_contrastive`: for each cell the mean, over the other cells p of its label in the global
batch, of the cross-entropy of p among all other cells of the global batch, whose logits are cosines
of vectors over a temperature (Khosla et al. 2020, equation 2, L_out); 0 for a cell without another
of its label. There is no projection head. The published loss has two augmented views of each image;
here a cell is encoded once, in a `sum` with cell_decoding its shown part, which changes from step
to step.

Losses over the cells of a global batch are the same in every layout (`train.batch_rows`), in
training and in validation, whose loss therefore depends on train.global_batch too.

Legend: C cells with a target, K labels, L levels (K, and one for cells without a label if there are any), H width of a
cell's vector, D of the teacher's, S slots of a global batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cellmill.config.parts.objectives import (
    ClassificationConfig,
    DistillConfig,
    LabelConfig,
    RegressionConfig,
    SupervisedContrastiveConfig,
)
from cellmill.data.arrays import MISSING
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch, with_genes
from cellmill.models.blocks import Reversed
from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.initial import with_std
from cellmill.models.objective import GeneStatistics, Objective, RowShare
from cellmill.runs.verdict import Verdict, compare

BINS = 15
DROPOUT = -1  # key of the head's dropout, which no block has
# added to variances of standardised numbers: equal predictions have correlation 0 and a finite
# gradient
EPS = 1e-8
ANCHORS = 1024  # cells compared with all others at once


def softmax(logits: np.ndarray) -> np.ndarray:
    """(cells, labels) float -> probabilities. scipy.special's takes a sixth of a second to import."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def calibration_error(highest: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of cells with these highest probabilities, (cells,),
    right or wrong.
    """
    bins = np.minimum((highest * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights=right - highest, minlength=BINS)
    return float(np.abs(gaps).sum() / len(highest))


def error_of_logits(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    """Return the calibration error of logits, (cells, labels) float64, divided by a temperature."""
    return calibration_error(*highest_of(logits / temperature, labels))


def highest_of(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each cell's highest probability, and whether its label is right, 0 or 1."""
    probabilities = softmax(logits)
    return probabilities.max(axis=1), (probabilities.argmax(axis=1) == labels).astype(np.float64)


class LabelHead(nn.Module):
    """Logits of the levels of a label, from vectors."""

    def __init__(self, width: int, hidden: int | None, levels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = None if hidden is None else with_std(nn.Linear(width, hidden), width**-0.5)
        self.out = with_std(nn.Linear(hidden or width, levels), (hidden or width) ** -0.5)

    def forward(self, vectors: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        """(C, H) -> (C, L); `keys` (C,) int64 key the dropout, which there is in training alone."""
        x = vectors if self.inner is None else F.gelu(self.inner(vectors))
        if keys is not None and self.training and self.dropout:
            x = keyed_dropout(x, self.dropout, keyed_state(keys, DROPOUT))
        logits: torch.Tensor = self.out(x)
        return logits


@dataclass(frozen=True, kw_only=True)
class TargetBatch(EncoderBatch):
    """Whole cells, and the label or the number of those that have one."""

    target_cells: torch.Tensor  # (C,) int64: indices of the cells with a target and genes
    # (C,): labels, int64 from 0, or standardised numbers, float32; (C, D) vectors
    targets: torch.Tensor
    n_targets: torch.Tensor  # C
    weights: torch.Tensor | None = None  # (C,) float32: factors of the loss of labels
    shares: tuple[RowShare, ...] | None = None
    """Share in the loss of the global batch, if it couples cells; without it, the batch's own cells
    are all.
    """


class CellObjective(Objective):
    """Base of objectives with one target per cell; they need a model with `cell_vectors`."""

    has_target_per_cell = True

    def find_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target of each cell, (cells, …), and which of them are known, (cells,) bool."""
        raise NotImplementedError

    def predict(
        self, model: Any, vectors: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(C, H) -> float32 predictions of the targets, which `judge` compares; `keys` (C,) key the
        dropout.
        """
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> TargetBatch:
        targets, known = self.find_targets(batch)
        cells = (known & with_genes(batch)).nonzero().flatten()
        given = {
            "target_cells": cells,
            "targets": targets[cells],
            "n_targets": torch.tensor(len(cells)),
        }
        return TargetBatch.prepared(batch, (seed, step), **given)

    def predicted(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        """Return `predict` of the cells with a target."""
        vectors = model.cell_vectors(states, prepared)[prepared.target_cells].to(states.dtype)
        return self.predict(model, vectors, prepared.cell_keys[prepared.target_cells])

    def observe(self, model: Any, prepared: TargetBatch) -> tuple[torch.Tensor, ...]:
        return prepared.targets, self.predicted(model, model.states(prepared), prepared)


class LabelObjective(CellObjective):
    """Base of objectives whose targets are labels."""

    config: LabelConfig

    @property
    def labels(self) -> list[str]:
        """The K labels, in the order of their codes: all levels but the last one, of cells without
        a value.
        """
        return [level for level in self.levels[self.config.label_column] if level != MISSING]

    def find_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        labels = self.level_numbers(batch, self.config.label_column) - 1
        return labels, (labels >= 0) & (labels < len(self.labels))

    def judged_labels(self) -> dict[str, list[str]]:
        return {self.config.label_column: self.labels}


class Classification(LabelObjective):
    config: ClassificationConfig
    figure_names = ("accuracy",)
    n_sums = 2
    temperature: float | None = None
    """Fitted temperature of an exported head, with which `judge` measures calibration; set by
    `evaluate`.
    """

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        config, levels, head = (
            self.config,
            len(self.levels[self.config.label_column]),
            f"label_head{self.suffix}",
        )
        setattr(
            model,
            head,
            LabelHead(model.vector_width, config.head_hidden, levels, config.head_dropout),
        )
        rows = (f"{head}.out.weight", f"{head}.out.bias")
        model.level_rows = {**model.level_rows, **dict.fromkeys(rows, config.label_column)}
        given = config.class_weights if isinstance(config.class_weights, dict) else {}
        self._weights = [given.get(label, 1.0) for label in self.labels]
        return (head,)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> TargetBatch:
        prepared = super().prepare(batch, seed=seed, step=step)
        weights = torch.tensor(self._weights if self.training else [1.0] * len(self._weights))
        return replace(prepared, weights=weights.to(prepared.targets.device)[prepared.targets])

    def loss(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        logits = self.predicted(model, states, prepared)
        assert prepared.weights is not None
        if self.kept_sums is not None:
            right = (logits.argmax(1) == prepared.targets).sum()
            self.kept_sums.append(torch.stack([right, right.new_tensor(len(logits))]).double())
        return (
            F.cross_entropy(logits, prepared.targets, reduction="none") * prepared.weights
        ).sum()

    def validation_figures(self, sums: Sequence[float]) -> dict[str, float]:
        right, n = sums
        return {"accuracy": right / n} if n else {}

    def predict(
        self, model: Any, vectors: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(C, H) -> (C, K) float32: logits of cells with these vectors, with dropout if `keys` (C,)
        are given.
        """
        if self.config.adversarial_scale:
            vectors = Reversed.apply(vectors, self.config.adversarial_scale)
        logits: torch.Tensor = getattr(model, f"label_head{self.suffix}")(vectors, keys)
        return logits[:, : len(self._weights)].float()

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        labels, logits = observed
        n = len(labels)
        if not n:
            return {"n_targets": 0}, []
        log_probabilities = torch.from_numpy(logits).double().log_softmax(1).numpy()
        loss = float(-log_probabilities[np.arange(n), labels].mean())
        shares = np.unique(labels, return_counts=True)[1] / n
        by_frequency = float(-(shares * np.log(shares)).sum())
        accuracy = float((log_probabilities.argmax(1) == labels).mean())
        metrics = {"n_targets": n, "cross_entropy": loss, "cross_entropy_frequencies": by_frequency}
        metrics |= {"accuracy": accuracy, "accuracy_largest_label": float(shares.max())}
        logits = logits.astype(np.float64)
        if self.temperature is not None:
            metrics |= {"temperature": self.temperature}
            metrics |= {"calibration_error": error_of_logits(logits, labels, self.temperature)}
        metrics |= {"calibration_error_uncalibrated": error_of_logits(logits, labels)}
        name = f"classification of {self.config.label_column}"
        return metrics, [
            compare(
                name, "the frequencies of labels", "nats", loss - by_frequency, lower_is_better=True
            )
        ]


class Regression(CellObjective):
    config: RegressionConfig
    figure_names = ("pearson",)
    n_sums = 6

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        config = self.config
        head = f"number_head{self.suffix}"
        setattr(
            model,
            head,
            LabelHead(model.vector_width, config.number_hidden, 1, config.number_dropout),
        )
        self.row_widths = (3,) if config.loss == "pearson" else ()
        self.validates_rows = bool(self.row_widths)
        return (head,)

    @property
    def _scale(self) -> tuple[float, float]:
        return self.config.target_std or 1.0, self.config.target_mean or 0.0

    def find_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.full((len(batch.lengths),), torch.nan, dtype=torch.float64)
        if batch.numbers is not None:
            numbers = batch.numbers[:, self.number_columns.index(self.config.target_column)]
        std, mean = self._scale
        return ((numbers - mean) / std).float(), numbers.isfinite()

    def loss(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        predicted = self.predicted(model, states, prepared)
        targets = prepared.targets
        if self.kept_sums is not None:
            x = predicted.double()
            y = targets.double()
            self.kept_sums.append(
                torch.stack([x.new_tensor(len(x)), *(s.sum() for s in (x, y, x * x, y * y, x * y))])
            )
        if self.config.loss == "pearson":
            rows = _rows(predicted, targets)
            return (
                anticorrelation(rows).float()
                if prepared.shares is None
                else prepared.shares[0].of(rows)
            )
        if self.config.loss == "huber":
            return F.huber_loss(predicted, targets, reduction="sum", delta=self.config.huber_delta)
        return F.mse_loss(predicted, targets, reduction="sum")

    def rows(
        self, model: Any, states: torch.Tensor, prepared: TargetBatch
    ) -> tuple[torch.Tensor, ...]:
        """(C, 3): 1, prediction and number."""
        return (_rows(self.predicted(model, states, prepared), prepared.targets),)

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(anticorrelation(table) for table in tables)

    def validation_figures(self, sums: Sequence[float]) -> dict[str, float]:
        n, x, y, xx, yy, xy = sums
        variances = (n * xx - x * x) * (n * yy - y * y)
        return {"pearson": (n * xy - x * y) / variances**0.5} if variances > 0 else {}

    def predict(
        self, model: Any, vectors: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        predicted: torch.Tensor = getattr(model, f"number_head{self.suffix}")(vectors, keys)
        return predicted[:, 0].float()

    def values(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """(C, H) -> (C,) float32: predicted numbers of cells with these vectors, in the unit of the
        column.
        """
        std, mean = self._scale
        return self.predict(model, vectors) * std + mean

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        numbers, predicted = (values.astype(np.float64) for values in observed)
        if len(numbers) < 2 or not numbers.std() or not predicted.std():
            return {"n_targets": len(numbers)}, []
        r2 = float(1 - np.square(numbers - predicted).mean() / numbers.var())
        name = f"regression of {self.config.target_column}"
        metrics = {
            "n_targets": len(numbers),
            "pearson": float(np.corrcoef(numbers, predicted)[0, 1]),
        }
        metrics["spearman"] = float(np.corrcoef(_ranks(numbers), _ranks(predicted))[0, 1])
        if self.config.loss == "pearson":
            return metrics, [compare(name, "no correlation", "Pearson's r", metrics["pearson"])]
        errors = (numbers - predicted) * self._scale[0]  # in the unit of the column
        metrics |= {"r2": r2, "mean_absolute_error": float(np.abs(errors).mean())}
        metrics["root_mean_squared_error"] = float(np.square(errors).mean() ** 0.5)
        return metrics, [compare(name, "the mean of the cells", "R²", r2)]


class Distill(CellObjective):
    config: DistillConfig

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        head = f"teacher_head{self.suffix}"
        given = model.vector_width
        # a plan may be made before the teacher's vectors are
        self.width = given if self.config.vectors is None else self.config.vectors.width
        setattr(model, head, with_std(nn.Linear(given, self.width), given**-0.5))
        return (head,)

    def find_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = batch.teacher
        if vectors is None:
            vectors = torch.full((len(batch.lengths), self.width), torch.nan)
        return vectors, vectors.isfinite().all(1)

    def loss(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        return (self.predicted(model, states, prepared) - prepared.targets).square().mean(1).sum()

    def predicted(self, model: Any, states: torch.Tensor, prepared: TargetBatch) -> torch.Tensor:
        vectors = model.cell_vectors(states, prepared)[prepared.target_cells].to(states.dtype)
        predicted: torch.Tensor = getattr(model, f"teacher_head{self.suffix}")(vectors)
        return predicted.float()

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        return {}, []


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
        return prepared.shares[0].of(rows)

    def rows(
        self, model: Any, states: torch.Tensor, prepared: TargetBatch
    ) -> tuple[torch.Tensor, ...]:
        """(C, 1 + H): label from 1 and vector of length 1."""
        vectors = model.cell_vectors(states, prepared)[prepared.target_cells].float()
        return (
            torch.cat(
                [prepared.targets[:, None].to(vectors) + 1, F.normalize(vectors, dim=1)], dim=1
            ),
        )

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(contrast(table, self.config.temperature) for table in tables)

    def observe(self, model: Any, prepared: TargetBatch) -> tuple[torch.Tensor, ...]:
        """Return the label, from 1, and the vector of each cell."""
        (rows,) = self.rows(model, model.states(prepared), prepared)
        return prepared.targets + 1, rows[:, 1:]

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        labels, vectors = (torch.from_numpy(array) for array in observed)
        n = len(labels)
        if n < 2:
            return {"n_targets": n}, []
        loss = (
            float(
                contrast(
                    torch.cat([labels[:, None].float(), vectors], dim=1), self.config.temperature
                )
            )
            / n
        )
        having = torch.bincount(labels)[labels] > 1
        alike = float(having.double().mean()) * math.log(n - 1)
        metrics = {
            "n_targets": n,
            "supervised_contrastive": loss,
            "supervised_contrastive_alike": alike,
        }
        name = f"supervised contrast of {self.config.label_column}"
        return metrics, [compare(name, "equal vectors", "nats", loss - alike, lower_is_better=True)]


def contrast(table: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the summed loss, a float64 scalar, of rows (S, 1 + H): label, or 0 for no cell, and
    vector of length 1.
    """
    labels = table[:, 0].detach()
    vectors = table[:, 1:]
    loss = table.new_zeros((), dtype=torch.float64) + 0 * vectors.sum()
    for anchors in torch.arange(len(table), device=table.device).split(ANCHORS):
        given = labels, vectors, anchors, temperature
        # computed again in the backward pass: ANCHORS * S logits at a time, not S * S
        loss = loss + checkpoint(_of_anchors, *given, use_reentrant=False, preserve_rng_state=False)
    return loss


def _of_anchors(
    labels: torch.Tensor, vectors: torch.Tensor, anchors: torch.Tensor, temperature: float
) -> torch.Tensor:
    own = labels[anchors, None]
    at = torch.arange(len(labels), device=labels.device)
    other = (labels != 0) & (at != anchors[:, None])
    positive = other & (labels == own) & (own != 0)
    n = positive.sum(1)
    logits = (vectors[anchors] @ vectors.T / temperature).masked_fill(~other, -torch.inf)
    # rows without positives, whose logits may all be -inf, have those of zeros and are left out
    below = torch.where(n[:, None] > 0, logits, 0).logsumexp(1)
    mean = torch.where(positive, logits, 0).sum(1) / n.clamp(min=1)
    return torch.where(n > 0, below - mean, 0).sum().double()


def _rows(predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.ones_like(predicted), predicted, targets], dim=1)


def anticorrelation(table: torch.Tensor) -> torch.Tensor:
    """Return S (1 - r), a float64 scalar, of rows (slots, 3): 1, prediction and number; rows of
    zeros are no cells.
    """
    filled, *columns = table.double().unbind(1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    x, y = (column - filled * (column.sum() / n) for column in columns)
    x_var, y_var = (centered.square().sum() / n + EPS for centered in (x, y))
    return n_cells * (1 - (x * y).sum() / n / (x_var * y_var).sqrt())


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of numbers, equal ones with their mean rank; scipy.stats takes a second of every worker
    to import.
    """
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[at]
    return ranks
