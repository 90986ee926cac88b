"""Options stored by an earlier version, in today's form. Torch-free.

A run's resolved options are stored in its run.json, in each checkpoint's state.json and in exported models. A version
that moves or renames an option translates it here; an option added with a default needs nothing, because validation
fills it in. A user's configuration is never translated: an old key there is an error that names its new place.
"""

from __future__ import annotations

from typing import Any

from cellmill.config.load import check_options
from cellmill.config.options import TrainOptions

OBJECTIVE_KEYS = ("mask_frac", "cell_loss_weight")
"""In section `model` until 0.1.0, beside `objective`."""
WITHOUT_BINS = ("rank", "continuous")
"""Tokenizers that had `bins` among their options, though they did not read it, before each had options of its own."""


def upgrade_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return stored options, or some sections of them, with every key under its present name."""
    options = dict(options)
    tokens, model = options.get("tokens"), options.get("model")
    if isinstance(tokens, dict) and tokens.get("tokenizer") in WITHOUT_BINS:
        options["tokens"] = {key: value for key, value in tokens.items() if key != "bins"}
    if isinstance(model, dict) and "objective" in model:
        moved = {key: model[key] for key in OBJECTIVE_KEYS if key in model}
        options["objective"] = {"name": model["objective"], **moved}
        options["model"] = {key: value for key, value in model.items() if key not in ("objective", *OBJECTIVE_KEYS)}
    return options


def stored_options(options: dict[str, Any], source: str) -> TrainOptions:
    """Parse the options stored in `source`. Raises ConfigError if this version cannot read them."""
    parsed: TrainOptions = check_options(TrainOptions, upgrade_options(options), source)
    return parsed
