"""Identity of a run: the options that define its numbers, its data and its initial weights.

A run whose options or data changed is another run, and is refused in a folder that holds the earlier one; only its
length may change (`runs/earlier.py`). Options that affect only speed or frequency (layout, token budget, checkpoints,
logging) are no part of it and may change between resumes.
"""

import re
from typing import Any

from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.load import stored_options
from cellmill.config.options import TrainOptions
from cellmill.errors import ConfigError

PATIENCE = "train.early_stop_patience"
LENGTH = frozenset({"train.steps", "train.epochs", PATIENCE})
"""Keys whose change leaves the steps taken so far as they are."""
FREE_SECTIONS = {"parallel", "track"}
FREE = {
    "finetune": {"min_known_frac"},
    "stream": {"io_threads", "stage_to", "stage_limit_gb"},
    "train": {
        *("token_budget", "max_bad_steps", "timeout_s", "val_every_steps", "val_cells", "checkpoint_every_steps"),
        *("checkpoint_every_min", "keep_checkpoints", "keep_steps", "log_every_steps", "profile_steps"),
    },
}


def identity(options: TrainOptions, init_from: str | None, gene_vectors: str | None = None) -> dict[str, Any]:
    """Return the options that define a run's numbers, as {section.key: value}.

    Parameters
    ----------
    init_from
        SHA-256 of the initial weights; None for random ones.
    gene_vectors
        SHA-256 of the file `model.gene_vectors`, in whose place it stands; None without one.
    """
    values = {
        f"{section}.{key}": value
        for section, keys in options.model_dump(mode="json").items()
        if section not in FREE_SECTIONS
        for key, value in keys.items()
        if key not in FREE.get(section, ())
    }
    if gene_vectors is not None:
        values["model.gene_vectors"] = gene_vectors
    return values | {"init_from": init_from, "weights_format": WEIGHTS_FORMAT}


def changed_keys(stored: dict[str, Any], now: dict[str, Any], source: str) -> dict[str, str]:
    """Return {section.key: `before -> now`}, sorted, of the options that differ from those stored in `source`.

    The stored options are validated by this version first, so an option added since then has its default and is no
    change. Raises ConfigError if they are not valid any more.

    Parameters
    ----------
    stored
        run.json, or the state.json of a checkpoint.
    now
        From `identity`.
    """
    # trackers are no part of the identity, and their package may be gone
    kept = {section: keys for section, keys in stored["options"].items() if section != "track"}
    try:
        options = stored_options(kept, source)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (the options that this folder was trained with; install what they name, or move the folder away)"
        ) from None
    given = stored["identity"]
    before = identity(options, given["init_from"], given.get("model.gene_vectors"))
    before["weights_format"] = stored["identity"].get("weights_format", 1)
    return {
        key: f"{_short(before.get(key))} -> {_short(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def _short(value: Any) -> str:
    """A value in a message; of a digest the first characters."""
    text = str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text


def check_data(folder: str, before: str, now: str) -> None:
    """Raises ConfigError naming both fingerprints if the checkpoints were trained on other shards."""
    if before != now:
        raise ConfigError(
            f"{folder}: its checkpoints were trained on data {before[:12]}, the shards are now {now[:12]}; "
            "restore the shards, or train on the new ones with `cellmill train --restart`, which sets these aside"
        )
