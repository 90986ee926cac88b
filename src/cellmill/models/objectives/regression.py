"""regression: predict a number per cell from the cell's vector.

Numbers are standardised: the mean over training cells is subtracted from each number, and the difference is
divided by the standard deviation over training cells. The head predicts the standardised number.

The loss is the squared error, the Huber loss or, with `loss: pearson`, 1 - r, where r is the correlation of
predictions and numbers over the cells of the global batch. A correlation does not change if all predictions
are shifted or scaled. So with `loss: pearson` the predictions have no unit, and `judge` reports only
correlations.

In the shapes below, "slots" are the slots of a global batch. Each slot has the row of one cell with a
number, or only zeros if it is empty (`train.batch_rows`).
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

VARIANCE_EPS = 1e-8
"""Added to the variances of predictions and targets in the loss.

Constant predictions then have correlation 0 and a finite gradient, instead of 0 / 0.
"""


class MomentSums(NamedTuple):
    """Sums over cells, where x is the prediction and y the target of a cell, and xx is x squared.

    The sums are tensors in `validation_sums`, and floats in `validation_metrics`.
    """

    n_cells: Any
    sum_x: Any
    sum_y: Any
    sum_xx: Any
    sum_yy: Any
    sum_xy: Any


class Regression(CellObjective):
    """Predict a number of a cell from the cell's vector."""

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
        """The mean that standardisation subtracts; 0 until `fit` or an option sets it."""
        return self.config.target_mean or 0.0

    @property
    def _std(self) -> float:
        """The standard deviation that standardisation divides by; 1 until `fit` or an option sets it."""
        return self.config.target_std or 1.0

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.numbers is not None, "the batch has no numbers"
        numbers = batch.numbers[:, self.number_columns.index(self.config.target_column)]
        # A number that float32 cannot hold, such as 1e300, counts as missing. `fit` left such numbers
        # out of the mean and the standard deviation too
        is_known = numbers.float().isfinite()
        targets = (numbers - self._mean) / self._std
        return targets.float(), is_known

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the standardised numbers, (cells,) float32, from `vectors` (cells, vector width)."""
        predicted: Tensor = getattr(model, self.head_name)(vectors, cell_keys)
        return predicted[:, 0].float()

    def predict_in_units(self, model: ObjectiveModel, vectors: Tensor) -> Tensor:
        """Predict numbers in the unit of the column, (cells,) float32.

        `vectors` are (cells, vector width).
        """
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
        """Make the row [1, prediction, target] of each cell with a number, (target cells, 3) float32."""
        predicted = self.predict_targets(model, states, prepared)
        return (_stack_rows(predicted, prepared.targets),)

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        return tuple(correlation_loss_sum(table) for table in tables)

    def validation_sums(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        x = predicted.double()
        y = prepared.targets.double()
        sums = MomentSums(
            n_cells=torch.ones_like(x).sum(),
            sum_x=x.sum(),
            sum_y=y.sum(),
            sum_xx=(x * x).sum(),
            sum_yy=(y * y).sum(),
            sum_xy=(x * y).sum(),
        )
        return torch.stack(sums)

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Compute the correlation of predictions and targets, unless either of them is constant.

        The variance of a constant may be a rounding error instead of 0. So a variance counts as 0 if it
        is at most MIN_VARIANCE_FRAC of the mean square.
        """
        n, sum_x, sum_y, sum_xx, sum_yy, sum_xy = MomentSums(*sums)
        # the covariance and the variances, each multiplied by n squared
        scaled_covariance = n * sum_xy - sum_x * sum_y
        scaled_variance_x = n * sum_xx - sum_x * sum_x
        scaled_variance_y = n * sum_yy - sum_y * sum_y
        is_constant_x = scaled_variance_x <= MIN_VARIANCE_FRAC * n * sum_xx
        is_constant_y = scaled_variance_y <= MIN_VARIANCE_FRAC * n * sum_yy
        if is_constant_x or is_constant_y:
            return {}
        return {"pearson": scaled_covariance / math.sqrt(scaled_variance_x * scaled_variance_y)}

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Score standardised predictions: by correlations and, unless the loss is pearson, by errors.

        If all targets are equal, there is no score. If all predictions are equal, there is no correlation.
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
    """Stack the rows [1, prediction, target] that `correlation_loss_sum` reads, (cells, 3) float32."""
    return torch.stack([torch.ones_like(predicted), predicted, targets], dim=1)


def correlation_loss_sum(rows: Tensor) -> Tensor:
    """Compute n (1 - r), a float64 scalar, for n cells whose predictions and targets correlate by r.

    `rows` are (slots, 3). The row of a cell is [1, prediction, target], and the row of an empty slot is
    zeros.
    """
    filled, predicted, targets = rows.double().unbind(1)  # filled is 1 for a slot with a cell, or 0
    n_cells = filled.detach().sum()
    divisor = n_cells.clamp(min=1)  # no 0 / 0 without cells
    predicted_mean = predicted.sum() / divisor
    target_mean = targets.sum() / divisor
    # centred predictions and targets; empty slots stay 0
    x = predicted - filled * predicted_mean
    y = targets - filled * target_mean
    variance_x = x.square().sum() / divisor + VARIANCE_EPS
    variance_y = y.square().sum() / divisor + VARIANCE_EPS
    covariance = (x * y).sum() / divisor
    correlation = covariance / (variance_x * variance_y).sqrt()
    return n_cells * (1 - correlation)


def _rank(values: np.ndarray) -> np.ndarray:
    """Return the rank of each of `values`, (n,), from 1; equal values get the mean of their ranks.

    The function does not use scipy.stats, because importing scipy.stats takes 1 s.
    """
    # equal values form a group; the last rank of a group is the number of values up to its end
    _, group, group_size = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = group_size.cumsum()
    mean_rank: np.ndarray = last_rank - (group_size - 1) / 2
    return mean_rank[group]
