"""HDF5 inputs: opened only if they hold their own bytes, and read by what they contain, whatever their name.

A file from elsewhere may point into other files (external links, external storage, virtual datasets), declare arrays
that would fill the memory, or need a filter that is not installed: each is one line.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py

from cellmill.data.h5_file import open_h5
from cellmill.data.inputs.anndata_layout import is_anndata, open_anndata
from cellmill.data.inputs.loom import is_loom, open_loom
from cellmill.data.inputs.source import CountSource, reading
from cellmill.data.inputs.tenx import is_tenx, open_tenx
from cellmill.errors import DataError

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
