"""Writing the arrays beside the manifest (`shard_index`), from the cells of a corpus in their order on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.data.joint_obs import JointObs
from cellmill.data.level_table import levels_of, numbers_in
from cellmill.data.manifest import IndexEntry
from cellmill.data.shard_index import HASHES, LEVELS, OFFSETS, hash_order, index_name, new_array
from cellmill.errors import DataError
from cellmill.files import sha256_file

MAX_NONZEROS = np.iinfo(np.int32).max  # of a shard: its indptr is int32


def write_split_index(
    folder: Path, split: str, nnz: np.ndarray, hashes: np.ndarray, cells_per_shard: int
) -> dict[str, IndexEntry]:
    """Write offsets and hashes of a split, whose cells are given in the order on disk."""
    if not len(nnz):
        return {}
    starts = range(0, len(nnz), cells_per_shard)
    at, paths = 0, {kind: folder / index_name(split, kind) for kind in (OFFSETS, HASHES)}
    with new_array(paths[OFFSETS], (len(nnz) + len(starts),), "<i4") as offsets:
        for first in starts:
            own = nnz[first : first + cells_per_shard]
            if (total := int(own.sum(dtype=np.int64))) > MAX_NONZEROS:
                raise DataError(
                    f"{folder}: {total:,} nonzeros in a shard, the limit is {MAX_NONZEROS:,}; lower "
                    "shard.cells_per_shard"
                )
            offsets[at] = 0
            np.cumsum(own, out=offsets[at + 1 : at + 1 + len(own)])
            at += len(own) + 1
    with new_array(paths[HASHES], (2, len(nnz)), "<u8") as ordered:
        ordered[:] = hashes[hash_order(hashes)].T
    return {kind: _entry(path) for kind, path in paths.items()}


def write_levels(
    folder: Path,
    obs: JointObs,
    kept: list[np.ndarray],
    sizes: list[int],
    chosen: dict[str, np.ndarray],
    index: dict[str, dict[str, IndexEntry]],
) -> dict[str, dict[str, Any]]:
    """Write the level numbers of every split, one column in memory at a time; return the manifest's `obs_levels`."""

    def chunks(place: int) -> Iterator[Any]:
        for number, rows in enumerate(kept):
            yield obs.column(place, np.full(len(rows), number), rows)

    found = {place: levels_of(chunks(place)) for place in range(len(obs.column_names))}
    levels = {place: own for place, own in found.items() if own is not None}
    table, first = {}, np.cumsum([0, *sizes])
    splits = {name: own for name, own in chosen.items() if len(own) and levels}
    paths = {name: folder / index_name(name, LEVELS) for name in splits}
    with ExitStack() as stack:
        arrays = {
            name: stack.enter_context(new_array(paths[name], (len(levels), len(own)), "<u2"))
            for name, own in splits.items()
        }
        for at, (place, own) in enumerate(levels.items()):
            of_row, sha256 = np.zeros(first[-1], np.uint16), hashlib.sha256()
            for start, rows, chunk in zip(first, kept, chunks(place)):
                numbers = numbers_in(chunk, own)
                sha256.update(numbers.astype("<i4").tobytes())
                of_row[start + rows] = numbers
            table[obs.column_names[place]] = {"levels": own, "digest": sha256.hexdigest()}
            for name, cells in splits.items():
                arrays[name][at] = of_row[first[cells["dataset"]] + cells["row"]]
    for name, path in paths.items():
        index[name][LEVELS] = _entry(path)
    return table


def _entry(path: Path) -> IndexEntry:
    return IndexEntry(path.name, sha256_file(path))
