"""The obs columns of a corpus: every column that at least one dataset has.

Text becomes categories, and numbers stay numbers. If a dataset does not have a column, its cells have a missing
value there. Column `dataset` is added. A user's own column `dataset` is kept as `dataset_original`.

The columns are stored as a file per dataset and column, so that no process has all of them in memory:

    DATASET-names.npy            names of the cells, UTF-8
    DATASET-COLUMN.npy           for each cell of the dataset its number, or for text its code. Code -1 is missing
    DATASET-COLUMN-values.npy    the text of each code, UTF-8

DATASET and COLUMN are positions in the lists of datasets and columns. The arrays are mapped into memory. Every
shard has cells of all datasets, so with anndata's own encoding whole columns would be read for each shard.

This module also finds the levels and numbers of obs columns, and writes them to the index
(`data/shards/index.py`). Columns of text, booleans or whole numbers have levels, sorted as text. A column with
more than `MAX_LEVELS` values has no levels. A column of text has numbers if all its values read as numbers.
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

MAX_LEVELS = 4096  # a column has at most this many levels. A column with more values has no levels
_ORIGINAL = f"{DATASET}_original"  # name in shards of a column that a user called `dataset`
Encoder = Callable[[Any], Any]  # turns the values of some cells into codes or numbers


def find_levels(chunks: Iterable[Any]) -> list[str] | None:
    """Find the levels of a column. Returns None if the column has no levels.

    The values of the column come in `chunks`, such as one array per dataset.
    """
    texts = set[str]()
    has_missing = False
    for chunk in chunks:
        codes, values = pd.factorize(chunk)
        has_decimals = values.dtype.kind == "f" and not np.equal(np.mod(values, 1), 0).all()
        if has_decimals:
            return None
        has_missing |= bool((codes < 0).any())
        texts.update(map(as_text, values))
        if len(texts) > MAX_LEVELS:
            return None
    levels = sorted(texts - {MISSING})
    # a cell with the text <missing> counts as a cell without a value
    return [*levels, MISSING] if has_missing or MISSING in texts else levels


def encode_levels(values: Any, levels: Sequence[str]) -> np.ndarray:
    """Return the level code of each value, `(values,)` int32.

    Codes are counted from 1. A value that is not a level has code 0.
    """
    code_by_level = {level: code for code, level in enumerate(levels, start=1)}
    indices, unique = pd.factorize(values)
    # a missing value has index -1, so it gets the code of the last of these texts
    texts = [*map(as_text, unique), MISSING]
    return np.array([code_by_level.get(text, 0) for text in texts], np.int32)[indices]


def encode_columns(
    obs: pd.DataFrame, dataset: str, levels: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Return the level codes of the cells of a dataset, `(cells, columns)` int32.

    `obs` is the data frame of the dataset. `levels` has the levels of each column, by the name that the column
    has in shards. If the dataset does not have a column, all its cells have code 0 there.
    """
    codes = np.zeros((len(obs), len(levels)), np.int32)
    for i, (name, levels_of_column) in enumerate(levels.items()):
        values = shard_column(obs, dataset, name)
        if values is not None:
            codes[:, i] = encode_levels(values, levels_of_column)
    return codes


def parse_numbers(chunk: np.ndarray | pd.Categorical) -> np.ndarray | None:
    """Return values of a column as numbers, `(values,)` float64. A missing value becomes NaN.

    Returns None if the values are text, and a text does not read as a number.
    """
    if isinstance(chunk, np.ndarray):
        return chunk.astype("<f8")
    try:
        # Python would read the text 1_2 as 12, but it names a well or a replicate. "x" raises ValueError
        numbers = [float("x" if "_" in text else text) for text in chunk.categories]
    except ValueError:
        return None
    # a missing value has code -1, so it gets the last of these numbers
    return np.array([*numbers, np.nan])[chunk.codes]


def parse_columns(obs: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return the numbers of some obs columns, `(cells, columns)` float64.

    A cell has NaN in a column if it has no value there, or if the value does not read as a number.
    """
    numbers = np.full((len(obs), len(columns)), np.nan)
    for i, name in enumerate(columns):
        if name in obs:
            numbers[:, i] = pd.to_numeric(obs[name].astype(object), errors="coerce")
    return numbers


def shard_column(obs: pd.DataFrame, dataset: str, name: str) -> np.ndarray | pd.Series | None:
    """Return the values that the cells of a dataset have in column `name` of shards.

    `obs` is the data frame of the dataset. Returns None if the dataset does not have the column.
    """
    if name == DATASET:
        return np.full(len(obs), dataset, object)
    column: pd.Series | None = obs.get(DATASET if name == _ORIGINAL else name)
    return column


def find_stored_dtype(column: pd.Series) -> str | None:
    """Find the type in which a column of a dataset can be stored.

    The type is `?` for booleans without missing values, `<i8` for integers without missing values, `<f8` for
    other numbers, and None for text and everything else.
    """
    types = pd.api.types
    has_missing = column.isna().any()
    if types.is_bool_dtype(column):
        return None if has_missing else "?"
    if not types.is_numeric_dtype(column):
        return None
    return "<i8" if types.is_integer_dtype(column) and not has_missing else "<f8"


@dataclass
class ObsColumn:
    """An obs column of the corpus."""

    name: str  # name in shards
    source: str  # name in the files of datasets
    # type of numbers or booleans, as `find_stored_dtype` returns it; None for text
    dtype: str | None
    present: list[bool]  # for each dataset, True if the dataset has the column
    # for text, the sorted values of all cells; None if there are more than `MAX_LEVELS` values
    values: list[str] | None = field(default_factory=list)


def join_columns(datasets: Sequence[dict[str, str | None]]) -> list[ObsColumn]:
    """Join the columns of all datasets to the columns of the corpus. Column `dataset` is not added.

    `datasets` has a dict for each dataset. It has the stored type of each column, by the name of the column.

    A column keeps its type if all datasets have it with the same type. A column of numbers becomes a column of
    floats if a dataset does not have it, or if the types differ. All other columns become text.
    """
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
    """The obs columns of the cells of a corpus, stored as files in `folder`."""

    folder: Path
    datasets: list[str]
    columns: list[ObsColumn]

    @property
    def column_names(self) -> list[str]:
        return [DATASET, *(column.name for column in self.columns)]

    @property
    def unbounded(self) -> set[str]:
        """Names of the columns of text with more than `MAX_LEVELS` values."""
        return {each.name for each in self.columns if each.dtype is None and each.values is None}

    def write(
        self,
        number: int,
        names: pd.Index,
        read_column: Callable[[str], pd.Series],
        is_kept: np.ndarray,
    ) -> None:
        """Store the names and obs columns of the cells of dataset `number`.

        Datasets must be written in order. Only one column is in memory at a time. `names` are the names of the
        cells, and `read_column` reads a column of the file. `is_kept`, `(cells,)` bool, is True for the cells
        that shards have. The text of other cells is stored as missing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save(f"{number}-names", _encode_texts(names))
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
            texts[~is_kept | series.isna()] = None
            coded = pd.Categorical(texts)
            self._save(f"{number}-{i}", coded.codes.astype("<i4"))
            self._save(f"{number}-{i}-values", _encode_texts(coded.categories))
            if column.values is not None:
                values = sorted({*column.values, *coded.categories})
                column.values = values if len(values) <= MAX_LEVELS else None

    def frame(self, dataset: np.ndarray, row: np.ndarray) -> pd.DataFrame:
        """Read the names and all columns of some cells as a data frame.

        `dataset`, `(cells,)`, has the number of each cell's dataset. `row`, `(cells,)`, has the row of each cell
        in the file of its dataset.
        """
        columns = {name: self.column(name, dataset, row) for name in self.column_names}
        names = np.empty(len(row), object)
        for number, cells in _group_by_dataset(dataset):
            texts = self._load(f"{number}-names")[row[cells]].tolist()
            names[cells] = [f"{self.datasets[number]}:{text.decode()}" for text in texts]
        return named_frame(names, columns)

    def column(
        self, name: str, dataset: np.ndarray, row: np.ndarray
    ) -> np.ndarray | pd.Categorical:
        """Read column `name` of some cells. `dataset` and `row` are the arguments of `frame`."""
        if name == DATASET:
            return pd.Categorical.from_codes(dataset, categories=self.datasets)
        i = [column.name for column in self.columns].index(name)
        column = self.columns[i]
        if column.dtype is None:
            return self._read_text_column(i, dataset, row)
        values = np.full(len(row), np.nan if column.dtype == "<f8" else 0, column.dtype)
        for number, cells in _group_by_dataset(dataset):
            if column.present[number]:
                values[cells] = self._load(f"{number}-{i}")[row[cells]]
        return values

    def _read_text_column(self, i: int, dataset: np.ndarray, row: np.ndarray) -> pd.Categorical:
        """Read text column `i` of some cells."""
        column = self.columns[i]
        # for each dataset: its cells, the index of each cell's code among the codes that occur, the number of
        # these codes, and their texts. Codes are found by a sort, which costs less than sorting texts
        pieces = []
        for number, cells in _group_by_dataset(dataset):
            if column.present[number]:
                codes, code_index = np.unique(
                    self._load(f"{number}-{i}")[row[cells]], return_inverse=True
                )
                stored = self._load(f"{number}-{i}-values")[codes[codes >= 0]].tolist()
                pieces.append((cells, code_index, len(codes), [text.decode() for text in stored]))

        # if a column has very many values, such as barcodes, a shard keeps only the values of its own cells
        categories = column.values
        if categories is None:
            categories = sorted(set[str]().union(*(texts for *_, texts in pieces)))
        category_by_text = {text: number for number, text in enumerate(categories)}

        category = np.full(len(row), -1, np.int32)
        for cells, code_index, n_codes, texts in pieces:
            # the first code may be -1, a missing value. It has no text, and stays category -1
            category_of_code = np.full(n_codes, -1, np.int32)
            category_of_code[n_codes - len(texts) :] = [category_by_text[text] for text in texts]
            category[cells] = category_of_code[code_index]
        return pd.Categorical.from_codes(category, pd.Index(categories, dtype=object))

    def _save(self, name: str, array: np.ndarray) -> None:
        np.save(self.folder / f"{name}.npy", array)

    def _load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)


def _group_by_dataset(dataset: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each dataset, and the indices of its cells. `dataset` is `(cells,)`."""
    for number in np.unique(dataset).tolist():
        yield number, np.flatnonzero(dataset == number)


def _encode_texts(texts: Iterable[str]) -> np.ndarray:
    """Return texts as an array of bytes, UTF-8."""
    return np.array([text.encode() for text in texts] or np.zeros(0, "S1"))


def write_columns(
    folder: Path,
    obs: JointObs,
    kept_rows: list[np.ndarray],
    sizes: list[int],
    cells_by_split: dict[str, np.ndarray],
) -> tuple[dict[str, ObsLevels], dict[str, str], dict[str, dict[IndexKind, IndexEntry]]]:
    """Write the arrays `levels` and `numbers` of the index of every split to `folder`.

    Only one column is in memory at a time. `kept_rows` has, for each dataset, the rows of the cells that shards
    have. `sizes` has the number of all cells of each dataset. `cells_by_split` has the cells of each split, in
    the order in which shards have them.

    Returns the manifest's `obs_levels` and `obs_numbers`, and the entries of the written files by split.
    """
    # index of each dataset's first cell among the cells of all datasets
    offsets = row_offsets(sizes)
    index: dict[str, dict[IndexKind, IndexEntry]] = {split: {} for split in cells_by_split}
    cells_by_split = {split: cells for split, cells in cells_by_split.items() if len(cells)}

    def read_column(name: str) -> Iterator[Any]:
        """Yield the values of a column, as one array per dataset."""
        for number, rows in enumerate(kept_rows):
            yield obs.column(name, np.full(len(rows), number), rows)

    def write_arrays(kind: IndexKind, encoders: Mapping[str, Encoder]) -> dict[str, str]:
        """Write an array of the index for every split, with a row for each column of `encoders`.

        The encoder of a column turns its values into codes or numbers. Returns the digest of each column.
        """
        digests = {}
        arrays = {}
        with ExitStack() as stack:
            for split, cells in cells_by_split.items():
                arrays[split] = stack.enter_context(
                    new_index(folder, split, kind, (len(encoders), len(cells)))
                )
            for i, (name, encode) in enumerate(encoders.items()):
                column = np.zeros(offsets[-1], INDEX_DTYPES[kind])  # of the cells of all datasets
                sha256 = hashlib.sha256()
                encoded = map(encode, read_column(name))
                for start, rows, values in zip(offsets, kept_rows, encoded):
                    sha256.update(values.tobytes())
                    column[start + rows] = values
                digests[name] = sha256.hexdigest()
                for split, cells in cells_by_split.items():
                    arrays[split][i] = column[offsets[cells["dataset"]] + cells["row"]]
        for split in cells_by_split:
            index[split][kind] = make_index_entry(folder, split, kind)
        return digests

    levels = {}
    columns_with_numbers = []
    for name in obs.column_names:
        levels_of_column = None if name in obs.unbounded else find_levels(read_column(name))
        if levels_of_column is not None:
            levels[name] = levels_of_column
        if all(parse_numbers(values) is not None for values in read_column(name)):
            columns_with_numbers.append(name)

    level_encoders = {name: partial(encode_levels, levels=levels[name]) for name in levels}
    level_digests = write_arrays("levels", level_encoders)
    number_digests = write_arrays("numbers", dict.fromkeys(columns_with_numbers, parse_numbers))
    obs_levels = {
        name: ObsLevels(levels=levels[name], digest=level_digests[name]) for name in levels
    }
    return obs_levels, number_digests, index
