"""Index of a checkpoint, `index.json`: the location of each part of each tensor, read without unpickling anything.

DCP's own index, `.metadata`, is a pickle of objects for every part that any rank has saved: seconds on each rank of a
large job. Here the parts of a tensor are columns of numbers, of which a rank picks those that overlap its own part.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from cellmill.errors import DataError
from cellmill.files import read_json, write_text
from cellmill.registry import in_one_line

INDEX = "index.json"


@dataclass(frozen=True)
class Stored:
    """Place of a part of a tensor, with the attributes that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def write_index(folder: Path, metadata: Metadata) -> None:
    """Write the index beside `.metadata`, whose content is `metadata`; not if it is of other values than tensors."""
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, of in metadata.state_dict_metadata.items():
        if not isinstance(of, TensorStorageMetadata):
            return
        stored = [metadata.storage_data[MetadataIndex(name, part.offsets)] for part in of.chunks]
        tensors[name] = {
            "dtype": str(of.properties.dtype).removeprefix("torch."),
            "size": list(of.size),
            "offsets": [number for part in of.chunks for number in part.offsets],
            "sizes": [number for part in of.chunks for number in part.sizes],
            "file": [files.setdefault(part.relative_path, len(files)) for part in stored],
            "start": [part.offset for part in stored],
            "bytes": [part.length for part in stored],
        }
    # without indentation, which would make it ten times as large
    write_text(folder / INDEX, json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":")))


def read_index(folder: Path, tensors: Mapping[str, Any] | None) -> Metadata | None:
    """Return the index of a checkpoint as DCP has it; None for one of an earlier version, which has no such file.

    Raises DataError if it is damaged.

    Parameters
    ----------
    tensors
        The tensors to be loaded, in mappings of any depth: the rest of the checkpoint, and parts of other ranks, are
        left out. None for all.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    value, wanted = read_json(path), None if tensors is None else dict(_flat(tensors))
    metadata = Metadata({}, storage_data={})
    try:
        files = [str(name) for name in value["files"]]
        if wrong := [name for name in files if Path(name).name != name]:
            raise ValueError(f"{wrong[0]!r} is elsewhere")
        for name, of in value["tensors"].items():
            if wanted is None or name in wanted:
                _add(metadata, name, of, files, None if wanted is None else wanted[name])
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a checkpoint's index ({in_one_line(error)}); nothing was loaded") from None
    return metadata


def _add(metadata: Metadata, name: str, of: dict[str, Any], files: list[str], tensor: torch.Tensor | None) -> None:
    """Add the parts of a tensor that overlap what this rank has of it; all if `tensor` is None."""
    dtype, n = getattr(torch, of["dtype"]), len(of["file"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{of['dtype']!r} is no type of numbers")
    offsets, sizes = (np.array(of[key], np.int64).reshape(n, len(of["size"])) for key in ("offsets", "sizes"))
    overlaps = np.ones(n, bool) if tensor is None else np.zeros(n, bool)
    for first, length in [] if tensor is None else _own(tensor):
        overlaps |= ((offsets < np.add(first, length)) & (offsets + sizes > first)).all(1)
    parts = []
    for row in np.flatnonzero(overlaps).tolist():
        at = torch.Size(offsets[row].tolist())
        parts.append(ChunkStorageMetadata(at, torch.Size(sizes[row].tolist())))
        place = Stored(files[of["file"][row]], int(of["start"][row]), int(of["bytes"][row]))
        metadata.storage_data[MetadataIndex(name, at)] = place
    size = torch.Size(of["size"])
    metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype), size, parts)


def _own(tensor: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of what this rank has of a tensor, as DCP's planner asks for them."""
    if not isinstance(tensor, DTensor):
        return [([0] * tensor.ndim, list(tensor.shape))]
    return [(list(part.offsets), list(part.sizes)) for part in tensor.__create_chunk_list__()]


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
