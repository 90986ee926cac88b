"""Tensors of a checkpoint as they lie in its folder: `index.json`, and whole tensors on the CPU.

DCP, which saves checkpoints and loads parts of tensors in any layout, takes a second to import:
stages that read whole tensors do without.
"""

import io
import math
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellmill.config.plugin import in_one_line
from cellmill.errors import DataError
from cellmill.files import read_json

INDEX = "index.json"


@dataclass(frozen=True)
class Stored:
    """Parts of one tensor, which cover it without overlap."""

    dtype: torch.dtype
    size: torch.Size
    offsets: np.ndarray  # (parts, dimensions) int64
    sizes: np.ndarray  # (parts, dimensions) int64
    files: list[str]  # of each part, beside the index
    starts: list[int]  # its first byte there
    lengths: list[int]  # its bytes: a tensor that torch.save wrote


def read_index(folder: Path, names: Collection[str] | None = None) -> dict[str, Stored]:
    """The tensors of a checkpoint, all or those of `names`. Raises DataError if the index is
    missing or damaged.
    """
    path = folder / INDEX
    if not path.exists():
        raise DataError(
            f"{folder}: no {INDEX}; expected a checkpoint of this version, train the run again"
        )
    value = read_json(path)
    try:
        files = [str(name) for name in value["files"]]
        wrong = [name for name in files if Path(name).name != name]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is elsewhere")
        return {
            name: _stored(entry, files)
            for name, entry in value["tensors"].items()
            if names is None or name in names
        }
    except (
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(
            f"{path}: not a checkpoint's index ({in_one_line(error)}); nothing was loaded"
        ) from None


def _stored(entry: dict[str, Any], files: list[str]) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    n = len(entry["file"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a type of numbers")
    size = torch.Size(entry["size"])
    offsets, sizes = (
        np.array(entry[key], np.int64).reshape(n, len(size)) for key in ("offsets", "sizes")
    )
    starts, lengths = (
        np.array(entry[key], np.int64).reshape(n).tolist() for key in ("start", "bytes")
    )
    return Stored(
        dtype, size, offsets, sizes, [files[number] for number in entry["file"]], starts, lengths
    )


def load_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill plain tensors on the CPU from a checkpoint's folder. Raises DataError."""
    index = read_index(folder, tensors)
    try:
        for name, tensor in tensors.items():
            stored = index[name]
            if stored.size != tensor.shape or stored.sizes.prod(axis=1).sum() != math.prod(
                stored.size
            ):
                raise ValueError(
                    f"{name}: expected {tuple(tensor.shape)}, got parts of {tuple(stored.size)}"
                )
            places = zip(stored.files, stored.starts, stored.lengths, stored.offsets, stored.sizes)
            for file, start, length, offset, size in places:
                with open(folder / file, "rb") as opened:
                    opened.seek(start)
                    part = torch.load(
                        io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True
                    )
                tensor[tuple(map(slice, offset.tolist(), (offset + size).tolist()))].copy_(part)
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{folder}: cannot be loaded ({in_one_line(error)}); the checkpoint is damaged"
        ) from error
