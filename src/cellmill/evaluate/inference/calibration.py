"""Calibration of a model's classifiers, on cells that it was not trained on.

One temperature divides all logits, so it never changes a cell's most likely label (Guo et al. 2017,
section 4.2). It minimises the cross-entropy, and is kept only if temperatures fitted without a
fifth of the cells lower the calibration error on that fifth; otherwise it is 1. The error is the
expected calibration error of the same paper, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from cellmill.config.options import TrainOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch_maker import BatchFields
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.models.batch import to_tensors
from cellmill.models.family import Model
from cellmill.models.objective import Objective
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.regression import Regression
from cellmill.models.objectives.shared.calibration import (
    calibration_error_of_logits,
    confidence_and_correctness,
    expected_calibration_error,
)

N_THRESHOLDS = 100  # in the table of a calibration: 0, 1 / N_THRESHOLDS, ...
# also the inverse of the smallest one; without bounds, separable cells have no best temperature
MAX_TEMPERATURE = 100.0
NO_VALIDATION = "the run had no labelled validation cells"
CELL_BLOCK = 65_536  # cells whose logits are computed at once
FOLDS = 5  # parts of the cells, held out in turn to see whether a temperature helps


@dataclass(frozen=True)
class Calibration:
    temperature: float
    n_cells: int
    accuracy: float
    calibration_error: float
    calibration_error_uncalibrated: float  # with temperature 1
    # entry i: accuracy of cells whose highest probability is i / N_THRESHOLDS or more; None without cells
    accuracy_above: list[float | None]
    labelled_above: list[float]  # entry i: share of these cells among all


def calibrate(logits: np.ndarray, labels: np.ndarray) -> Calibration:
    """Calibration of `logits`, (cells, labels) float, on cells with the ids `labels`, (cells,) int
    from 0.
    """
    logits = logits.astype(np.float64)
    # scale each fold by the temperature of the other folds
    fold = np.arange(len(labels)) % FOLDS
    scaled = logits.copy()
    for number in range(min(FOLDS, len(labels))):
        held_out = fold == number
        if not held_out.all():
            scaled[held_out] /= fit_temperature(logits[~held_out], labels[~held_out])
    lowers_error = calibration_error_of_logits(scaled, labels) < calibration_error_of_logits(
        logits, labels
    )
    temperature = fit_temperature(logits, labels) if lowers_error else 1.0
    confidence, is_right = confidence_and_correctness(logits / temperature, labels)
    # (cells, N_THRESHOLDS): cells that each threshold keeps
    above = confidence[:, None] >= np.arange(N_THRESHOLDS) / N_THRESHOLDS
    accuracy = [float(is_right[chosen].mean()) if chosen.any() else None for chosen in above.T]
    return Calibration(
        temperature=temperature,
        n_cells=len(labels),
        accuracy=float(is_right.mean()),
        calibration_error=expected_calibration_error(confidence, is_right),
        calibration_error_uncalibrated=calibration_error_of_logits(logits, labels),
        accuracy_above=accuracy,
        labelled_above=above.mean(axis=0).tolist(),
    )


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the smallest cross-entropy, between 1 / MAX_TEMPERATURE and MAX_TEMPERATURE."""

    def loss(log_temperature: float) -> float:
        scaled = torch.from_numpy(logits / np.exp(log_temperature)).log_softmax(1).numpy()
        return -float(scaled[np.arange(len(labels)), labels].mean())

    bound = float(np.log(MAX_TEMPERATURE))
    # imported here, for a fifth of a second, because few models have a head to calibrate
    minimize_scalar = import_module("scipy.optimize").minimize_scalar
    return float(np.exp(minimize_scalar(loss, bounds=(-bound, bound), method="bounded").x))


def find_classifications(objective: Objective) -> dict[str, Classification]:
    """Parts of the objective that predict labels, by name; without adversarial parts, whose
    label the vectors should hide. An objective that is not a sum has the name "".
    """
    return {
        name: part
        for name, part in objective.parts_by_name().items()
        if isinstance(part, Classification) and part.config.adversarial_scale is None
    }


def find_regressions(objective: Objective) -> dict[str, Regression]:
    """Parts of the objective that predict numbers, by name."""
    return {
        name: part
        for name, part in objective.parts_by_name().items()
        if isinstance(part, Regression)
    }


@torch.inference_mode()
def run_head(
    model: Model, vectors: np.ndarray, head: Callable[[Model, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """Output of `head`, such as `Classification.predict`, (cells, ...) float32, for `vectors` of
    `embed`, (cells, hidden) float32.
    """
    device = next(model.parameters()).device
    parts = torch.from_numpy(vectors).split(CELL_BLOCK)
    return np.concatenate([head(model, part.to(device)).cpu().numpy() for part in parts])


def calibrate_head(
    model: Model, options: TrainOptions, manifest: Path, objective: Classification
) -> Calibration | None:
    """Calibration of the head `objective` on the labelled validation cells of its run; None without
    any. The model is on the CPU, and `manifest` is the manifest of its shards.
    """
    if Manifest.read(manifest).splits["val"].n_obs == 0:
        return None
    stream = CellStream(
        SplitSource(manifest, "val", options.train.val_cells),
        OrderOptions(
            options.stream, options.train.global_batch, options.train.seed, is_training=False
        ),
        options.tokens,
        MicroBatchRule(options.train.token_budget),
        fields=BatchFields(level_columns=options.obs_columns()),
        in_rank_order=options.model.reads_token_order,
    )
    column = [*options.obs_columns()].index(objective.config.label_column)
    vectors = []
    labels = []
    with torch.inference_mode():
        for batch in chain.from_iterable(stream):
            assert batch.levels is not None
            level = batch.levels[:, column]  # 0 is unknown, the one after the labels is missing
            is_known = (level > 0) & (level <= len(objective.label_names))
            is_known &= np.diff(batch.cu_seqlens) > 0
            vectors.append(model.embed(to_tensors(batch)).float().numpy()[is_known])
            labels.append(level[is_known].astype(np.int64) - 1)
    stream.close()
    class_ids = np.concatenate(labels)
    if not len(class_ids):
        return None
    return calibrate(run_head(model, np.concatenate(vectors), objective.predict), class_ids)
