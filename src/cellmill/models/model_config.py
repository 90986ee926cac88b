"""config.json of an exported model, checked before anything is made of it. Torch-free."""

from pathlib import Path
from typing import Any

from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.load import upgrade_options
from cellmill.errors import DataError
from cellmill.files import read_json

TEXTS = ("family", "vocabulary_digest", "weights_sha256")
"""Keys that hold a string."""
SECTIONS = ("model", "tokens", "objective")


def unusable(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}; export the model again (consolidate)")


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the contents, with every option under its present name. Raises DataError naming what is wrong."""
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if version != WEIGHTS_FORMAT:
        raise unusable(path, f"expected a model of format {WEIGHTS_FORMAT}, got {_shown(version)}")
    if missing := [key for key in (*TEXTS, "model", "tokens") if key not in config]:
        raise unusable(path, f"{missing[0]} is missing")
    if wrong := [key for key in TEXTS if not isinstance(config[key], str)]:
        raise unusable(path, f"{wrong[0]}: expected a string, got {_shown(config[wrong[0]])}")
    config = upgrade_options(config)
    if wrong := [key for key in SECTIONS if not isinstance(config.get(key), dict)]:
        raise unusable(path, f"{wrong[0]}: expected a mapping, got {_shown(config.get(wrong[0]))}")
    levels = config.get("levels", {})
    if not isinstance(levels, dict) or not all(map(_is_texts, levels.values())):
        raise unusable(path, f"levels: expected lists of strings by column, got {_shown(levels)}")
    if not _is_texts(config.get("supervised_by", [])):
        raise unusable(path, f"supervised_by: expected a list of strings, got {_shown(config['supervised_by'])}")
    return config


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _shown(value: Any) -> str:
    """A value in at most 80 characters."""
    try:
        return repr(value)[:80]
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
