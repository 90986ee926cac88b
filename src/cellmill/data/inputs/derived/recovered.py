"""Counts recovered from log-normalised values and the cells' depths.

SeuratDisk and many atlases have only these. A value is log(1 + count * target / depth of the cell), so
expm1(value) * depth / target is the count. The result is taken only if it is a whole number from 1 for
every value, up to the error of 32-bit logarithms, and 1 for one of them: with too small a target all
counts would be multiples. `counts: expm1(raw)` sets it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.inputs.source import TOTALS
from cellmill.data.rows import row_numbers
from cellmill.errors import DataError

_TARGETS = (1e6, 1e5, 1e4)
_CLOSE = 0.1  # largest distance to a whole number
_OPTION = re.compile(r"expm1\((.+)\)")


def matrix_to_recover(counts: str) -> str | None:
    """The matrix that a value of `counts` such as `expm1(raw)` names."""
    match = _OPTION.fullmatch(counts)
    return match[1] if match else None


def find_totals(obs: pd.DataFrame) -> str | None:
    """The first of TOTALS that obs has as numbers."""
    for name in TOTALS:
        if name in obs and pd.api.types.is_numeric_dtype(obs[name]):
            return name
    return None


class RecoveredCounts(StoredMatrix):
    """Counts recovered from logarithms: whole numbers expm1(values) * depth / target.

    The target is the first of _TARGETS, or else the median depth, that fits.
    """

    def __init__(self, path: Path, name: str, logs: StoredMatrix, obs: pd.DataFrame):
        self._path = path
        self._name = name
        self._logs = logs
        self.shape = logs.shape
        column = find_totals(obs)
        if column is None:
            raise DataError(
                f"{path}: expm1({name}) needs the counts of each cell in an obs column; expected one of "
                f"{', '.join(TOTALS)}, got {', '.join(map(str, obs)) or 'none'}"
            )
        self._column = column
        self._totals = obs[column].to_numpy(dtype=np.float64)
        self._target: float | None = None

    @property
    def is_by_cell(self) -> bool:
        return self._logs.is_by_cell

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        first = 0
        for part in self._logs.blocks(block):
            totals = self._totals[first : first + part.shape[0]][row_numbers(part.indptr)]
            values = np.expm1(part.data.astype(np.float64)) * totals
            if len(values):
                values = self._whole(values)
            yield sp.csr_matrix((values, part.indices, part.indptr), shape=part.shape)
            first += part.shape[0]

    def _whole(self, values: np.ndarray) -> np.ndarray:
        """Counts from expm1 of values times depth. Raises DataError unless they are whole."""
        if self._target is None:
            targets = [*_TARGETS, float(np.median(self._totals[self._totals > 0]))]
        else:
            targets = [self._target]
        for target in targets:
            exact = values / target
            counts = np.rint(exact)
            is_whole = (np.abs(exact - counts) < _CLOSE).all()
            is_whole = is_whole and (counts[values != 0] >= 1).all()
            if is_whole and (self._target is not None or (counts == 1).any()):
                self._target = target
                return counts
        usual = self._target or 1e4
        exact = values / usual
        shown = exact[np.abs(exact - np.rint(exact)).argmax()]
        raise DataError(
            f"{self._path}: expm1({self._name}) * {self._column} / {usual:,.0f} gives no whole numbers, such as "
            f"{shown:.4g}: {self._name} does not hold log(1 + counts per 10,000) of these cells"
        )

    def close(self) -> None:
        self._logs.close()
