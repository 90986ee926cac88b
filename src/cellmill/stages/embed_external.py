"""embed_external: embeddings of the cells of a dataset by a command of another environment, for a row beside the model.

The command runs without a shell, in the working directory, and prints to this stage's log. What it writes is checked
and kept in the form of stage `embed`, so that `evaluate` reads no file that another package wrote.
"""

import os
import subprocess
import time
from pathlib import Path

from cellmill.config.external import ExternalModel, command_words
from cellmill.config.load import check_options
from cellmill.data.dataset_file import open_dataset
from cellmill.data.h5_file import check_h5ad
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.embedding_file import write_embedding
from cellmill.evaluate.external_file import read_external


def run(*, name: str, command: str, input: Path, out: Path) -> None:
    """Write the embedding of the cells of `input` by `command` to `out` (.h5ad)."""
    check_h5ad(out, "--out")
    option = f"evaluate.external.{name}.command"
    model: ExternalModel = check_options(ExternalModel, {"command": command}, f"evaluate.external.{name}")
    with open_dataset(input) as reader:
        obs = reader.obs
    out.parent.mkdir(parents=True, exist_ok=True)
    written, started = out.with_name(f".{out.stem}.{os.getpid()}.h5ad"), time.perf_counter()
    try:
        _call(command_words(command, str(input), str(written)), option)
        seconds = time.perf_counter() - started
        vectors = read_external(written, obs.index, option)
    finally:
        written.unlink(missing_ok=True)
    about = {"model_digest": model.command_digest, "command": command, "seconds": seconds}
    write_embedding(out, obs, vectors, about)
    print(f"{input.stem}: {name}: {len(obs):,} cells, {vectors.shape[1]:,} numbers each, {seconds:.1f} s -> {out}")


def _call(words: list[str], option: str) -> None:
    """Run a program. Raises ConfigError if it cannot be started, DataError if it fails."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise ConfigError(
            f"{option}: {words[0]!r} cannot be run: {error.strerror}; name a program of PATH, or its path"
        ) from None
    if done.returncode < 0:
        raise DataError(f"{option}: it was ended by signal {-done.returncode}; its last lines are above")
    if done.returncode:
        raise DataError(f"{option}: it ended with exit status {done.returncode}; its last lines are above")
