"""Published weights as tensors by name, and the layout of attention that cellmill shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cellmill.errors import DataError
from cellmill.files import read_json


def read_weights(folder: Path, *names: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the first of the files `names` in `folder`, .safetensors or of torch, and its tensors on the CPU.

    torch files are read with `weights_only`, which unpickles tensors alone.
    """
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(f"{folder}: expected the weights in {' or '.join(names)}, got neither")
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise almost anything
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}: cannot be read safely: {line}") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise DataError(f"{path}: expected tensors by name, got something else")
    return path, dict(loaded)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises DataError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a mapping, got {type(value).__name__}")
    return value


def require(path: Path, mapping: Mapping[str, Any], name: str) -> Any:
    """Return `mapping[name]`. Raises DataError naming `path`."""
    if name not in mapping:
        raise DataError(f"{path}: {name} is missing")
    return mapping[name]


def check_tokens(path: Path, tokens: Mapping[str, Any]) -> None:
    """Raise DataError naming `path` for a token that is no row of a table."""
    for name, token in tokens.items():
        if type(token) is not int or not 0 <= token < 2**31:
            raise DataError(f"{path}: {name}: expected a token, a whole number from 0, got {token!r}")


def joined_heads(path: Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """(H, ...) each -> (3 H, ...): query, key and value of the first head, then of the second.

    Raises DataError naming `path` when H is no multiple of `heads`.
    """
    if wrong := [len(x) for x in (q, k, v) if len(x) % heads]:
        raise DataError(
            f"{path}: expected queries, keys and values of {heads} equal heads, got {wrong[0]} rows; its configuration "
            "is another model's"
        )
    return torch.stack([x.unflatten(0, (heads, -1)) for x in (q, k, v)], dim=1).flatten(0, 2)
