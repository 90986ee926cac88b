"""Tables of the levels of obs columns, made from the obs of a corpus, and numbers of levels of any obs by such a table.

Text, booleans and whole numbers have levels, sorted as text. Numbers with decimals and columns of more than
`MAX_LEVELS` values, such as barcodes, have none.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.obs_levels import DATASET, MISSING, level_numbers, text_of

MAX_LEVELS = 4096


def level_table(obs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return `levels` and `digest` of each column of `obs` that has levels; the digest is of every cell's level."""
    table: dict[str, dict[str, Any]] = {}
    for name in obs.columns:
        codes, values = pd.factorize(obs[name])
        if (levels := _levels(codes, values)) is not None:
            numbers = level_numbers(codes, values, levels)
            table[str(name)] = {"levels": levels, "digest": hashlib.sha256(numbers.astype("<i4").tobytes()).hexdigest()}
    return table


def _levels(codes: np.ndarray, values: Any) -> list[str] | None:
    if len(values) > MAX_LEVELS:
        return None
    if values.dtype.kind == "f" and not np.equal(np.mod(values, 1), 0).all():
        return None
    missing = [MISSING] if (codes < 0).any() else []
    return sorted({text_of(value) for value in values} - {MISSING}) + missing


def numbers_of(obs: pd.DataFrame, dataset: str, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Return `(n_obs, columns)` int32: numbers of levels of the obs of a dataset, 0 in columns that it lacks."""
    numbers = np.zeros((len(obs), len(levels)), np.int32)
    for at, (name, known) in enumerate(levels.items()):
        if name == DATASET:
            numbers[:, at] = level_numbers(np.zeros(len(obs), np.int64), [dataset], known)
            continue
        # shards keep a column that a user called `dataset` under another name
        own = DATASET if name == f"{DATASET}_original" else name
        if own in obs:
            codes, values = pd.factorize(obs[own])
            numbers[:, at] = level_numbers(codes, values, known)
    return numbers
