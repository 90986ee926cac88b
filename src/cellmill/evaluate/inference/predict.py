"""Prediction of labels and numbers by the heads of a model, and `LoadedModel` (`cellmill.load`).

config.json of a model that predicts labels has the entry `classifier`: label_column, labels (in the
order of the head's rows) and `calibration` (fields of `Calibration`), or None and the reason in
`uncalibrated`. If a sum has several classifiers, the others are in `more_classifiers`, by part.
`regressors` lists the columns of predicted numbers.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.corpus import DATASET
from cellmill.config.datasets import NO_COLUMNS
from cellmill.config.load import check_options, find_atlas
from cellmill.config.run import Embed, Map, Predict
from cellmill.data.arrays import as_text
from cellmill.data.genes.names import organisms_of
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.shards.obs import shard_column
from cellmill.errors import ConfigError, did_you_mean
from cellmill.evaluate.atlas.mapping import (
    ABOUT_PREDICTION,
    LABEL,
    PROBABILITIES,
    PROBABILITY,
    REJECTED,
    SEEN,
    VALUE,
    Mapped,
    drop_earlier,
    map_vectors,
)
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.inference.agreement import compare_labels
from cellmill.evaluate.inference.calibration import (
    NO_VALIDATION,
    STEPS,
    find_classifications,
    find_regressions,
    run_head,
)
from cellmill.evaluate.inference.embed import (
    Embedding,
    describe_limits,
    embed_cells,
    load_for_inference,
)
from cellmill.evaluate.inference.seen import Seen, mark_seen_cells, table_of_seen
from cellmill.models.family import Model
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.shared.calibration import softmax

MAX_NAMES = 20  # labels that are named, the most frequent


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
class Predicted:
    """Content that `cellmill predict` writes.

    Names end in `_PART` if a sum has several heads of a kind.
    """

    obs: dict[str, Any]
    """(cells,) each: cellmill_label, cellmill_probability, cellmill_value; cellmill_rejected with a
    threshold, and cellmill_seen_in_training if the model's training cells are known.
    """
    # cellmill_probabilities, (cells, labels) float32, after the temperature
    obsm: dict[str, np.ndarray]
    about: dict[str, Any]  # uns["cellmill_prediction"]
    # sentences about labels that the file has too
    agreement: list[str] = field(default_factory=list)
    key = ABOUT_PREDICTION  # of `about` in uns

    def __repr__(self) -> str:
        n_cells = len(next(iter(self.obs.values()), ()))
        lines = ["Predicted", f"{n_cells:,} cells, obs: {', '.join(self.obs)}"]
        for name, column in self.obs.items():
            if name.startswith(LABEL):
                counts = tally(np.asarray(column.dropna(), str))
                labels = _list_first([f"{label!r} {n:,}" for label, n in counts.items()])
                lines.append(f"{name}: {labels or 'no label'}")
            elif name.startswith(REJECTED):
                lines.append(f"{name}: {int(column.sum()):,}")
        return "\n    ".join(lines + self.agreement)

    @property
    def labels(self) -> pd.Categorical:
        """(cells,), of the first head of labels."""
        if LABEL not in self.obs:
            raise ConfigError(
                f"the model predicts no labels; its numbers are in obs: {', '.join(self.obs)}"
            )
        return self.obs[LABEL]

    def add_to(self, adata: Any) -> None:
        """Add obs, obsm and uns to the AnnData whose cells these are, for earlier predictions."""
        drop_earlier(adata, self.about)
        for name, column in self.obs.items():
            adata.obs[name] = column
        for name, table in self.obsm.items():
            adata.obsm[name] = table
        adata.uns[ABOUT_PREDICTION] = self.about


def choose_thresholds(
    model: Model, config: dict[str, Any], section: Predict, name: str
) -> dict[str, float]:
    """Smallest probability at which a label is assigned, by the suffix of each head's columns.

    Raises ConfigError if the model, called `name`, has no heads, or if no threshold reaches the
    accuracy.
    """
    heads = find_classifiers(model, config)
    thresholds = {}
    if not heads and not find_regressions(model.objective):
        raise ConfigError(
            f"{name}: it predicts no labels; export a run with objective classification or regression"
        )
    for suffix, (_, classifier) in heads.items():
        thresholds[suffix] = section.min_probability or 0.0
        if section.min_accuracy is None:
            continue
        calibration = classifier["calibration"]
        if calibration is None:
            why = classifier.get("uncalibrated", NO_VALIDATION)
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
        thresholds[suffix] = reached.index(True) / STEPS
    return thresholds


def predict_heads(
    model: Model,
    config: dict[str, Any],
    embedding: Embedding,
    thresholds: dict[str, float],
    obs: pd.DataFrame,
    seen: Seen,
) -> Predicted:
    """Predictions of all heads for embedded cells, compared with the labels in `obs`.

    A label is missing below its head's threshold, and for a cell without a vector.
    """
    digest = config["weights_sha256"]  # SHA-256 of model.safetensors, compared on load
    predicted = Predicted(
        {}, {}, {"model_digest": digest, "n_without_genes": embedding.n_without_genes}
    )
    if seen.cells is not None:
        predicted.obs[SEEN] = seen.cells
        predicted.about["n_seen_in_training"] = int(seen.cells.sum())
    if seen.unknown:
        predicted.about["training_cells_unknown"] = seen.unknown
    for suffix, (objective, classifier) in find_classifiers(model, config).items():
        logits = run_head(model, embedding.vectors, objective.predict).astype(np.float64)
        _predict_labels(predicted, suffix, classifier, logits, thresholds[suffix])
        column = classifier["label_column"]
        if column in obs and column != DATASET:
            assigned = np.asarray(predicted.obs[LABEL + suffix], object)
            given = label_texts(obs[column], classifier["labels"])
            figures, lines = compare_labels(column, given, assigned, classifier["labels"], seen)
            predicted.about.update({key + suffix: value for key, value in figures.items()})
            predicted.agreement.extend(lines)
    regressions = find_regressions(model.objective)
    for name, head in regressions.items():
        suffix = f"_{name}" if len(regressions) > 1 else ""
        predicted.obs[VALUE + suffix] = run_head(model, embedding.vectors, head.predict_in_units)
        predicted.about[f"value_column{suffix}"] = head.config.target_column
    return predicted


def _predict_labels(
    predicted: Predicted,
    suffix: str,
    classifier: dict[str, Any],
    logits: np.ndarray,
    min_probability: float,
) -> None:
    """Add the labels of one head, with `logits` (cells, labels), under names that end in `suffix`."""
    calibration = classifier["calibration"] or {}
    probabilities = softmax(logits / calibration.get("temperature", 1.0)).astype(np.float32)
    # a cell without a vector has probabilities of NaN, and no label
    highest = probabilities.max(axis=1)
    has_vector = np.isfinite(highest)
    rejected = highest < min_probability
    best = np.where(has_vector[:, None], probabilities, 0).argmax(axis=1)
    codes = np.where(has_vector & ~rejected, best, -1)
    predicted.obs[LABEL + suffix] = pd.Categorical.from_codes(codes, list(classifier["labels"]))
    predicted.obs[PROBABILITY + suffix] = highest
    if min_probability:
        predicted.obs[REJECTED + suffix] = rejected
    predicted.obsm[PROBABILITIES + suffix] = probabilities
    about = {
        "label_column": classifier["label_column"],
        "labels": classifier["labels"],
        "min_probability": min_probability,
        "n_rejected": int(rejected.sum()),
    }
    kept = ("temperature", "calibration_error", "n_cells")
    about |= {key: calibration[key] for key in kept if key in calibration}
    predicted.about.update({key + suffix: value for key, value in about.items()})


def label_texts(column: Any, known: Sequence[str]) -> np.ndarray:
    """(cells,): labels as shards have them; None for a missing label.

    A text that means no label is one only if it is `known`.
    """
    codes, values = pd.factorize(column)
    texts: list[str | None] = []
    for value in values:
        text = as_text(value)
        is_unknown = isinstance(value, str) and text not in known
        texts.append(None if is_unknown and NO_COLUMNS.means_no_label(text) else text)
    return np.array([*texts, None], object)[codes]


class LoadedModel:
    """An exported model with its vocabulary and tokens. A cell's vector depends only on its counts.

    Neither the other cells nor their order change it (except for rounding, 5e-6), and `cellmill
    embed` writes the same.

    Attributes: `folder`, `config` (config.json), `vocabulary`, and `labels`, of the first head; empty without any.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model, self.vocabulary, self._tokens, self.config = load_for_inference(folder)
        self.labels: list[str] = list((self.config.get("classifier") or {}).get("labels", ()))

    def embed(
        self, adata: Any, counts: str = "X", *, dataset: str = "adata", **options: Any
    ) -> np.ndarray:
        """Vectors of all cells in their order, (n_obs, hidden) float32; NaN for a cell without a
        gene of the model.

        `adata` is an AnnData in memory; genes are matched by Ensembl id or symbol. `counts` is X,
        raw, or the name of a layer, `dataset` the name that a model with this covariate reads.
        `options` are those of section `embed`: token_budget, precision, min_coverage_frac,
        min_expressed_frac. Raises DataError if the matrix holds no counts, or the model knows too
        few of its genes.
        """
        section = _embed_options("embed", options)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._model, self.vocabulary, self._tokens, section)
        _warn(dataset, embedding)
        return embedding.vectors

    @contextmanager
    def _open_reader(self, adata: Any, counts: str, dataset: str) -> Iterator[CountsReader]:
        with CountsReader(open_memory(adata, counts, dataset)) as reader:
            reader.dataset = dataset
            yield reader

    def predict(
        self,
        adata: Any,
        counts: str = "X",
        *,
        min_probability: float | None = None,
        min_accuracy: float | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> Predicted:
        """Predictions of all heads, as `cellmill predict` writes them: labels, calibrated
        probabilities and numbers.

        `obs`, `obsm` and `about` have what the command writes, under its names, and `add_to(adata)`
        adds it; `labels` are from the first head of labels. Thresholds are options of section
        `predict`; other arguments are as in `embed`. Raises ConfigError for a model that predicts
        neither labels nor numbers.
        """
        given = {"min_probability": min_probability, "min_accuracy": min_accuracy}
        section = check_options(Predict, given, "options of predict")
        thresholds = choose_thresholds(self._model, self.config, section, str(self.folder))
        embed = _embed_options("predict", options, given)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._model, self.vocabulary, self._tokens, embed)
            seen = mark_seen_cells(reader, self.folder)
            predicted = predict_heads(
                self._model, self.config, embedding, thresholds, reader.obs, seen
            )
        _warn(dataset, embedding)
        return predicted

    def map(
        self,
        adata: Any,
        counts: str = "X",
        *,
        refuse_frac: float = 0.05,
        certainty: float = 0.8,
        atlas: Path | str | None = None,
        dataset: str = "adata",
        **options: Any,
    ) -> Mapped:
        """Labels, neighbours and distances in the model's atlas, as `cellmill map` writes them.

        `atlas` is its folder, by default `atlas` in the model's. `add_to(adata)` of the result adds
        everything. Thresholds are options of section `map`; other arguments are as in `embed`.
        Raises DataError if the atlas is missing, damaged or another model's.
        """
        given = {"refuse_frac": refuse_frac, "certainty": certainty}
        section = check_options(Map, given, "options of map")
        embed = _embed_options("map", options, [*given, "atlas"])
        folder = find_atlas(self.folder, None if atlas is None else Path(atlas))
        width = self._model.vector_width
        cell_atlas = CellAtlas.read(folder, self.config["weights_sha256"], width)
        with self._open_reader(adata, counts, dataset) as reader:
            embedding = embed_cells(reader, self._model, self.vocabulary, self._tokens, embed)
            seen = mark_seen_cells(reader, self.folder)
        _warn(dataset, embedding)
        return map_vectors(cell_atlas, embedding.vectors, seen, section)

    def seen(self, adata: Any, counts: str = "X", *, dataset: str = "adata") -> pd.DataFrame:
        """Cells that the model, or a model before it, was trained on, as `cellmill seen` finds them.

        A row per cell; column `seen` is exact, near or new (`seen.KINDS`). Arguments are as in
        `embed`. Raises DataError if no gene is known, or the training cells are not: the model has
        no list of them.
        """
        with self._open_reader(adata, counts, dataset) as reader:
            table, notes = table_of_seen(reader, self.folder, self.vocabulary)
        for note in notes:
            warnings.warn(f"{dataset}: {note}", stacklevel=2)
        return table

    def __repr__(self) -> str:
        organisms = ", ".join(organisms_of(self.vocabulary)) or "unknown organism"
        n_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        lines = [
            f"LoadedModel {self.folder}",
            f"{self.config['family']} of {self._model.vector_width:,} dimensions, "
            f"{n_parameters:,} parameters, {self.vocabulary.n_genes:,} genes ({organisms})",
            f"labels: {_list_first(self.labels) or 'none'}",
        ]
        return "\n    ".join(lines)


def _embed_options(method: str, options: dict[str, Any], others: Iterable[str] = ()) -> Embed:
    """Options of section `embed` that a method was called with; `others` are its other arguments."""
    known = ["counts", "dataset", *others, *Embed.model_fields]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{method}: unknown argument {name!r}; {hint}")
    embed: Embed = check_options(Embed, options, f"options of {method}")
    return embed


def _warn(dataset: str, embedding: Embedding) -> None:
    for line in describe_limits(embedding):
        warnings.warn(f"{dataset}: {line.removeprefix('warning: ')}", stacklevel=3)


def tally(values: np.ndarray) -> dict[str, int]:
    """Number of cells of each class, the largest first."""
    return dict(sorted(Counter(values.tolist()).items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class LabelCounts:
    n_labelled: int
    n_unknown: int  # cells of a label that the model does not know
    unknown: dict[str, int]  # cells by such a label, the most frequent first
    problem: str | None  # what is wrong with the labels, without a full stop

    def figures(self) -> dict[str, Any]:
        """Cells of unknown labels and the labels of most of them; empty without any."""
        if not self.unknown:
            return {}
        named = dict(list(self.unknown.items())[:MAX_NAMES])
        return {"n_cells_of_unknown_labels": self.n_unknown, "unknown_labels": named}


def count_labels(
    obs: pd.DataFrame, dataset: str, column: str, labels: Sequence[str]
) -> LabelCounts:
    """Count the cells of `obs` by labels that are not in `labels`; `dataset` is the value of a
    column `dataset`.
    """
    found = shard_column(obs, dataset, column)
    if found is None:
        return LabelCounts(0, 0, {}, f"{column}: the file has no such obs column")
    texts = label_texts(found, labels)
    given = texts[~pd.isna(texts)]
    unknown = {label: n for label, n in tally(given).items() if label not in labels}
    n = len(given)
    n_unknown = sum(unknown.values())
    problem = ""
    named = _list_first([f"{label!r} {n:,}" for label, n in unknown.items()])
    if not n:
        problem = "no cell has a label"
    elif n_unknown == n:
        known = _list_first(labels)
        problem = f"none of {n:,} labelled cells has a label that the model knows: expected {known}; got {named}"
    elif unknown:
        problem = f"{n_unknown:,} of {n:,} labelled cells have a label that the model does not know: {named}"
    return LabelCounts(n, n_unknown, unknown, f"{column}: {problem}" if problem else None)


def _list_first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown
