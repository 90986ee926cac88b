"""Calibration of a model's classifiers, on cells that the model was not trained on.

All logits of a classifier are divided by one temperature, which never changes the most likely label of a
cell (Guo et al. 2017, section 4.2). The temperature is the one with the smallest cross-entropy.

To see whether a temperature helps, it is also fitted without a fifth of the cells, for each fifth in
turn. These temperatures must lower the calibration error on the cells that were left out. Otherwise the
temperature is 1. The error is the expected calibration error of the same paper, section 3.
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
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.batch_maker import BatchFields
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import OrderOptions
from cellmill.files import progress
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

N_THRESHOLDS = 100  # a calibration has the thresholds 0, 1 / N_THRESHOLDS, 2 / N_THRESHOLDS, ...
# A temperature is between 1 / MAX_TEMPERATURE and MAX_TEMPERATURE. Without bounds, there is no best
# temperature if all cells are classified correctly.
MAX_TEMPERATURE = 100.0
MAX_FLOPS = 1e14  # of the embedding of validation cells, 2 per token and parameter of the blocks
FEW_CELLS = 300  # fewer cells of a large model's calibration are warned about
NO_VALIDATION = "the run had no labelled validation cells"
CELL_BLOCK = 65_536  # logits of at most this many cells are computed at once
FOLDS = 5  # number of parts of the cells; each is left out once to see whether a temperature helps


@dataclass(frozen=True)
class Calibration:
    """Temperature of a classifier, and its accuracy on the cells of the calibration.

    The fields are entries of config.json. Entry i of a list is for threshold i / N_THRESHOLDS.
    """

    temperature: float
    n_cells: int  # cells of the calibration
    accuracy: float
    calibration_error: float  # with the temperature
    calibration_error_uncalibrated: float  # without a temperature
    # accuracy on cells with a highest probability of at least the threshold; None if there is no cell
    accuracy_above: list[float | None]
    labelled_above: list[float]  # share of these cells among all cells


def calibrate(logits: np.ndarray, labels: np.ndarray) -> Calibration:
    """Calibrate a classifier on cells with known labels.

    `logits` are (cells, labels) float. `labels`, (cells,) int, are the true labels by index.
    """
    logits = logits.astype(np.float64)
    # divide the logits of each fold by the temperature that is fitted on the other folds
    fold_of_cell = np.arange(len(labels)) % FOLDS
    scaled = logits.copy()  # logits divided by the temperature of the other folds
    for fold in range(min(FOLDS, len(labels))):
        is_left_out = fold_of_cell == fold
        if not is_left_out.all():
            scaled[is_left_out] /= fit_temperature(logits[~is_left_out], labels[~is_left_out])
    lowers_error = calibration_error_of_logits(scaled, labels) < calibration_error_of_logits(
        logits, labels
    )
    temperature = fit_temperature(logits, labels) if lowers_error else 1.0

    # accuracy of the cells that each threshold keeps
    confidence, is_right = confidence_and_correctness(logits / temperature, labels)
    # (cells, N_THRESHOLDS): True for the cells that a threshold keeps
    is_kept = confidence[:, None] >= np.arange(N_THRESHOLDS) / N_THRESHOLDS
    accuracies = [float(is_right[kept].mean()) if kept.any() else None for kept in is_kept.T]
    return Calibration(
        temperature=temperature,
        n_cells=len(labels),
        accuracy=float(is_right.mean()),
        calibration_error=expected_calibration_error(confidence, is_right),
        calibration_error_uncalibrated=calibration_error_of_logits(logits, labels),
        accuracy_above=accuracies,
        labelled_above=is_kept.mean(axis=0).tolist(),
    )


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Find the temperature with the smallest cross-entropy.

    It is between 1 / MAX_TEMPERATURE and MAX_TEMPERATURE.
    """

    def loss(log_temperature: float) -> float:
        scaled = torch.from_numpy(logits / np.exp(log_temperature)).log_softmax(1).numpy()
        return -float(scaled[np.arange(len(labels)), labels].mean())

    bound = float(np.log(MAX_TEMPERATURE))
    # This import takes a fifth of a second. It is made here, because few models have a head to calibrate.
    minimize_scalar = import_module("scipy.optimize").minimize_scalar
    return float(np.exp(minimize_scalar(loss, bounds=(-bound, bound), method="bounded").x))


def find_classifications(objective: Objective) -> dict[str, Classification]:
    """Return the parts of the objective that predict labels, by name.

    Adversarial parts are left out, because vectors should not tell their labels. An objective that is not a
    sum has the name "".
    """
    return {
        name: part
        for name, part in objective.parts_by_name().items()
        if isinstance(part, Classification) and part.config.adversarial_scale is None
    }


def find_regressions(objective: Objective) -> dict[str, Regression]:
    """Return the parts of the objective that predict numbers, by name."""
    return {
        name: part
        for name, part in objective.parts_by_name().items()
        if isinstance(part, Regression)
    }


@torch.inference_mode()
def run_head(
    model: Model, vectors: np.ndarray, head: Callable[[Model, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """Compute the output of `head`, such as `Classification.predict`, for cells with these `vectors`.

    `vectors` are (cells, hidden) float32, as `embed` writes them. Returns (cells, ...) float32.
    """
    device = next(model.parameters()).device
    parts = torch.from_numpy(vectors).split(CELL_BLOCK)
    return np.concatenate([head(model, part.to(device)).cpu().numpy() for part in parts])


def keep_cells(batch: Batch, is_kept: np.ndarray) -> Batch:
    """Return the cells of a batch that a mask has, (cells,) bool."""
    lengths = np.diff(batch.cu_seqlens)
    kept = {"cell": is_kept, "token": np.repeat(is_kept, lengths)}
    cu_seqlens = np.cumsum([0, *lengths[is_kept]], dtype=np.int32)
    return batch.map(lambda axis, array: array[kept[axis.name]], cu_seqlens=cu_seqlens)


def calibrate_head(
    model: Model, options: TrainOptions, manifest: Path, objective: Classification
) -> Calibration | None:
    """Calibrate the head `objective` on the labelled validation cells of its run; None without such cells.

    Of large models the first cells are used, as many as MAX_FLOPS allow; shards are shuffled. `options`
    are the options of the run, and `manifest` is the path of the manifest of the run's shards.
    """
    n_cells = Manifest.read(manifest).splits["val"].n_obs
    if n_cells == 0:
        return None
    n_cells = min(n_cells, options.train.val_cells or n_cells)
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
    device = next(model.parameters()).device
    blocks = model.get_submodule(model.plan.blocks)
    n_parameters = sum(parameter.numel() for parameter in blocks.parameters())
    max_tokens = MAX_FLOPS / max(2 * n_parameters, 1)
    n_tokens = 0
    vectors = []
    labels = []
    batches = progress(
        chain.from_iterable(stream), "calibration", n_cells, size=lambda batch: len(batch.cell_ids)
    )
    with torch.inference_mode():
        for batch in batches:
            assert batch.levels is not None
            # code of each cell's label: 0 is an unknown label, and the code after the last label a missing one
            level = batch.levels[:, column]
            is_known = (level > 0) & (level <= len(objective.label_names))
            is_known &= np.diff(batch.cu_seqlens) > 0
            if not is_known.any():
                continue
            batch = keep_cells(batch, is_known)
            vectors.append(model.embed(to_tensors(batch, device)).float().cpu().numpy())
            labels.append(level[is_known].astype(np.int64) - 1)
            n_tokens += len(batch.token_ids)
            if n_tokens > max_tokens:
                break
    stream.close()
    if not labels:
        return None
    logits = run_head(model, np.concatenate(vectors), objective.predict)
    known_labels = np.concatenate(labels)
    if n_tokens > max_tokens and len(known_labels) < FEW_CELLS:
        print(
            f"warning: the classifier of {objective.config.label_column} is calibrated on {len(known_labels)} cells "
            "only, because the model is large: thresholds of predict.min_accuracy are uncertain"
        )
    return calibrate(logits, known_labels)
