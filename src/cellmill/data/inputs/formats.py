"""Input formats: how each is told, and the module that opens it. FASTA files are `cellmill.data.fasta`'s."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cellmill.data.counts_reader import CountsReader, refuse_duplicates
from cellmill.data.inputs.hdf5 import open_hdf5
from cellmill.data.inputs.mtx import is_mtx, open_mtx
from cellmill.data.inputs.soma import is_soma, open_soma
from cellmill.data.inputs.source import CountSource
from cellmill.data.inputs.zarr_store import is_zarr, open_zarr
from cellmill.errors import DataError


class Format(NamedTuple):
    """One input format."""

    name: str
    is_format: Callable[[Path], bool]
    open: Callable[[Path, str], CountSource]


FORMATS = (
    Format("Zarr", is_zarr, open_zarr),
    Format("Matrix Market", is_mtx, open_mtx),
    Format("SOMA", is_soma, open_soma),
    Format("HDF5", lambda path: not path.is_dir(), open_hdf5),  # last: any other file, told by what it contains
)


def open_source(path: Path, counts: str) -> CountSource:
    """Open the matrix `counts` of the input at `path`, whose format is told by its name and content.

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
