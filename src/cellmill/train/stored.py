"""Tensors of a checkpoint as stored in its folder: `index.json`, and whole tensors on the CPU.

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
    files: list[str]  # file of each part, in the folder of the index
    starts: list[int]  # first byte of each part
    lengths: list[int]  # bytes of each part, a tensor that torch.save wrote


def read_index(folder: Path, names: Collection[str] | None = None) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name, all or only `names`.

    Raise DataError if the index is missing or damaged.
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
        tensors = {}
        for name, entry in value["tensors"].items():
            if names is None or name in names:
                tensors[name] = _read_entry(entry, files)
        return tensors
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


def _read_entry(entry: dict[str, Any], files: list[str]) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a type of numbers")
    size = torch.Size(entry["size"])
    n_parts = len(entry["file"])
    shape = (n_parts, len(size))
    return Stored(
        dtype,
        size,
        offsets=np.array(entry["offsets"], np.int64).reshape(shape),
        sizes=np.array(entry["sizes"], np.int64).reshape(shape),
        files=[files[number] for number in entry["file"]],
        starts=np.array(entry["start"], np.int64).reshape(n_parts).tolist(),
        lengths=np.array(entry["bytes"], np.int64).reshape(n_parts).tolist(),
    )


def load_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill plain tensors on the CPU from a checkpoint's folder. Raise DataError if that fails."""
    index = read_index(folder, tensors)
    try:
        for name, tensor in tensors.items():
            stored = index[name]
            n_elements = stored.sizes.prod(axis=1).sum()
            if stored.size != tensor.shape or n_elements != math.prod(stored.size):
                raise ValueError(
                    f"{name}: expected {tuple(tensor.shape)}, got parts of {tuple(stored.size)}"
                )
            ends = stored.offsets + stored.sizes
            for row, file in enumerate(stored.files):
                with open(folder / file, "rb") as opened:
                    opened.seek(stored.starts[row])
                    data = io.BytesIO(opened.read(stored.lengths[row]))
                part = torch.load(data, map_location="cpu", weights_only=True)
                block = tuple(map(slice, stored.offsets[row].tolist(), ends[row].tolist()))
                tensor[block].copy_(part)
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{folder}: cannot be loaded ({in_one_line(error)}); the checkpoint is damaged"
        ) from error
