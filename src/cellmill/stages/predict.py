"""predict: labels of the cells of any dataset, from the exported model of a run with objective classification alone."""

from pathlib import Path

from cellmill.config.options import PredictOptions
from cellmill.data.dataset_file import open_dataset
from cellmill.errors import ConfigError
from cellmill.evaluate.embed import embed_cells, load_for_inference
from cellmill.evaluate.embedding_checks import check_coverage, limits_of
from cellmill.evaluate.predict import predict, threshold, uncalibrated
from cellmill.evaluate.prediction_file import append_prediction, write_prediction
from cellmill.files import sha256_file
from cellmill.stages.embed import checked_input


def run(
    *, options: PredictOptions, model: Path, input: Path | str, counts: str, out: Path, append: bool = False
) -> None:
    """Write labels and probabilities of the cells of `input`, preprocessed or raw, to `out` (.h5ad). It may be a URL.

    With them are obs and nothing else, or, with `append`, everything in the .h5ad `input`, which `out` may be.
    """
    path = checked_input(input, out, append)
    network, vocabulary, tokens, config = load_for_inference(model)
    if (classifier := config.get("classifier")) is None:
        raise ConfigError(f"--model {model}: it predicts no labels; export a run with objective classification")
    smallest, section = threshold(options.predict, classifier), options.embed
    with open_dataset(path, counts) as reader:
        embedding = embed_cells(reader, network, vocabulary, tokens, section.token_budget, precision=section.precision)
        check_coverage(path, embedding, section)
        reader.warn_if_rounded()
        obs = reader.obs
    prediction = predict(network, embedding.vectors, classifier, smallest)
    calibration = classifier["calibration"] or {}
    about = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "label_column": classifier["label_column"],
        "labels": classifier["labels"],
        "min_probability": smallest,
        "n_unknown": prediction.n_unknown,
        "n_without_genes": embedding.n_without_genes,
    }
    about |= {key: calibration[key] for key in ("temperature", "calibration_error", "n_cells") if key in calibration}
    if append:
        append_prediction(path, out, prediction, about)
    else:
        write_prediction(out, obs, prediction, about)
    known = f"{prediction.n_unknown:,} below probability {smallest:g} are unknown" if smallest else "none unknown"
    print(f"{path.stem}: {len(obs):,} cells labelled by {classifier['label_column']}, {known} -> {out}")
    if not calibration:
        print(f"{path.stem}: warning: probabilities are not calibrated: {uncalibrated(classifier)}")
    for line in limits_of(embedding):
        print(f"{path.stem}: {line}")
