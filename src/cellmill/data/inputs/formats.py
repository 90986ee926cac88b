"""The table of input formats, and the one way to open an input.

HDF5 files are read by what they contain, whatever their name. A file from elsewhere may point into
other files (external links, external storage, virtual datasets), declare arrays that would fill the
memory, or need a filter that is not installed: each of these is refused in one line.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import h5py

from cellmill.config import plugin
from cellmill.config.datasets import CountsRule
from cellmill.data.inputs import anndata_files, soma, tenx_loom
from cellmill.data.inputs.containers import split_part
from cellmill.data.inputs.derived.grouped import MODES, choose_mode, group_probes, is_split
from cellmill.data.inputs.h5 import open_h5, reading
from cellmill.data.inputs.h5_walk import check_walk, is_hdf5, open_without_locks
from cellmill.data.inputs.matrices import size_problem
from cellmill.data.inputs.reader import CountsReader, keep_apart
from cellmill.data.inputs.source import CountSource, DeclaredNames, Format
from cellmill.data.inputs.text import counts as text_counts
from cellmill.data.inputs.text import fasta, mtx
from cellmill.data.inputs.text.tables import is_table
from cellmill.errors import ConfigError, DataError

_HDF5_ENDS = (".h5ad", ".h5mu", ".h5", ".hdf5", ".loom", ".h5seurat")
_MAX_LISTED = 12  # inputs of a folder
_FROM_R = (
    'in R write the counts with DropletUtils::write10xCounts("cells.h5", counts(sce)), '
    'of Seurat with SeuratObject::LayerData(object, layer = "counts") for counts(sce), after JoinLayers(object) if it '
    "has layers such as counts.1"
)
_FROM_BPCELLS = (
    "it is a matrix of BPCells: in R run BPCells::write_matrix_10x_hdf5(BPCells::open_matrix_dir(FOLDER), "
    '"cells.h5")'
)
_FROM_ALEVIN = "let alevin write text with --dumpMtx"
_HINTS: dict[str | tuple[str, ...], str] = {
    (".rds", ".rda", ".rdata", ".qs", ".qs2"): _FROM_R,
    (".xlsx", ".xls"): "save the sheet as .csv",
    (".h5ad.gz", ".h5.gz", ".loom.gz"): "unpack it with gunzip",
    (".tar", ".tar.gz", ".tgz"): "unpack it with tar -xf",
    ".bz2": "unpack it with bunzip2",
    ".xz": "unpack it with unxz",
    ".zst": "unpack it with zstd -d",
    (".gef", ".gem", ".gem.gz"): "write an .h5ad with stereopy: stereo.io.stereo_to_anndata",
    ".gct": "remove its first two lines and save it as .tsv",
    (".eds", ".eds.gz", "quants_mat.gz"): _FROM_ALEVIN,
    ".st": "keep the columns of cell, gene and count, named cell, gene and count, and save it as .tsv",
    ".bam": "count its reads first, with STARsolo or Cell Ranger",
    ".cloupe": "give filtered_feature_bc_matrix.h5 of the same run of Cell Ranger",
    (".parquet", ".feather"): "read it with pandas and save it as .csv",
    (".npz", ".pkl", ".pickle"): "read it in Python and save it as .h5ad with anndata",
}
"""Remedies for files of unknown format, by the end of their names."""
_HINTS_OF_FOLDERS = {
    "storage_order": _FROM_BPCELLS,
    "quants_mat.gz": _FROM_ALEVIN,
    "alevin/quants_mat.gz": _FROM_ALEVIN,
}
"""Remedies for folders, by a file in them."""
# names of filters in hdf5plugin
_FILTERS = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}


def _to_convert(name: str, mark: str, command: str) -> Format:
    """Folders that have a file `mark`, and are read by `cellmill convert` alone."""

    def refuse(path: Path, file: Any, counts: str) -> NoReturn:
        command_line = f"cellmill convert {command.format(path)} --out NAME.h5ad"
        raise ConfigError(f"{path}: run {command_line} first, and use that file")

    return Format(name, lambda path, file: (path / mark).is_file(), refuse)


FORMATS = (
    fasta.FORMAT,
    anndata_files.ZARR,
    mtx.FORMAT,
    soma.FORMAT,
    anndata_files.H5AD,
    tenx_loom.TENX,
    tenx_loom.LOOM,
    _to_convert("token dataset of Geneformer", "state.json", "geneformer {} --dictionaries FOLDER"),
    _to_convert("scModelForge", "shard_000/gene_indices.npy", "scmodelforge {} --genes FILE"),
)
"""In the order of their tests."""


def formats() -> Iterator[Format]:
    """List the formats of the table, then those of installed packages.

    A package has entry points of the group `cellmill.input`, each a `Format`.
    """
    yield from FORMATS
    for name in plugin.names("input"):
        form = plugin.load("input", name)
        if not isinstance(form, Format):
            raise ConfigError(
                f"input {name!r} is not a {Format.__module__}.Format; repair or remove the package"
            )
        yield form
    yield text_counts.FORMAT  # last: a package may read text tables of its own


def _format_of(path: Path, file: h5py.File | None) -> Format:
    for form in formats():
        if form.is_format(path, file):
            return form
    if file is None and not path.is_dir() and (path.suffix in _HDF5_ENDS or not path.is_file()):
        open_h5(path).close()  # raises: missing, not a file, or not HDF5
    listed = f"no known format; there are: {', '.join(form.name for form in formats())}"
    raise DataError(f"{path}: {listed}{_hint(path, file)}")


def _hint(path: Path, file: h5py.File | None) -> str:
    """Say what to do about an input of unknown format: inputs in a folder, or a command that converts it."""
    for mark, hint in _HINTS_OF_FOLDERS.items():
        if (path / mark).is_file():
            return f"; {hint}"
    if path.is_dir():
        inputs = _inputs_below(path, depth=3)
        tables = (file.name for file in sorted(path.iterdir()) if is_table(file))
        for found, remedy in ((inputs, "one of these"), (tables, "the table of counts")):
            listed = ", ".join(islice(found, _MAX_LISTED))
            if listed:
                return f"; it has {listed}: give {remedy}"
        return ""
    names = {*(file or ())}
    if {"assays", "meta.data"} <= names:
        return '; it is an h5Seurat: in R run SeuratDisk::Convert("cells.h5Seurat", dest = "h5ad")'
    if "barcode_idx" in names:
        return "; it lists the molecules of Cell Ranger: give filtered_feature_bc_matrix.h5"
    for end, hint in _HINTS.items():
        if path.name.lower().endswith(end):
            return f"; {hint}"
    return ""


def _inputs_below(folder: Path, depth: int) -> Iterator[str]:
    """Inputs in the folders of a folder, such as Gene/filtered of STARsolo's Solo.out."""
    for item in sorted(folder.iterdir()):
        if item.name.startswith(".") or item.is_symlink():
            continue
        forms = (mtx.FORMAT, anndata_files.ZARR)
        if item.is_dir() and any(form.is_format(item, None) for form in forms):
            yield f"{item.name}/"
        elif item.is_dir() and depth > 1:
            yield from (f"{item.name}/{name}" for name in _inputs_below(item, depth - 1))
        elif item.suffix in _HDF5_ENDS and is_hdf5(item):
            yield item.name


def open_counts(path: Path | str, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` of an input of any format.

    `counts` is `X`, `raw` or the name of a layer, and of 10x files a genome. Prints on stderr how rows
    that are parts of genes were summed, and how cells with one name are told apart. Raises DataError
    when the input is missing, truncated or of no known format, lacks the matrix, or has no cells or
    genes.
    """
    path, counts = split_part(Path(path), counts)
    with ExitStack() as stack:
        file = stack.enter_context(open_h5(path)) if is_hdf5(path) else None
        with reading(path):
            if file is not None:
                _refuse_foreign_bytes(path, file)
            source = _open_source(path, file, counts)
        stack.callback(source.close)
        if 0 in source.matrix.shape:
            n_obs, n_vars = source.matrix.shape
            raise DataError(f"{path}: empty: {n_obs} cells x {n_vars} genes")
        names, note = keep_apart(source.obs.index)
        if note is not None:
            source.rename_cells(names)
            source.notes.append(note)
        for note in source.notes:
            print(f"{source.path}: {note}", file=sys.stderr)
        return CountsReader(source, stack.pop_all().close)


def _open_source(path: Path, file: h5py.File | None, counts: str) -> CountSource:
    """The input as its format reads it, with rows that are parts of genes summed."""
    form = _format_of(path, file)
    try:
        source = form.open(path, file, counts)
    except DataError:
        if counts not in MODES:
            raise
        source = form.open(path, file, "X")
        if not is_split(source.var.index):
            source.close()
            raise
    if source.ordered:
        return source
    return choose_mode(group_probes(source), counts)


def open_dataset(
    path: Path,
    counts: str = "X",
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> CountsReader:
    """Open the matrix `counts` of a user's input, to be read by the options of the same names.

    HDF5 is first walked by a child process. Raises DataError.
    """
    check_walk([split_part(path)[0]])
    reader = open_counts(path, counts)
    reader.counts_rule = counts_rule
    if gene_column is not None:
        try:
            reader.use_gene_column(gene_column)
        except DataError:
            reader.close()
            raise
    return reader


@contextmanager
def declared_names(path: Path) -> Iterator[DeclaredNames | None]:
    """Yield the names of the input at `path`, while it is open.

    None if it is damaged, or if its names are known only after its data is read.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_without_locks(path)) if is_hdf5(path) else None
            names = _format_of(path, file).names(path, file) if path.exists() else None
        except Exception:  # the stage reports a damaged file
            names = None
        yield names


def _refuse_foreign_bytes(path: Path, file: h5py.File) -> None:
    """Raise DataError for HDF5 that reads more than its own bytes, or cannot be read.

    These are links and storage outside the file, arrays too large for it, and missing filters.
    """

    def link_problem(name: str, link: Any) -> str | None:
        if not isinstance(link, h5py.ExternalLink):
            return None
        return f"{name} is a link into {link.filename!r}; expected a file that holds its own data"

    def problem(name: str, item: Any) -> str | None:
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            return None
        if item.external or item.is_virtual:
            return f"{name} is stored in another file; expected a file that holds its own data"
        fault = size_problem(name, item, item.id.get_storage_size)
        if fault is not None:
            return fault
        properties = item.id.get_create_plist()
        for number in range(properties.get_nfilters() if item.chunks else 0):
            code, _, _, title = properties.get_filter(number)
            if not h5py.h5z.filter_avail(code) and find_spec("hdf5plugin") is not None:
                # registers its filters; takes a second and is seldom needed
                importlib.import_module("hdf5plugin")
            if not h5py.h5z.filter_avail(code):
                known = _FILTERS.get(code, f"{code} {title.decode(errors='replace')!r}")
                return (
                    f"{name} is compressed with filter {known}, which is not installed: "
                    "pip install 'cellmill[hdf5plugin]', or write the file with compression='gzip'"
                )
        return None

    # h5py cannot pass an exception through its visits
    fault = file.visititems_links(link_problem) or file.visititems(problem)
    if fault:
        raise DataError(f"{path}: {fault}")
