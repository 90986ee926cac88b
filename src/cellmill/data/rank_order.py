"""Rank order of the genes of cells: by count divided by the gene's corpus median, descending, ties by
gene.

Shards and cells embedded on the fly get the same order, so both give the same tokens bit for bit. The
sort key is float32 and never negative, so its bits sort as integers: one sort of (key bits, position)
packed into 64 bits is exact for genes and counts of any width, and takes about a tenth of the time of
an argsort.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cellmill.data import compiled_loops
from cellmill.data.rows import SparseCounts, positions_in_rows, row_numbers, row_offsets

_RANKED = 128  # cells ranked at a time: their numbers fit into a core's cache


@dataclass(frozen=True)
class RankOrder:
    """Sorts the genes of cells into rank order."""

    inverse_medians: np.ndarray  # `(genes,)` float32: 1 / corpus median
    max_unsorted_genes: int = 0  # cells with at most this many genes are left as they are

    def sort(self, cells: SparseCounts) -> None:
        """Sort genes and counts of cells in place. Genes ascend before; counts are uint16 or uint32.

        Compiled loops and numpy give the same result.
        """
        _, genes, counts = cells
        is_long = cells.lengths > self.max_unsorted_genes
        genes_per_cell = cells.lengths[is_long]
        starts = cells.offsets[:-1][is_long]
        offsets = row_offsets(genes_per_cell)
        loops = compiled_loops.COMPILED.loops_for(int(offsets[-1]))
        if loops is not None and genes_per_cell.max(initial=0) <= loops.MAX_RANKED:
            loops.rank_rows(starts, genes_per_cell, genes, counts, self.inverse_medians)
            return
        # index of each gene of the long cells
        entries = np.repeat(starts, genes_per_cell) + positions_in_rows(offsets)
        long_cells = SparseCounts(offsets, genes[entries], counts[entries])
        _, genes[entries], counts[entries] = rank_order_rows(long_cells, self.inverse_medians)


def inverse_medians(medians: np.ndarray) -> np.ndarray:
    """1 / corpus median of each gene, float32; medians of a vocabulary are positive."""
    return np.float32(1) / medians.astype(np.float32)


def rank_buckets(positions: np.ndarray) -> np.ndarray:
    """floor(log2(position + 1)) of positions in a cell from 0, int32."""
    return np.frexp(positions + 1)[1] - 1


def rank_order_rows(cells: SparseCounts, inverse_median: np.ndarray) -> SparseCounts:
    """Copy of `cells` in rank order: by count / median descending, ties by gene ascending.

    The genes of a cell are in any order, each at most once. There are at most 2**32 in all.
    """
    offsets, genes, counts = cells
    genes = genes.astype(np.int32, copy=False)
    ascending = genes[1:] > genes[:-1]
    borders = offsets[1:-1]
    between = borders[(borders > 0) & (borders < len(genes))]
    ascending[between - 1] = True  # from the last gene of a cell to the first of the next
    if not ascending.all():  # ties of the key are broken by position
        order = np.lexsort((genes, row_numbers(offsets)))
        genes = genes[order]
        counts = counts[order]
    ranked = np.empty_like(genes)
    ranked_counts = np.empty_like(counts)
    for first in range(0, cells.n_cells, _RANKED):
        part_offsets = offsets[first : first + _RANKED + 1]
        start, stop = part_offsets[[0, -1]].tolist()
        part = slice(start, stop)
        in_part = SparseCounts(part_offsets - start, genes[part], counts[part])
        order = _rank_order(in_part, inverse_median)
        genes[part].take(order, out=ranked[part], mode="clip")  # `raise` would copy
        counts[part].take(order, out=ranked_counts[part], mode="clip")
    return SparseCounts(offsets, ranked, ranked_counts)


def _rank_order(cells: SparseCounts, inverse_median: np.ndarray) -> np.ndarray:
    """Positions, int64, in rank order within each cell."""
    key = cells.counts.astype(np.float32)
    key *= inverse_median.take(cells.genes)
    # inverted bits of the key, so that the largest comes first, then the position
    packed = (~key.view(np.uint32)).astype(np.uint64)
    packed <<= np.uint64(32)
    packed |= np.arange(len(packed), dtype=np.uint64)
    for start, stop in pairwise(cells.offsets.tolist()):
        packed[start:stop].sort()
    packed &= np.uint64(0xFFFFFFFF)
    return packed.view(np.int64)
