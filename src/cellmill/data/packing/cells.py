"""Packed cells in memory: genes and counts of each, a part for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cellmill.data.packing.codec import Parts, ValueCoding, unpack_parts
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import row_offsets

Order = Literal["rank", "genes"]
"""Order of the genes of a cell: `rank`, as stored, also of sequences; or `genes`, ascending."""


class CellKind(NamedTuple):
    """What packed cells hold."""

    order: Order
    n_genes: int  # genes are below it
    dtype: np.dtype[Any]  # of the counts: uint16 or uint32


class Unpacked(NamedTuple):
    """Cells as arrays."""

    starts: np.ndarray  # `(cells + 1,)` int64, first gene of each cell, and the end
    genes: np.ndarray  # `(nonzeros,)` int32
    counts: np.ndarray | None  # `(nonzeros,)`, of `CellKind.dtype`


@dataclass(frozen=True)
class PackedCells:
    """Packed cells in one memory. Arrays are `(cells,)` int64."""

    memory: np.ndarray  # uint8
    gene_starts: np.ndarray  # first byte of the genes
    count_starts: np.ndarray  # first byte of the counts, which is the end of the genes
    ends: np.ndarray
    n_genes: np.ndarray

    def select(self, chosen: slice | np.ndarray) -> PackedCells:
        """Some of the cells, in the same memory."""
        return PackedCells(
            self.memory,
            self.gene_starts[chosen],
            self.count_starts[chosen],
            self.ends[chosen],
            self.n_genes[chosen],
        )

    def unpack(self, kind: CellKind, max_genes: int | None = None) -> Unpacked:
        """All genes and counts, or the first `max_genes` genes of each cell without counts.

        Raises codec.DamagedPart.
        """
        kept = self.n_genes if max_genes is None else np.minimum(self.n_genes, max_genes)
        starts = row_offsets(kept)
        genes = recycled_empty(starts[-1], np.int32)
        counts = None
        if max_genes is None:
            counts = recycled_empty(starts[-1], kind.dtype)
        self.unpack_into(kind, kept, starts[:-1], genes, counts)
        return Unpacked(starts, genes, counts)

    def unpack_into(
        self,
        kind: CellKind,
        kept: np.ndarray,
        targets: np.ndarray,
        genes: np.ndarray,
        counts: np.ndarray | None,
    ) -> None:
        """Unpack the first `kept` genes and counts of each cell to positions `targets`.

        Raises codec.DamagedPart.
        """
        count_starts = self.count_starts
        gene_bytes = count_starts - self.gene_starts
        parts = Parts(self.memory, self.gene_starts, gene_bytes, self.n_genes, kept, targets)
        ascending = kind.order == "genes"
        unpack_parts(parts, ValueCoding(ascending, added=0, limit=kind.n_genes - 1), genes)
        if counts is not None:
            limit = int(np.iinfo(kind.dtype).max)
            count_bytes = self.ends - count_starts
            parts = Parts(self.memory, count_starts, count_bytes, self.n_genes, kept, targets)
            unpack_parts(parts, ValueCoding(ascending=False, added=1, limit=limit), counts)


def join_cells(parts: list[PackedCells]) -> PackedCells:
    """Cells of several memories in one of their own, one after the other."""
    pieces = [np.empty(0, np.uint8)]
    for part in parts:
        for begin, end in zip(part.gene_starts.tolist(), part.ends.tolist()):
            pieces.append(part.memory[begin:end])
    n_genes = np.concatenate([part.n_genes for part in parts])
    gene_bytes = np.concatenate([part.count_starts - part.gene_starts for part in parts])
    offsets = row_offsets([len(piece) for piece in pieces[1:]])
    starts = offsets[:-1]
    memory = np.concatenate(pieces)
    return PackedCells(memory, starts, starts + gene_bytes, offsets[1:], n_genes)
