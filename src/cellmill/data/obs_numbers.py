"""Numbers of obs columns, such as an age or a protein's count, for objectives that predict them.

They are read from the obs of the shards when a stream is opened, and kept in memory: 8 bytes a cell and column. A
missing value is NaN.
"""

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from cellmill.data.manifest import Manifest


def read_numbers(manifest: Manifest, split: str, columns: Iterable[str]) -> np.ndarray:
    """Numbers of the cells of a split, `(cells, columns)` float64. Opens all of its shards.

    Raises DataError when a column is not of numbers.
    """
    names = list(columns)
    paths = [manifest.shard_path(shard) for shard in manifest.entry(split).shards]
    # by name: a launcher, which waits for hours, needs h5py for such columns alone
    module = importlib.import_module("cellmill.data.shard_levels")
    read_shard: Callable[[Path, list[str]], np.ndarray] = module.read_shard_numbers
    return np.concatenate([read_shard(path, names) for path in paths])
