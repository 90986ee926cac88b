"""The table of input formats, and the one way to open an input.

HDF5 files are read by what they contain, whatever their name. A file from elsewhere may point into other files
(external links, external storage, virtual datasets), declare arrays that would fill the memory, or need a filter that
is not installed: each of these is refused in one line.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py

from cellmill.config import plugin
from cellmill.config.corpus import is_fasta
from cellmill.data.inputs.anndata_files import (
    is_anndata,
    is_zarr,
    names_in_anndata,
    names_in_zarr,
    open_anndata,
    open_zarr,
)
from cellmill.data.inputs.fasta import open_fasta
from cellmill.data.inputs.h5 import open_h5, reading
from cellmill.data.inputs.h5_walk import check_walk, is_hdf5
from cellmill.data.inputs.loom import is_loom, names_in_loom, open_loom
from cellmill.data.inputs.matrices import size_problem
from cellmill.data.inputs.mtx import is_mtx, open_mtx
from cellmill.data.inputs.reader import CountsReader, refuse_duplicates
from cellmill.data.inputs.soma import is_soma, open_soma
from cellmill.data.inputs.source import CountSource, DeclaredNames, Format
from cellmill.data.inputs.tenx import is_tenx, open_tenx
from cellmill.errors import ConfigError, DataError


def _to_convert(kind: str, needed: str) -> Callable[[Path, Any, str], CountSource]:
    def refuse(path: Path, file: Any, counts: str) -> CountSource:
        raise ConfigError(
            f"{path}: run cellmill convert {kind} {path} {needed} --out NAME.h5ad first, and use that file"
        )

    return refuse


FORMATS = (
    Format(
        "FASTA of proteins (.fasta, .fa, .faa, also .gz)",
        lambda path, file: file is None and is_fasta(path),
        open_fasta,
    ),
    Format(".zarr", is_zarr, open_zarr, names_in_zarr),
    Format("folder with matrix.mtx", is_mtx, open_mtx),
    Format("SOMA experiment", is_soma, open_soma),
    Format(".h5ad", is_anndata, open_anndata, names_in_anndata),
    Format("10x .h5", is_tenx, open_tenx),
    Format(".loom", is_loom, open_loom, names_in_loom),
    Format(
        "token dataset of Geneformer",
        lambda path, file: (path / "state.json").is_file(),
        _to_convert("geneformer", "--dictionaries FOLDER"),
    ),
    Format(
        "scModelForge",
        lambda path, file: (path / "shard_000" / "gene_indices.npy").is_file(),
        _to_convert("scmodelforge", "--genes FILE"),
    ),
)
"""In the order of their tests. `config.corpus.INPUTS` names them to users, as every process reads it."""


def formats() -> Iterator[Format]:
    """The table, then formats of installed packages: entry points of the group `cellmill.input`, each a `Format`."""
    yield from FORMATS
    for name in plugin.names("input"):
        form = plugin.load("input", name)
        if not isinstance(form, Format):
            raise ConfigError(f"input {name!r} is not a {Format.__module__}.Format; repair or remove the package")
        yield form


def _format_of(path: Path, file: h5py.File | None) -> Format:
    if (found := next((form for form in formats() if form.is_format(path, file)), None)) is not None:
        return found
    if file is None and not path.is_dir():
        open_h5(path).close()  # raises: missing, not a file, or not HDF5
    raise DataError(f"{path}: no known format; there are: {', '.join(form.name for form in formats())}")


def open_counts(path: Path | str, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` (`X`, `raw` or the name of a layer; of 10x files a genome) of an input of any format.

    Raises DataError when the input is missing, truncated or of no known format, lacks the matrix, has no cells or
    genes, or has duplicate obs names.
    """
    path = Path(path)
    with ExitStack() as stack:
        file = stack.enter_context(open_h5(path)) if is_hdf5(path) else None
        with reading(path):
            if file is not None:
                _refuse_foreign_bytes(path, file)
            source = _format_of(path, file).open(path, file, counts)
        stack.callback(source.close)
        if 0 in source.matrix.shape:
            raise DataError(f"{path}: empty: {len(source.obs)} cells x {len(source.var)} genes")
        refuse_duplicates(path, "obs", source.obs.index)
        return CountsReader(source, stack.pop_all().close)


def open_dataset(path: Path, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` of a user's input: HDF5 is walked by a child process first. Raises DataError."""
    check_walk([path])
    return open_counts(path, counts)


@contextmanager
def declared_names(path: Path) -> Iterator[DeclaredNames | None]:
    """Names of the input at `path`, while it is open; None if they are unknown without its data, or damaged."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(h5py.File(path)) if is_hdf5(path) else None
            names = _format_of(path, file).names(path, file) if path.exists() else None
        except Exception:  # the stage reports a damaged file
            names = None
        yield names


_FILTERS = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}  # in hdf5plugin


def _refuse_foreign_bytes(path: Path, file: h5py.File) -> None:
    """Raise DataError for links and storage outside the file, arrays too large for it, and missing filters."""

    def link_problem(name: str, link: Any) -> str | None:
        if not isinstance(link, h5py.ExternalLink):
            return None
        return f"{name} is a link into {link.filename!r}; expected a file that holds its own data"

    def problem(name: str, item: Any) -> str | None:
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            return None
        if item.external or item.is_virtual:
            return f"{name} is stored in another file; expected a file that holds its own data"
        return size_problem(name, item, item.id.get_storage_size) or _missing_filter(name, item)

    # h5py cannot pass an exception through its visits
    if found := file.visititems_links(link_problem) or file.visititems(problem):
        raise DataError(f"{path}: {found}")


def _missing_filter(name: str, dataset: h5py.Dataset) -> str | None:
    properties = dataset.id.get_create_plist()
    for number in range(properties.get_nfilters() if dataset.chunks else 0):
        code, _, _, title = properties.get_filter(number)
        if not h5py.h5z.filter_avail(code) and find_spec("hdf5plugin") is not None:
            importlib.import_module("hdf5plugin")  # registers its filters; takes a second and is seldom needed
        if not h5py.h5z.filter_avail(code):
            known = _FILTERS.get(code, f"{code} {title.decode(errors='replace')!r}")
            return (
                f"{name} is compressed with filter {known}, which is not installed: "
                "pip install 'cellmill[hdf5plugin]', or write the file with compression='gzip'"
            )
    return None
