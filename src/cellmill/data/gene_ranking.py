"""Rank order of the genes in a cell: by count over the gene's corpus median, highest first, ties by gene.

Shards are written in this order, and cells embedded on the fly go through the same function, so both give the same
tokens bit for bit. The library size scales all values of a cell alike and does not matter. The sort key is float32
and never negative, so its bits sort as integers: one sort of (key bits, position) packed in 64 bits is exact for
genes and counts of any width, and takes about a tenth of an argsort.
"""

from itertools import pairwise

import numpy as np

from cellmill.errors import DataError


def inverse_medians(medians: np.ndarray) -> np.ndarray:
    """1 / corpus median of each gene, float32. Raises DataError for a median that is not positive."""
    bad = ~(np.isfinite(medians) & (medians > 0))
    if bad.any():
        raise DataError(
            f"expected a positive median for gene {int(bad.argmax())} of the vocabulary, got "
            f"{medians[bad.argmax()]:g}; make the vocabulary again"
        )
    return np.float32(1) / medians.astype(np.float32)


def rank_buckets(places: np.ndarray) -> np.ndarray:
    """floor(log2(place + 1)) of places in a cell from 0, int32."""
    return np.frexp(places + 1)[1] - 1


def rank_order(genes: np.ndarray, counts: np.ndarray, inverse_median: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Genes (int32) and counts of one cell by count / median descending, ties by gene ascending."""
    return rank_order_rows(np.array([0, len(genes)]), genes, counts, inverse_median)


def rank_order_rows(
    starts: np.ndarray, genes: np.ndarray, counts: np.ndarray, inverse_median: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`rank_order` of many cells at once: genes as int32 and counts in their own dtype, both `(nonzeros,)`.

    `starts`, `(cells + 1,)`, are offsets of each cell's first gene, the first 0. `genes` and `counts`, `(nonzeros,)`,
    are in any order within a cell, each gene at most once, at most 2**32 in all.
    """
    genes, counts = _by_gene(starts, genes.astype(np.int32, copy=False), counts)
    key = counts.astype(np.float32) * inverse_median[genes]
    packed = (~key.view(np.uint32)).astype(np.uint64) << np.uint64(32)
    packed |= np.arange(len(genes), dtype=np.uint64)
    for start, stop in pairwise(starts.tolist()):
        packed[start:stop].sort()
    order = (packed & np.uint64(0xFFFFFFFF)).view(np.int64)
    return genes[order], counts[order]


def _by_gene(starts: np.ndarray, genes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the genes of each cell, so that ties of the key are broken by position."""
    if len(genes) < 2:
        return genes, counts
    ascending = genes[1:] > genes[:-1]
    borders = starts[1:-1]
    ascending[borders[(borders > 0) & (borders < len(genes))] - 1] = True
    if ascending.all():
        return genes, counts
    cell = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.lexsort((genes, cell))
    return genes[order], counts[order]
