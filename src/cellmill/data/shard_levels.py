"""Levels of the cells of a shard of an earlier version, which has no index beside it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.data.h5_file import one_line, open_h5, read_texts
from cellmill.data.manifest import REMEDY
from cellmill.data.obs_levels import level_numbers
from cellmill.errors import DataError


def read_shard(path: Path, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Numbers of the shard's cells, `(cells, columns)` int32. Raises DataError when its obs cannot be read."""
    try:
        with open_h5(path, REMEDY) as file:
            columns = [level_numbers(*_codes(file["obs"][name]), known) for name, known in levels.items()]
    except (LookupError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: its obs columns cannot be read: {one_line(error)}; {REMEDY}") from None
    if unknown := [name for name, numbers in zip(levels, columns) if not numbers.all()]:
        raise DataError(f"{path}: obs column {unknown[0]!r} has values that the manifest does not list; {REMEDY}")
    return np.stack(columns, axis=1)


def _codes(column: h5py.Group | h5py.Dataset) -> tuple[np.ndarray, Iterable[Any]]:
    """Return code of each cell, -1 for a missing value, and the values that codes stand for."""
    if isinstance(column, h5py.Group):  # anndata's categorical; other groups have no codes
        if column["codes"].dtype.kind not in "iu":
            raise TypeError(f"{column.name}/codes are not whole numbers")
        return column["codes"][:].astype(np.int64), read_texts(column["categories"])
    values, codes = np.unique(column[:], return_inverse=True)
    if values.dtype.kind == "f":
        codes = np.where(np.isnan(values)[codes], -1, codes)
    return codes, values


def read_shard_numbers(path: Path, columns: list[str]) -> np.ndarray:
    """Numbers of the shard's cells, `(cells, columns)` float64, NaN for missing ones.

    Text is read as numbers if all of it is: a FASTA header, or a table, may have nothing else. Raises DataError when
    its obs cannot be read, or a column is not of numbers.
    """
    found = []
    try:
        with open_h5(path, REMEDY) as file:
            for name in columns:
                found.append(_numbers(file["obs"][name]))
    except (LookupError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: its obs columns cannot be read: {one_line(error)}; {REMEDY}") from None
    for name, numbers in zip(columns, found):
        if isinstance(numbers, str):
            raise DataError(
                f"{path}: obs column {name!r} (objective.target_column) is text, such as {numbers[:40]!r}; name a "
                "column of numbers"
            )
    return np.stack([numbers for numbers in found if not isinstance(numbers, str)], axis=1)


def _numbers(column: h5py.Group | h5py.Dataset) -> np.ndarray | str:
    """(cells,) float64; or a value that is no number."""
    if isinstance(column, h5py.Dataset) and column.dtype.kind in "iufb":
        return column[:].astype(np.float64)
    codes, values = _codes(column)
    numbers = [np.nan]  # of code -1
    for value in values:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        try:
            numbers.append(float("x" if "_" in text else text))  # 1_2 names a well or a replicate; Python reads 12
        except ValueError:
            return text
    return np.array(numbers)[codes + 1]
