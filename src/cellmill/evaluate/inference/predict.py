"""Prediction of labels and numbers by the heads of a model.

config.json of a model that predicts labels has the entry `classifier`, with `label_column`, `labels`
in the order of the head's rows, and `calibration`: the fields of `Calibration`, or None with the
reason in `uncalibrated`. If a sum has several classifiers, the others are in `more_classifiers`, by part.
`regressors` lists the columns of predicted numbers.
"""

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
from cellmill.evaluate.inference.label_counts import MAX_NAMES, count_by_label, label_texts
from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.models.family import Model
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.shared.calibration import softmax


def find_classifiers(
    model: Model, config: dict[str, Any]
) -> dict[str, tuple[Classification, dict[str, Any]]]:
    """Return the heads that predict labels and their entries of config.json, by the suffix of their
    columns.
    """
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
    """Content that `cellmill predict` writes.

    obs has cellmill_label, cellmill_probability, cellmill_value; cellmill_rejected with a threshold,
    and cellmill_seen_in_training if the model's training cells are known. obsm has
    cellmill_probabilities, (cells, labels) float32, after the temperature.

    In a sum, names of the second and further heads of labels end in `_PART`, and so do names of all
    heads of numbers if it has several.
    """

    # sentences about labels and numbers that the file has too
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
        """(cells,), of the first head of labels."""
        if LABEL not in self.obs:
            numbers = [name for name in self.obs if name.startswith(VALUE)]
            raise ConfigError(
                f"the model predicts no labels; its numbers are in obs: {', '.join(numbers)}"
            )
        return self.obs[LABEL]


def choose_thresholds(
    model: Model, config: dict[str, Any], section: Predict, name: str
) -> dict[str, float]:
    """Smallest probability at which a label is assigned, by the suffix of each head's columns.

    Raises ConfigError if the model, called `name`, has no heads, or as `check_heads`, or if no
    threshold reaches the accuracy.
    """
    heads = find_classifiers(model, config)
    thresholds = {}
    if not heads and not find_regressions(model.objective):
        raise ConfigError(
            f"{name}: it predicts neither labels nor numbers; export a run with objective classification or regression"
        )
    check_heads(model)
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
        # the first threshold that reaches the accuracy; one that no cell reaches has none
        accuracies = [-1.0 if known is None else known for known in calibration["accuracy_above"]]
        reached = [accuracy >= section.min_accuracy for accuracy in accuracies]
        if not any(reached):
            raise ConfigError(
                f"predict.min_accuracy {section.min_accuracy:g}: no threshold reaches it on the validation cells, the "
                f"best has {max(accuracies):.3f}; lower it"
            )
        thresholds[suffix] = reached.index(True) / N_THRESHOLDS
    return thresholds


def predict_heads(
    model: Model,
    config: dict[str, Any],
    embedding: Embedding,
    thresholds: dict[str, float],
    obs: pd.DataFrame,
    seen: Seen,
) -> Predictions:
    """Predictions of all heads for embedded cells, compared with the labels and numbers in `obs`.

    A label is missing below its head's threshold, and for a cell without a vector.
    """
    columns: dict[str, Any] = {}
    tables: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {
        "model_digest": config["weights_sha256"],  # of model.safetensors, compared on load
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
            file_labels = label_texts(obs[column], entry["labels"])
            figures, lines = compare_labels(column, file_labels, assigned, entry["labels"], seen)
            about |= _add_suffix(figures, suffix)
            agreement += lines
    regressions = find_regressions(model.objective)
    for name, regression in regressions.items():
        suffix = f"_{name}" if len(regressions) > 1 else ""
        numbers = run_head(model, embedding.vectors, regression.predict_in_units)
        column = regression.config.target_column
        columns[VALUE + suffix] = numbers
        about[f"value_column{suffix}"] = column
        file_numbers = parse_columns(obs, [column])[:, 0]
        if column in obs and not np.isfinite(file_numbers).any():
            agreement.append(f"warning: obs column {column}: no cell has a number")
        # Pearson's loss fixes neither scale nor offset
        has_scale = regression.config.loss != "pearson"
        mean = regression.config.target_mean if has_scale else None
        predicted_numbers = numbers.astype(np.float64)
        figures, lines = compare_numbers(column, file_numbers, predicted_numbers, mean, seen)
        about |= _add_suffix(figures, suffix)
        agreement += lines
    return Predictions(columns, tables, about, agreement)


def _add_suffix(values: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    return {name + suffix: value for name, value in values.items()}


def _predict_labels(
    entry: dict[str, Any], logits: np.ndarray, min_probability: float
) -> Annotations:
    """Labels of one head, with `logits` (cells, labels), under names without its suffix."""
    calibration = entry["calibration"] or {}
    probabilities = softmax(logits / calibration.get("temperature", 1.0)).astype(np.float32)
    # a cell without a vector has probabilities of NaN, and no label
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
    # names in uns by field of `Calibration`
    names = {
        "temperature": "temperature",
        "calibration_error": "calibration_error",
        "n_cells": "n_calibration_cells",
    }
    for key, name in names.items():
        if key in calibration:
            about[name] = calibration[key]
    return Annotations(obs, {PROBABILITIES: probabilities}, about)
