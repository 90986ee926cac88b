"""Rank order of cells, sorted in place: by count over the gene's median in the corpus, as
`data.arrays.rank_order_rows`.
"""

from dataclasses import dataclass

import numpy as np

from cellmill.data.arrays import rank_order_rows
from cellmill.data.packing import codec
from cellmill.data.rows import SparseCounts, positions_in_rows, row_offsets


@dataclass(frozen=True)
class RankOrder:
    """Puts cells into rank order."""

    inverse_medians: np.ndarray  # `(genes,)` float32
    sorts_above: int = 0  # cells with at most this many genes are left as they are

    def sort(self, cells: SparseCounts) -> None:
        """Sort cells, whose genes ascend, in place; counts are uint16 or uint32.

        By compiled loops or by numpy, with the same result.
        """
        n = cells.lengths
        is_long = n > self.sorts_above
        n = n[is_long]
        starts = cells.offsets[:-1][is_long]
        _, genes, counts = cells
        offsets = row_offsets(n)
        loops = codec.COMPILED.loops_for(int(offsets[-1]))
        if loops is not None and n.max(initial=0) <= loops.MAX_RANKED:
            loops.rank_rows(starts, n, genes, counts, self.inverse_medians)
            return
        entries = np.repeat(starts, n) + positions_in_rows(offsets)
        long_cells = SparseCounts(offsets, genes[entries], counts[entries])
        _, genes[entries], counts[entries] = rank_order_rows(long_cells, self.inverse_medians)
