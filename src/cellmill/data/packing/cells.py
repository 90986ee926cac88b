"""Packed cells in memory. A cell has two parts: its genes, then its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cellmill.data import compiled_loops
from cellmill.data.packing.codec import Parts, ValueCoding, pack_parts, unpack_parts
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import SparseCounts, row_offsets

# order of the genes of a cell. genes: ascending. rank: as they are given, which is rank order, or for a
# sequence its own order
GeneOrder = Literal["rank", "genes"]


class CellKind(NamedTuple):
    """What packed cells hold."""

    gene_order: GeneOrder
    n_genes: int  # genes are rows of the vocabulary, below this number
    dtype: np.dtype[Any]  # dtype of the counts: uint16 or uint32


@dataclass(frozen=True)
class PackedCells:
    """Packed cells in one buffer. Arrays are `(cells,)` int64, except `memory`."""

    memory: np.ndarray  # `(bytes,)` uint8
    gene_starts: np.ndarray  # first byte of the genes
    count_starts: np.ndarray  # first byte of the counts, the one after the genes
    stops: np.ndarray  # byte after the counts
    lengths: np.ndarray  # number of genes

    def select(self, chosen: slice | np.ndarray) -> PackedCells:
        """Select some of the cells, in the same buffer."""
        return PackedCells(
            self.memory,
            self.gene_starts[chosen],
            self.count_starts[chosen],
            self.stops[chosen],
            self.lengths[chosen],
        )

    def unpack(self, kind: CellKind, max_genes: int | None = None) -> SparseCounts:
        """Unpack genes and counts, or only the first `max_genes` genes of each cell.

        Raises DamagedPart.
        """
        n_kept = self.lengths if max_genes is None else np.minimum(self.lengths, max_genes)
        offsets = row_offsets(n_kept)
        genes = recycled_empty(offsets[-1], np.int32)
        counts = None
        if max_genes is None:
            counts = recycled_empty(offsets[-1], kind.dtype)
        self.unpack_into(kind, n_kept, offsets[:-1], genes, counts)
        return SparseCounts(offsets, genes, counts)

    def unpack_into(
        self,
        kind: CellKind,
        n_kept: np.ndarray,
        targets: np.ndarray,
        genes: np.ndarray,
        counts: np.ndarray | None,
    ) -> None:
        """Unpack the first `n_kept` genes of each cell into `genes`, from position `targets` on.

        Their counts go into `counts` in the same way. `n_kept` and `targets` are `(cells,)` int64.
        Raises DamagedPart.
        """
        count_starts = self.count_starts
        gene_bytes = count_starts - self.gene_starts
        parts = Parts(self.memory, self.gene_starts, gene_bytes, self.lengths, n_kept, targets)
        ascending = kind.gene_order == "genes"
        unpack_parts(parts, ValueCoding(ascending, added=0, limit=kind.n_genes - 1), genes)
        if counts is not None:
            limit = int(np.iinfo(kind.dtype).max)
            count_bytes = self.stops - count_starts
            parts = Parts(self.memory, count_starts, count_bytes, self.lengths, n_kept, targets)
            unpack_parts(parts, ValueCoding(ascending=False, added=1, limit=limit), counts)


def pack_cells(cells: SparseCounts, gene_order: GeneOrder) -> tuple[np.ndarray, np.ndarray]:
    """Pack cells. Their counts are above 0.

    Returns the bytes, `(bytes,)` uint8, which are the genes and then the counts of each cell in turn,
    and the number of bytes of each of these parts, `(2 * cells,)` int64. Raises ValueError if
    `gene_order` is `genes` and the genes of a cell do not ascend.
    """
    values = recycled_empty(2 * len(cells.counts), np.uint32)
    ascending = gene_order == "genes"
    loops = compiled_loops.COMPILED.loops_for(len(values))
    join = _join_values if loops is None else loops.join_values
    if not join(*cells, ascending, values):
        raise ValueError("genes of a cell do not ascend")
    return pack_parts(values, row_offsets(np.repeat(cells.lengths, 2)))


def _join_values(
    offsets: np.ndarray, genes: np.ndarray, counts: np.ndarray, ascending: bool, values: np.ndarray
) -> bool:
    """Fill `values`, `(2 * nonzeros,)` uint32, with the values to pack of each cell in turn.

    These are its genes, or their differences minus 1 if they ascend, and then its counts minus 1.
    Returns False if genes that should ascend do not.
    """
    gene_values = genes
    if ascending:
        is_first = np.zeros(len(genes) + 1, bool)
        is_first[offsets[:-1]] = True
        before = np.where(is_first[:-1], -1, np.roll(genes, 1))
        gene_values = genes - before - 1
        if (gene_values < 0).any():
            return False
    lengths = np.diff(offsets)
    # values of a cell begin at twice its offset
    gene_position = np.arange(len(genes)) + np.repeat(offsets[:-1], lengths)
    count_position = gene_position + np.repeat(lengths, lengths)
    values[gene_position] = gene_values
    values[count_position] = counts.astype(np.uint32) - 1
    return True


def join_cells(buffers: list[PackedCells]) -> PackedCells:
    """Copy cells from several buffers into a new one, one after the other."""
    bytes_by_cell = [np.empty(0, np.uint8)]
    for cells in buffers:
        for start, stop in zip(cells.gene_starts.tolist(), cells.stops.tolist()):
            bytes_by_cell.append(cells.memory[start:stop])
    lengths = np.concatenate([cells.lengths for cells in buffers])
    gene_bytes = np.concatenate([cells.count_starts - cells.gene_starts for cells in buffers])
    offsets = row_offsets([len(cell) for cell in bytes_by_cell[1:]])
    gene_starts = offsets[:-1]
    memory = np.concatenate(bytes_by_cell)
    return PackedCells(memory, gene_starts, gene_starts + gene_bytes, offsets[1:], lengths)
