"""Counts of an input, read in blocks of rows, never the whole matrix.

The reader checks that the values of a format are counts and returns canonical CSR blocks. Whole
numbers may also be normalised values that were rounded, or ones for all detected genes:
`RoundedCounts` looks for four signs in up to 4,096 cells with at least 50 detected genes. True
counts show none: nearly every such cell has a gene with one count, some have a gene with more,
cells differ in depth by far more, and a cell of 300 genes has a gene with more than 10 counts (at
least 15 in six datasets of blood, cell lines and brain). Counts downsampled to one depth share the
sign of depth, so the signs are warnings and not errors.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import DATASET
from cellmill.config.datasets import CountsRule
from cellmill.data.arrays import MAX_COUNT, sum_repeated, text_values
from cellmill.data.fractions import StochasticRounding, describe_fractions, describe_negatives
from cellmill.data.inputs.source import (
    FEATURE_TYPES,
    CountSource,
    StoredObs,
    with_feature_types,
)
from cellmill.data.rows import row_sums
from cellmill.errors import DataError, require_known

_CHECKED_CELLS = 512  # cells that `check_some` reads
# limits of `RoundedCounts`
_MAX_CELLS = 4096  # cells that it looks at
_MIN_CELLS = 20  # fewer cells show nothing
_MIN_GENES = 50  # detected genes of a cell that it looks at
_MIN_GENES_OF_DEEP_CELL = 300  # detected genes of a cell whose largest count it looks at
_MAX_LOG_COUNT = 10  # log(1 + counts per 10,000) is at most 9.2
_MIN_SPREAD = 1.3  # counts: the 95th percentile of the cells' sums is at least this times the 5th
# limit of `ClippedCounts`
_MIN_CLIPPED = 2  # values at the largest number of their type; a single one may be there by chance
_NORMALISED = "normalised values that were rounded"
OBS_REMEDY = "call obs_names_make_unique() and write the file again"


class RoundedCounts:
    """The first cells that are read, and whether they look like other whole numbers than counts."""

    def __init__(self) -> None:
        # sum, smallest and largest count, and number of genes
        self.cells = np.zeros((4, 0), np.int64)

    def add(self, counts: sp.csr_matrix) -> None:
        """Add cells of a canonical CSR block without stored zeros."""
        rows = np.flatnonzero(np.diff(counts.indptr) >= _MIN_GENES)[
            : _MAX_CELLS - self.cells.shape[1]
        ]
        if len(rows):
            block = counts[rows]
            starts = block.indptr[:-1]
            measures = [
                row_sums(block.data, block.indptr),
                np.minimum.reduceat(block.data, starts),
                np.maximum.reduceat(block.data, starts),
                np.diff(block.indptr),
            ]
            self.cells = np.hstack([self.cells, measures])

    def sign(self) -> str | None:
        """What the values may be instead, and the sign of it; None if they look like counts."""
        sums, smallest, largest, n_genes = self.cells
        if len(sums) < _MIN_CELLS:
            return None
        if largest.max() == 1:
            return "zeros and ones instead of counts: no value is above 1"
        largest = largest[n_genes >= _MIN_GENES_OF_DEEP_CELL]
        low, high = np.quantile(sums, (0.05, 0.95))
        above_one = float((smallest > 1).mean())
        if above_one > 0.5:
            return f"{_NORMALISED}: {above_one:.0%} of cells have no gene with a count of 1"
        with_low_counts = (
            float((largest <= _MAX_LOG_COUNT).mean()) if len(largest) >= _MIN_CELLS else 0.0
        )
        if with_low_counts > 0.95:
            return (
                f"{_NORMALISED}: {with_low_counts:.0%} of cells of {_MIN_GENES_OF_DEEP_CELL} genes "
                f"have no count above {_MAX_LOG_COUNT}, as in logarithms"
            )
        if high < _MIN_SPREAD * low:
            return f"{_NORMALISED}: the sums of 90% of cells lie between {low:,.0f} and {high:,.0f}"
        return None


class ClippedCounts:
    """Counts the stored values at the largest number of a small integer type.

    Larger counts may have been cut off there: anndata's `concat_on_disk` casts every file to the type
    of the first one.
    """

    def __init__(self) -> None:
        self._dtype: np.dtype | None = None
        self._n_largest = 0
        self._n_below = 0  # values in the tenth of the range below the largest

    @classmethod
    def from_array(cls, counted: np.ndarray) -> Self:
        """Values that `as_array` returned."""
        clipped = cls()
        code, clipped._n_largest, clipped._n_below = counted.tolist()
        clipped._dtype = np.dtype(chr(code)) if code else None
        return clipped

    def as_array(self) -> np.ndarray:
        """Character of the type (0: none so far) and both numbers, int64 (3,)."""
        code = 0 if self._dtype is None else ord(self._dtype.char)
        return np.array([code, self._n_largest, self._n_below], np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add stored values. Only types of one or two bytes are counted."""
        if values.dtype.kind not in "iu" or values.dtype.itemsize > 2:
            return
        self._dtype = values.dtype
        largest = np.iinfo(values.dtype).max
        n_high = int((values >= largest - largest // 10).sum())
        n_largest = int((values == largest).sum())
        self._n_largest += n_largest
        self._n_below += n_high - n_largest

    def sign(self) -> str | None:
        """The sign that the values show, in words; None if none."""
        if self._dtype is None or self._n_largest < _MIN_CLIPPED:
            return None
        if self._n_largest <= self._n_below:
            return None
        largest = np.iinfo(self._dtype).max
        return f"{self._n_largest:,} values are {largest}, the largest {self._dtype}"


class CountsReader(AbstractContextManager["CountsReader"]):
    """Counts of one input; made by `open_counts`, closed by `close` or a `with` block.

    Attributes: `path`, `counts` (X, raw or a layer), `n_obs`, `n_vars`, `obs_names` (a unique text index),
    `obs_columns`, `var` (a DataFrame whose text index may repeat), `var_names`, and `ordered`: rows are sequences,
    whose columns stand in their own order and may repeat, or, if `ranked` too, genes in rank order, without counts.
    """

    dataset: str | None = None  # its name, if it is not the stem of `path`
    counts_rule: CountsRule = "refuse"  # treatment of estimated counts; set before `rows`
    n_rounded = 0  # number of values with fractions in the rows that were read last

    def __init__(self, source: CountSource, close: Callable[[], None] | None = None):
        self.path = source.path
        self.counts = source.counts
        self.obs_names = source.obs.index
        self.obs_columns = list(source.obs.columns)
        self.var = with_feature_types(source.var)
        self.var_names: list[str] = list(self.var.index)
        self.n_obs = len(self.obs_names)
        self.n_vars = len(self.var)
        self.ordered = source.ordered
        self.ranked = source.ranked
        self.recorded = source.recorded
        self._source = source
        self.close = close or source.close
        # what `names.match_columns` found, by the digest of the vocabulary
        self.matches: dict[str, Any] = {}
        self._rounded = RoundedCounts()
        self._clipped = ClippedCounts()

    def __exit__(self, *_: object) -> None:
        self.close()

    def find_counts(self) -> str:
        """The value of `counts` whose matrix looks like counts. Raises DataError if there is none."""
        return self._source.find_counts()

    def use_gene_column(self, name: str) -> None:
        """Name genes by column `name` of var, or by its `index`, whatever other columns hold.

        Raises DataError when it is missing.
        """
        if name != "index":
            require_known(
                name, [*map(str, self.var)], f"{self.path}: no var column {name!r} (gene_column)"
            )
            self.var_names = text_values(self.var[name]).tolist()
        kept = [column for column in (FEATURE_TYPES,) if column in self.var]
        self.var = self.var[kept].set_axis(pd.Index(self.var_names, dtype=object), axis=0)

    @cached_property
    def obs(self) -> pd.DataFrame:
        """All of obs, indexed by `obs_names`. `read_obs` needs less memory for preprocessed cells."""
        stored = self._source.obs
        return stored if isinstance(stored, pd.DataFrame) else stored.read(self.obs_columns)

    @property
    def stored_obs(self) -> pd.DataFrame | StoredObs:
        """obs in memory, or, of preprocessed cells, in the open file."""
        return self._source.obs

    def read_obs(self, names: Iterable[str]) -> pd.DataFrame:
        """Those of the columns `names` that obs has, indexed by `obs_names`."""
        known = [name for name in dict.fromkeys(names) if name in self.obs_columns]
        stored = self._source.obs
        return stored[known] if isinstance(stored, pd.DataFrame) else stored.read(known)

    def read_column(self, name: str) -> pd.Series:
        """Column `name` of `obs_columns`."""
        return self.read_obs([name])[name]

    def written_column(self, name: str) -> pd.Series:
        """Column `name` of obs, with the texts of the file that are read as missing values."""
        written = self._source.written.get(name)
        return self.obs[name] if written is None else pd.Series(written, self.obs.index, name=name)

    def obs_column(self, name: str, owner: str) -> pd.Series:
        """Column `name` of obs, which option `owner` names. Raises DataError when it is missing."""
        known = [*map(str, self.obs_columns)]
        require_known(name, known, f"{self.path}: no obs column {name!r} ({owner})")
        return self.read_column(name)

    def split_values(self, column: str) -> np.ndarray:
        """Text of obs column `column` by cell; for `dataset`, the name of the file.

        Raises DataError if a cell has no value.
        """
        if column == DATASET:
            return np.full(self.n_obs, self.path.stem, object)
        values = self.obs_column(column, "shard.split_by")
        n_missing = int(values.isna().sum())
        if n_missing:
            raise DataError(
                f"{self.path}: {n_missing:,} cells have no {column!r} (shard.split_by), so no split; "
                "fill in the column, or split by another"
            )
        return text_values(values.astype(object))

    def rows(self, block: int = 4096, first: int = 0) -> Iterator[sp.csr_matrix]:
        """Yield all cells in order, `block` at a time: CSR `(cells, n_vars)`, uint32.

        Columns ascend, and no zeros are stored; `ordered` rows are as stored. Begins with row `first`,
        a multiple of `block` or `n_obs`, and reads none before it where the format allows that. May be
        called again. Raises DataError naming cell and gene of the first value that is not a count, or
        damage.
        """
        if not first:
            self.n_rounded = 0
            self._clipped = ClippedCounts()
        for matrix in self._source.matrix.blocks(block, first):
            self._clipped.add(matrix.data)
            values = self._whole_numbers(matrix, first)
            counts = sp.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)
            if not self.ordered:
                if not counts.has_canonical_format:
                    counts = sum_repeated(
                        counts, f"{self.path}: {self.counts}: entries of one cell and gene"
                    )
                if not counts.data.all():
                    counts.eliminate_zeros()
                self._rounded.add(counts)
            yield counts
            first += matrix.shape[0]

    def seen_values(self) -> dict[str, np.ndarray]:
        """What the rows so far have shown of the values, for `restore_values` of another reader."""
        return {
            "rounded_cells": self._rounded.cells,
            "clipped": self._clipped.as_array(),
            "n_rounded": np.array(self.n_rounded),
        }

    def restore_values(self, seen: Mapping[str, np.ndarray]) -> None:
        """Go on from what another reader has seen, before `rows` are read from a later one."""
        self._rounded.cells = seen["rounded_cells"]
        self._clipped = ClippedCounts.from_array(seen["clipped"])
        self.n_rounded = int(seen["n_rounded"])

    def check_some(self) -> None:
        """Check the first cells as `rows` does.

        If the matrix is not stored by cell, check some values, which are too few to judge estimated
        counts. Raises DataError for the first value that is not a count, or damage.
        """
        matrix = self._source.matrix
        if matrix.is_by_cell:
            next(self.rows(_CHECKED_CELLS))
            return
        if matrix.pieces() is not None and self.counts_rule == "refuse":
            self._whole_numbers(matrix.some(_CHECKED_CELLS), 0)

    def doubts(self) -> Iterator[str]:
        """List doubts about the values that were read.

        They may look normalised and rounded, be zeros and ones only, or look cut off at the
        largest number of their type.
        """
        if self.ordered:
            return
        rounded = self._rounded.sign()
        if rounded is not None:
            yield f"{self.path}: {self.counts} may hold {rounded}; {self._elsewhere()}"
        clipped = self._clipped.sign()
        if clipped is not None:
            yield (
                f"{self.path}: {self.counts} may hold counts that were cut off: {clipped}; "
                "write the file again with a larger type, from the files that it was made of"
            )

    def warn_of_values(self) -> None:
        """Print `doubts` on stderr."""
        for doubt in self.doubts():
            print(f"warning: {doubt}", file=sys.stderr)

    def _whole_numbers(self, matrix: sp.csr_matrix, first: int) -> np.ndarray:
        """Return the values of `matrix`, uint32, rounded by `counts_rule`.

        Raises DataError for values that are not counts.
        """
        values = matrix.data
        if values.dtype in (np.float32, np.float64):
            # NaN and values out of range become some other number
            with np.errstate(invalid="ignore"):
                counts = values.astype(np.uint32)
            if (counts.astype(values.dtype) == values).all():
                return counts
        kind = values.dtype.kind
        if kind not in "buif":
            raise DataError(f"{self.path}: {self.counts} expected counts, got {values.dtype}")
        if kind == "f" and not np.isfinite(values).all():
            remedy = "; counts are whole numbers from 0"
            raise self._fault(~np.isfinite(values), "is not finite", remedy, matrix, first)
        if kind in "if" and (values < 0).any():
            remedy = f": it looks {describe_negatives(matrix)}; {self._elsewhere()}"
            raise self._fault(values < 0, "is negative", remedy, matrix, first)
        if kind == "f":
            is_fractional = values != np.floor(values)
            if is_fractional.any():
                values = self._rounded_values(matrix, is_fractional, first)
        if len(values) and values.max() > MAX_COUNT:
            is_largest = values == values.max()
            remedy = "; the limit is 2^32 - 1"
            raise self._fault(is_largest, "is too large", remedy, matrix, first)
        return values.astype(np.uint32)

    def _rounded_values(
        self, matrix: sp.csr_matrix, is_fractional: np.ndarray, first: int
    ) -> np.ndarray:
        """Round estimated counts to whole numbers.

        Raises DataError for other values, and if `counts_rule` is refuse.
        """
        looks = describe_fractions(matrix)
        if self.counts_rule == "refuse":
            fault = "is fractional"
            remedy = f": it looks {looks.text}"
            if looks.may_be_counts:
                remedy += "; set counts_rule to stochastic or round, if they are counts"
            if self._source.others or not looks.may_be_counts:
                remedy += f"; {self._elsewhere()}"
            raise self._fault(is_fractional, fault, remedy, matrix, first)
        if not looks.may_be_counts:
            fault = f"is fractional, and counts_rule {self.counts_rule} is for estimated counts: it looks {looks.text}"
            raise self._fault(is_fractional, fault, f"; {self._elsewhere()}", matrix, first)
        self.n_rounded += int(is_fractional.sum())
        if self.counts_rule == "round":
            return np.rint(matrix.data)  # halves to even
        return self._draw.round(matrix, first)

    @cached_property
    def _draw(self) -> StochasticRounding:
        return StochasticRounding(self.dataset or self.path.name, self.var_names)

    def _fault(
        self, bad: np.ndarray, fault: str, remedy: str, matrix: sp.csr_matrix, first: int
    ) -> DataError:
        """Error that names the first of the `bad` values, with its cell and gene."""
        index = int(bad.argmax())
        row = int(np.searchsorted(matrix.indptr, index, side="right")) - 1
        cell = self.obs_names[first + row]
        gene = self.var_names[matrix.indices[index]]
        value = matrix.data[index]
        digits = f"{value:g}"
        if float(digits) != value and float(digits).is_integer():  # it must not look whole
            digits = str(value)
        return DataError(
            f"{self.path}: {self.counts} does not hold counts: {digits} (cell {cell!r}, gene {gene!r}) {fault}{remedy}"
        )

    def _elsewhere(self) -> str:
        return self._source.elsewhere()


def keep_apart(names: pd.Index) -> tuple[pd.Index, str | None]:
    """Make names of cells unique: if some are equal, every copy gets the number of its row.

    Returns a sentence if some were equal.
    """
    is_repeated = names.duplicated(keep=False)
    if not is_repeated.any():
        return names, None
    texts = names.to_numpy(dtype=object).copy()
    rows = np.flatnonzero(is_repeated)
    for row in rows.tolist():
        texts[row] = f"{texts[row]}:row{row + 1}"
    unique = pd.Index(texts, dtype=object)
    repeated = names[rows]
    first = repeated[0]
    copies = int((names == first).sum())
    note = (
        f"{len(rows):,} cells share {repeated.nunique():,} names ({first!r} occurs {copies:,} times): they are kept "
        f"apart by row, as {texts[rows[0]]!r}; no cell is joined by such a name"
    )
    return (unique, note) if unique.is_unique else (keep_apart(unique)[0], note)


def refuse_duplicates(
    where: Path | str, kind: str, names: pd.Index, remedy: str = OBS_REMEDY
) -> None:
    """Raise DataError when two of the `names` of a file are equal."""
    repeated = names[names.duplicated()]
    if len(repeated):
        others = f" and {repeated.nunique() - 1:,} more repeat" if repeated.nunique() > 1 else ""
        raise DataError(
            f"{where}: {kind} names are not unique: {repeated[0]!r} occurs {int((names == repeated[0]).sum())} times"
            f"{others}; {remedy}"
        )
