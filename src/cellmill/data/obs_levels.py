"""Levels of obs columns as integers: equal in every run, layout and split of a corpus, and in exported models.

Level i of a column is number i + 1; 0 is unknown: a value that the corpus does not have. A missing value is a level of
its own, the last one, where the corpus has cells without a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.data.h5_file import one_line, open_h5
from cellmill.data.manifest import REMEDY
from cellmill.errors import DataError

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


def read_level_numbers(paths: Iterable[Path], levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Return `(cells, columns)` int32 of all cells of the shards at `paths`, in the order of `levels`.

    Raises DataError when a shard cannot be read.
    """
    return np.concatenate([_read_shard(path, levels) for path in paths])


def _read_shard(path: Path, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    try:
        with open_h5(path, REMEDY) as file:
            columns = [level_numbers(*_codes(file["obs"][name]), known) for name, known in levels.items()]
    except (KeyError, TypeError, OSError) as error:
        raise DataError(f"{path}: its obs columns cannot be read: {one_line(error)}; {REMEDY}") from None
    return np.stack(columns, axis=1)


def _codes(column: h5py.Group | h5py.Dataset) -> tuple[np.ndarray, Iterable[Any]]:
    """Return code of each cell, -1 for a missing value, and the values that codes stand for."""
    if isinstance(column, h5py.Group):  # anndata's categorical; other groups have no codes
        return column["codes"][:].astype(np.int64), column["categories"].asstr()[:] if len(column["categories"]) else ()
    values, codes = np.unique(column[:], return_inverse=True)
    if values.dtype.kind == "f":
        codes = np.where(np.isnan(values)[codes], -1, codes)
    return codes, values
