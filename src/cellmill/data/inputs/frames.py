"""Data frames of AnnData files: as anndata writes them, as it did before 0.7, and as SeuratDisk does."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata.io import read_elem

from cellmill.data.arrays import named_frame, text_index
from cellmill.data.inputs.containers import members
from cellmill.data.inputs.h5 import decode, one_line
from cellmill.data.inputs.matrices import is_array
from cellmill.data.inputs.source import StoredObs
from cellmill.errors import DataError


def open_obs(path: Path, file: Any) -> StoredObs:
    """obs of an open file: its names are read, its columns when they are needed.

    Of layouts before anndata 0.8 and of SeuratDisk, all columns are read: only the whole frame has the
    texts of their codes.
    """
    with _reading(path, "obs"):
        group = file["obs"]
        is_whole = "column-order" not in group.attrs or "__categories" in group
    if is_whole:
        frame = read_frame(path, file, "obs")
        return StoredObs(frame.index, [*frame.columns], lambda name: frame[name].array)
    with _reading(path, "obs"):
        names = read_elem(group[group.attrs["_index"]])
        columns = [decode(name) for name in group.attrs["column-order"]]
        index = text_index(pd.Index(names))
    return StoredObs(index, columns, partial(_read_column, path, group, len(index)))


def _read_column(path: Path, group: Any, n_obs: int, name: str) -> Any:
    with _reading(path, f"obs/{name}"):
        values = read_elem(group[name])
        if np.shape(values) != (n_obs,):
            raise ValueError(f"expected shape ({n_obs},), got {np.shape(values)}")
    return values


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Raise DataError for what anndata raises, which wraps whatever h5py, numpy or pandas raise."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{path}: /{name} cannot be read: {one_line(error)}") from None


def read_frame(path: Path, file: Any, name: str) -> pd.DataFrame:
    """Data frame `name` of an open file, with a text index. Raise DataError for a damaged one."""
    # anndata warns of layouts before 0.8
    with _reading(path, name), warnings.catch_warnings(action="ignore"):
        if is_array(file[name]):
            frame = _compound_frame(file, name)
        elif "encoding-type" not in file[name].attrs and "column-order" not in file[name].attrs:
            frame = _plain_frame(file[name])
        else:
            frame = read_elem(file[name])
        if isinstance(frame, pd.DataFrame):
            frame = _with_levels(file[name], frame)
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{path}: /{name} is not a data frame")
    # Scarf lists the index among the columns, and anndata writes no column of its name
    frame = frame.drop(columns="_index", errors="ignore")
    return frame.set_axis(text_index(frame.index), axis=0)


def _compound_frame(file: Any, name: str) -> pd.DataFrame:
    """Read the data frame that is stored as the compound dataset `name`.

    Its index is field `index`, else the first field.
    """
    records = file[name][()]
    if records.dtype.names is None:
        raise ValueError("expected a data frame, got an array without fields")
    columns = {field: _decoded(records[field]) for field in records.dtype.names}
    index = [*(field for field in ("index", "_index") if field in columns), *columns][0]
    names = columns.pop(index)
    for field, codes in columns.items():
        categories = file.get(f"uns/{field}_categories")
        if categories is not None and np.issubdtype(codes.dtype, np.integer):
            columns[field] = pd.Categorical.from_codes(codes, _decoded(categories[()]))
    return named_frame(names, columns)


def _plain_frame(group: Any) -> pd.DataFrame:
    """Read the data frame of a group without attributes of anndata, as SeuratDisk writes it.

    It has an array for each column.
    """
    columns: dict[str, Any] = {}
    for name in group:
        item = group.get(name)
        if is_array(item) and len(item.shape) == 1:
            columns[str(name)] = _decoded(item[()])
        elif item is not None and not is_array(item) and {"categories", "codes"} <= {*item}:
            columns[str(name)] = pd.Categorical.from_codes(
                item["codes"][()], _decoded(item["categories"][()])
            )
    declared = decode(group.attrs.get("_index", "_index"))
    texts = [name for name in columns if columns[name].dtype == np.dtype(object)]
    unique = [name for name in texts if len({*columns[name]}) == len(columns[name])]
    likely = (declared, "_index", "index", *unique, *texts)
    index = [name for name in likely if name in columns]
    if not index:
        raise ValueError("expected a data frame, got a group without a column of names")
    names = columns.pop(index[0])
    return named_frame(names, columns)


def _with_levels(stored: Any, frame: pd.DataFrame) -> pd.DataFrame:
    """Replace the codes of R's factors by their texts.

    SeuratDisk writes the texts as anndata 0.7 did, in the group `__categories`. But it does not name
    them in an attribute of the codes, so anndata reads numbers. In a group with such an attribute, other
    texts are of factors that were replaced by numbers.
    """
    levels: dict[str, Any] = {}
    if is_array(stored) or "__categories" not in stored:
        return frame
    if any("categories" in stored[name].attrs for name in frame if name in stored):
        return frame
    for name in members(stored, "__categories"):
        if name in frame and frame[name].dtype.kind in "iu":
            codes = frame[name].to_numpy()  # of a missing value: below 0
            texts = _decoded(stored[f"__categories/{name}"][()])
            levels[name] = pd.Categorical.from_codes(np.where(codes < 0, -1, codes), texts)
    return frame.assign(**levels)


def _decoded(values: Any) -> np.ndarray:
    values = np.atleast_1d(values)
    if values.dtype.kind not in "SO":
        return values.astype(values.dtype.newbyteorder("="))
    texts = [text.decode() if isinstance(text, bytes) else text for text in values.tolist()]
    return np.array(texts, dtype=object)
