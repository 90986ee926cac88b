"""Options stored by an earlier version, in today's form.

A run's resolved options are stored in its run.json and in each checkpoint's state.json. A version that moves or
renames an option translates it in `upgrade_options`; an option added with a default needs nothing here, because
validation fills it in.
"""

from __future__ import annotations

from typing import Any

WITHOUT_BINS = ("rank", "continuous")
"""Tokenizers that had `bins` among their options, though they did not read it, before each had options of its own."""


def upgrade_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return stored options, or some sections of them, with every key under its present name."""
    tokens = options.get("tokens")
    if isinstance(tokens, dict) and tokens.get("tokenizer") in WITHOUT_BINS:
        options = options | {"tokens": {key: value for key, value in tokens.items() if key != "bins"}}
    return options
