"""obs of a corpus, the union of its datasets' columns, on disk by dataset and column: no process holds all of it.

Text becomes categories, numbers stay numbers; cells of a dataset without a column have NaN there. Column `dataset` is
added, and a user's own column of that name is kept as `dataset_original`.

    DATASET-names.npy            obs names, UTF-8
    DATASET-COLUMN.npy           numbers of the cells in the order of the file, or of text its code; -1 is missing
    DATASET-COLUMN-values.npy    text of each code, UTF-8

DATASET and COLUMN are places in the lists of datasets and columns, from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from cellmill.data.level_table import MAX_LEVELS
from cellmill.data.obs_levels import DATASET
from cellmill.data.text_columns import text_values

_TYPES = {"bool": "?", "int": "<i8", "float": "<f8"}  # kinds of columns; all others are `text`


@dataclass(frozen=True)
class ColumnFacts:
    """Facts of a column of one dataset that decide its kind in the corpus."""

    boolean: bool
    whole: bool  # an integer type
    number: bool  # a number type, booleans left out
    missing: bool  # some cells have no value

    @classmethod
    def of(cls, column: pd.Series) -> ColumnFacts:
        types = pd.api.types
        boolean = bool(types.is_bool_dtype(column))
        number = bool(types.is_numeric_dtype(column)) and not boolean
        return cls(boolean, bool(types.is_integer_dtype(column)), number, bool(column.isna().any()))


def facts_of(obs: pd.DataFrame) -> dict[str, ColumnFacts]:
    """Facts of every column of a dataset's obs, by name."""
    return {str(name): ColumnFacts.of(obs[name]) for name in obs.columns}


@dataclass
class ObsColumn:
    """A column of the corpus."""

    name: str  # in shards
    source: str  # in the datasets
    kind: str  # bool, int, float or text
    present: list[bool]  # by dataset
    values: list[str] | None = field(default_factory=list)  # of text, sorted; None if more than MAX_LEVELS

    @property
    def stored(self) -> str:
        """dtype on disk."""
        return _TYPES.get(self.kind, "<i4")


def columns_of(facts: Sequence[dict[str, ColumnFacts]]) -> list[ObsColumn]:
    """Columns of a corpus, without `dataset`, from the facts of each dataset."""
    columns = []
    for name in dict.fromkeys(name for own in facts for name in own):
        parts = [own.get(name) for own in facts]
        # a user's own column `dataset` is kept under another name
        shown = name if name != DATASET else f"{DATASET}_original"
        columns.append(ObsColumn(shown, name, _kind(parts), [part is not None for part in parts]))
    return columns


def _kind(parts: Sequence[ColumnFacts | None]) -> str:
    present = [part for part in parts if part is not None]
    whole = len(present) == len(parts) and not any(part.missing for part in present)
    if whole and all(part.boolean for part in present):
        return "bool"
    if whole and all(part.whole for part in present):
        return "int"
    return "float" if all(part.number for part in present) else "text"


class JointObs:
    """obs of the cells of a corpus, read from `folder`."""

    def __init__(self, folder: Path, datasets: Sequence[str], columns: Sequence[ObsColumn]):
        self.folder, self.datasets, self.columns = folder, list(datasets), list(columns)
        self._names = pd.Categorical.from_codes(np.arange(len(self.datasets)), categories=self.datasets)

    @property
    def column_names(self) -> list[str]:
        return [DATASET, *(column.name for column in self.columns)]

    def write(self, number: int, obs: pd.DataFrame, kept: np.ndarray) -> None:
        """Store dataset `number`; `kept` is a mask of the cells that shards have. Datasets come in order."""
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self.folder / f"{number}-names.npy", _encoded(obs.index))
        for place, column in enumerate(self.columns):
            if not column.present[number]:
                continue
            series, path = obs[column.source], self.folder / f"{number}-{place}.npy"
            if column.kind == "text":
                codes, values = _codes(series, kept)
                np.save(path, codes)
                np.save(self.folder / f"{number}-{place}-values.npy", _encoded(values))
                _join(column, values)
            elif column.kind == "float":
                np.save(path, series.to_numpy(np.float64, na_value=np.nan))
            else:
                np.save(path, series.to_numpy(column.stored))

    def frame(self, dataset: np.ndarray, row: np.ndarray) -> pd.DataFrame:
        """obs of cells, given as numbers of datasets and rows in their files, in that order."""
        columns = {name: self.column(place, dataset, row) for place, name in enumerate(self.column_names)}
        names = np.empty(len(row), object)
        for number, own in _by_dataset(dataset):
            texts = _decoded(self._load(f"{number}-names")[row[own]])
            names[own] = [f"{self.datasets[number]}:{text}" for text in texts]
        frame = pd.DataFrame(index=pd.RangeIndex(len(row)))
        for name, values in columns.items():
            frame[name] = values
        frame.index = pd.Index(names, dtype=object)
        return frame

    def column(self, place: int, dataset: np.ndarray, row: np.ndarray) -> np.ndarray | pd.Categorical:
        """Values of column `place` of `column_names`."""
        if place == 0:
            return self._names[dataset]
        column = self.columns[place - 1]
        if column.kind == "text":
            return self._text(place - 1, dataset, row)
        values = np.full(len(row), np.nan if column.kind == "float" else 0, column.stored)
        for number, own in _by_dataset(dataset):
            if column.present[number]:
                values[own] = self._load(f"{number}-{place - 1}")[row[own]]
        return values

    def _text(self, place: int, dataset: np.ndarray, row: np.ndarray) -> pd.Categorical:
        column, parts = self.columns[place], []
        for number, own in _by_dataset(dataset):
            if column.present[number]:
                codes = self._load(f"{number}-{place}")[row[own]]
                used = np.unique(codes[codes >= 0])
                parts.append((own, codes, used, _decoded(self._load(f"{number}-{place}-values")[used])))
        # of a column of many values, such as barcodes, a shard has its own alone
        known = column.values if column.values is not None else sorted({text for *_, texts in parts for text in texts})
        numbers, joint = {text: i for i, text in enumerate(known)}, np.full(len(row), -1, np.int32)
        for own, codes, used, texts in parts:
            table = np.array([*(numbers[text] for text in texts), -1], np.int32)
            joint[own] = table[np.where(codes < 0, len(used), np.searchsorted(used, codes))]
        return pd.Categorical.from_codes(joint, categories=pd.Categorical(np.array(known, object)).categories)

    def _load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)


def _join(column: ObsColumn, values: list[str]) -> None:
    """Add the values of a dataset to those of the column, unless they are too many."""
    if column.values is not None:
        joint = sorted({*column.values, *values})
        column.values = joint if len(joint) <= MAX_LEVELS else None


def _codes(series: pd.Series, kept: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Code of each cell, -1 if it is missing or not kept, and the text of each code in order."""
    codes, values = pd.factorize(series)
    codes = np.where(kept, codes, -1)
    texts = text_values(pd.Series(values).astype(object))
    known = sorted(set(texts[np.unique(codes[codes >= 0])]))
    number = {text: i for i, text in enumerate(known)}
    table = np.array([*(number.get(text, -1) for text in texts), -1], np.int32)
    return table[codes], known


def _by_dataset(dataset: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each dataset and the positions of its cells."""
    for number in np.unique(dataset).tolist():
        yield number, np.flatnonzero(dataset == number)


def _encoded(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts] or np.zeros(0, "S1"))


def _decoded(texts: np.ndarray) -> list[str]:
    return [text.decode() for text in texts.tolist()]
