"""Levels of obs columns as integers: equal in every run, layout and split of a corpus, and in exported models.

Level i of a column is number i + 1; 0 is unknown: a value that the corpus does not have. A missing value is a level of
its own, the last one, where the corpus has cells without a value.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cellmill.data.manifest import Manifest
from cellmill.data.shard_index import LevelNumbers, open_levels

MISSING = "<missing>"
DATASET = "dataset"
"""Column of shards that cellmill adds: the name of a cell's dataset."""


def level_numbers(codes: np.ndarray, values: Iterable[Any], levels: Sequence[str]) -> np.ndarray:
    """Return numbers of levels, int32, of cells whose value is `values[code]`; code -1 is a missing value."""
    number = {level: i for i, level in enumerate(levels, start=1)}
    table = [*(number.get(text_of(value), 0) for value in values), number.get(MISSING, 0)]
    return np.array(table, np.int32)[codes]


def text_of(value: Any) -> str:
    """Text of a value; whole numbers have no decimals, as a column with missing values is stored as floats."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def read_level_numbers(
    manifest: Manifest, split: str, levels: Mapping[str, Sequence[str]]
) -> LevelNumbers | np.ndarray:
    """Numbers of the cells of a split, in the order of `levels`: `[cells]` is `(cells, columns)` int32.

    Shards of an earlier version are all opened for it. Raises DataError when one cannot be read.
    """
    numbers = open_levels(manifest, split, levels)
    if numbers is not None:
        return numbers
    paths = [manifest.shard_path(shard) for shard in manifest.entry(split).shards]
    # by name: a launcher, which waits for hours, needs no h5py for shards of today
    read_shard: Callable[..., np.ndarray] = importlib.import_module("cellmill.data.shard_levels").read_shard
    return np.concatenate([read_shard(path, levels) for path in paths])
