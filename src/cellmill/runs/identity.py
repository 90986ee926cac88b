"""Identity of a run: the options that define its numbers, its data and its initial weights.

A run whose options changed starts afresh and the earlier training is set aside; so does a finished run whose data
changed. An *unfinished* run whose data changed is refused, because nothing says that the change was intended. Options
that affect only speed or frequency (layout, token budget, checkpoints, logging) may change between resumes.
"""

from typing import Any

from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.load import stored_options
from cellmill.config.options import TrainOptions
from cellmill.errors import ConfigError

FREE_SECTIONS = {"parallel", "track"}
FREE = {
    "stream": {"io_threads"},
    "train": {
        *("token_budget", "max_bad_steps", "timeout_s", "val_every_steps", "val_cells", "checkpoint_every_steps"),
        *("checkpoint_every_min", "keep_checkpoints", "log_every_steps", "profile_steps"),
    },
}


def identity(options: TrainOptions, init_from: str | None) -> dict[str, Any]:
    """Return the options that define a run's numbers, as {section.key: value}.

    Parameters
    ----------
    init_from
        SHA-256 of the initial weights; None for random ones.
    """
    values = {
        f"{section}.{key}": value
        for section, keys in options.model_dump(mode="json").items()
        if section not in FREE_SECTIONS
        for key, value in keys.items()
        if key not in FREE.get(section, ())
    }
    return values | {"init_from": init_from, "weights_format": WEIGHTS_FORMAT}


def changed_keys(stored: dict[str, Any], now: dict[str, Any], source: str) -> list[str]:
    """Return `key before -> now` for each option that differs from those stored in `source`.

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
    before = identity(options, stored["identity"]["init_from"])
    before["weights_format"] = stored["identity"].get("weights_format", 1)
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def check_data(folder: str, before: str, now: str) -> None:
    """Raises ConfigError naming both fingerprints if the checkpoints were trained on other shards."""
    if before != now:
        raise ConfigError(
            f"{folder}: its checkpoints were trained on data {before[:12]}, the shards are now {now[:12]}; "
            "restore the shards, or move this folder away to train on the new ones"
        )
