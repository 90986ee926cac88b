"""predict: labels and numbers of the cells of any dataset, from the exported model of a run with such objectives."""

from pathlib import Path
from typing import Any

from cellmill.config.options import PredictOptions
from cellmill.data.dataset_file import open_dataset
from cellmill.errors import ConfigError
from cellmill.evaluate.embed import embed_cells, load_for_inference
from cellmill.evaluate.embedding_checks import check_coverage, limits_of
from cellmill.evaluate.predict import (
    Prediction,
    classifiers_of,
    predict,
    regressions_of,
    threshold,
    uncalibrated,
    values_of,
)
from cellmill.evaluate.prediction_file import Predicted, append_prediction, write_prediction
from cellmill.files import sha256_file
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
    heads, section = classifiers_of(network, config), options.embed
    if not heads and not regressions_of(network.objective):
        raise ConfigError(
            f"--model {model}: it predicts no labels; export a run with objective classification or regression"
        )
    smallest = {end: threshold(options.predict, classifier) for end, (_, classifier) in heads.items()}
    with open_dataset(path, counts) as reader:
        embedding = embed_cells(reader, network, vocabulary, tokens, section.token_budget, precision=section.precision)
        check_coverage(path, embedding, section)
        reader.warn_if_rounded()
        obs = reader.obs
    about = {"model_digest": sha256_file(model / "model.safetensors"), "n_without_genes": embedding.n_without_genes}
    predicted = Predicted({}, {}, about)
    for end, (objective, classifier) in heads.items():
        prediction = predict(network, embedding.vectors, classifier, smallest[end], objective)
        predicted.add_labels(end, prediction, _about(classifier, prediction, smallest[end]))
        _say(path, len(obs), classifier, prediction, smallest[end], out)
    for end, (column, values) in values_of(network, embedding.vectors).items():
        predicted.add_values(end, values, column)
        print(f"{path.stem}: {len(obs):,} cells have a predicted {column} -> {out}")
    if append:
        append_prediction(path, out, predicted)
    else:
        write_prediction(out, obs, predicted)
    for line in limits_of(embedding):
        print(f"{path.stem}: {line}")


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


def _say(
    path: Path, n_cells: int, classifier: dict[str, Any], prediction: Prediction, smallest: float, out: Path
) -> None:
    known = f"{prediction.n_unknown:,} below probability {smallest:g} are unknown" if smallest else "none unknown"
    print(f"{path.stem}: {n_cells:,} cells labelled by {classifier['label_column']}, {known} -> {out}")
    if not classifier["calibration"]:
        print(f"{path.stem}: warning: probabilities are not calibrated: {uncalibrated(classifier)}")
