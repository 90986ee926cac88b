"""regression: predict a number per cell from its vector.

The head predicts the standardised number. Loss pearson is 1 - r, where r is the correlation over the
cells of the global batch. It leaves scale and offset of the predictions arbitrary, so only
correlations judge them.

Legend: C cells with a target, E width of a cell's vector, S slots of a global batch: a row per cell
with a target, zeros in the others (`train.batch_rows`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cellmill.config.parts.objectives import RegressionConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.objective import (
    MIN_VARIANCE_FRAC,
    GeneStatistics,
    Judgement,
    ObjectiveModel,
    Tensors,
    pearson,
)
from cellmill.models.objectives.shared.per_cell import CellHead, CellObjective, TargetBatch
from cellmill.runs.results import compare

# added to the variances of predictions and targets, so that constant predictions have correlation 0
# and a finite gradient
EPS = 1e-8


class MomentSums(NamedTuple):
    """Sums over cells of predictions x and targets y.

    Tensors in `validation_sums`, floats in `validation_metrics`.
    """

    n: Any
    x: Any
    y: Any
    xx: Any
    yy: Any
    xy: Any


class Regression(CellObjective):
    config: RegressionConfig
    metric_names = ("pearson",)
    n_sums = len(MomentSums._fields)

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        config = self.config
        self.head_name = f"number_head{self.suffix}"
        head = CellHead(model.vector_width, config.head_hidden, 1, config.head_dropout)
        setattr(model, self.head_name, head)
        if config.loss == "pearson":
            self.coupled_widths = (3,)
        return (self.head_name,)

    @property
    def _mean(self) -> float:
        """Mean of the numbers that are standardised."""
        return self.config.target_mean or 0.0

    @property
    def _std(self) -> float:
        """Standard deviation of the numbers that are standardised."""
        return self.config.target_std or 1.0

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.numbers is not None, "the batch has no numbers"
        numbers = batch.numbers[:, self.number_columns.index(self.config.target_column)]
        targets = (numbers - self._mean) / self._std
        # a number that float32 cannot hold is missing, as it was when `fit` took the mean
        return targets.float(), numbers.float().isfinite()

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        predicted: Tensor = getattr(model, self.head_name)(vectors, cell_keys)
        return predicted[:, 0].float()

    def predict_in_units(self, model: ObjectiveModel, vectors: Tensor) -> Tensor:
        """Predict numbers in the unit of the column: `vectors` `(C, E)` -> `(C,)` float32."""
        return self.predict(model, vectors) * self._std + self._mean

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        targets = prepared.targets
        if self.config.loss == "pearson":
            return self.coupled_loss(_stack_rows(predicted, targets), prepared)
        if self.config.loss == "huber":
            delta = self.config.huber_delta
            return F.huber_loss(predicted, targets, reduction="sum", delta=delta)
        return F.mse_loss(predicted, targets, reduction="sum")

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensors:
        """Make the row [1, prediction, target] of each cell, `(C, 3)` float32."""
        predicted = self.predict_targets(model, states, prepared)
        return (_stack_rows(predicted, prepared.targets),)

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        return tuple(correlation_loss_sum(table) for table in tables)

    def validation_sums(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        x = predicted.double()
        y = prepared.targets.double()
        sums = MomentSums(
            n=torch.ones_like(x).sum(),
            x=x.sum(),
            y=y.sum(),
            xx=(x * x).sum(),
            yy=(y * y).sum(),
            xy=(x * y).sum(),
        )
        return torch.stack(sums)

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        n, x, y, xx, yy, xy = MomentSums(*sums)
        # covariance and variances, each times n squared
        covariance = n * xy - x * y
        x_variance = n * xx - x * x
        y_variance = n * yy - y * y
        is_constant = (
            x_variance <= MIN_VARIANCE_FRAC * n * xx or y_variance <= MIN_VARIANCE_FRAC * n * yy
        )
        if is_constant:
            return {}
        return {"pearson": covariance / math.sqrt(x_variance * y_variance)}

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score standardised predictions: correlations and, unless the loss is pearson, errors.

        Constant targets get no score, and constant predictions no correlation.
        """
        targets, predicted = (values.astype(np.float64) for values in observed)
        metrics: dict[str, Any] = {"n_targets": len(targets)}
        if targets.var() == 0:
            return metrics, []
        correlation = pearson(targets, predicted)
        if correlation is not None:
            metrics["pearson"] = correlation
            metrics["spearman"] = pearson(_rank(targets), _rank(predicted))
        name = f"regression of {self.config.target_column}"
        if self.config.loss == "pearson":
            if correlation is None:
                return metrics, []
            return metrics, [compare(name, "no correlation", "Pearson's r", correlation)]
        errors = targets - predicted
        r2 = float(1 - np.square(errors).mean() / targets.var())
        metrics["r2"] = r2
        errors_in_units = errors * self._std  # in the unit of the column
        metrics["mean_absolute_error"] = float(np.abs(errors_in_units).mean())
        mean_square = np.square(errors_in_units).mean()
        metrics["root_mean_squared_error"] = float(mean_square**0.5)
        return metrics, [compare(name, "the mean of the cells", "R²", r2)]


def _stack_rows(predicted: Tensor, targets: Tensor) -> Tensor:
    """Stack the rows that `correlation_loss_sum` reads, `(C, 3)` float32."""
    return torch.stack([torch.ones_like(predicted), predicted, targets], dim=1)


def correlation_loss_sum(rows: Tensor) -> Tensor:
    """Compute n (1 - r), a float64 scalar, for n cells with correlation r.

    Each of the `rows` `(S, 3)` is [1, prediction, target]; a row of zeros is an empty slot.
    """
    filled, predicted, targets = rows.double().unbind(1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    x_mean = predicted.sum() / n
    y_mean = targets.sum() / n
    x = predicted - filled * x_mean
    y = targets - filled * y_mean
    x_variance = x.square().sum() / n + EPS
    y_variance = y.square().sum() / n + EPS
    covariance = (x * y).sum() / n
    correlation = covariance / (x_variance * y_variance).sqrt()
    return n_cells * (1 - correlation)


def _rank(values: np.ndarray) -> np.ndarray:
    """Return the rank of each of `values`, `(n,)`; equal values share their mean rank.

    Without scipy.stats, whose import takes 1 s.
    """
    # equal values are a group; its last rank is the number of values up to it
    _, group, group_size = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = group_size.cumsum()
    mean_rank: np.ndarray = last_rank - (group_size - 1) / 2
    return mean_rank[group]
