"""Names of the obs columns and count matrices of an input, read without its data: milliseconds per file.

AnnData in HDF5 or in a Zarr folder, and Loom. Of other inputs, and of damaged ones, nothing is known here.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellmill.errors import DataError
from cellmill.files import read_json

MOST_NAMES = 2_000_000  # names of cells that are compared, 0.3 s per million


@dataclass(frozen=True)
class DeclaredNames:
    """What an input says it has."""

    columns: list[str]
    counts: list[str]
    _categories: dict[str, Any] = field(default_factory=dict)
    _names: Any = None  # array of the names of cells

    def categories_of(self, column: str) -> list[Any] | None:
        """Categories of a column; None for text in full, whose values take as long as the stage, and in Zarr."""
        array = self._categories.get(column)
        if isinstance(array, h5py.Group):  # text of pandas 3: values and a mask
            array = array.get("values")
        if not isinstance(array, h5py.Dataset) or array.shape is None or len(array.shape) != 1:
            return None
        try:
            return [each.decode() if isinstance(each, bytes) else each for each in array[:]]
        except (OSError, ValueError):  # damaged, or not UTF-8
            return None

    def repeated_name(self) -> tuple[str, int, int] | None:
        """A name of several cells, the number of these, and of other such names; None if all differ.

        None is also for files of more than `MOST_NAMES` cells, whose names stage preprocess compares, and for Zarr and
        Loom.
        """
        array = self._names.get("values") if isinstance(self._names, h5py.Group) else self._names
        if not isinstance(array, h5py.Dataset) or array.shape is None or len(array.shape) != 1:
            return None
        if array.dtype.kind not in "OS" or len(array) > MOST_NAMES or array.external or array.is_virtual:
            return None
        try:
            names = array[:].tolist()
        except (OSError, ValueError):  # damaged
            return None
        if len({*names}) == len(names):
            return None
        repeated = [(name, n) for name, n in Counter(names).items() if n > 1]
        (name, n), others = repeated[0], len(repeated) - 1
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name), n, others


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
    counts += [_layer_name(name) for name in layers] if isinstance(layers, h5py.Group) else []
    categorical = {name: obs.get(f"{name}/categories") for name in columns if isinstance(obs.get(name), h5py.Group)}
    index = obs.attrs.get("_index")
    names = obs.get(index) if isinstance(index, str) else None
    return DeclaredNames(columns, counts, {name: node for name, node in categorical.items() if node is not None}, names)


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
    names = sorted(path.name for path in layers.iterdir() if path.is_dir()) if layers.is_dir() else []
    counts += map(_layer_name, names)
    return DeclaredNames([str(name) for name in columns], counts)


def _layer_name(layer: str) -> str:
    return f"layers/{layer}" if layer in ("X", "raw") else layer  # as `inputs.anndata_layout.layer_name`


def _attributes(group: Path) -> Any:
    """Attributes of a group of Zarr 3 or 2."""
    if (group / "zarr.json").exists():
        return read_json(group / "zarr.json")["attributes"]
    return read_json(group / ".zattrs")
