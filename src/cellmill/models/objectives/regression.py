"""regression: a number of a cell, such as an age or a protein's count, predicted from its vector by a head.

The head predicts the standardised number. Its loss is summed over the cells that have a number and divided by how many
they are over all processes; cells without a number, and those of which nothing is shown, take no part. Validation has
no dropout, and logs Pearson's correlation.

Loss pearson is 1 - r, where r is the correlation over the cells of the global batch, in every layout
(`train.batch_rows`). Predictions then have neither scale nor offset, and are judged by their correlation alone.

Legend: C cells with a number, H width of a cell's vector, S cells of a global batch with one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cellmill.models.batch import TensorBatch, with_genes
from cellmill.models.encoder_batch import EncoderBatch, whole
from cellmill.models.objective import GeneStatistics, Objective
from cellmill.models.objectives.classification import LabelHead
from cellmill.models.objectives.regression_config import RegressionConfig
from cellmill.models.row_share import RowShare
from cellmill.runs.verdict import Verdict, compare

EPS = 1e-8  # added to variances of standardised numbers: equal predictions have correlation 0 and a finite gradient


@dataclass(frozen=True, kw_only=True)
class NumberedCells(EncoderBatch):
    """Whole cells, and the numbers of those that have one."""

    cells: torch.Tensor
    """(C,) int64: indices of the cells with a number and tokens."""
    numbers: torch.Tensor
    """(C,) float32, standardised."""
    n_targets: torch.Tensor
    """C."""
    shares: tuple[RowShare, ...] | None = None
    """Share in the loss pearson of the global batch; without it, the own cells are all."""


class Regression(Objective):
    """See the module; needs a model with `cell_vectors`."""

    config: RegressionConfig
    figure_names = ("pearson",)
    n_sums = 6

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `number_head`."""
        config = self.config
        setattr(model, self._head, LabelHead(model.vector_width, config.number_hidden, 1, config.number_dropout))
        self.row_widths = (3,) if config.loss == "pearson" else ()
        self.validates_rows = bool(self.row_widths)
        return (self._head,)

    @property
    def _head(self) -> str:
        return f"number_head{self.suffix}"

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> NumberedCells:
        """Find the cells with a number."""
        numbers = torch.full((len(batch.lengths),), torch.nan, dtype=torch.float64)
        if batch.numbers is not None:
            numbers = batch.numbers[:, self.number_columns.index(self.config.target_column)]
        cells = (numbers.isfinite() & with_genes(batch)).nonzero().flatten()
        own = (numbers[cells] - (self.config.target_mean or 0.0)) / (self.config.target_std or 1.0)
        return NumberedCells(
            **vars(whole(batch, (seed, step))), cells=cells, numbers=own.float(), n_targets=torch.tensor(len(cells))
        )

    def loss(self, model: Any, states: torch.Tensor, prepared: NumberedCells) -> torch.Tensor:
        """Return the summed loss of the cells, a float32 scalar."""
        predicted = self._predicted(model, states, prepared)
        if self.kept_sums is not None:
            x, y = predicted.double(), prepared.numbers.double()
            self.kept_sums.append(torch.stack([x.new_tensor(len(x)), *(s.sum() for s in (x, y, x * x, y * y, x * y))]))
        if self.config.loss == "pearson":
            rows = _rows(predicted, prepared)
            return anticorrelation(rows).float() if prepared.shares is None else prepared.shares[0].of(rows)
        if self.config.loss == "huber":
            return F.huber_loss(predicted, prepared.numbers, reduction="sum", delta=self.config.huber_delta)
        return F.mse_loss(predicted, prepared.numbers, reduction="sum")

    def rows(self, model: Any, states: torch.Tensor, prepared: NumberedCells) -> tuple[torch.Tensor, ...]:
        """(C, 3): 1, prediction and number."""
        return (_rows(self._predicted(model, states, prepared), prepared),)

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the summed loss pearson of all cells."""
        return tuple(anticorrelation(table) for table in tables)

    def validation_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """Return Pearson's correlation of predictions and numbers, where both vary."""
        n, x, y, xx, yy, xy = sums
        variances = (n * xx - x * x) * (n * yy - y * y)
        return {"pearson": (n * xy - x * y) / variances**0.5} if variances > 0 else {}

    def values(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """(C, H) -> (C,) float32: predicted numbers of cells with these vectors, in the unit of the column."""
        predicted: torch.Tensor = getattr(model, self._head)(vectors)
        return predicted[:, 0].float() * (self.config.target_std or 1.0) + (self.config.target_mean or 0.0)

    def _predicted(self, model: Any, states: torch.Tensor, prepared: NumberedCells) -> torch.Tensor:
        vectors = model.cell_vectors(states, prepared)[prepared.cells].to(states.dtype)
        predicted: torch.Tensor = getattr(model, self._head)(vectors, prepared.cell_keys[prepared.cells])
        return predicted[:, 0].float()

    def observe(self, model: Any, prepared: NumberedCells) -> tuple[torch.Tensor, ...]:
        """Return the number of each cell and its prediction, standardised."""
        return prepared.numbers, self._predicted(model, model.states(prepared), prepared)

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return figures of the cells, and a verdict against their own mean: R²."""
        numbers, predicted = (values.astype(np.float64) for values in observed)
        if len(numbers) < 2 or not numbers.std() or not predicted.std():
            return {"n_targets": len(numbers)}, []
        r2 = float(1 - np.square(numbers - predicted).mean() / numbers.var())
        std, name = self.config.target_std or 1.0, f"regression of {self.config.target_column}"
        figures = {"n_targets": len(numbers), "pearson": float(np.corrcoef(numbers, predicted)[0, 1])}
        figures["spearman"] = float(np.corrcoef(_ranks(numbers), _ranks(predicted))[0, 1])
        if self.config.loss == "pearson":
            return figures, [compare(name, "no correlation", "Pearson's r", figures["pearson"])]
        errors = (numbers - predicted) * std  # in the unit of the column
        figures |= {"r2": r2, "mean_absolute_error": float(np.abs(errors).mean())}
        figures["root_mean_squared_error"] = float(np.square(errors).mean() ** 0.5)
        return figures, [compare(name, "the mean of the cells", "R²", r2)]


def anticorrelation(table: torch.Tensor) -> torch.Tensor:
    """Return S (1 - r), a float64 scalar, of rows (slots, 3): 1, prediction and number; rows of zeros are no cells."""
    filled, *columns = table.double().unbind(1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    x, y = (column - filled * (column.sum() / n) for column in columns)
    x_var, y_var = (centered.square().sum() / n + EPS for centered in (x, y))
    return n_cells * (1 - (x * y).sum() / n / (x_var * y_var).sqrt())


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of numbers, equal ones with their mean rank; scipy.stats takes a second of every worker to import."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[at]
    return ranks


def _rows(predicted: torch.Tensor, prepared: NumberedCells) -> torch.Tensor:
    return torch.stack([torch.ones_like(predicted), predicted, prepared.numbers], dim=1)
