"""obs of a corpus, the union of its datasets' columns, on disk by dataset and column: no process
holds all of it.

Text becomes categories, numbers stay numbers; cells of a dataset without a column have NaN there.
Column `dataset` is added, and a user's own column of that name is kept as `dataset_original`.

    DATASET-names.npy            obs names, UTF-8
    DATASET-COLUMN.npy           numbers of the cells in the order of the file, or for text its codes; -1 is missing
    DATASET-COLUMN-values.npy    text of each code, UTF-8

DATASET and COLUMN are positions in the lists of datasets and columns. These arrays are mapped, as
every shard has cells of all datasets: anndata's own encoding would read whole columns for each.

Levels and numbers of obs columns are derived here, and the arrays of `data/shards/index.py`
written. Text, booleans and whole numbers have levels, sorted as text, unless there are more than
`MAX_LEVELS`. A column of text has numbers if all of it reads as numbers.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.arrays import DATASET, MISSING, as_text, text_values
from cellmill.data.shards.index import new_array
from cellmill.data.shards.manifest import IndexEntry, Kind, ObsLevels
from cellmill.errors import DataError
from cellmill.files import sha256_file

MAX_LEVELS = 4096
MAX_NONZEROS = np.iinfo(np.int32).max  # of a shard: its indptr is int32


def levels_of(chunks: Iterable[Any]) -> list[str] | None:
    """Levels of a column, given as arrays of its values in turn; None if it has none."""
    texts = set()
    missing = False
    for chunk in chunks:
        codes, values = pd.factorize(chunk)
        if values.dtype.kind == "f" and not np.equal(np.mod(values, 1), 0).all():
            return None
        missing |= bool((codes < 0).any())
        texts |= {as_text(value) for value in values}
        if len(texts) > MAX_LEVELS:
            return None
    return sorted(texts - {MISSING}) + [MISSING] * missing


def level_numbers(values: Any, levels: Sequence[str]) -> np.ndarray:
    """Return numbers of levels, int32, of an array of values: 0 for one that is no level."""
    codes, unique = pd.factorize(values)
    number = {level: i for i, level in enumerate(levels, start=1)}
    # a missing value is -1
    table = [*(number.get(as_text(value), 0) for value in unique), number.get(MISSING, 0)]
    return np.array(table, np.int32)[codes]


def numbers_in(chunk: np.ndarray | pd.Categorical) -> np.ndarray | None:
    """Numbers, float64, of an array of values, NaN for missing ones; None for text that is not all
    numbers.
    """
    if isinstance(chunk, np.ndarray):
        return chunk.astype("<f8")
    try:  # 1_2 names a well or a replicate; Python reads 12
        numbers = [float("x" if "_" in text else text) for text in chunk.categories]
    except ValueError:
        return None
    return np.array([*numbers, np.nan])[chunk.codes]


def values_of_columns(obs: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return `(n_obs, columns)` float64: numbers of obs columns, NaN where there is none."""
    table = np.full((len(obs), len(columns)), np.nan)
    for place, name in enumerate(columns):
        if name in obs:
            table[:, place] = pd.to_numeric(obs[name].astype(object), errors="coerce")
    return table


def numbers_of(obs: pd.DataFrame, dataset: str, levels: Mapping[str, Sequence[str]]) -> np.ndarray:
    """Return `(n_obs, columns)` int32: numbers of levels of the obs of a dataset, 0 in columns that
    it lacks.
    """
    numbers = np.zeros((len(obs), len(levels)), np.int32)
    for place, (name, known) in enumerate(levels.items()):
        values = values_of_column(obs, dataset, name)
        if values is not None:
            numbers[:, place] = level_numbers(values, known)
    return numbers


def values_of_column(obs: pd.DataFrame, dataset: str, name: str) -> np.ndarray | pd.Series | None:
    """Values of a column of shards in the obs of a dataset; None without it."""
    if name == DATASET:
        return np.full(len(obs), dataset, object)
    # shards keep a column that a user called `dataset` under another name
    column: pd.Series | None = obs.get(DATASET if name == f"{DATASET}_original" else name)
    return column


def dtype_of(column: pd.Series) -> str | None:
    """dtype of a column of a dataset's obs: `?`, `<i8` or `<f8`; None for text."""
    types = pd.api.types
    missing = column.isna().any()
    if types.is_bool_dtype(column):
        return None if missing else "?"
    if not types.is_numeric_dtype(column):
        return None
    return "<i8" if types.is_integer_dtype(column) and not missing else "<f8"


@dataclass
class ObsColumn:
    """A column of the corpus."""

    name: str  # in shards
    source: str  # in the datasets
    dtype: str | None  # of numbers and booleans; None for text
    present: list[bool]  # by dataset
    # of text, sorted; None if more than MAX_LEVELS
    values: list[str] | None = field(default_factory=list)


def columns_of(dtypes: Sequence[dict[str, str | None]]) -> list[ObsColumn]:
    """Columns of a corpus, without `dataset`, from the dtypes of each dataset."""
    columns = []
    for name in dict.fromkeys(name for dataset in dtypes for name in dataset):
        present = [name in dataset for dataset in dtypes]
        found = {dataset[name] for dataset in dtypes if name in dataset}
        dtype = "<f8" if found <= {"<i8", "<f8"} else None
        if all(present) and len(found) == 1:
            [dtype] = found
        columns.append(
            ObsColumn(name if name != DATASET else f"{DATASET}_original", name, dtype, present)
        )
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

    def write(self, number: int, obs: pd.DataFrame, kept: np.ndarray) -> None:
        """Store dataset `number`; `kept` is a mask of the cells that shards have. Datasets come in
        order.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self.folder / f"{number}-names.npy", _encoded(obs.index))
        for place, column in enumerate(self.columns):
            if not column.present[number]:
                continue
            series = obs[column.source]
            path = self.folder / f"{number}-{place}.npy"
            if column.dtype == "<f8":
                np.save(path, series.to_numpy(np.float64, na_value=np.nan))
            elif column.dtype is not None:
                np.save(path, series.to_numpy(column.dtype))
            else:
                texts = text_values(series)
                texts[~kept | series.isna()] = None
                coded = pd.Categorical(texts)
                np.save(path, coded.codes.astype("<i4"))
                np.save(self.folder / f"{number}-{place}-values.npy", _encoded(coded.categories))
                if column.values is not None:
                    joint = sorted({*column.values, *coded.categories})
                    column.values = joint if len(joint) <= MAX_LEVELS else None

    def frame(self, dataset: np.ndarray, row: np.ndarray) -> pd.DataFrame:
        """obs of cells, given as numbers of datasets and rows in their files, in that order."""
        columns = {
            name: self.column(place, dataset, row) for place, name in enumerate(self.column_names)
        }
        names = np.empty(len(row), object)
        for number, cells in _by_dataset(dataset):
            texts = self._load(f"{number}-names")[row[cells]].tolist()
            names[cells] = [f"{self.datasets[number]}:{text.decode()}" for text in texts]
        return pd.DataFrame(columns, index=pd.Index(names, dtype=object))

    def column(
        self, place: int, dataset: np.ndarray, row: np.ndarray
    ) -> np.ndarray | pd.Categorical:
        """Values of column `place` of `column_names`."""
        if place == 0:
            return pd.Categorical.from_codes(dataset, categories=self.datasets)
        column = self.columns[place - 1]
        place = place - 1
        missing = {"<f8": np.nan, None: None}.get(column.dtype, 0)
        values = np.full(len(row), missing, column.dtype or object)
        for number, cells in _by_dataset(dataset):
            if not column.present[number]:
                continue
            stored = self._load(f"{number}-{place}")[row[cells]]
            if column.dtype is None:
                codes, inverse = np.unique(stored, return_inverse=True)
                texts = self._load(f"{number}-{place}-values")[codes[codes >= 0]].tolist()
                decoded = [None] * int((codes < 0).any()) + [text.decode() for text in texts]
                stored = np.array(decoded, object)[inverse]
            values[cells] = stored
        # of a column of many values, such as barcodes, a shard has its own alone
        return (
            values if column.dtype is not None else pd.Categorical(values, categories=column.values)
        )

    def _load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)


def _by_dataset(dataset: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each dataset and the positions of its cells."""
    for number in np.unique(dataset).tolist():
        yield number, np.flatnonzero(dataset == number)


def _encoded(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts] or np.zeros(0, "S1"))


def write_split_index(
    folder: Path, split: str, nnz: np.ndarray, hashes: np.ndarray, cells_per_shard: int
) -> dict[Kind, IndexEntry]:
    """Write offsets and hashes of a split, whose cells are given in the order on disk."""
    if not len(nnz):
        return {}
    parts = np.split(nnz, range(cells_per_shard, len(nnz), cells_per_shard))
    total = max(int(shard.sum(dtype=np.int64)) for shard in parts)
    if total > MAX_NONZEROS:
        raise DataError(
            f"{folder}: {total:,} nonzeros in a shard, the limit is {MAX_NONZEROS:,}; lower shard.cells_per_shard"
        )
    with new_array(folder / f"{split}-offsets.npy", (len(nnz) + len(parts),), "<i4") as offsets:
        np.concatenate(
            [np.append(0, np.cumsum(shard)) for shard in parts], out=offsets, casting="unsafe"
        )
    with new_array(folder / f"{split}-hashes.npy", (2, len(nnz)), "<u8") as ordered:
        ordered[:] = hashes[np.lexsort(hashes.T[::-1])].T
    return {kind: _entry(folder, split, kind) for kind in ("offsets", "hashes")}


def write_columns(
    folder: Path,
    obs: JointObs,
    kept: list[np.ndarray],
    sizes: list[int],
    chosen: dict[str, np.ndarray],
    index: dict[str, dict[Kind, IndexEntry]],
) -> tuple[dict[str, ObsLevels], dict[str, str]]:
    """Write levels and numbers of every split, one column in memory at a time.

    Returns the manifest's `obs_levels` and `obs_numbers`, and adds the files to `index`.
    """
    names = dict.fromkeys(obs.column_names)
    first = np.cumsum([0, *sizes])
    splits = {split: cells for split, cells in chosen.items() if len(cells)}

    def chunks(name: str) -> Iterator[Any]:
        for number, rows in enumerate(kept):
            yield obs.column(obs.column_names.index(name), np.full(len(rows), number), rows)

    def write(kind: Kind, dtype: str, columns: dict[str, Callable[[Any], Any]]) -> dict[str, str]:
        """Write columns, given as functions of an array of values; return the digest of each."""
        digests = {}
        with ExitStack() as stack:
            arrays = {
                split: stack.enter_context(
                    new_array(folder / f"{split}-{kind}.npy", (len(columns), len(cells)), dtype)
                )
                for split, cells in splits.items()
            }
            for place, (name, encode) in enumerate(columns.items()):
                column = np.zeros(first[-1], dtype)
                sha256 = hashlib.sha256()
                for start, rows, values in zip(first, kept, map(encode, chunks(name))):
                    sha256.update(values.tobytes())
                    column[start + rows] = values
                digests[name] = sha256.hexdigest()
                for split, cells in splits.items():
                    arrays[split][place] = column[first[cells["dataset"]] + cells["row"]]
        for split in splits:
            index[split][kind] = _entry(folder, split, kind)
        return digests

    levels = {name: own for name in names if (own := levels_of(chunks(name))) is not None}
    digests = write(
        "levels", "<u2", {name: partial(level_numbers, levels=own) for name, own in levels.items()}
    )
    numeric = [
        name for name in names if all(numbers_in(chunk) is not None for chunk in chunks(name))
    ]
    numbers = write("numbers", "<f8", dict.fromkeys(numeric, numbers_in))
    return {name: {"levels": own, "digest": digests[name]} for name, own in levels.items()}, numbers


def _entry(folder: Path, split: str, kind: Kind) -> IndexEntry:
    path = folder / f"{split}-{kind}.npy"
    return IndexEntry(name=path.name, sha256=sha256_file(path))
