"""Prediction of labels and numbers by the heads of a model.

A model that predicts labels has the entry `classifier` in config.json. That entry has:

- `label_column`, the obs column of the labels;
- `labels`, in the order of the head's rows;
- `calibration`, the fields of `Calibration`. If it is None, `uncalibrated` has the reason.

If the objective is a sum with several classifiers, the further entries are in `more_classifiers`, by the
name of the part. `regressors` lists the obs columns of predicted numbers.

The names of a head's results end in a suffix, so that the results of several heads differ. The first
head of labels has the empty suffix.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.corpus import DATASET
from cellmill.config.run import Predict
from cellmill.data.prepare.qc_lines import list_counts
from cellmill.data.shards.obs import parse_columns
from cellmill.errors import ConfigError
from cellmill.evaluate.inference.agreement import compare_labels, compare_numbers
from cellmill.evaluate.inference.annotations import (
    ABOUT_PREDICTION,
    LABEL,
    PROBABILITIES,
    PROBABILITY,
    REJECTED,
    SEEN,
    VALUE,
    Annotations,
)
from cellmill.evaluate.inference.calibration import (
    N_THRESHOLDS,
    NO_VALIDATION,
    find_classifications,
    find_regressions,
    run_head,
)
from cellmill.evaluate.inference.embed import Embedding, check_heads
from cellmill.evaluate.inference.label_counts import MAX_NAMES, count_by_label, list_label_texts
from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.models.family import Model
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.regression import Regression
from cellmill.models.objectives.shared.calibration import softmax


def find_classifiers(
    model: Model, config: dict[str, Any]
) -> dict[str, tuple[Classification, dict[str, Any]]]:
    """Return each head that predicts labels, with its entry of config.json, by the head's suffix."""
    heads = find_classifications(model.objective)
    first = next(iter(heads), None)
    if first is None or "classifier" not in config:
        return {}
    classifiers = {"": (heads[first], config["classifier"])}
    for name, entry in config.get("more_classifiers", {}).items():
        if name in heads:
            classifiers[f"_{name}"] = (heads[name], entry)
    return classifiers


@dataclass(frozen=True)
class Predictions(Annotations):
    """Predictions that `cellmill predict` writes.

    For each head of labels, obs has cellmill_label and cellmill_probability. With a threshold, obs also
    has cellmill_rejected. obsm has cellmill_probabilities, (cells, labels) float32, after the logits were
    divided by the temperature. For each head of numbers, obs has cellmill_value. If the model's training
    cells are known, obs has cellmill_seen_in_training.

    In a sum, the names of the second and further heads of labels end in `_PART`, where PART is the name
    of the part. If a sum has several heads of numbers, the names of all of these end in `_PART`.
    """

    # sentences that compare predictions with the labels and numbers in the file
    agreement: list[str] = field(default_factory=list)
    key = ABOUT_PREDICTION

    def __repr__(self) -> str:
        n_cells = len(next(iter(self.obs.values()), ()))
        lines = ["Predictions", f"{n_cells:,} cells, obs: {', '.join(self.obs)}"]
        for name, column in self.obs.items():
            if name.startswith(LABEL):
                counts = count_by_label(np.asarray(column.dropna(), str))
                labels = list_counts(counts, MAX_NAMES)
                lines.append(f"{name}: {labels or 'no label'}")
            elif name.startswith(REJECTED):
                lines.append(f"{name}: {int(column.sum()):,}")
        return "\n    ".join(lines + self.agreement)

    @property
    def labels(self) -> pd.Categorical:
        """Predicted labels of the first head of labels, (cells,).

        Raises ConfigError for a model that predicts numbers only.
        """
        if LABEL not in self.obs:
            numbers = [name for name in self.obs if name.startswith(VALUE)]
            raise ConfigError(
                f"the model predicts no labels; its numbers are in obs: {', '.join(numbers)}"
            )
        return self.obs[LABEL]


def choose_thresholds(
    model: Model, config: dict[str, Any], section: Predict, name: str
) -> dict[str, float]:
    """Choose the smallest probability at which a head assigns a label, by the head's suffix.

    `name` is what messages call the model.

    Raises ConfigError if the model has no heads, or if the heads would get other vectors than in training.
    With `min_accuracy`, also raises ConfigError if a head is not calibrated, or if no threshold reaches the
    accuracy. Prints a line if a threshold is set and the model predicts numbers only.
    """
    heads = find_classifiers(model, config)
    thresholds = {}
    if not heads and not find_regressions(model.objective):
        raise ConfigError(
            f"{name}: it predicts neither labels nor numbers; export a run with objective classification or regression"
        )
    check_heads(model)
    for option, value in section:
        if value is not None and not heads:
            # a section predict may be shared with runs that predict labels
            print(
                f"{name}: predict.{option} has no effect: the model predicts numbers only, which have no threshold",
                file=sys.stderr,
            )
    for suffix, (_, entry) in heads.items():
        thresholds[suffix] = section.min_probability or 0.0
        if section.min_accuracy is None:
            continue
        calibration = entry["calibration"]
        if calibration is None:
            why = entry.get("uncalibrated", NO_VALIDATION)
            raise ConfigError(
                f"predict.min_accuracy: the model is not calibrated ({why}); set predict.min_probability"
            )
        # accuracy of the cells above each threshold; the table has None if no cell is above it
        accuracies = [
            -1.0 if accuracy is None else accuracy for accuracy in calibration["accuracy_above"]
        ]
        is_reached = [accuracy >= section.min_accuracy for accuracy in accuracies]
        if not any(is_reached):
            # rounded down, because a best accuracy of 0.9497 does not reach 0.95
            best = math.floor(1000 * max(accuracies)) / 1000
            raise ConfigError(
                f"predict.min_accuracy {section.min_accuracy:g}: no threshold reaches it on the validation cells, the "
                f"best has {best:.3f}; lower it"
            )
        thresholds[suffix] = is_reached.index(True) / N_THRESHOLDS
    return thresholds


def predict_heads(
    model: Model,
    config: dict[str, Any],
    embedding: Embedding,
    thresholds: dict[str, float],
    obs: pd.DataFrame,
    seen: Seen,
) -> Predictions:
    """Predict with all heads, and compare the predictions with the labels and numbers in `obs`.

    `thresholds` are the result of `choose_thresholds`. A cell has no label if its highest probability is
    below the head's threshold, or if the cell has no vector.
    """
    columns: dict[str, Any] = {}
    tables: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {
        "model_digest": config["weights_sha256"],  # SHA-256 of model.safetensors
        "n_without_genes": embedding.n_without_genes,
    }
    agreement: list[str] = []
    if seen.is_seen is not None:
        columns[SEEN] = seen.is_seen
        about["n_seen_in_training"] = int(seen.is_seen.sum())
    if seen.caveat:
        about["training_cells_unknown"] = seen.caveat

    for suffix, (head, entry) in find_classifiers(model, config).items():
        logits = run_head(model, embedding.vectors, head.predict).astype(np.float64)
        predicted = _predict_labels(entry, logits, thresholds[suffix])
        columns |= _add_suffix(predicted.obs, suffix)
        tables |= _add_suffix(predicted.obsm, suffix)
        about |= _add_suffix(predicted.about, suffix)
        column = entry["label_column"]
        if column in obs and column != DATASET:
            assigned = np.asarray(predicted.obs[LABEL], object)
            file_labels = list_label_texts(obs[column], entry["labels"])
            figures, lines = compare_labels(column, file_labels, assigned, entry["labels"], seen)
            about |= _add_suffix(figures, suffix)
            agreement += lines

    for suffix, regression in _find_regressors(model).items():
        numbers = run_head(model, embedding.vectors, regression.predict_in_units)
        figures, lines = _compare_with_numbers(regression, numbers, obs, seen)
        columns[VALUE + suffix] = numbers
        about[f"value_column{suffix}"] = regression.config.target_column
        about |= _add_suffix(figures, suffix)
        agreement += lines
    return Predictions(columns, tables, about, agreement)


def _find_regressors(model: Model) -> dict[str, Regression]:
    """Return each head that predicts numbers, by the head's suffix.

    A single head has the empty suffix. Several heads all have the name of their part as suffix.
    """
    regressions = find_regressions(model.objective)
    has_suffix = len(regressions) > 1
    return {
        f"_{name}" if has_suffix else "": regression for name, regression in regressions.items()
    }


def _compare_with_numbers(
    regression: Regression, numbers: np.ndarray, obs: pd.DataFrame, seen: Seen
) -> tuple[dict[str, Any], list[str]]:
    """Return figures and sentences on predicted `numbers`, (cells,), against the file's numbers."""
    column = regression.config.target_column
    file_numbers = parse_columns(obs, [column])[:, 0]
    warnings = []
    if column in obs and not np.isfinite(file_numbers).any():
        warnings.append(f"warning: obs column {column}: no cell has a number")
    # numbers that were trained with Pearson's loss have neither scale nor offset of the column
    has_scale = regression.config.loss != "pearson"
    training_mean = regression.config.target_mean if has_scale else None
    predicted = numbers.astype(np.float64)
    figures, lines = compare_numbers(column, file_numbers, predicted, training_mean, seen)
    return figures, warnings + lines


def _add_suffix(values: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    return {name + suffix: value for name, value in values.items()}


def _predict_labels(
    entry: dict[str, Any], logits: np.ndarray, min_probability: float
) -> Annotations:
    """Return the predictions of one head of labels from its `logits`, (cells, labels).

    `entry` is the entry of the head in config.json. Names have no suffix: the caller adds the suffix.
    """
    calibration = entry["calibration"] or {}
    probabilities = softmax(logits / calibration.get("temperature", 1.0)).astype(np.float32)
    # A cell without a vector has NaN probabilities, and gets no label. argmax takes no NaN, so such a
    # cell has probabilities of 0 there, and code -1 afterwards.
    highest = probabilities.max(axis=1)
    has_vector = np.isfinite(highest)
    rejected = highest < min_probability
    best = np.where(has_vector[:, None], probabilities, 0).argmax(axis=1)
    codes = np.where(has_vector & ~rejected, best, -1)
    obs: dict[str, Any] = {
        LABEL: pd.Categorical.from_codes(codes, list(entry["labels"])),
        PROBABILITY: highest,
    }
    if min_probability:
        obs[REJECTED] = rejected
    about = {
        "label_column": entry["label_column"],
        "labels": entry["labels"],
        "min_probability": min_probability,
        "n_rejected": int(rejected.sum()),
    }
    uns_name_by_field = {
        "temperature": "temperature",
        "calibration_error": "calibration_error",
        "n_cells": "n_calibration_cells",
    }
    for calibration_field, name in uns_name_by_field.items():
        if calibration_field in calibration:
            about[name] = calibration[calibration_field]
    return Annotations(obs, {PROBABILITIES: probabilities}, about)
