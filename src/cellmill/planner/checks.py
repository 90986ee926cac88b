"""What plan and train refuse, each in one line, before a process is started. Torch-free."""

from __future__ import annotations

from pathlib import Path

from cellmill.config import check_options
from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.layout import check_lanes, layout
from cellmill.config.options import TrainOptions
from cellmill.config.run import check_together
from cellmill.data.manifest import Manifest
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json


def check_run(options: TrainOptions, nodes: int, nproc_per_node: int, train_cells: int) -> None:
    """Raises ConfigError when sections exclude each other or do not fit the number of processes or cells."""
    try:
        check_together(
            options.tokens, options.stream, options.model, options.objective, options.parallel, options.train
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    sizes = layout(options.parallel, nodes * nproc_per_node, nproc_per_node)
    if train_cells < sizes.dp:
        raise ConfigError(
            f"{sizes.data_parallel_words} for {train_cells} training cells: use fewer processes (the profile)"
        )
    check_lanes(options.stream.lanes, options.train.global_batch, sizes)


def check_vocabulary(vocabulary: Path, shards: Manifest) -> None:
    """Raises DataError when a vocabulary is not the one the shards were made with: tokens would be other genes."""
    digest = Vocabulary.read(vocabulary).digest
    if digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {digest[:12]}, the shards were made with "
            f"{shards.vocabulary['digest'][:12]}; give their vocabulary, or make the shards again"
        )


def check_weights(options: TrainOptions, init_from: Path) -> None:
    """Raises ConfigError when the exported model `init_from` is of another architecture or tokenizer."""
    config = read_json(init_from / "config.json")
    if config["format"] != WEIGHTS_FORMAT:
        raise ConfigError(
            f"{init_from}: a model of format {config['format']}, this version's are of {WEIGHTS_FORMAT}; train it again"
        )
    theirs = check_options(type(options.model), config["model"], f"{init_from / 'config.json'}: model")
    pairs = [(f"model.{key}", getattr(theirs, key), getattr(options.model, key)) for key in options.model.weight_keys]
    pairs.append(("tokens.tokenizer", config["tokens"]["tokenizer"], options.tokens.tokenizer))
    for key, before, now in pairs:
        if before != now:
            raise ConfigError(
                f"{key} is {now!r}, the model to start from ({init_from}) has {before!r}; make them equal"
            )
