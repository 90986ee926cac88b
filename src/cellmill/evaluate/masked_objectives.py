"""The judging half of the masked objectives, in the interface of a model's `objective`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL
from cellmill.evaluate.gene_statistics import GeneStatistics
from cellmill.models.batch import TensorBatch
from cellmill.models.family import Model
from cellmill.models.masked.objective import MaskedBatch
from cellmill.runs.verdict import Verdict, compare


class MaskedObjective:
    """Masks of `model`, drawn by the model itself."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> MaskedBatch:
        """Draw masks and targets."""
        prepared: MaskedBatch = self.model.prepare(batch, seed=seed, step=step)
        return prepared


class MaskedValue(MaskedObjective):
    """Prediction of masked values against each gene's mean over training cells.

    Genes differ far more in their mean than cells differ in a gene, so predicting each gene's mean already looks good:
    the measure is R² over the gene mean, 1 - SSE(model) / SSE(gene mean).
    """

    def observe(self, model: Model, prepared: MaskedBatch) -> tuple[torch.Tensor, ...]:
        """Vocabulary row, true value and predicted value of each target; a bin is predicted by its expectation."""
        predicted = model.predict(prepared)
        if predicted.ndim == 2:  # logits of bins, which count from 1
            bins = torch.arange(1, predicted.shape[1] + 1, device=predicted.device, dtype=torch.float32)
            predicted = predicted.softmax(1) @ bins
        return prepared.genes[prepared.targets] - len(SPECIAL), prepared.answers, predicted

    def judge(self, *arrays: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Figures and verdict on vocabulary rows, true values and predicted values, `(targets,)` each.

        The figures are `n_targets`, `r2_over_gene_mean`, `r2_over_global_mean`, `pearson_gene_centred`, `mse`,
        `mse_gene_mean` and `mse_global_mean`; None where the variance is zero.
        """
        genes, targets, predicted = arrays[0], arrays[1].astype(np.float64), arrays[2].astype(np.float64)
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


class MaskedGene(MaskedObjective):
    """Prediction of masked genes against the gene frequencies of training cells."""

    def observe(self, model: Model, prepared: MaskedBatch) -> tuple[torch.Tensor, ...]:
        """Vocabulary row of each target, whether the top prediction is right, and its cross-entropy in nats."""
        logits, answers = model.predict(prepared), prepared.answers
        correct, cross_entropy = logits.argmax(1) == answers, F.cross_entropy(logits, answers, reduction="none")
        return answers - len(SPECIAL), correct, cross_entropy

    def judge(self, *arrays: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Figures and verdict on vocabulary rows, correctness (bool) and cross-entropies, `(targets,)` each.

        The figures are `n_targets`, `accuracy`, `accuracy_frequency` (of always predicting the most frequent gene),
        `cross_entropy` and `cross_entropy_frequency` (nats; of add-one frequencies).
        """
        genes, correct, cross_entropy = arrays
        frequency = (train.n + 1) / (train.n.sum() + len(train.n))
        base = float(-np.log(frequency[genes]).mean())
        entropy = float(cross_entropy.astype(np.float64).mean())
        figures = {
            "n_targets": len(genes),
            "accuracy": float(correct.mean()),
            "accuracy_frequency": float((genes == int(train.n.argmax())).mean()),
            "cross_entropy": entropy,
            "cross_entropy_frequency": base,
        }
        name, against = "prediction of masked genes", "gene frequency in training cells"
        return figures, [compare(name, against, "nats cross-entropy", entropy - base, lower_is_better=True)]


def objective_of(model: Model) -> Any:
    """The objective that the model was trained with."""
    return {"masked_value": MaskedValue, "masked_gene": MaskedGene}[model.config.objective](model)  # type: ignore[union-attr, index]


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(values**2))


def _r2(mse: float, reference: float) -> float | None:
    return 1 - mse / reference if reference > 0 else None


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None
