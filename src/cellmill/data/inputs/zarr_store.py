"""AnnData in Zarr, version 2 or 3: a folder, or a .zarr.zip.

Refused: links, FIFOs and devices in the folder; arrays that are far larger than what is stored of them. zarr itself
refuses codec pickle, which runs code.
"""

import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import ZipStore

from cellmill.data.inputs.anndata_layout import is_anndata, layer_path, open_anndata
from cellmill.data.inputs.source import CountSource, reading
from cellmill.errors import DataError

MARKS = (".zgroup", "zarr.json", ".zmetadata")
_LARGE = 1 << 26  # bytes of an array, or of a chunk, that are read without a question
_MOST_CHUNK = 1 << 32  # bytes, as in HDF5
_MOST_RATIO = 100_000  # of declared to stored bytes
_PER_CELL = 16  # bytes of an obs column: one value of all cells is stored as nothing


def is_zarr(path: Path) -> bool:
    """True for a folder of Zarr and a .zarr.zip."""
    if path.is_dir():
        return path.name.endswith(".zarr") or any((path / mark).exists() for mark in MARKS)
    return path.name.lower().endswith((".zarr.zip", ".zip"))


def open_zarr(path: Path, counts: str) -> CountSource:
    """Open the matrix `counts` of an AnnData in Zarr. Raises DataError when it is damaged or refused."""
    if path.is_dir():
        _refuse_special(path)
        store: Any = path
    else:
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path}: not a zip file")
        store = ZipStore(path, mode="r")
    with reading(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr's, of strings in version 3
        try:
            group = zarr.open_group(store, mode="r")
        except (zarr.errors.GroupNotFoundError, FileNotFoundError):
            raise DataError(f"{path}: not a Zarr group: no .zgroup or zarr.json") from None
        if not is_anndata(group):
            raise DataError(f"{path}: not an AnnData: no obs and var groups")
        _check_arrays(path, group, counts)
        source = open_anndata(path, group, counts)
    if not path.is_dir():
        source.close_file = store.close
    return source


def _refuse_special(folder: Path) -> None:
    """Raise DataError for anything in `folder` that is neither a file nor a folder of its own."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _refuse_special(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "no regular file"
                raise DataError(f"{entry.path}: {kind}; expected regular files alone: copy the folder with cp -rL")


def _check_arrays(path: Path, group: Any, counts: str) -> None:
    n_obs = _n_obs(group)
    for part in ("obs", "var", "X" if counts == "X" else "raw" if counts == "raw" else layer_path(counts)):
        if part in group:
            for name, array in _arrays(group[part], part):
                _check_array(path, name, array, n_obs if part == "obs" else 0)


def _arrays(item: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, zarr.Array):
        yield name, item
        return
    for inner, array in item.members(max_depth=8):
        if isinstance(array, zarr.Array):
            yield f"{name}/{inner}", array


def _n_obs(group: Any) -> int:
    """Length of the index of obs, 0 if it is not stored."""
    obs = group["obs"]
    index = obs.get(str(obs.attrs.get("_index", "_index"))) if isinstance(obs, zarr.Group) else None
    if isinstance(index, zarr.Group):  # text of pandas 3: values and a mask
        index = index.get("values")
    if not isinstance(index, zarr.Array) or not index.shape or index.nchunks_initialized < index.nchunks:
        return 0
    return int(index.shape[0])


def _check_array(path: Path, name: str, array: Any, n_obs: int) -> None:
    size = max(1, array.dtype.itemsize)
    chunk = int(np.prod([float(n) for n in array.shards or array.chunks])) * size
    declared = int(np.prod([float(n) for n in array.shape])) * size
    if max(chunk, declared) <= _LARGE:
        return
    stored = array.nbytes_stored()
    if chunk > _MOST_CHUNK or declared > max(_LARGE, _MOST_RATIO * stored, _PER_CELL * n_obs):
        raise DataError(
            f"{path}: {name} is damaged: it declares {declared:,} bytes in chunks of {chunk:,}, and stores {stored:,}"
        )
