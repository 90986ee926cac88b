"""Array arithmetic of the data engine: blocks of CSR counts, rank order of genes, and text columns.

A cell's genes are ranked by count over the gene's corpus median, highest first, ties by gene.
Shards and cells embedded on the fly go through the same function, so both give the same tokens bit
for bit. The sort key is float32 and never negative, so its bits sort as integers: one sort of (key
bits, position) packed into 64 bits is exact for genes and counts of any width, and takes about a
tenth of the time of an argsort.

Text columns are normalised because pandas 3 stores text as `str` and keeps missing values in
`astype(str)` where pandas 2 made `nan` of them, and because anndata 0.12 refuses to write `str`.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from cellmill.errors import DataError

if TYPE_CHECKING:  # takes a fifth of a second, which readers of shards alone do not need
    import pandas as pd

# counts of a cell after normalisation, as `target_sum` of `scanpy.pp.normalize_total`
TARGET_SUM = 10_000.0
MAX_COUNT = int(np.iinfo(np.uint32).max)
DATASET = "dataset"  # obs column that shards add: the name of a cell's dataset
MISSING = "<missing>"  # level of cells without a value
_RANKED = 128  # cells at a time, whose numbers fit into a core's cache


def select_columns(
    block: sp.csr_matrix, target: np.ndarray, n_columns: int, what: str = "columns of one gene"
) -> sp.csr_matrix:
    """Canonical `block` with column j moved to `target[j]` (int32) and columns of one target, which
    `what` names, summed; -1 drops a column.
    """
    if (
        len(target) == n_columns
        and block.has_canonical_format
        and (target == np.arange(n_columns)).all()
    ):
        return block
    columns = target.take(block.indices)  # a third of the time of target[block.indices]
    keep = columns >= 0 if (target < 0).any() else None
    if keep is None or keep.all():
        indptr = block.indptr
        data = block.data
    else:
        indptr = row_offsets(keep)[block.indptr]
        columns = columns[keep]
        data = block.data[keep]
    moved = sp.csr_matrix((data, columns, indptr), shape=(block.shape[0], n_columns))
    return moved if moved.has_canonical_format else sum_repeated(moved, what)


def select_rows(block: sp.csr_matrix, keep: np.ndarray) -> sp.csr_matrix:
    """Rows of `block` where the mask `keep` is True; `block` itself if that is everywhere."""
    return block if keep.all() else block[np.flatnonzero(keep)]


def sum_repeated(block: sp.csr_matrix, what: str) -> sp.csr_matrix:
    """A canonical copy of `block`, of the same dtype, whose repeated entries, which `what` names,
    are summed.

    Raises DataError when a sum of unsigned integers is larger than its dtype.
    """
    if block.data.dtype.kind != "u":
        # a copy with sorted rows, in less than half the time of scipy's own sort
        ordered = block.tocsc().tocsr()
        ordered.sum_duplicates()
        return ordered
    # rows sorted by column, then value: both are packed into one integer, of 32 bits where they
    # fit, which takes a quarter of the time of two transpositions
    fits = max(block.shape[1] - 1, int(block.data.max(initial=0))) < 1 << 16
    word, bits = (np.uint32, 16) if fits else (np.uint64, 32)
    packed = block.indices.astype(word)
    packed <<= word(bits)
    packed |= block.data
    for start, stop in pairwise(block.indptr.tolist()):
        packed[start:stop].sort()
    columns = (packed >> word(bits)).astype(np.int32, copy=False)
    packed &= word((1 << bits) - 1)
    values = packed.astype(block.data.dtype, copy=False)
    ordered = sp.csr_matrix((values, columns, block.indptr), shape=block.shape)
    if ordered.has_canonical_format:
        return ordered
    wide = ordered.astype(np.uint64)
    wide.sum_duplicates()
    if len(wide.data) and (largest := int(wide.data.max())) > np.iinfo(block.data.dtype).max:
        raise DataError(
            f"{what} sum to {largest:,}; the limit is {np.iinfo(block.data.dtype).max:,}"
        )
    return sp.csr_matrix(
        (wide.data.astype(block.data.dtype), wide.indices, wide.indptr), shape=block.shape
    )


def summed(block: sp.csr_matrix) -> sp.csr_matrix:
    """A canonical copy of `block`: of a sequence its composition."""
    block = block.copy()
    block.sum_duplicates()
    return block


def row_sums(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Exact int64 sum of each row of integer `values`, `(nonzeros,)`; rows, which may be empty,
    start at `indptr`.
    """
    sums = np.zeros(len(indptr) - 1, np.int64)
    filled = np.flatnonzero(indptr[1:] > indptr[:-1])
    if len(filled):
        sums[filled] = np.add.reduceat(values, indptr[:-1][filled], dtype=np.int64)
    return sums


def row_offsets(lengths: Any) -> np.ndarray:
    """First entry of each row of these lengths, and the end of the last: `(rows + 1,)` int64."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def positions_in_rows(starts: np.ndarray) -> np.ndarray:
    """Position from 0 of each entry in its row, int64; rows start at `starts`, `(rows + 1,)`."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


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
    for start, stop, factor in zip(indptr[:-1].tolist(), indptr[1:].tolist(), scale):
        values[start:stop] *= factor
    return values


def scale_of_totals(totals: np.ndarray, dtype: type[np.floating[Any]]) -> np.ndarray:
    """Factor, `(cells,)` of `dtype`, that makes sums of counts 10,000; 0 for a cell without counts."""
    scale = np.zeros(len(totals), dtype)
    filled = totals.nonzero()[0]
    scale[filled] = dtype(TARGET_SUM) / totals[filled].astype(dtype)
    return scale


def log_normalise(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 10,000 of the cell), float32; a cell without counts stays zero."""
    values = np.log1p(counts_per_10k(counts.data, counts.indptr)).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def inverse_medians(medians: np.ndarray) -> np.ndarray:
    """1 / corpus median of each gene, float32; a vocabulary has positive medians alone."""
    return np.float32(1) / medians.astype(np.float32)


def rank_buckets(places: np.ndarray) -> np.ndarray:
    """floor(log2(place + 1)) of places in a cell from 0, int32."""
    return np.frexp(places + 1)[1] - 1


def rank_order_rows(
    starts: np.ndarray, genes: np.ndarray, counts: np.ndarray, inverse_median: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Genes (int32) and counts of each cell by count / median descending, ties by gene ascending;
    `(nonzeros,)`.

    `starts`, `(cells + 1,)`, are offsets of each cell's first gene, the first 0. `genes` and
    `counts`, `(nonzeros,)`, are in any order within a cell, each gene at most once, at most 2**32
    in all.
    """
    genes = genes.astype(np.int32, copy=False)
    ascending = genes[1:] > genes[:-1]
    borders = starts[1:-1]
    ascending[borders[(borders > 0) & (borders < len(genes))] - 1] = True
    if not ascending.all():  # ties of the key are broken by position
        order = np.lexsort((genes, np.repeat(np.arange(len(starts) - 1), np.diff(starts))))
        genes = genes[order]
        counts = counts[order]
    ranked = np.empty_like(genes)
    ranked_counts = np.empty_like(counts)
    edges = starts.tolist()
    for first in range(0, len(edges) - 1, _RANKED):
        borders_of_part = edges[first : first + _RANKED + 1]
        part = slice(borders_of_part[0], borders_of_part[-1])
        key = counts[part].astype(np.float32)
        key *= inverse_median.take(genes[part])
        packed = (~key.view(np.uint32)).astype(np.uint64)
        packed <<= np.uint64(32)
        packed |= np.arange(len(packed), dtype=np.uint64)
        for start, stop in pairwise(borders_of_part):
            packed[start - borders_of_part[0] : stop - borders_of_part[0]].sort()
        packed &= np.uint64(0xFFFFFFFF)
        order = packed.view(np.int64)
        genes[part].take(order, out=ranked[part], mode="clip")  # `raise` would copy
        counts[part].take(order, out=ranked_counts[part], mode="clip")
    return ranked, ranked_counts


def text_values(column: pd.Series, missing: str = "") -> np.ndarray:
    """Values of a column as str, `(cells,)` object, and `missing` where there is none."""
    pd = import_module("pandas")
    codes, values = pd.factorize(column)
    texts = pd.Series(values).astype(str).to_numpy(object)
    return np.array([*texts, missing], object)[codes]


def as_text(value: Any) -> str:
    """Text of a value; whole numbers lose their decimals, since a column with gaps holds floats."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def text_index(index: pd.Index) -> pd.Index:
    """An index of str, of dtype object; a missing name is `nan`."""
    texts = index.astype(str).astype(object)
    return texts.fillna("nan") if texts.hasnans else texts


def plain_text(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with text of dtype object in its index, columns and categories; columns with
    missing text are categories.
    """
    pd = import_module("pandas")
    changed = {}
    for name in frame.columns:
        column = frame[name]
        is_string = isinstance(column.dtype, pd.StringDtype)
        if isinstance(column.dtype, pd.CategoricalDtype):
            names = column.cat.categories
            if isinstance(names.dtype, pd.StringDtype):
                changed[name] = column.cat.rename_categories(names.astype(object))
        elif is_string or column.dtype == object:
            if column.isna().any():
                codes, values = pd.factorize(
                    column.astype(object).map(str, na_action="ignore"), sort=True
                )
                changed[name] = pd.Categorical.from_codes(codes, pd.Index(values, dtype=object))
            elif is_string:
                changed[name] = column.astype(object)
    index = (
        frame.index.astype(object) if isinstance(frame.index.dtype, pd.StringDtype) else frame.index
    )
    return frame.assign(**changed).set_axis(index, axis=0)
