"""Contract of an input format: the names of cells and genes, and a matrix that is read in blocks of cells.

A format is a function `open(path, counts) -> CountSource` in a module of its own, and a line in
`cellmill.data.inputs.formats`. It reads values as they are stored; `CountsReader` checks that they are counts.
pyarrow, of the extra `arrow`, is imported when a file needs it.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.h5 import one_line
from cellmill.errors import ConfigError, DataError, UserError


class StoredMatrix(Protocol):
    """Matrix of cells x genes on disk."""

    shape: tuple[int, int]

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """All cells in order, `block` at a time (the last may be shorter): CSR `(cells, genes)` of any real dtype in
        native byte order, int32 indices within the width, entries of a row in any order and possibly repeated.

        May be called again. Holds a few blocks in memory. Raises DataError when the file is damaged.
        """
        ...

    def close(self) -> None:
        """Drop temporary files."""
        ...


@dataclass
class CountSource:
    """One matrix of an input. `obs` and `var` have text indices and the lengths of `matrix.shape`."""

    path: Path
    counts: str  # name of the matrix, as the dataset's `counts`
    matrix: StoredMatrix
    obs: pd.DataFrame
    var: pd.DataFrame
    others: list[str] = field(default_factory=list)  # further values of `counts` that the input has
    ordered: bool = False  # rows are sequences: order and repeats of their columns count
    option: str = "the dataset's `counts`"  # where a user says which matrix
    ranked: bool = False  # rows are genes in rank order, without counts; `ordered` as well
    close_file: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close the file and drop temporary ones."""
        self.matrix.close()
        self.close_file()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError naming `path` for whatever a library raises on a damaged file."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise DataError(f"{path}: damaged, or needs more memory than there is") from None
    except Exception as error:  # h5py, zarr, codecs, numpy and pandas raise errors of many kinds
        raise DataError(f"{path}: damaged: {one_line(error)}") from None


def reblocked(parts: Iterable[sp.csr_matrix], block: int) -> Iterator[sp.csr_matrix]:
    """Rows of `parts` in the same order, `block` at a time."""
    held: list[sp.csr_matrix] = []
    missing = block
    for part in parts:
        at = 0
        while part.shape[0] - at >= missing:
            held.append(part[at : at + missing])
            yield _stacked(held)
            held, at, missing = [], at + missing, block
        if at < part.shape[0]:
            held.append(part[at:])
            missing -= part.shape[0] - at
    if held:
        yield _stacked(held)


def _stacked(parts: list[sp.csr_matrix]) -> sp.csr_matrix:
    return parts[0] if len(parts) == 1 else sp.vstack(parts, format="csr")


def import_arrow(name: str = "pyarrow") -> Any:
    """The module `name` of pyarrow. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"this input requires {name}, which is missing: pip install 'cellmill[arrow]'") from None


def as_obs(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Frame of cells `names`, with text, and what pandas has no type for, as categories of text."""
    made: dict[str, Any] = {}
    for name, column in frame.items():
        plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        text = column.astype(object).where(column.isna(), column.astype(str))
        made[str(name)] = column.to_numpy() if plain else pd.Categorical(text.where(text.notna(), None))
    return pd.DataFrame(made, index=pd.Index(names, dtype=object))
