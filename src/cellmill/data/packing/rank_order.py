"""Rank order of cells in place: by count over the gene's corpus median, as `arrays`."""

from dataclasses import dataclass

import numpy as np

from cellmill.data.arrays import rank_order_rows
from cellmill.data.packing.codec import COMPILED
from cellmill.data.rows import positions_in_rows, row_offsets


@dataclass(frozen=True)
class RankOrder:
    """Puts cells of more than `most_genes` genes into rank order."""

    inverse_medians: np.ndarray  # `(genes,)` float32
    most_genes: int = 0

    def sort(
        self, starts: np.ndarray, n: np.ndarray, genes: np.ndarray, counts: np.ndarray
    ) -> None:
        """Sort cells in place, each of which has `n` genes, ascending, and counts from `starts` on.

        `starts` and `n` are `(cells,)` int64, `genes` int32, `counts` uint16 or uint32. By compiled
        loops or by numpy, with the same result.
        """
        is_long = n > self.most_genes
        n = n[is_long]
        starts = starts[is_long]
        ends = row_offsets(n)
        loops = COMPILED.get(int(ends[-1]))
        if loops is not None:
            loops.rank_rows(starts, n, genes, counts, self.inverse_medians)
            return
        entries = np.repeat(starts, n) + positions_in_rows(ends)
        ranked = rank_order_rows(ends, genes[entries], counts[entries], self.inverse_medians)
        genes[entries], counts[entries] = ranked
