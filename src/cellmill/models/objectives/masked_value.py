"""masked_value: predict the values of masked tokens; their genes stay visible.

The loss is cross-entropy for bins and squared error for continuous values. Genes differ far more in their mean than
cells differ in a gene, so predicting each gene's mean already looks good. Values are therefore judged by R² *over the
gene mean*, 1 - SSE(model) / SSE(gene mean), and by the correlation after subtracting the gene mean from both.

A value is made from a cell's library size, the sum of all its counts, hidden ones included. With one hidden token the
visible values tell its value exactly, with many their sum. `renormalize` makes the values that the model sees from
visible counts alone; without it, R² and correlation include what leaks this way.

Legend: N targets, H hidden.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.models.initial import STD, Fill, normal
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.config import MaskedValueConfig
from cellmill.models.objectives.masking import MaskedBatch, MaskedObjective
from cellmill.runs.verdict import Verdict, compare


class MaskedValue(MaskedObjective):
    """See the module."""

    config: MaskedValueConfig
    hides_gene = False

    def __init__(self, config: MaskedValueConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.tokenizer = tokens.load()(tokens) if config.renormalize else None

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `value_out`, and `hidden_value`, the embedding of a hidden value."""
        model.hidden_value = nn.Parameter(torch.empty(model.width))
        model.value_out = nn.Linear(model.width, self.tokens.n_values - self._first_bin if self._is_class else 1)
        return ("value_out",)

    def initial_value(self, name: str) -> Fill | None:
        """Initialize `hidden_value` like an embedding."""
        return normal(STD) if name == "hidden_value" else None

    def loss_of(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return cross-entropy of bins, or the squared error of values, summed."""
        predicted = self.predict(model, states, prepared)
        if self._is_class:
            return F.cross_entropy(predicted, prepared.answers - self._first_bin, reduction="sum")
        return (predicted - prepared.answers).square().sum()

    def predict(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(N, H) -> float32 values (N,), or logits of bins (N, bins)."""
        out = model.value_out(states).float()
        return out if self._is_class else out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, true value and predicted value of each target; for bins the expected bin."""
        predicted = self.predict(model, model.head(model.states(prepared)[prepared.targets]), prepared)
        if predicted.ndim == 2:
            bins = torch.arange(predicted.shape[1], device=predicted.device, dtype=torch.float32) + self._first_bin
            predicted = predicted.softmax(1) @ bins
        return prepared.genes[prepared.targets] - len(SPECIAL), prepared.answers, predicted

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return figures (R² over gene and global mean, gene-centred correlation, mean squares) and their verdict.

        Undefined figures (no variance) are None.
        """
        genes, (targets, predicted) = observed[0], (array.astype(np.float64) for array in observed[1:])
        by_gene = train.mean[genes]
        mse = _mean_square(targets - predicted)
        mse_gene, mse_global = _mean_square(targets - by_gene), _mean_square(targets - train.global_mean)
        r2 = _r2(mse, mse_gene)
        figures = {
            "n_targets": len(targets),
            "r2_over_gene_mean": r2,
            "r2_over_global_mean": _r2(mse, mse_global),
            "pearson_gene_centred": _pearson(targets - by_gene, predicted - by_gene),
            "mse": mse,
            "mse_gene_mean": mse_gene,
            "mse_global_mean": mse_global,
        }
        if r2 is None:
            return figures, []
        return figures, [compare("prediction of masked values", "the gene's training mean", "R²", r2)]

    @property
    def _first_bin(self) -> int:
        """Bins count from 1; 0 is that of genes without counts."""
        return 0 if self.tokens.zero_frac else 1

    @property
    def _is_class(self) -> bool:
        return self.tokens.value_kind == "class"


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(values**2))


def _r2(mse: float, reference: float) -> float | None:
    return 1 - mse / reference if reference > 0 else None


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None
