"""Labels and numbers of cells by the heads of a model: logits of vectors, calibration, and what is unknown.

config.json of a model that predicts labels has `classifier`: label_column, labels (in the order of the head's rows) and
`calibration`, whose keys are those of `evaluate.calibration.Calibration`; None without, and then `uncalibrated` is the
reason. Of a sum of several, the others are in `more_classifiers`, by part. `regressors` are the columns whose numbers
it predicts, by part.
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
from cellmill.models.objectives.regression import Regression

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
    """Return the objective, or the first part of a sum, that predicts labels; None if there is none."""
    return next(iter(classifications_of(objective).values()), None)


def classifications_of(objective: Objective) -> dict[str, Classification]:
    """Return the objective, or the parts of a sum, that predict labels, by part; not those whose label is hidden."""
    heads = {name: leaf for name, leaf in objective.leaves().items() if isinstance(leaf, Classification)}
    return {name: head for name, head in heads.items() if head.config.adversarial_scale is None}


def regressions_of(objective: Objective) -> dict[str, Regression]:
    """Return the objective, or the parts of a sum, that predict numbers, by part."""
    return {name: leaf for name, leaf in objective.leaves().items() if isinstance(leaf, Regression)}


def classifiers_of(model: Model, config: dict[str, Any]) -> dict[str, tuple[Classification, dict[str, Any]]]:
    """Return the heads that predict labels and their entries of config.json, by the end of the columns' names."""
    heads = classifications_of(model.objective)
    first = next(iter(heads), None)
    if first is None or "classifier" not in config:
        return {}
    others = {name: entry for name, entry in config.get("more_classifiers", {}).items() if name in heads}
    return {"": (heads[first], config["classifier"])} | {f"_{name}": (heads[name], own) for name, own in others.items()}


@torch.inference_mode()
def logits_of(model: Model, vectors: np.ndarray, objective: Classification | None = None) -> np.ndarray:
    """Return logits of cells, (cells, K) float32, from vectors that the model's `embed` gave; of the first head."""
    objective = objective or classification_of(model.objective)
    assert objective is not None
    device = next(model.parameters()).device
    parts = torch.from_numpy(vectors).split(CHUNK)
    return np.concatenate([objective.logits(model, part.to(device)).cpu().numpy() for part in parts])


@torch.inference_mode()
def values_of(model: Model, vectors: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """Return obs columns and their predicted numbers, (cells,) float32, by the end of the names in files.

    They are NaN for a cell without a vector. Empty for a model that predicts no numbers.
    """
    device, heads = next(model.parameters()).device, regressions_of(model.objective)
    parts, found = [part.to(device) for part in torch.from_numpy(vectors).split(CHUNK)], {}
    for name, head in heads.items():
        values = torch.cat([head.values(model, part) for part in parts]).cpu().numpy()
        found[f"_{name}" if len(heads) > 1 else ""] = head.config.target_column, values
    return found


def calibration_of(
    model: Model, options: TrainOptions, manifest: Path, objective: Classification
) -> Calibration | None:
    """Return the calibration of a head on the labelled validation cells of its run, None if there are none.

    The model is whole, on the CPU and in eval mode.
    """
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
    return calibrate(logits_of(model, np.concatenate(vectors), objective), found) if len(found) else None


def temperature_of(classifier: dict[str, Any]) -> float | None:
    """Return the fitted temperature of a head; None if it is not calibrated."""
    return None if classifier["calibration"] is None else float(classifier["calibration"]["temperature"])


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


def predict(
    model: Model,
    vectors: np.ndarray,
    classifier: dict[str, Any],
    smallest: float,
    objective: Classification | None = None,
) -> Prediction:
    """Return labels of cells with these vectors, (cells, H) float32; those below `smallest` are unknown.

    `classifier` is the entry of config.json of `objective`; None is the first head.
    """
    temperature = temperature_of(classifier) or 1.0
    probabilities = softmax(logits_of(model, vectors, objective).astype(np.float64) / temperature, axis=1).astype(
        np.float32
    )
    names = list(classifier["labels"])
    categories = names if UNKNOWN in names or not smallest else [*names, UNKNOWN]
    known = ~np.isnan(probabilities).any(axis=1)
    codes = np.where(known, np.where(known[:, None], probabilities, 0).argmax(axis=1), -1)
    below = known & (probabilities.max(axis=1) < smallest)
    if below.any():
        codes[below] = categories.index(UNKNOWN)
    return Prediction(pd.Categorical.from_codes(codes, categories), probabilities, int(below.sum()))
