"""Registry of input formats: how each is recognised, which function opens it, and which names it declares.

FASTA files are opened by `cellmill.data.inputs.fasta`; inputs at a URL are fetched first.

HDF5 files are read by what they contain, whatever their name. A file from elsewhere may point into other files
(external links, external storage, virtual datasets), declare arrays that would fill the memory, or need a filter that
is not installed: each of these is refused in one line.

`declared_names` reads the names of obs columns and count matrices without the data, in milliseconds per file: of
AnnData in HDF5 or in a Zarr folder, and of Loom. For other inputs and for damaged ones it returns None.
"""

import hashlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from cellmill.config.corpus import is_fasta
from cellmill.config.datasets import is_url, redacted
from cellmill.data.inputs.anndata_files import is_anndata, is_zarr, open_anndata, open_zarr
from cellmill.data.inputs.fasta import FastaReader
from cellmill.data.inputs.fetch import RECORD, fetch_url, read_record
from cellmill.data.inputs.h5 import open_h5
from cellmill.data.inputs.h5_walk import check_walk
from cellmill.data.inputs.loom import is_loom, open_loom
from cellmill.data.inputs.mtx import is_mtx, open_mtx
from cellmill.data.inputs.reader import CountsReader, refuse_duplicates
from cellmill.data.inputs.soma import is_soma, open_soma
from cellmill.data.inputs.source import CountSource, reading
from cellmill.data.inputs.tenx import is_tenx, open_tenx
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json, sha256_file

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


LAYOUTS = ((is_anndata, open_anndata), (is_tenx, open_tenx), (is_loom, open_loom))
"""A test of the open file and the function that reads it, in the order of the tests."""

_LARGE = 1 << 26  # bytes; smaller arrays may be declared by any file
_MOST_RATIO = 100_000  # of declared to stored bytes; the filters that h5py and hdf5plugin have stay below
_PLUGIN = "hdf5plugin"
_FILTERS = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}  # in hdf5plugin


def open_hdf5(path: Path, counts: str) -> CountSource:
    """Open the matrix `counts` of an AnnData, 10x Genomics or Loom file.

    Raises DataError when the file is missing, damaged or none of these, or holds what this module refuses.
    """
    file = open_h5(path)
    try:
        with reading(path):
            refuse_foreign_bytes(path, file)
            for is_layout, open_layout in LAYOUTS:
                if is_layout(file):
                    source = open_layout(path, file, counts)
                    source.close_file = file.close
                    return source
        raise DataError(f"{path}: not an .h5ad, a 10x Genomics .h5 or a .loom: no obs and var groups")
    except BaseException:
        file.close()
        raise


def refuse_foreign_bytes(path: Path, file: h5py.File) -> None:
    """Raise DataError for links and storage outside the file, arrays too large for it, and missing filters."""

    problem = file.visititems_links(_problem_of_link) or file.visititems(_problem_of_object)
    if problem:  # h5py cannot pass an exception through its visits
        raise DataError(f"{path}: {problem}")


def _problem_of_link(name: str, link: Any) -> str | None:
    if not isinstance(link, h5py.ExternalLink):
        return None
    return f"{name} is a link into {link.filename!r}; expected a file that holds its own data"


def _problem_of_object(name: str, item: Any) -> str | None:
    if not isinstance(item, h5py.Dataset) or item.shape is None:
        return None
    if item.external or item.is_virtual:
        return f"{name} is stored in another file; expected a file that holds its own data"
    stored = item.id.get_storage_size()
    if item.nbytes > max(_LARGE, _MOST_RATIO * stored):
        return f"{name} is damaged: it declares {item.nbytes:,} bytes in shape {item.shape} and stores {stored:,}"
    return _missing_filter(name, item) if item.chunks else None


def _missing_filter(name: str, dataset: h5py.Dataset) -> str | None:
    properties = dataset.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code, _, _, title = properties.get_filter(number)
        if not h5py.h5z.filter_avail(code) and find_spec(_PLUGIN) is not None:
            importlib.import_module(_PLUGIN)  # registers its filters; takes a second and is seldom needed
        if not h5py.h5z.filter_avail(code):
            known = _FILTERS.get(code, f"{code} {title.decode(errors='replace')!r}")
            return (
                f"{name} is compressed with filter {known}, which is not installed: "
                "pip install 'cellmill[hdf5plugin]', or write the file with compression='gzip'"
            )
    return None


class Format(NamedTuple):
    """One input format."""

    name: str
    is_format: Callable[[Path], bool]
    open: Callable[[Path, str], CountSource]


FORMATS = (
    Format("Zarr", is_zarr, open_zarr),
    Format("Matrix Market", is_mtx, open_mtx),
    Format("SOMA", is_soma, open_soma),
    Format("HDF5", lambda path: not path.is_dir(), open_hdf5),  # last: any other file, recognised by its content
)


def open_source(path: Path, counts: str) -> CountSource:
    """Open the matrix `counts` of the input at `path`, whose format is recognised by its name and content.

    Raises DataError when there is no such input, or no format is its own.
    """
    for form in FORMATS:
        if form.is_format(path):
            return form.open(path, counts)
    raise DataError(f"{path}: not a file; of folders, Zarr and Matrix Market (matrix.mtx) are read, and SOMA")


def open_counts(path: Path | str, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` (`X`, `raw` or the name of a layer; of 10x files a genome) of an input of any format.

    Raises DataError when the input is missing, truncated or of no known format, lacks the matrix, has no cells or
    genes, or has duplicate obs names.
    """
    path = Path(path)
    source = open_source(path, counts)
    try:
        if 0 in source.matrix.shape:
            raise DataError(f"{path}: empty: {len(source.obs)} cells x {len(source.var)} genes")
        refuse_duplicates(path, "obs", source.obs.index, "call obs_names_make_unique() and write the file again")
        return CountsReader(source)
    except BaseException:
        source.close()
        raise


def open_dataset(path: Path, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` of a local input. Raises DataError."""
    if not is_fasta(path):
        check_walk([path])
        return open_counts(path, counts)
    if counts != "X":
        raise ConfigError(f"{path}: a FASTA file has no matrix {counts!r}; leave the dataset's `counts` empty")
    return FastaReader(path)


def local_input(given: Path | str, cache: Path | None = None) -> Path:
    """Local path of an input: itself, the fetched copy of a URL, or the copy that a record of `fetch` names.

    A copy that is gone is fetched again. Raises DataError if it is then another file than the record's.
    """
    if isinstance(given, str) and is_url(given):
        return fetch_url(given, cache).path
    path = Path(given)
    if not path.name.endswith(RECORD):
        return path
    record = read_record(path)
    if record.path.exists():
        return record.path
    again = fetch_url(record.url, cache)
    if again.sha256 != record.sha256:
        raise DataError(f"{redacted(record.url)}: is another file than when {path} was written; delete that and rerun")
    return again.path


def origin_of(path: Path) -> dict[str, Any]:
    """Name, SHA-256 and size of a local input, for reports; of a folder over its files by name."""
    if path.is_file():
        return {"file": path.name, "sha256": sha256_file(path), "bytes": path.stat().st_size}
    whole, size = hashlib.sha256(), 0
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole.update(f"{sha256_file(file)}  {file.relative_to(path).as_posix()}\n".encode())
        size += file.stat().st_size
    return {"file": path.name, "sha256": whole.hexdigest(), "bytes": size}
