"""obs of a corpus, the union of its datasets' columns, on disk by dataset and column: no process holds all of it.

Text becomes categories, numbers stay numbers; cells of a dataset without a column have NaN there. Column `dataset` is
added, and a user's own column of that name is kept as `dataset_original`.

    DATASET-names.npy            obs names, UTF-8
    DATASET-COLUMN.npy           numbers of the cells in the order of the file, or for text its codes; -1 is missing
    DATASET-COLUMN-values.npy    text of each code, UTF-8

DATASET and COLUMN are places in the lists of datasets and columns, from 0.

Levels of obs columns are derived here, and the arrays of `data/shards/index.py` written. Text, booleans and whole
numbers have levels, sorted as text. Numbers with decimals and columns of more than `MAX_LEVELS` values, such as
barcodes, have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.data.inputs.h5 import one_line, open_h5, read_texts
from cellmill.data.shards.index import (
    DATASET,
    HASHES,
    LEVELS,
    MISSING,
    OFFSETS,
    hash_order,
    index_name,
    level_numbers,
    new_array,
    text_of,
)
from cellmill.data.shards.manifest import REMEDY, IndexEntry
from cellmill.errors import DataError
from cellmill.files import sha256_file


def read_shard(path: Path, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Numbers of the shard's cells, `(cells, columns)` int32. Raises DataError when its obs cannot be read."""
    try:
        with open_h5(path, REMEDY) as file:
            columns = [level_numbers(*_stored_codes(file["obs"][name]), known) for name, known in levels.items()]
    except (LookupError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: its obs columns cannot be read: {one_line(error)}; {REMEDY}") from None
    if unknown := [name for name, numbers in zip(levels, columns) if not numbers.all()]:
        raise DataError(f"{path}: obs column {unknown[0]!r} has values that the manifest does not list; {REMEDY}")
    return np.stack(columns, axis=1)


def _stored_codes(column: h5py.Group | h5py.Dataset) -> tuple[np.ndarray, Iterable[Any]]:
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
    """`(cells,)` float64; or a value that is not a number."""
    if isinstance(column, h5py.Dataset) and column.dtype.kind in "iufb":
        return column[:].astype(np.float64)
    codes, values = _stored_codes(column)
    numbers = [np.nan]  # of code -1
    for value in values:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        try:
            numbers.append(float("x" if "_" in text else text))  # 1_2 names a well or a replicate; Python reads 12
        except ValueError:
            return text
    return np.array(numbers)[codes + 1]


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
    """Add the values of a dataset to the column's, unless there are too many."""
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
