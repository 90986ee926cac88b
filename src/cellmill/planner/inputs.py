"""Checks of the files that a training reads, before any process is started; each error is one line."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from cellmill.config import check_options
from cellmill.config.load import unequal
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.index import MISSING, read_level_numbers, read_numbers
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.files import read_json, sha256_file


def check_vocabulary(vocabulary: Path, shards: Manifest) -> None:
    """Raise DataError if the shards were made with another vocabulary, in which tokens are other genes."""
    digest = Vocabulary.read(vocabulary).digest
    if digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {digest[:12]}, the shards were made with "
            f"{shards.vocabulary['digest'][:12]}; pass the vocabulary of the shards, or make the shards again"
        )


def fitted(options: TrainOptions, vocabulary: Path) -> TrainOptions:
    """Return the options with what the vocabulary has for the tokenizer. Raises DataError if it has not."""
    if not options.tokens.needs_quantiles:
        return options
    quantiles = Vocabulary.read(vocabulary).quantiles
    if quantiles is None:
        raise DataError(
            f"{vocabulary}: it has no quantiles, which tokens.tokenizer {options.tokens.tokenizer} is fitted to; set "
            "vocabulary.quantiles to yes and make it again"
        )
    return options.model_copy(update={"tokens": options.tokens.fitted(quantiles.tolist())})


def vectors_digest(options: TrainOptions, init_from: Path | None) -> str | None:
    """Return the SHA-256 of `model.gene_vectors`, or None. Raises ConfigError if the vectors come from nowhere."""
    path, dim = (getattr(options.model, name, None) for name in ("gene_vectors", "gene_vector_dim"))
    if path is None:
        if dim is not None and init_from is None:
            raise ConfigError(
                "model.gene_vector_dim is set, but no vectors; set model.gene_vectors to their file, or init_from to a "
                "model that has them"
            )
        return None
    if not Path(path).is_file():
        raise ConfigError(f"model.gene_vectors: {path}: no such file")
    return sha256_file(Path(path))


def with_counts(options: TrainOptions, shards: Manifest) -> TrainOptions:
    """Return the options with what the objective takes from the training cells' labels and numbers."""
    options = _standardised(options, shards)
    columns = dict.fromkeys(options.objective.counted_columns(), "objective")
    if not columns:
        return options
    levels = shards.levels(columns)
    numbers = read_level_numbers(shards, "train", levels)[: _n_cells(options, shards)]
    cells = {}
    for at, (name, known) in enumerate(levels.items()):
        counts = np.bincount(numbers[:, at], minlength=len(known) + 1)[1:].tolist()
        cells[name] = {level: n for level, n in zip(known, counts) if level != MISSING}
    return options.model_copy(update={"objective": options.objective.fitted(cells)})


def with_named_genes(options: TrainOptions, vocabulary: Path, shards: Manifest) -> TrainOptions:
    """Return the options with the tokens of genes that levels of the objective's columns are named after."""
    columns = dict.fromkeys(options.objective.gene_columns(), "objective")
    if not columns:
        return options
    # by name: tables of genes need pandas, which other launchers do without
    find: Callable[..., dict[str, list[int]]] = importlib.import_module("cellmill.data.genes.names").perturbed_genes
    known, tokens = Vocabulary.read(vocabulary), {}
    for name, levels in shards.levels(columns).items():
        rows = find([level for level in levels if level != MISSING], known)
        tokens[name] = {level: [row + len(SPECIAL) for row in of_level] for level, of_level in rows.items()}
    return options.model_copy(update={"objective": options.objective.with_genes(tokens)})


def _n_cells(options: TrainOptions, shards: Manifest) -> int:
    """Return the number of training cells that the run reads, the first ones."""
    return options.stream.train_cells(shards.splits["train"].n_obs)


def _standardised(options: TrainOptions, shards: Manifest) -> TrainOptions:
    """Return the options with mean and standard deviation of the numbers that the objective predicts."""
    columns = options.number_columns()
    if not columns:
        return options
    shards.fingerprint_with((), columns)  # names a column that is not there
    moments = {}
    for name, numbers in zip(columns, read_numbers(shards, "train", columns)[: _n_cells(options, shards)].T):
        known = numbers[np.isfinite(numbers)]
        if not len(known) or not known.std():
            raise ConfigError(
                f"{columns[name]} {name}: expected numbers that differ, got {len(known):,} training cells with "
                f"{'the same' if len(known) else 'a'} number; choose another column"
            )
        moments[name] = (float(known.mean()), float(known.std()))
    return options.model_copy(update={"objective": options.objective.standardised(moments)})


def check_levels(options: TrainOptions, levels: Mapping[str, Sequence[str]], train_cells: int) -> None:
    """Raise ConfigError for a column in which all cells of the corpus are alike, or a label that few cells share.

    So for a level that an option names, and no cell of the corpus has.
    """
    for name, option in options.read_columns().items():
        is_label = name in options.objective.supervised_by
        n = len(levels[name]) - (is_label and MISSING in levels[name])
        if n < 2:
            raise ConfigError(
                f"{option} {name}: all {'labelled ' if is_label else ''}cells of the corpus have the same value; "
                "choose another column, or do without"
            )
        if is_label and 2 * n > train_cells:
            raise ConfigError(
                f"{option} {name}: {n:,} values for {train_cells:,} training cells, so most cells have no other of "
                "their value; choose a column of labels"
            )
    for part in options.objective.each():
        for name, (option, named) in part.named_levels().items():
            known = [level for level in levels[name] if level != MISSING]
            if unknown := [level for level in named if level not in known]:
                raise ConfigError(
                    f"{option}: no cell of the corpus has {name} {unknown[0]!r}; {did_you_mean(unknown[0], known)}"
                )


def check_genes(options: TrainOptions, init_from: Path, vocabulary: Path) -> None:
    """Raise ConfigError if the exported model `init_from` has too few genes of the corpus."""
    known = Vocabulary.read(vocabulary).known_by(Vocabulary.read(init_from / "vocabulary.tsv"))
    if known.expressed_frac < (least := options.finetune.min_known_frac):
        raise ConfigError(
            f"init_from {init_from}: it has {known}; finetune.min_known_frac is {least:g}; start from a model of these "
            "genes, or lower it"
        )


def check_weights(options: TrainOptions, init_from: Path) -> None:
    """Raise ConfigError if the exported model `init_from` has another architecture or tokenizer."""
    path = init_from / "config.json"
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise ConfigError(f"{init_from}: expected a model of format {WEIGHTS_FORMAT}, got {version}; train it again")
    if wrong := [key for key in ("model", "tokens") if not isinstance(config.get(key), dict)]:
        raise ConfigError(f"{path}: {wrong[0]}: expected a mapping, got {config.get(wrong[0])!r}; export it again")
    theirs = check_options(type(options.model), config["model"], f"{path}: model")
    pairs = [(f"model.{key}", getattr(theirs, key), getattr(options.model, key)) for key in options.model.weight_keys]
    pairs.append(("tokens.tokenizer", config["tokens"].get("tokenizer"), options.tokens.tokenizer))
    for key, before, now in pairs:
        if before != now:
            raise ConfigError(unequal(key, now, init_from, before))
