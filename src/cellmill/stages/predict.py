"""predict: labels and numbers of the cells of any dataset, from the exported model of a run with such objectives."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.options import PredictOptions
from cellmill.data.dataset_file import open_dataset
from cellmill.data.obs_levels import DATASET
from cellmill.evaluate.embed import embed_cells, load_for_inference
from cellmill.evaluate.embedding_checks import check_coverage, limits_of
from cellmill.evaluate.predict import Prediction, classifiers_of, uncalibrated
from cellmill.evaluate.predicted import predict_heads, thresholds_of
from cellmill.evaluate.prediction_file import append_prediction, write_prediction
from cellmill.evaluate.unknown_labels import count_labels, texts_of
from cellmill.stages.embed import checked_input


def run(
    *, options: PredictOptions, model: Path, input: Path | str, counts: str, out: Path, append: bool = False
) -> None:
    """Write labels, probabilities and numbers of the cells of `input`, preprocessed or raw, to `out` (.h5ad).

    `input` may be a URL.

    With them are obs and nothing else, or, with `append`, everything in the .h5ad `input`, which `out` may be.
    """
    path = checked_input(input, out, append)
    network, vocabulary, tokens, config = load_for_inference(model)
    section, smallest = options.embed, thresholds_of(network, config, options.predict, f"--model {model}")
    with open_dataset(path, counts) as reader:
        embedding = embed_cells(reader, network, vocabulary, tokens, section.token_budget, precision=section.precision)
        check_coverage(path, embedding, section)
        reader.warn_if_rounded()
        obs = reader.obs
    print(f"{path.stem}: {embedding.coverage_frac:.1%} of counts on known genes")
    predicted = predict_heads(network, config, embedding, smallest)
    for end, (_, classifier) in classifiers_of(network, config).items():
        _say(path, len(obs), classifier, predicted.heads[end], smallest[end], out)
        _say_agreement(path, obs, classifier, predicted.heads[end])
    for key, column in predicted.about.items():
        if key.startswith("value_column"):
            print(f"{path.stem}: {len(obs):,} cells have a predicted {column} -> {out}")
    if append:
        append_prediction(path, out, predicted)
    else:
        write_prediction(out, obs, predicted)
    for line in limits_of(embedding):
        print(f"{path.stem}: {line}")


def _say(
    path: Path, n_cells: int, classifier: dict[str, Any], prediction: Prediction, smallest: float, out: Path
) -> None:
    known = f"{prediction.n_unknown:,} below probability {smallest:g} are unknown" if smallest else "none unknown"
    print(f"{path.stem}: {n_cells:,} cells labelled by {classifier['label_column']}, {known} -> {out}")
    if not classifier["calibration"]:
        print(f"{path.stem}: warning: probabilities are not calibrated: {uncalibrated(classifier)}")


def _say_agreement(path: Path, obs: pd.DataFrame, classifier: dict[str, Any], prediction: Prediction) -> None:
    """Say how many cells are predicted as the file labels them, and which labels the model does not know."""
    column, labels = classifier["label_column"], classifier["labels"]
    if column not in obs or column == DATASET:
        return
    counts = count_labels(obs, path.stem, column, labels)
    if n_known := counts.n_labelled - counts.n_unknown:
        own = pd.Series(texts_of(obs[column]))
        n_equal = int((own.isin(labels) & (own == np.asarray(prediction.labels, object))).sum())
        print(
            f"{path.stem}: {n_equal:,} of the {n_known:,} cells whose {column} the model knows have it as predicted "
            f"label ({n_equal / n_known:.3f})"
        )
    for line in counts.problems():
        print(f"{path.stem}: warning: obs column {line}")
