"""How well a model fills in what is hidden, beside what needs no model.

Genes differ far more in their mean than cells differ in a gene, so predicting each gene's mean already looks good:
values are judged by R² *over the gene mean*, 1 - SSE(model) / SSE(gene mean), and by the correlation of what is left
when the gene mean is taken off both. Hidden genes are judged beside the genes' frequency. Means and frequencies come
from tokens of training cells alone; masks are keyed by cell and position, so they are the same at every evaluation.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.counts_reader import CountsReader
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.tokens import tokenize
from cellmill.data.vocabulary import Vocabulary
from cellmill.evaluate.embed import pack, place_genes, read_tokens
from cellmill.models.batch import to_tensors
from cellmill.models.family import Model
from cellmill.runs.verdict import Verdict, compare, sentence

MAX_CELLS = 10_000
"""Held-out cells used at most; R² then has a standard error below 0.001."""
MAX_TRAIN_CELLS = 200_000
"""Training cells that means are taken over; shards are preshuffled, so the first of them are a random draw."""
_ROWS = 4096


@dataclass(frozen=True)
class TrainTokens:
    """What training cells look like, gene by gene."""

    n: np.ndarray
    """Tokens of each gene, `(genes,)` int64."""
    mean: np.ndarray
    """Mean value of each gene's tokens, `(genes,)` float64; the mean over all tokens where a gene has none."""
    global_mean: float
    n_cells: int


def read_train_tokens(manifest: Manifest, tokens: Tokens, max_cells: int = MAX_TRAIN_CELLS) -> TrainTokens:
    """Frequencies and means over the tokens of the training shards."""
    n_genes, n_cells = int(manifest.vocabulary["n_genes"]), 0
    n, total = np.zeros(n_genes, np.int64), np.zeros(n_genes)
    shards = open_shards(manifest, "train")
    for shard in shards:
        for first in range(0, shard.n_obs, _ROWS):
            if n_cells >= max_cells:
                break
            starts = shard.indptr[first : first + _ROWS + 1]
            genes = np.empty(int(starts[-1] - starts[0]), np.int32)
            counts = np.empty(len(genes), shard.dtype)
            if len(genes):
                shard.read_genes(int(starts[0]), [genes])
                shard.read_counts(int(starts[0]), [counts])
            ids, values, _ = tokenize(genes, counts, starts - starts[0], tokens)
            rows = ids - len(SPECIAL)
            n += np.bincount(rows, minlength=n_genes)
            total += np.bincount(rows, weights=values, minlength=n_genes)
            n_cells += len(starts) - 1
        shard.close()
    overall = float(total.sum() / max(n.sum(), 1))
    return TrainTokens(n, np.where(n > 0, total / np.maximum(n, 1), overall), overall, n_cells)


def reconstruct(
    model: Model,
    reader: CountsReader,
    vocabulary: Vocabulary,
    tokens: Tokens,
    train: TrainTokens,
    *,
    chosen: np.ndarray,
    objective: str,
    seed: int,
    token_budget: int,
) -> dict[str, Any]:
    """What the model makes of hidden tokens of the cells where `chosen` (bool, one for each cell of the file).

    Returns `objective` (masked_value or masked_gene), `n_cells`, and what `judge_values` or `judge_genes` gives;
    a hidden bin is predicted by its expectation. At most MAX_CELLS cells, by a seeded draw.
    """
    cells = np.flatnonzero(chosen)
    if len(cells) > MAX_CELLS:
        cells = np.random.Generator(np.random.Philox(key=[seed, 2])).permutation(cells)[:MAX_CELLS]
    mask = np.zeros(reader.n_obs, dtype=bool)
    mask[cells] = True
    judge = _predicted_values if objective == "masked_value" else _predicted_genes
    device, places = next(model.parameters()).device, place_genes(reader, vocabulary)
    parts: list[tuple[np.ndarray, ...]] = []
    model.eval()
    with torch.inference_mode():
        for block in read_tokens(reader, places, vocabulary, tokens, mask, np.zeros(2, np.int64)):
            for part in pack(block, token_budget):
                batch = to_tensors(part, device)
                prepared = model.prepare(batch, seed=seed, step=0)
                genes = batch.genes[prepared.targets] - len(SPECIAL)
                found = judge(model.predict(prepared), prepared.answers)
                parts.append(tuple(tensor.cpu().numpy() for tensor in (genes, *found)))
    if not parts:
        return {"objective": objective, "n_cells": 0, "verdict": [], "verdicts": []}
    genes, first, second = (np.concatenate(column) for column in zip(*parts))
    judged = judge_values if objective == "masked_value" else judge_genes
    figures, verdicts = judged(genes, first, second, train=train)
    text = {"verdict": [sentence(one) for one in verdicts], "verdicts": [asdict(one) for one in verdicts]}
    return {"objective": objective, "n_cells": len(cells), **figures, **text}


def _predicted_values(predicted: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if predicted.ndim == 2:  # logits of bins, which count from 1
        bins = torch.arange(1, predicted.shape[1] + 1, device=predicted.device, dtype=torch.float32)
        predicted = predicted.softmax(1) @ bins
    return answers, predicted


def _predicted_genes(logits: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits.argmax(1) == answers, F.cross_entropy(logits, answers, reduction="none")


def judge_values(
    genes: np.ndarray, targets: np.ndarray, predicted: np.ndarray, *, train: TrainTokens
) -> tuple[dict[str, Any], list[Verdict]]:
    """Figures and verdict on predicted values of masked tokens.

    Parameters
    ----------
    genes
        Vocabulary row of each target, `(targets,)`.
    targets, predicted
        True and predicted value, `(targets,)`.

    The figures are `n_targets`, `r2_over_gene_mean`, `r2_over_global_mean`, `pearson_gene_centred`, `mse`,
    `mse_gene_mean` and `mse_global_mean`; None where the variance is zero.
    """
    targets, predicted = targets.astype(np.float64), predicted.astype(np.float64)
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


def judge_genes(
    genes: np.ndarray, correct: np.ndarray, cross_entropy: np.ndarray, *, train: TrainTokens
) -> tuple[dict[str, Any], list[Verdict]]:
    """Figures and verdict on predicted genes of masked tokens, against the gene frequencies of training cells.

    Parameters
    ----------
    genes
        Vocabulary row of each masked gene, `(targets,)`.
    correct, cross_entropy
        Whether the top prediction is right, and -log(probability) of the right gene, `(targets,)`.

    The figures are `n_targets`, `accuracy`, `accuracy_frequency` (of always predicting the most frequent gene),
    `cross_entropy` and `cross_entropy_frequency` (nats; of add-one frequencies).
    """
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
    name = "prediction of masked genes"
    return figures, [
        compare(name, "gene frequency in training cells", "nats cross-entropy", entropy - base, lower_is_better=True)
    ]


def _mean_square(values: np.ndarray) -> float:
    return float(np.mean(values**2))


def _r2(mse: float, reference: float) -> float | None:
    return 1 - mse / reference if reference > 0 else None


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None
