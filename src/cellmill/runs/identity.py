"""What a checkpoint belongs to: the options that define its numbers, the data, and where its weights came from.

A run whose options changed begins afresh and the earlier one is set aside, and so does a finished one whose data
changed; an *unfinished* one whose data changed under it is refused, since nothing says that this was meant. Options
that only say how fast or how often (layout, token budget, checkpoints, logging) may change between resumes.
"""

from __future__ import annotations

from typing import Any

from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.errors import ConfigError

FREE = {
    "stream": {"io_threads"},
    "train": {
        "token_budget",
        "max_bad_steps",
        "timeout_s",
        "val_every_steps",
        "val_cells",
        "checkpoint_every_steps",
        "checkpoint_every_min",
        "keep_checkpoints",
        "log_every_steps",
        "profile_steps",
    },
}


def identity(options: dict[str, Any], init_from: str | None) -> dict[str, Any]:
    """The options that define a run's numbers, as {section.key: value}, from its resolved sections."""
    sections = ["tokens", "stream", "model", "objective", "train"]
    if options.get("finetune", {"method": "full"}) != {"method": "full"}:
        sections.append("finetune")  # the default is left out: runs from before the section keep their identity
    values = {
        f"{section}.{key}": value
        for section in sections
        for key, value in options[section].items()
        if key not in FREE.get(section, ())
    }
    return values | {"init_from": init_from, "weights_format": WEIGHTS_FORMAT}


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key before -> now` for each option that differs."""
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def check_data(folder: str, before: str, now: str) -> None:
    """Raises ConfigError naming both fingerprints when the shards are not those the checkpoints were made from."""
    if before != now:
        raise ConfigError(
            f"{folder}: its checkpoints were trained on data {before[:12]}, the shards are now {now[:12]}; "
            "restore the shards, or move this folder away to train on the new ones"
        )
