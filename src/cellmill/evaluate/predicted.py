"""Predictions of all heads of a model for the cells of one dataset, as files and `LoadedModel.predict` have them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.run import Predict
from cellmill.errors import ConfigError
from cellmill.evaluate.embed import Embedding
from cellmill.evaluate.predict import (
    Prediction,
    classifiers_of,
    predict,
    regressions_of,
    threshold,
    values_of,
)
from cellmill.models.family import Model

LABEL, PROBABILITY = "cellmill_label", "cellmill_probability"  # obs
PROBABILITIES = "cellmill_probabilities"  # obsm, in the order of uns[ABOUT]["labels"]
VALUE = "cellmill_value"  # obs
ABOUT = "cellmill_prediction"  # uns


@dataclass(frozen=True)
class Predicted:
    """What `cellmill predict` writes; names end in `_PART` where a sum has several heads alike.

    `labels`, `probabilities`, `highest` and `n_unknown` are those of the first head of labels.
    """

    obs: dict[str, Any]
    """cellmill_label, cellmill_probability and cellmill_value, each (cells,)."""
    obsm: dict[str, np.ndarray]
    """cellmill_probabilities, (cells, labels)."""
    about: dict[str, Any]
    """uns["cellmill_prediction"]."""
    heads: dict[str, Prediction] = field(default_factory=dict)
    """Predictions of labels by the end of their names; empty for the first."""

    @property
    def labels(self) -> pd.Categorical:
        """(cells,)"""
        return self._first.labels

    @property
    def probabilities(self) -> np.ndarray:
        """(cells, labels) float32, after the temperature."""
        return self._first.probabilities

    @property
    def highest(self) -> np.ndarray:
        """(cells,) float32: probability of the likeliest label."""
        return self._first.highest

    @property
    def n_unknown(self) -> int:
        """Cells below the smallest probability."""
        return self._first.n_unknown

    def add_to(self, adata: Any) -> None:
        """Add obs, obsm and uns to the AnnData whose cells these are."""
        for name, column in self.obs.items():
            adata.obs[name] = column
        for name, table in self.obsm.items():
            adata.obsm[name] = table
        adata.uns[ABOUT] = self.about

    @property
    def _first(self) -> Prediction:
        if not self.heads:
            raise ConfigError(f"the model predicts no labels; its numbers are in obs: {', '.join(self.obs)}")
        return next(iter(self.heads.values()))


def thresholds_of(model: Model, config: dict[str, Any], section: Predict, name: str) -> dict[str, float]:
    """Return the smallest probability of a label, by the end of the names of each head of labels.

    Raises ConfigError, which names the model as `name`, for one that predicts nothing.
    """
    heads = classifiers_of(model, config)
    if not heads and not regressions_of(model.objective):
        raise ConfigError(f"{name}: it predicts no labels; export a run with objective classification or regression")
    return {end: threshold(section, classifier) for end, (_, classifier) in heads.items()}


def predict_heads(model: Model, config: dict[str, Any], embedding: Embedding, smallest: dict[str, float]) -> Predicted:
    """Return the predictions of all heads for embedded cells; `smallest` is that of `thresholds_of`."""
    digest = config["weights_sha256"]  # of model.safetensors, compared when it was loaded
    predicted = Predicted({}, {}, {"model_digest": digest, "n_without_genes": embedding.n_without_genes})
    for end, (objective, classifier) in classifiers_of(model, config).items():
        prediction = predict(model, embedding.vectors, classifier, smallest[end], objective)
        predicted.heads[end] = prediction
        predicted.obs[LABEL + end], predicted.obs[PROBABILITY + end] = prediction.labels, prediction.highest
        predicted.obsm[PROBABILITIES + end] = prediction.probabilities
        of_head = _about(classifier, prediction, smallest[end])
        predicted.about.update({key + end: value for key, value in of_head.items()})
    for end, (column, values) in values_of(model, embedding.vectors).items():
        predicted.obs[VALUE + end], predicted.about[f"value_column{end}"] = values, column
    return predicted


def _about(classifier: dict[str, Any], prediction: Prediction, smallest: float) -> dict[str, Any]:
    """Entries of uns for a head that predicts labels."""
    calibration = classifier["calibration"] or {}
    about = {
        "label_column": classifier["label_column"],
        "labels": classifier["labels"],
        "min_probability": smallest,
        "n_unknown": prediction.n_unknown,
    }
    kept = ("temperature", "calibration_error", "n_cells")
    return about | {key: calibration[key] for key in kept if key in calibration}
