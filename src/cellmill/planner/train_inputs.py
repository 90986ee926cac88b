"""Checks of the files that a training reads, before any process is started; each error is one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cellmill.config import check_options
from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.load import upgrade_options
from cellmill.config.options import TrainOptions
from cellmill.data.manifest import Manifest
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json


def check_vocabulary(vocabulary: Path, shards: Manifest) -> None:
    """Raise DataError if the shards were made with another vocabulary, in which tokens are other genes."""
    digest = Vocabulary.read(vocabulary).digest
    if digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {digest[:12]}, the shards were made with "
            f"{shards.vocabulary['digest'][:12]}; pass the vocabulary of the shards, or make the shards again"
        )


def check_levels(options: TrainOptions, levels: Mapping[str, Sequence[str]], train_cells: int) -> None:
    """Raise ConfigError for a column in which all cells of the corpus are alike, or a label that few cells share."""
    for name, option in options.obs_columns().items():
        n = len(levels[name])
        if n < 2:
            raise ConfigError(
                f"{option} {name}: all cells of the corpus have the same value; choose another column, or do without"
            )
        if name in options.objective.supervised_by and 2 * n > train_cells:
            raise ConfigError(
                f"{option} {name}: {n:,} values for {train_cells:,} training cells, so most cells have no other of "
                "their value; choose a column of labels"
            )


def check_weights(options: TrainOptions, init_from: Path) -> None:
    """Raise ConfigError if the exported model `init_from` has another architecture or tokenizer."""
    path = init_from / "config.json"
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise ConfigError(f"{init_from}: expected a model of format {WEIGHTS_FORMAT}, got {version}; train it again")
    config = upgrade_options(config)
    if wrong := [key for key in ("model", "tokens") if not isinstance(config.get(key), dict)]:
        raise ConfigError(f"{path}: {wrong[0]}: expected a mapping, got {config.get(wrong[0])!r}; export it again")
    theirs = check_options(type(options.model), config["model"], f"{path}: model")
    pairs = [(f"model.{key}", getattr(theirs, key), getattr(options.model, key)) for key in options.model.weight_keys]
    pairs.append(("tokens.tokenizer", config["tokens"].get("tokenizer"), options.tokens.tokenizer))
    for key, before, now in pairs:
        if before != now:
            raise ConfigError(
                f"{key} is {now!r}, the model to start from ({init_from}) has {before!r}; make them equal"
            )
