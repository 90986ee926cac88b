"""Contract of an input format: names of cells and genes, and a matrix read in blocks of cells.

A format is one module and one row in the table of `cellmill.data.inputs.formats`; an installed
package adds a row by an entry point of the group `cellmill.input`. Values are read as stored;
`CountsReader` checks that they are counts.
"""

import importlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.datasets import COUNTS
from cellmill.data.arrays import named_frame, text_columns
from cellmill.data.fractions import describe_fractions
from cellmill.data.inputs.h5 import decode
from cellmill.data.inputs.matrices import MAX_LENGTH, StoredMatrix
from cellmill.errors import ConfigError, DataError, require_known

COUNTS_RULE_KEY = "counts_rule"
"""Record of preprocessed cells: how their estimated counts were rounded."""
GENE_LENGTH = "gene_length"
"""Record of preprocessed cells: how many of them had their counts divided by the lengths of genes.
"""


COUNTED = "looks like counts"
ESTIMATED = "looks like estimated counts"
DETECTED = "has only zeros and ones"
LOGS = "looks log-transformed"
_PARTS_OF_COUNTS = ("spliced", "mature", "unspliced", "nascent", "ambiguous")
"""Layers of velocyto and kb-python that hold some of a cell's molecules, the likelier ones first."""
_FEWEST_ONES = 1000  # nonzero values; fewer counts may all be 1
_UNNAMED = 4  # rank of a matrix whose name says nothing of counts
TOTALS = ("n_counts", "total_counts", "nCount_RNA", "n_umis", "nUMI", "n_molecules")
"""Columns of obs that may hold the depth of each cell."""
FEATURE_TYPES = "feature_types"
"""The column of var that says which rows are genes, and which antibodies, guides or controls."""
_GENE_EXPRESSION = "gene expression"
_SHORT_TYPES = frozenset(
    {"rna", "gex", "gene", "adt", "hto", "protein", "antibody", "atac", "peaks"}
    | {"crispr", "guide", "grna", "sgrna"}
)
_NO_VALUE = frozenset({"", "NA", "NaN", "nan", "<NA>"})  # texts of a cell without a value
_MAX_LISTED = 8  # columns named in a note
_NO_TYPE = frozenset({"", "nan", "none"})  # texts of a row without a type of feature


def look_at(matrix: sp.csr_matrix) -> str:
    """What some cells of a matrix look like, in words."""
    values = matrix.data
    if values.dtype.kind not in "buif":
        return "has no numbers"
    if not np.isfinite(values).all():
        return "has values that are not finite"
    if not values.any():
        return "has no values"
    if (values < 0).any():
        return "looks scaled"
    if (values == np.floor(values)).all():
        only_ones = values.max() == 1 and np.count_nonzero(values) >= _FEWEST_ONES
        return DETECTED if only_ones else COUNTED
    looks = describe_fractions(matrix)
    return ESTIMATED if looks.may_be_counts else f"looks {looks.text.partition(':')[0]}"


def _likelihood(name: str) -> int:
    """Rank of a matrix by its name: the lower, the likelier it has the raw counts of whole cells."""
    lower = name.lower()
    if lower in _PARTS_OF_COUNTS:
        return _UNNAMED + 1 + _PARTS_OF_COUNTS.index(lower)
    ranks = (
        name == "raw",
        lower == "counts",
        "raw" in lower and "count" in lower,
        "count" in lower,
    )
    return ranks.index(True) if any(ranks) else _UNNAMED


def looks_recoverable(looks: Mapping[str, str], obs: Container[str]) -> str | None:
    """Return the value of `counts` that recovers counts from logarithms; None if there is none.

    obs must have the cells' depths.
    """
    logs = next((name for name, kind in looks.items() if kind == LOGS), None)
    has_totals = any(name in obs for name in TOTALS)
    return f"expm1({logs})" if logs is not None and has_totals else None


@dataclass(frozen=True)
class StoredObs:
    """obs of an open file, whose columns are read when they are asked for.

    A column of unique text takes 80 bytes a cell in memory.
    """

    index: pd.Index  # text
    columns: Sequence[str]
    read_column: Callable[[str], Any]  # the values of a column; raises DataError

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def read(self, names: Sequence[str]) -> pd.DataFrame:
        """Columns `names`. Raise DataError for a damaged one."""
        return pd.DataFrame({name: self.read_column(name) for name in names}, index=self.index)


@dataclass
class CountSource:
    """One matrix of an input. `obs` and `var` have text indices and the lengths of `matrix.shape`.

    Genes are named by the index of `var`, or in any of its columns of text
    (`data/genes/columns.py`).
    """

    path: Path
    counts: str  # name of the matrix, as the dataset's `counts`
    matrix: StoredMatrix
    obs: pd.DataFrame | StoredObs
    var: pd.DataFrame
    others: list[str] = field(default_factory=list)  # further values of `counts` that the input has
    ordered: bool = False  # rows are sequences: order and repeats of their columns count
    option: str = COUNTS
    ranked: bool = False  # rows are genes in rank order, without counts; `ordered` as well
    # records of preprocessed cells, by COUNTS_RULE_KEY and others
    recorded: dict[str, str] = field(default_factory=dict)
    close_file: Callable[[], None] = lambda: None
    # sentences for the user on how the file was read
    notes: list[str] = field(default_factory=list)
    # columns of obs with texts that are read as missing values, as they are written
    written: dict[str, Any] = field(default_factory=dict)

    # what the values of every matrix look like, by the name of the matrix
    look: Callable[[], dict[str, str]] = dict

    def rename_cells(self, names: pd.Index) -> None:
        """Name the cells anew, in their order."""
        if isinstance(self.obs, StoredObs):
            self.obs = replace(self.obs, index=names)
        else:
            self.obs = self.obs.set_axis(names, axis=0)

    def find_counts(self) -> str:
        """The value of `counts` to read: this matrix if it looks like counts, else the likeliest.

        Estimated counts give way to whole numbers only in a matrix that is named for counts: others
        may be masks. Parts of the molecules come last. Raise DataError if no matrix holds counts.
        """
        looks = self.look()
        others = sorted(self.others, key=_likelihood)
        named = [self.counts, *(name for name in others if _likelihood(name) < _UNNAMED)]
        whole = [self.counts, *(name for name in others if _likelihood(name) <= _UNNAMED)]
        choices = [(COUNTED, named), (ESTIMATED, whole), (COUNTED, others), (ESTIMATED, others)]
        for kind, names in choices:
            for name in names:
                if looks.get(name, COUNTED) == kind:
                    return name
        recover = looks_recoverable(looks, self.obs.columns)
        if recover is None:
            raise DataError(f"{self.path}: {self.counts} {looks[self.counts]}; {self.elsewhere()}")
        return recover

    def elsewhere(self) -> str:
        """Where counts may be, in words, for a message that `matrix` has none."""
        if not self.others:
            return "the file has no other matrix; use a file with raw counts"
        looks = self.look()
        hopeful = [n for n in self.others if looks.get(n, COUNTED) in (COUNTED, ESTIMATED)]
        if hopeful:
            return f"raw counts may be in {' or '.join(hopeful)}: set {self.option}"
        listed = ", ".join(f"{name} {kind}" for name, kind in looks.items() if kind != COUNTED)
        recover = looks_recoverable(looks, self.obs.columns)
        remedy = f"set {self.option} to {recover}, or use" if recover else "use"
        other = "other " if looks.get(self.counts) == COUNTED else ""
        return f"no {other}matrix in this file holds counts ({listed}); {remedy} a file with raw counts"

    def close(self) -> None:
        """Close the file and drop temporary ones."""
        self.matrix.close()
        self.close_file()


@dataclass(frozen=True)
class DeclaredNames:
    """Names of an open input.

    Arrays are read when needed, and count as unknown if they are damaged.
    """

    columns: list[str]
    counts: list[str]
    nodes: dict[str, Any] = field(default_factory=dict)  # categories of columns

    def categories_of(self, column: str) -> list[Any] | None:
        """Return the categories of a column.

        None in Zarr, and for a column of plain text, whose values take as long to read as the stage.
        """
        return _values(self.nodes.get(column))


def _values(array: Any) -> list[Any] | None:
    if isinstance(array, h5py.Group):  # text of pandas 3: values and a mask
        array = array.get("values")
    if not isinstance(array, h5py.Dataset) or array.ndim != 1 or len(array) > MAX_LENGTH:
        return None
    if array.dtype.kind not in "OSbiuf" or array.external or array.is_virtual:
        return None
    try:
        return [decode(value) if isinstance(value, bytes) else value for value in array[:]]
    except (OSError, ValueError):
        return None


class Format(NamedTuple):
    """One input format.

    `file` is the input opened by h5py if it is HDF5, else None; links in it may lead elsewhere.
    """

    name: str  # as messages and help texts list it
    is_format: Callable[[Path, Any], bool]  # (path, file); by name or a few bytes
    # (path, file, counts), where counts is X, or another matrix
    open: Callable[[Path, Any, str], CountSource]
    names: Callable[[Path, Any], DeclaredNames | None] = lambda path, file: None
    """What the input says that it has, in milliseconds; None if unknown before the data is read."""


def with_feature_types(var: pd.DataFrame) -> pd.DataFrame:
    """Return `var` with a column FEATURE_TYPES, if it has types of features under another name.

    DropletUtils, for example, calls them `Type`.
    """
    if FEATURE_TYPES in var:
        return var
    for texts in text_columns(var).values():
        kinds = {text.strip().lower() for text in {*texts}} - _NO_TYPE
        if _GENE_EXPRESSION in kinds or (len(kinds) > 1 and kinds <= _SHORT_TYPES):
            return var.assign(**{FEATURE_TYPES: texts})
    return var


def require_matrix(
    where: Path | str, counts: str, known: Collection[str], option: str = COUNTS
) -> None:
    """Raise DataError unless the input has the matrix `counts`."""
    require_known(counts, known, f"{where}: no matrix {counts!r} ({option})")


def optional_package(name: str, extra: str, needed_by: str = "this input") -> Any:
    """The module `name`. Raises ConfigError if the extra of cellmill that has it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{needed_by} requires {name}, which is missing: pip install 'cellmill[{extra}]'"
        ) from None


def mark_missing(obs: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any], list[str]]:
    """Return obs of a format without missing values, its texts such as NA marked as missing.

    Also returns the columns that have some as they are written, and a sentence for the user.
    """
    marked = {}
    written = {}
    for name, column in obs.items():
        if pd.api.types.is_numeric_dtype(column):
            continue
        texts = pd.Categorical(column)
        missing = [text for text in texts.categories if text in _NO_VALUE]
        if missing:
            marked[str(name)] = texts.remove_categories(missing)
            written[str(name)] = texts
    if not marked:
        return obs, {}, []
    numbers = [f"{name} {(column.codes < 0).sum():,}" for name, column in marked.items()]
    listed = ", ".join(numbers[:_MAX_LISTED]) + (", ..." if len(numbers) > _MAX_LISTED else "")
    return (
        obs.assign(**marked),
        written,
        [f"texts of obs that are read as missing values (NA, nan or empty): {listed}"],
    )


def as_obs(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Frame of cells `names`, with text, and what pandas has no type for, as categories of text."""
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        text = column.astype(object).where(column.isna(), column.astype(str))
        columns[str(name)] = (
            column.to_numpy() if plain else pd.Categorical(text.where(text.notna(), None))
        )
    return named_frame(names, columns)
