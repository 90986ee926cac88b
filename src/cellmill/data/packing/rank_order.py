"""Sorting the genes of cells into rank order: by count divided by the gene's corpus median, descending.

The order is that of `data.arrays.rank_order_rows`.
"""

from dataclasses import dataclass

import numpy as np

from cellmill.data import compiled_loops
from cellmill.data.arrays import rank_order_rows
from cellmill.data.rows import SparseCounts, positions_in_rows, row_offsets


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
