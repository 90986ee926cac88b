"""Labels of cells by the classification head of a model: logits of vectors, calibration, and what is unknown.

config.json of such a model has `classifier`: label_column, labels (in the order of the head's rows) and `calibration`,
whose keys are those of `evaluate.calibration.Calibration`. None without, and then `uncalibrated` is the reason.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import softmax

from cellmill.config.options import TrainOptions
from cellmill.config.run import Predict
from cellmill.data.manifest import Manifest
from cellmill.data.stream import CellStream
from cellmill.errors import ConfigError
from cellmill.evaluate.calibration import STEPS, Calibration, calibrate
from cellmill.models.batch import to_tensors
from cellmill.models.family import Model
from cellmill.models.objective import Objective
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.sum import Sum

UNKNOWN = "unknown"
NO_VALIDATION = "the run had no labelled validation cells"
CHUNK = 65_536  # cells whose logits are computed at once


@dataclass(frozen=True)
class Prediction:
    """Labels of cells; NaN and a missing label for a cell without a vector."""

    labels: pd.Categorical  # (cells,)
    probabilities: np.ndarray  # (cells, K) float32, of all labels, after the temperature
    n_unknown: int

    @property
    def highest(self) -> np.ndarray:
        """(cells,) float32: probability of the likeliest label."""
        return self.probabilities.max(axis=1)


def classification_of(objective: Objective) -> Classification | None:
    """Return the objective, or the part of a sum, that predicts labels; None if there is none."""
    parts = objective.each.values() if isinstance(objective, Sum) else [objective]
    return next((part for part in parts if isinstance(part, Classification)), None)


@torch.inference_mode()
def logits_of(model: Model, vectors: np.ndarray) -> np.ndarray:
    """Return logits of cells, (cells, K) float32, from vectors that the model's `embed` gave."""
    objective = classification_of(model.objective)
    assert objective is not None
    device = next(model.parameters()).device
    parts = torch.from_numpy(vectors).split(CHUNK)
    return np.concatenate([objective.logits(model, part.to(device)).cpu().numpy() for part in parts])


def calibration_of(model: Model, options: TrainOptions, manifest: Path) -> Calibration | None:
    """Return the calibration of a model on the labelled validation cells of its run, None if there are none.

    The model is whole, on the CPU and in eval mode.
    """
    objective = classification_of(model.objective)
    assert objective is not None
    if Manifest.read(manifest).splits["val"].n_obs == 0:
        return None
    stream = CellStream(
        manifest,
        "val",
        options.tokens,
        options.stream,
        global_batch=options.train.global_batch,
        token_budget=options.train.token_budget,
        rank=0,
        world=1,
        seed=options.train.seed,
        shuffle=False,
        max_cells=options.train.val_cells,
        columns=options.obs_columns(),
    )
    at, vectors, labels = [*options.obs_columns()].index(objective.config.label_column), [], []
    with torch.inference_mode():
        for batch in (batch for step in stream for batch in step):
            assert batch.levels is not None
            known = (batch.levels[:, at] > 0) & (batch.levels[:, at] <= len(objective.labels))
            known &= np.diff(batch.cu_seqlens) > 0
            vectors.append(model.embed(to_tensors(batch)).float().numpy()[known])
            labels.append(batch.levels[known, at].astype(np.int64) - 1)
    stream.close()
    found = np.concatenate(labels)
    return calibrate(logits_of(model, np.concatenate(vectors)), found) if len(found) else None


def uncalibrated(classifier: dict[str, Any]) -> str:
    """Return why the probabilities of a model are not calibrated."""
    return str(classifier.get("uncalibrated", NO_VALIDATION))


def threshold(section: Predict, classifier: dict[str, Any]) -> float:
    """Return the smallest probability of a label that is given; 0 gives every cell one.

    Raises ConfigError for an accuracy that no threshold reaches on the validation cells, or without any of these.
    """
    if section.min_accuracy is None:
        return section.min_probability or 0.0
    calibration = classifier["calibration"]
    if calibration is None:
        raise ConfigError(
            f"predict.min_accuracy: the model is not calibrated ({uncalibrated(classifier)}); set "
            "predict.min_probability"
        )
    known = [(accuracy, at) for at, accuracy in enumerate(calibration["accuracy_above"]) if accuracy is not None]
    reached = [at for accuracy, at in known if accuracy >= section.min_accuracy]
    if not reached:
        raise ConfigError(
            f"predict.min_accuracy {section.min_accuracy:g}: no threshold reaches it on the validation cells, the best "
            f"has {max(known)[0]:.3f}; lower it"
        )
    return reached[0] / STEPS


def predict(model: Model, vectors: np.ndarray, classifier: dict[str, Any], smallest: float) -> Prediction:
    """Return labels of cells with these vectors, (cells, H) float32; those below `smallest` are unknown."""
    calibration = classifier["calibration"]
    temperature = 1.0 if calibration is None else calibration["temperature"]
    probabilities = softmax(logits_of(model, vectors).astype(np.float64) / temperature, axis=1).astype(np.float32)
    names = list(classifier["labels"])
    categories = names if UNKNOWN in names or not smallest else [*names, UNKNOWN]
    known = ~np.isnan(probabilities).any(axis=1)
    codes = np.where(known, np.where(known[:, None], probabilities, 0).argmax(axis=1), -1)
    below = known & (probabilities.max(axis=1) < smallest)
    if below.any():
        codes[below] = categories.index(UNKNOWN)
    return Prediction(pd.Categorical.from_codes(codes, categories), probabilities, int(below.sum()))
