"""Levels of obs columns, from the values of a corpus, and the numbers of levels of any obs.

Text, booleans and whole numbers have levels, sorted as text. Numbers with decimals and columns of more than
`MAX_LEVELS` values, such as barcodes, have none.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.obs_levels import DATASET, MISSING, level_numbers, text_of

MAX_LEVELS = 4096


def levels_of(chunks: Iterable[Any]) -> list[str] | None:
    """Levels of a column, given as arrays of its values in turn; None if it has none."""
    texts, missing = set(), False
    for chunk in chunks:
        codes, values = pd.factorize(chunk)
        if values.dtype.kind == "f" and not np.equal(np.mod(values, 1), 0).all():
            return None
        missing |= bool((codes < 0).any())
        texts |= {text_of(value) for value in values}
        if len(texts) > MAX_LEVELS:
            return None
    return sorted(texts - {MISSING}) + [MISSING] * missing


def numbers_in(chunk: Any, levels: Sequence[str]) -> np.ndarray:
    """Numbers of levels, int32, of an array of values."""
    codes, values = pd.factorize(chunk)
    return level_numbers(codes, values, levels)


def values_of_columns(obs: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return `(n_obs, columns)` float64: numbers of obs columns, NaN where there is none."""
    table = np.full((len(obs), len(columns)), np.nan)
    for at, name in enumerate(columns):
        if name in obs:
            table[:, at] = pd.to_numeric(obs[name].astype(object), errors="coerce")
    return table


def numbers_of(obs: pd.DataFrame, dataset: str, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Return `(n_obs, columns)` int32: numbers of levels of the obs of a dataset, 0 in columns that it lacks."""
    numbers = np.zeros((len(obs), len(levels)), np.int32)
    for at, (name, known) in enumerate(levels.items()):
        found = values_of_column(obs, dataset, name)
        if found is not None:
            numbers[:, at] = level_numbers(*found, known)
    return numbers


def values_of_column(obs: pd.DataFrame, dataset: str, name: str) -> tuple[np.ndarray, Any] | None:
    """Codes of cells, -1 for a missing value, and the values of the codes, of a column of shards; None without it."""
    if name == DATASET:
        return np.zeros(len(obs), np.int64), [dataset]
    # shards keep a column that a user called `dataset` under another name
    own = DATASET if name == f"{DATASET}_original" else name
    return pd.factorize(obs[own]) if own in obs else None
