"""Checks of the files that a training reads, before any process is started."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from cellmill.config import check_options
from cellmill.config.checks import check_rows
from cellmill.config.corpus import MISSING
from cellmill.config.datasets import NO_COLUMNS
from cellmill.config.load import INHERITED, advising, read_model_config, unequal_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.objective import TeacherVectors
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.index import CellColumns, open_vectors
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.files import sha256_file
from cellmill.runs.folder import TrainFolder
from cellmill.runs.identity import ROUNDED_READS, TOKEN_ORDER


class Corpus(NamedTuple):
    """The corpus of a run."""

    options: TrainOptions  # with the columns that they take from the corpus
    shards: Manifest
    n_cells: int  # training cells that the run reads
    fingerprint: str  # of the cells, and of the columns that the run reads


def open_corpus(options: TrainOptions, manifest: Path, train: Path | None = None) -> Corpus:
    """Return the corpus of a run, whose training is in folder `train`.

    Raise ConfigError if the run cannot be trained on them, DataError for a damaged manifest.
    """
    shards = Manifest.read(manifest)
    objective = options.objective.choose_columns(
        CorpusFacts(options, shards), options.objective.supervised_by
    )
    options = options.model_copy(update={"objective": objective})
    columns = options.read_columns()
    check_rows(options.tokens, shards, str(manifest), options.objective.needs_counts)
    n_cells = options.stream.train_cells(shards.splits["train"].n_obs)
    check_levels(options, shards.levels(columns), n_cells, train)
    fingerprint = shards.fingerprint_with(columns, options.number_columns())
    return Corpus(options, shards, n_cells, fingerprint)


def check_vocabulary(vocabulary: Path, shards: Manifest) -> None:
    """Raise DataError if the shards were made with another vocabulary, so tokens mean other genes."""
    digest = Vocabulary.read(vocabulary).digest
    if digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {digest[:12]}, the shards were made with "
            f"{shards.vocabulary['digest'][:12]}; pass the vocabulary of the shards, or make the shards again"
        )


@dataclass(frozen=True)
class CorpusFacts:
    """`Facts` of a corpus: of the training cells that the run reads, and of the vocabulary."""

    options: TrainOptions
    shards: Manifest
    vocabulary: Path | None = None  # only `genes` reads it
    teacher_folder: Path | None = None  # a teacher's vectors
    train: Path | None = None  # folder of the training

    def _read_column(self, kind: Literal["levels", "numbers"], name: str) -> np.ndarray:
        """Return level codes or numbers of a column, `(cells,)`."""
        n_cells = self.options.stream.train_cells(self.shards.splits["train"].n_obs)
        return CellColumns(self.shards, "train", kind, [name])[slice(n_cells)][:, 0]

    def cells_by_level(self, column: str) -> dict[str, int]:
        if column not in self.shards.obs_levels:
            return {}
        levels = self.shards.levels({column: "objective"})[column]
        codes = self._read_column("levels", column)  # from 1; 0 is unknown
        counts = np.bincount(codes, minlength=len(levels) + 1)[1:].tolist()
        return {level: n for level, n in zip(levels, counts) if level != MISSING}

    def cells_by_levels(self, column: str, other: str) -> dict[tuple[str, str], int]:
        if not {column, other} <= self.shards.obs_levels.keys():
            return {}
        names, other_names = self.shards.levels(
            dict.fromkeys((column, other), "objective")
        ).values()
        codes = self._read_column("levels", column) - 1
        other_codes = self._read_column("levels", other) - 1
        counts = np.zeros((len(names), len(other_names)), np.int64)
        np.add.at(counts, (codes, other_codes), 1)
        pairs = {}
        for row, number in np.argwhere(counts):
            pair = names[row], other_names[number]
            if MISSING not in pair:
                pairs[pair] = int(counts[row, number])
        return pairs

    def moments(self, column: str) -> tuple[float, float]:
        option = self.options.number_columns()[column]
        self.shards.fingerprint_with((), {column: option})  # raises if there is no such column
        numbers = self._read_column("numbers", column)
        # targets are float32, so a number that float32 cannot hold counts as missing
        # (`models.objectives.regression`); NaN is not at most the largest number either
        numbers = numbers[np.abs(numbers) <= np.finfo(np.float32).max]
        if not len(numbers) or np.ptp(numbers) == 0:
            which = "the same" if len(numbers) else "a"
            message = (
                f"{option} {column}: expected numbers that differ, got {len(numbers):,} training cells with {which} "
                "number; choose another column"
            )
            # the standard deviation of equal numbers may be a rounding error instead of 0
            if not len(numbers) or numbers.std() == 0:
                raise ConfigError(message)
            _refuse_new_training(message, self.train)
        return float(numbers.mean()), float(numbers.std())

    def genes(self, column: str) -> dict[str, list[int]]:
        """Return the token ids of the genes that each level is named after."""
        # imported by name: tables of genes need pandas, which other launchers do without
        names = importlib.import_module("cellmill.data.genes.names")
        levels = self.shards.levels({column: "objective"})[column]
        named = _exclude_missing(levels)
        assert self.vocabulary is not None, "expected a vocabulary"
        rows_by_level = names.perturbed_genes(named, Vocabulary.read(self.vocabulary))
        tokens = {}
        for level, rows in rows_by_level.items():
            tokens[level] = [row + len(SPECIAL) for row in rows]
        return tokens

    def teacher(self) -> TeacherVectors:
        if self.teacher_folder is None:
            raise ConfigError(
                "objective distill requires its teacher's vectors; pass --teacher, as the workflow does"
            )
        return open_vectors(self.teacher_folder, self.shards, verify=True)[0]


def fit_options(
    options: TrainOptions,
    vocabulary: Path,
    shards: Manifest,
    teacher: Path | None = None,
    init_from: Path | None = None,
    train: Path | None = None,
) -> TrainOptions:
    """Return the options fitted to vocabulary, training cells and a teacher's folder.

    `train` is the folder of the training. Bins are those of the model `init_from`. Raise DataError if a
    file is unusable.
    """
    tokens = options.tokens
    if tokens.needs_quantiles and init_from is not None:
        edges = read_model_config(init_from / "config.json")["tokens"].get("edges")
        if edges is not None:
            tokens = tokens.model_copy(update={"edges": edges})
    if tokens.needs_quantiles:
        quantiles = Vocabulary.read(vocabulary).quantiles
        if quantiles is None:
            raise DataError(
                f"{vocabulary}: it has no quantiles, which tokens.tokenizer {tokens.tokenizer} is fitted to; set "
                "vocabulary.quantiles to yes and make it again"
            )
        tokens = tokens.fitted(quantiles.tolist())
    objective = options.objective.fit(CorpusFacts(options, shards, vocabulary, teacher, train))
    return options.model_copy(update={"tokens": tokens, "objective": objective})


def digest_vectors(options: TrainOptions, init_from: Path | None) -> str | None:
    """Return the SHA-256 of `model.gene_vectors`, or None. Raise ConfigError if there is no file."""
    path = getattr(options.model, "gene_vectors", None)
    dim = getattr(options.model, "gene_vector_dim", None)
    if path is None:
        stored = {} if init_from is None else read_model_config(init_from / "config.json")["model"]
        if dim is not None and stored.get("gene_vector_dim") is None:
            raise ConfigError(
                "model.gene_vector_dim is set, but no vectors; set model.gene_vectors to their file, or init_from to a "
                "model that has them"
            )
        return None
    if not Path(path).is_file():
        raise ConfigError(f"model.gene_vectors: {path}: no such file")
    return sha256_file(Path(path))


def describe_reading(options: TrainOptions, shards: Manifest) -> dict[str, str]:
    """Return the entries of a run's identity for what earlier versions read in another way.

    These are an order of tokens that the shards lack, and reads by `stream.weight_by`.
    """
    reading = {}
    is_sorted = options.model.reads_token_order and options.tokens.value_kind != "place"
    if is_sorted and shards.gene_order == "genes":
        reading[TOKEN_ORDER] = "by rank"
    if options.stream.weight_by is not None:
        reading[ROUNDED_READS] = "drawn in each epoch"
    return reading


def _refuse_new_training(message: str, train: Path | None) -> None:
    """Raise ConfigError, or print a warning if folder `train` has a checkpoint or a finished training.

    Earlier versions accepted it, and another column would be another training.
    """
    is_begun = train is not None and (
        (train / "status.json").exists() or TrainFolder(train).saved_step() > 0
    )
    if not is_begun:
        raise ConfigError(message)
    print(f"warning: {message}, in a new training; this one can be finished")


def check_levels(
    options: TrainOptions,
    levels: Mapping[str, Sequence[str]],
    train_cells: int,
    train: Path | None = None,
) -> None:
    """Raise ConfigError if a run cannot learn from the levels of a column.

    A column must have several levels. In a column of the objective MISSING does not count as a level,
    because objectives learn nothing from cells without a value. Labels must be shared by cells, and
    levels that options name must exist. Print a warning for labels that may mean no label. `train` is
    the folder of the training.
    """
    objective_columns = options.objective.columns().levels
    for name, option in options.read_columns().items():
        known_levels = _exclude_missing(levels[name])
        if name in options.objective.supervised_by:
            _check_labels(f"{option} {name}", name, known_levels, train_cells)
            continue
        message = (
            f"{option} {name}: all cells of the corpus with a value have the same value; choose another "
            "column, or do without"
        )
        if len(levels[name]) < 2:
            raise ConfigError(message)
        if name in objective_columns and len(known_levels) < 2:
            _refuse_new_training(message, train)
    for option, name, wanted_levels in options.objective.columns().named:
        named = _exclude_missing(levels[name])
        for level in wanted_levels:
            if level not in named:
                hint = did_you_mean(level, named)
                raise ConfigError(f"{option}: no cell of the corpus has {name} {level!r}; {hint}")


def _exclude_missing(levels: Sequence[str]) -> list[str]:
    return [level for level in levels if level != MISSING]


def _check_labels(option: str, name: str, labels: Sequence[str], train_cells: int) -> None:
    """Raise ConfigError unless there are several labels, shared by cells.

    Print a warning for labels that may mean no label.
    """
    if len(labels) < 2:
        raise ConfigError(
            f"{option}: all labelled cells of the corpus have the same value; choose another column, "
            "or do without"
        )
    if 2 * len(labels) > train_cells:
        raise ConfigError(
            f"{option}: {len(labels):,} values for {train_cells:,} training cells, so most cells have no other of "
            "their value; choose a column of labels"
        )
    empty = [label for label in labels if NO_COLUMNS.means_no_label(label)]
    if empty:
        print(
            f"warning: {option}: {', '.join(map(repr, empty))} of {len(labels):,} classes may mean no label; name "
            f"{name} as a label in the table of datasets, and these cells get none",
        )


def check_genes(options: TrainOptions, init_from: Path, vocabulary: Path) -> None:
    """Raise ConfigError if the exported model `init_from` has too few genes of the corpus."""
    with advising():
        model_genes = Vocabulary.read(init_from / "vocabulary.tsv")
    coverage = Vocabulary.read(vocabulary).known_by(model_genes)
    least = options.finetune.min_known_frac
    if coverage.expressed_frac < least:
        raise ConfigError(
            f"init_from {init_from}: it has {coverage}; finetune.min_known_frac is {least:g}; start from a model of "
            "these genes, or lower it"
        )


def check_architecture(options: TrainOptions, init_from: Path) -> None:
    """Raise ConfigError if the exported model `init_from` has another architecture or tokenizer."""
    path = init_from / "config.json"
    config = read_model_config(path)
    stored = {}
    for key, contract in INHERITED.items():
        stored[key] = check_options(contract, config[key], f"{path}: {key}")
    messages = [*unequal_options(stored, vars(options), init_from).values()]
    if messages:
        raise ConfigError(messages[0])
