"""obs of a corpus: the union of its datasets' columns.

It is stored as a file per dataset and column, so that no process holds all of it. Text becomes
categories, numbers stay numbers, and cells of a dataset without a column have NaN there. Column
`dataset` is added, and a user's own column of that name is kept as `dataset_original`.

    DATASET-names.npy            obs names, UTF-8
    DATASET-COLUMN.npy           numbers of the cells in the order of the file, or for text its codes; -1 is missing
    DATASET-COLUMN-values.npy    text of each code, UTF-8

DATASET and COLUMN are positions in the lists of datasets and columns. These arrays are mapped, since
every shard has cells of all datasets: anndata's own encoding would read whole columns for each.

Levels and numbers of obs columns are derived here and written as arrays of `data/shards/index.py`.
Text, booleans and whole numbers have levels, sorted as text, unless there are more than `MAX_LEVELS`.
A column of text has numbers if all of it reads as numbers.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.corpus import DATASET, MISSING
from cellmill.data.arrays import as_text, named_frame, text_values
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import INDEX_DTYPES, make_index_entry, new_index
from cellmill.data.shards.manifest import IndexEntry, IndexKind, ObsLevels

MAX_LEVELS = 4096
_ORIGINAL = f"{DATASET}_original"  # a column that a user called `dataset`, in shards
Encoder = Callable[[Any], Any]


def find_levels(chunks: Iterable[Any]) -> list[str] | None:
    """Find the levels of a column, whose values come in `chunks`; None if it has none."""
    texts = set[str]()
    has_missing = False
    for chunk in chunks:
        codes, values = pd.factorize(chunk)
        if values.dtype.kind == "f" and not np.equal(np.mod(values, 1), 0).all():
            return None
        has_missing |= bool((codes < 0).any())
        texts.update(map(as_text, values))
        if len(texts) > MAX_LEVELS:
            return None
    levels = sorted(texts - {MISSING})
    # a cell with the text <missing> counts as one without a value
    return [*levels, MISSING] if has_missing or MISSING in texts else levels


def encode_levels(values: Any, levels: Sequence[str]) -> np.ndarray:
    """Return the level code of each value, int32, from 1; 0 for a value that is not a level."""
    code_of_level = {level: code for code, level in enumerate(levels, start=1)}
    indices, unique = pd.factorize(values)
    texts = [*map(as_text, unique), MISSING]  # the index of a missing value is -1
    return np.array([code_of_level.get(text, 0) for text in texts], np.int32)[indices]


def encode_columns(
    obs: pd.DataFrame, dataset: str, levels: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Return the level codes of a dataset's obs, `(n_obs, columns)` int32; 0 in columns that it lacks."""
    codes = np.zeros((len(obs), len(levels)), np.int32)
    for i, (name, known) in enumerate(levels.items()):
        values = shard_column(obs, dataset, name)
        if values is not None:
            codes[:, i] = encode_levels(values, known)
    return codes


def parse_numbers(chunk: np.ndarray | pd.Categorical) -> np.ndarray | None:
    """Return an array of values as numbers, float64, NaN for missing values.

    None if they are text that is not all numbers.
    """
    if isinstance(chunk, np.ndarray):
        return chunk.astype("<f8")
    try:  # 1_2 names a well or a replicate; Python reads 12
        numbers = [float("x" if "_" in text else text) for text in chunk.categories]
    except ValueError:
        return None
    return np.array([*numbers, np.nan])[chunk.codes]


def parse_columns(obs: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return the numbers of obs columns, `(n_obs, columns)` float64; NaN where there is none."""
    numbers = np.full((len(obs), len(columns)), np.nan)
    for i, name in enumerate(columns):
        if name in obs:
            numbers[:, i] = pd.to_numeric(obs[name].astype(object), errors="coerce")
    return numbers


def shard_column(obs: pd.DataFrame, dataset: str, name: str) -> np.ndarray | pd.Series | None:
    """Return the values of a dataset's obs in column `name` of shards; None if it lacks the column."""
    if name == DATASET:
        return np.full(len(obs), dataset, object)
    column: pd.Series | None = obs.get(DATASET if name == _ORIGINAL else name)
    return column


def dtype_of(column: pd.Series) -> str | None:
    """Return the dtype of a column of a dataset's obs: `?`, `<i8` or `<f8`; None for text."""
    types = pd.api.types
    has_missing = column.isna().any()
    if types.is_bool_dtype(column):
        return None if has_missing else "?"
    if not types.is_numeric_dtype(column):
        return None
    return "<i8" if types.is_integer_dtype(column) and not has_missing else "<f8"


@dataclass
class ObsColumn:
    """A column of the corpus."""

    name: str  # in shards
    source: str  # in the datasets
    dtype: str | None  # dtype of numbers and booleans; None for text
    present: list[bool]  # by dataset
    # values of text, sorted; None if more than MAX_LEVELS
    values: list[str] | None = field(default_factory=list)


def join_columns(datasets: Sequence[dict[str, str | None]]) -> list[ObsColumn]:
    """Join the columns of all datasets, given by name with their dtypes; `dataset` is not one of them."""
    columns = []
    for source in dict.fromkeys(chain(*datasets)):
        present = [source in dtypes for dtypes in datasets]
        dtypes = {dtypes[source] for dtypes in datasets if source in dtypes}
        dtype = None
        if all(present) and len(dtypes) == 1:
            [dtype] = dtypes
        elif dtypes <= {"<i8", "<f8"}:
            dtype = "<f8"
        name = _ORIGINAL if source == DATASET else source
        columns.append(ObsColumn(name, source, dtype, present))
    return columns


@dataclass
class JointObs:
    """obs of the cells of a corpus, read from `folder`."""

    folder: Path
    datasets: list[str]
    columns: list[ObsColumn]

    @property
    def column_names(self) -> list[str]:
        return [DATASET, *(column.name for column in self.columns)]

    @property
    def unbounded(self) -> set[str]:
        """Columns of text with more than MAX_LEVELS values."""
        return {each.name for each in self.columns if each.dtype is None and each.values is None}

    def write(
        self,
        number: int,
        names: pd.Index,
        read_column: Callable[[str], pd.Series],
        kept: np.ndarray,
    ) -> None:
        """Store obs of dataset `number`, one column in memory at a time. Datasets come in order.

        `names` are the obs names, `read_column` reads a column of the file, and `kept`, `(n_obs,)` bool,
        is True for the cells that shards have.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save(f"{number}-names", _encode(names))
        for i, column in enumerate(self.columns):
            if not column.present[number]:
                continue
            series = read_column(column.source)
            if column.dtype == "<f8":
                self._save(f"{number}-{i}", series.to_numpy(np.float64, na_value=np.nan))
                continue
            if column.dtype is not None:
                self._save(f"{number}-{i}", series.to_numpy(column.dtype))
                continue
            texts = text_values(series)
            texts[~kept | series.isna()] = None
            coded = pd.Categorical(texts)
            self._save(f"{number}-{i}", coded.codes.astype("<i4"))
            self._save(f"{number}-{i}-values", _encode(coded.categories))
            if column.values is not None:
                values = sorted({*column.values, *coded.categories})
                column.values = values if len(values) <= MAX_LEVELS else None

    def frame(self, dataset: np.ndarray, row: np.ndarray) -> pd.DataFrame:
        """Read the obs of cells. `dataset` and `row`, `(cells,)`, are each cell's dataset and row there."""
        columns = {name: self.column(name, dataset, row) for name in self.column_names}
        names = np.empty(len(row), object)
        for number, cells in _by_dataset(dataset):
            texts = self._load(f"{number}-names")[row[cells]].tolist()
            names[cells] = [f"{self.datasets[number]}:{text.decode()}" for text in texts]
        return named_frame(names, columns)

    def column(
        self, name: str, dataset: np.ndarray, row: np.ndarray
    ) -> np.ndarray | pd.Categorical:
        """Read a column of `column_names` for cells, as in `frame`."""
        if name == DATASET:
            return pd.Categorical.from_codes(dataset, categories=self.datasets)
        i = [column.name for column in self.columns].index(name)
        column = self.columns[i]
        if column.dtype is None:
            return self._text_column(i, dataset, row)
        values = np.full(len(row), np.nan if column.dtype == "<f8" else 0, column.dtype)
        for number, cells in _by_dataset(dataset):
            if column.present[number]:
                values[cells] = self._load(f"{number}-{i}")[row[cells]]
        return values

    def _text_column(self, i: int, dataset: np.ndarray, row: np.ndarray) -> pd.Categorical:
        """Read text column `i`. Stored codes are sorted, which costs less than sorting texts."""
        column = self.columns[i]
        datasets = []
        for number, cells in _by_dataset(dataset):
            if column.present[number]:
                codes, inverse = np.unique(
                    self._load(f"{number}-{i}")[row[cells]], return_inverse=True
                )
                stored = self._load(f"{number}-{i}-values")[codes[codes >= 0]].tolist()
                datasets.append((cells, inverse, len(codes), [text.decode() for text in stored]))
        categories = column.values
        # of a column with many values, such as barcodes, a shard keeps only the values of its cells
        if categories is None:
            categories = sorted(set[str]().union(*(texts for *_, texts in datasets)))
        number_of_text = {text: number for number, text in enumerate(categories)}
        category = np.full(len(row), -1, np.int32)
        for cells, inverse, n_codes, texts in datasets:
            # the first code may be -1, a missing value
            category_of_code = np.full(n_codes, -1, np.int32)
            category_of_code[n_codes - len(texts) :] = [number_of_text[text] for text in texts]
            category[cells] = category_of_code[inverse]
        return pd.Categorical.from_codes(category, pd.Index(categories, dtype=object))

    def _save(self, name: str, array: np.ndarray) -> None:
        np.save(self.folder / f"{name}.npy", array)

    def _load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)


def _by_dataset(dataset: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each dataset and the positions of its cells."""
    for number in np.unique(dataset).tolist():
        yield number, np.flatnonzero(dataset == number)


def _encode(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts] or np.zeros(0, "S1"))


def write_columns(
    folder: Path,
    obs: JointObs,
    kept: list[np.ndarray],
    sizes: list[int],
    splits: dict[str, np.ndarray],
) -> tuple[dict[str, ObsLevels], dict[str, str], dict[str, dict[IndexKind, IndexEntry]]]:
    """Write levels and numbers of every split, one column in memory at a time.

    `kept` are the rows of each dataset that shards have, `sizes` the cells of each dataset, and
    `splits` the cells of each split in the order on disk. Returns the manifest's `obs_levels` and
    `obs_numbers`, and the entries of the files by split.
    """
    offsets = row_offsets(sizes)  # first cell of each dataset among all cells
    index: dict[str, dict[IndexKind, IndexEntry]] = {split: {} for split in splits}
    splits = {split: cells for split, cells in splits.items() if len(cells)}

    def read(name: str) -> Iterator[Any]:
        """Yield the values of a column, dataset by dataset."""
        for number, rows in enumerate(kept):
            yield obs.column(name, np.full(len(rows), number), rows)

    def write(kind: IndexKind, encoders: Mapping[str, Encoder]) -> dict[str, str]:
        """Write the columns that `encoders` make of arrays of values; return the digest of each."""
        digests = {}
        arrays = {}
        with ExitStack() as stack:
            for split, cells in splits.items():
                arrays[split] = stack.enter_context(
                    new_index(folder, split, kind, (len(encoders), len(cells)))
                )
            for i, (name, encode) in enumerate(encoders.items()):
                column = np.zeros(offsets[-1], INDEX_DTYPES[kind])
                sha256 = hashlib.sha256()
                for start, rows, values in zip(offsets, kept, map(encode, read(name))):
                    sha256.update(values.tobytes())
                    column[start + rows] = values
                digests[name] = sha256.hexdigest()
                for split, cells in splits.items():
                    arrays[split][i] = column[offsets[cells["dataset"]] + cells["row"]]
        for split in splits:
            index[split][kind] = make_index_entry(folder, split, kind)
        return digests

    levels = {}
    numeric = []
    for name in obs.column_names:
        levels_of_column = None if name in obs.unbounded else find_levels(read(name))
        if levels_of_column is not None:
            levels[name] = levels_of_column
        if all(parse_numbers(values) is not None for values in read(name)):
            numeric.append(name)
    encoders = {name: partial(encode_levels, levels=levels[name]) for name in levels}
    level_digests = write("levels", encoders)
    number_digests = write("numbers", dict.fromkeys(numeric, parse_numbers))
    obs_levels = {
        name: ObsLevels(levels=levels[name], digest=level_digests[name]) for name in levels
    }
    return obs_levels, number_digests, index
