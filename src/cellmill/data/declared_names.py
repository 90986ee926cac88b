"""Names of the obs columns and count matrices of an input, read without its data: milliseconds per file.

AnnData in HDF5 or in a Zarr folder, and Loom. Of other inputs, and of damaged ones, nothing is known here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.errors import DataError
from cellmill.files import read_json


@dataclass(frozen=True)
class DeclaredNames:
    """What an input says it has."""

    columns: list[str]
    counts: list[str]
    _categories: dict[str, Any] = field(default_factory=dict)

    def categories_of(self, column: str) -> list[Any] | None:
        """Categories of a column; None for text in full, whose values take as long as the stage, and in Zarr."""
        array = self._categories.get(column)
        if not isinstance(array, h5py.Dataset) or array.shape is None or len(array.shape) != 1:
            return None
        try:
            return [each.decode() if isinstance(each, bytes) else each for each in array[:]]
        except (OSError, ValueError):  # damaged, or not UTF-8
            return None


@contextmanager
def declared_names(path: Path) -> Iterator[DeclaredNames | None]:
    """Names of the input at `path`, while it is open; None if they are not known."""
    if path.is_dir():
        yield _of_zarr(path)
    elif not path.is_file():  # opening a FIFO would wait without end
        yield None
    else:
        try:
            file = h5py.File(path, "r")
        except OSError:
            yield None
            return
        with file:
            yield _of_anndata(file) or _of_loom(file)


def _of_anndata(file: h5py.File) -> DeclaredNames | None:
    obs, layers = file.get("obs"), file.get("layers")
    if not isinstance(obs, h5py.Group) or (columns := _texts(obs.attrs.get("column-order"))) is None:
        return None
    counts = [name for name, at in (("X", "X"), ("raw", "raw/X")) if at in file]
    counts += [*layers] if isinstance(layers, h5py.Group) else []
    categorical = {name: obs.get(f"{name}/categories") for name in columns if isinstance(obs.get(name), h5py.Group)}
    return DeclaredNames(columns, counts, {name: node for name, node in categorical.items() if node is not None})


def _texts(values: Any) -> list[str] | None:
    """Names in an attribute; None if it is absent or damaged."""
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        return None
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


def _of_loom(file: h5py.File) -> DeclaredNames | None:
    cells, layers = file.get("col_attrs"), file.get("layers")
    if "matrix" not in file or not isinstance(cells, h5py.Group):
        return None
    return DeclaredNames([*cells], ["X", *(layers if isinstance(layers, h5py.Group) else [])])


def _of_zarr(folder: Path) -> DeclaredNames | None:
    try:
        columns = _attributes(folder / "obs").get("column-order")
    except (DataError, AttributeError, KeyError, TypeError):
        return None
    if not isinstance(columns, list):
        return None
    layers = folder / "layers"
    counts = [name for name, at in (("X", "X"), ("raw", "raw/X")) if (folder / at).is_dir()]
    counts += sorted(path.name for path in layers.iterdir() if path.is_dir()) if layers.is_dir() else []
    return DeclaredNames([str(name) for name in columns], counts)


def _attributes(group: Path) -> Any:
    """Attributes of a group of Zarr 3 or 2."""
    if (group / "zarr.json").exists():
        return read_json(group / "zarr.json")["attributes"]
    return read_json(group / ".zattrs")
