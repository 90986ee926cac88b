"""Arithmetic on blocks of CSR counts, and text columns that are the same with every pandas.

Text columns are normalised for two reasons. pandas 3 stores text as `str`, and `astype(str)` keeps
missing values, which pandas 2 turned into the text `nan`. And anndata 0.12 refuses to write `str`.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.rows import row_offsets, row_sums
from cellmill.errors import DataError

if TYPE_CHECKING:  # takes a fifth of a second, which readers of shards do not need
    import pandas as pd

# counts of a cell after normalisation, as `target_sum` of `scanpy.pp.normalize_total`
TARGET_SUM = 10_000.0
MAX_COUNT = int(np.iinfo(np.uint32).max)


def select_columns(
    block: sp.csr_matrix, target: np.ndarray, n_columns: int, what: str = "columns of one gene"
) -> sp.csr_matrix:
    """Move column j of canonical `block` to column `target[j]` (int32); -1 drops it.

    Columns with the same target are summed. `what` names them in errors.
    """
    is_same = len(target) == n_columns and (target == np.arange(n_columns)).all()
    if is_same and block.has_canonical_format:
        return block
    columns = target.take(block.indices)  # a third of the time of target[block.indices]
    data = block.data
    indptr = block.indptr
    if (target < 0).any():
        keep = columns >= 0
        columns = columns[keep]
        data = data[keep]
        indptr = row_offsets(keep)[indptr]
    moved = sp.csr_matrix((data, columns, indptr), shape=(block.shape[0], n_columns))
    return moved if moved.has_canonical_format else sum_repeated(moved, what)


def select_rows(block: sp.csr_matrix, keep: np.ndarray) -> sp.csr_matrix:
    """Select the rows of `block` where the mask `keep` is True; `block` itself if it always is."""
    return block if keep.all() else block[np.flatnonzero(keep)]


def sum_repeated(block: sp.csr_matrix, what: str) -> sp.csr_matrix:
    """Copy `block` with repeated entries summed, in canonical form and the same dtype.

    Raises DataError if a sum is too large for unsigned integers of that dtype. `what` names the
    repeated entries there.
    """
    dtype = block.data.dtype
    if dtype.kind != "u":
        # a copy with sorted rows, in less than half the time of scipy's own sort
        ordered = block.tocsc().tocsr()
        ordered.sum_duplicates()
        return ordered
    ordered = _sort_by_column(block)
    if ordered.has_canonical_format:
        return ordered
    ordered = ordered.astype(np.uint64)
    ordered.sum_duplicates()
    largest = int(ordered.data.max(initial=0))
    limit = np.iinfo(dtype).max
    if largest > limit:
        raise DataError(f"{what} sum to {largest:,}; the limit is {limit:,}")
    return ordered.astype(dtype)


def _sort_by_column(block: sp.csr_matrix) -> sp.csr_matrix:
    """Copy a block of unsigned integers with each row sorted by column, then value.

    Column and value are packed into one integer to be sorted, of 32 bits if both fit. This takes a
    quarter of the time of two transpositions.
    """
    largest = max(block.shape[1] - 1, int(block.data.max(initial=0)))
    word, bits = (np.uint32, 16) if largest < 1 << 16 else (np.uint64, 32)
    packed = block.indices.astype(word)
    packed <<= word(bits)
    packed |= block.data
    for start, stop in pairwise(block.indptr.tolist()):
        packed[start:stop].sort()
    columns = (packed >> word(bits)).astype(np.int32, copy=False)
    packed &= word((1 << bits) - 1)
    values = packed.astype(block.data.dtype, copy=False)
    return sp.csr_matrix((values, columns, block.indptr), shape=block.shape)


def gene_counts(counts: sp.csr_matrix, ordered: bool) -> sp.csr_matrix:
    """Return the counts of each gene, canonical.

    In a sequence (`ordered`) these are the occurrences of each token, summed in a copy.
    """
    if ordered:
        counts = counts.copy()
        counts.sum_duplicates()
    return counts


def counts_per_10k(
    counts: np.ndarray, indptr: np.ndarray, dtype: type[np.floating[Any]] = np.float64
) -> np.ndarray:
    """Scale each row of counts to a sum of 10,000; return `(nonzeros,)` of `dtype`.

    `counts`, `(nonzeros,)`, are of any integer type, above zero. Rows, which may be empty, start at
    `indptr`, `(cells + 1,)`, the first at 0.
    """
    values = counts.astype(dtype)
    scale = scale_of_totals(row_sums(counts, indptr), dtype)
    # a loop, because a temporary as long as the counts costs more in allocation than the arithmetic
    for (start, stop), factor in zip(pairwise(indptr.tolist()), scale):
        values[start:stop] *= factor
    return values


def scale_of_totals(totals: np.ndarray, dtype: type[np.floating[Any]]) -> np.ndarray:
    """Compute the factors that scale `totals`, sums of counts, to 10,000: `(cells,)` of `dtype`.

    A cell without counts has factor 0.
    """
    scale = np.zeros(len(totals), dtype)
    filled = totals.nonzero()[0]
    scale[filled] = dtype(TARGET_SUM) / totals[filled].astype(dtype)
    return scale


def log_normalise(counts: sp.csr_matrix) -> sp.csr_matrix:
    """Compute log(1 + counts per 10,000 of the cell), float32; a cell without counts stays zero."""
    values = counts_per_10k(counts.data, counts.indptr)
    logs = np.log1p(values).astype(np.float32)
    return sp.csr_matrix((logs, counts.indices, counts.indptr), shape=counts.shape)


def text_values(column: pd.Series, missing: str = "") -> np.ndarray:
    """Return the text of each value of a column, `(cells,)` object; `missing` for a missing value."""
    codes, values = import_module("pandas").factorize(column)
    return np.array([*map(as_text, values), missing], object)[codes]


def text_columns(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the texts of the columns that hold text, or categories of text, by name.

    A missing value is an empty text.
    """
    pd = import_module("pandas")
    texts = {}
    for name, column in frame.items():
        values = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
        if pd.api.types.is_object_dtype(values) or pd.api.types.is_string_dtype(values):
            texts[str(name)] = text_values(column).tolist()
    return texts


def as_text(value: Any) -> str:
    """Return a value as text. A whole number has no decimals, though a column with gaps holds floats."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def text_index(index: pd.Index) -> pd.Index:
    """Return the index as str, of dtype object. A missing name becomes the text `nan`."""
    texts = index.astype(str).astype(object)
    return texts.fillna("nan") if texts.hasnans else texts


def named_frame(names: Any, columns: Any = None) -> pd.DataFrame:
    """Make a data frame of `columns`, if any, indexed by `names` of dtype object."""
    pd = import_module("pandas")
    return pd.DataFrame(columns, index=pd.Index(names, dtype=object))


def plain_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with text of dtype object in its index, columns and categories.

    Columns with missing text become categories.
    """
    pd = import_module("pandas")
    changed = {}
    for name, column in frame.items():
        if isinstance(column.dtype, pd.CategoricalDtype):
            categories = column.cat.categories
            if isinstance(categories.dtype, pd.StringDtype):
                changed[name] = column.cat.rename_categories(categories.astype(object))
            continue
        is_string = isinstance(column.dtype, pd.StringDtype)
        if (is_string or column.dtype == object) and column.isna().any():
            texts = column.astype(object).map(str, na_action="ignore")
            codes, values = pd.factorize(texts, sort=True)
            changed[name] = pd.Categorical.from_codes(codes, pd.Index(values, dtype=object))
        elif is_string:
            changed[name] = column.astype(object)
    index = frame.index
    if isinstance(index.dtype, pd.StringDtype):
        index = index.astype(object)
    return frame.assign(**changed).set_axis(index, axis=0)


def divide(sums: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return `sums` / `n`, NaN where `n` is 0."""
    quotient = np.full(np.shape(sums), np.nan)
    np.divide(sums, n, out=quotient, where=n > 0)
    return quotient
