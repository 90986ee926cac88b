"""The pass of `preprocess` over the counts of a file: measures of its cells, and the rows that pass.

A killed process resumes it. The state `measured` has the number of cells, sums over them, and what
the reader has seen of the values. Measures of cells and the rows are appended to streams.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from cellmill.config.corpus import Preprocess
from cellmill.data.arrays import select_columns, select_rows
from cellmill.data.inputs.h5 import count_dtype
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.naming import Genes
from cellmill.data.prepare.protocols import LengthNormalisation
from cellmill.data.rows import row_offsets, row_sums
from cellmill.data.saved_work import SavedBytes, SavedRows, SavedWork
from cellmill.files import progress

DROPPED = ("filter", "no counts", "min_genes", "min_counts", "max_mito_frac", "no gene left")
"""Reasons to drop a cell. The first reason that applies is reported. The last one means that min_cells
dropped all its genes.
"""
_BLOCK = 512  # most cells at a time: their numbers fit into a core's cache
_STATE = "measured"


class RowSpill:
    """Blocks of counts of `n_columns` columns on disk; `add` all of them, then read `blocks`.

    Memory holds one block. On disk a block is the number of its rows and the bytes of a count,
    int64; the values of each row, int32; columns, of two bytes if that is enough; and counts.
    """

    def __init__(self, stream: SavedBytes, n_columns: int) -> None:
        self.stream = stream
        self._n_columns = n_columns
        self._column = count_dtype(n_columns - 1)  # for most inputs two bytes, written faster

    def add(self, block: sp.csr_matrix) -> None:
        """Append rows, of unsigned counts and int32 indices."""
        counts = block.data.astype(count_dtype(int(block.data.max(initial=0))), copy=False)
        lengths = np.diff(block.indptr).astype(np.int32)
        self.stream.write(np.array([len(lengths), counts.itemsize], np.int64))
        self.stream.write(lengths)
        self.stream.write(block.indices.astype(self._column))
        self.stream.write(np.ascontiguousarray(counts))

    def blocks(self, position: int = 0) -> Iterator[tuple[sp.csr_matrix, int]]:
        """Yield the blocks from byte `position` on, in the order in which they were added.

        Each has counts of its own dtype, and comes with the position after it.
        """

        def read(n: int, dtype: np.dtype) -> np.ndarray:
            nonlocal position
            array = np.empty(n, dtype)
            self.stream.read_into(array, position)
            position += array.nbytes
            return array

        while position < self.stream.size:
            n_rows, itemsize = read(2, np.dtype(np.int64)).tolist()
            indptr = row_offsets(read(n_rows, np.dtype(np.int32))).astype(np.int32)
            columns = read(int(indptr[-1]), self._column).astype(np.int32)
            counts = read(len(columns), np.dtype(f"<u{itemsize}"))
            shape = (n_rows, self._n_columns)
            yield sp.csr_matrix((counts, columns, indptr), shape=shape), position


@dataclass
class MeasuredCells:
    """Measures of all cells of a file, and of the genes in those that are kept."""

    measures: dict[str, np.ndarray]  # n_genes, n_counts and mito_frac
    reason: np.ndarray  # index into DROPPED, -1 for a kept cell
    detected: np.ndarray  # number of kept cells in which each gene is detected
    largest: int  # largest count of a kept cell
    # counts of all cells on each of `Genes.unnamed`; float64, exact below 2^53
    unnamed_sums: np.ndarray
    total: float  # counts of all cells on genes, named or not
    passing: RowSpill  # rows of the kept cells

    def tally(self) -> dict[str, int]:
        """Number of dropped cells by reason."""
        return {name: int((self.reason == number).sum()) for number, name in enumerate(DROPPED)}


def measure_cells(
    reader: CountsReader,
    genes: Genes,
    options: Preprocess,
    keep: np.ndarray,
    saved: SavedWork,
    normalisation: LengthNormalisation | None,
) -> MeasuredCells:
    """Measure every cell, and spill the rows of the cells that pass.

    What a killed process has measured is restored from `saved`.
    """
    size = len(genes.gene_ids)
    n = reader.n_obs
    n_genes = np.zeros(n, np.int64)
    n_counts = np.zeros(n, np.int64)
    mito_frac = np.zeros(n)
    measures = {"n_genes": n_genes, "n_counts": n_counts, "mito_frac": mito_frac}
    reason = np.full(n, -1, np.int8)
    detected = np.zeros(size, np.int64)
    left_out = np.zeros(reader.n_vars)
    largest = np.zeros((), np.int64)
    sums = {"detected": detected, "left_out": left_out, "largest": largest}
    stored = saved.restore(_STATE)
    passing = RowSpill(saved.stream("rows", _STATE), size)
    by_cell = SavedRows(saved, _STATE, measures | {"reason": reason})
    first = 0
    if stored is not None:
        first = by_cell.restore(int(stored["n_cells"]))
        for name, array in sums.items():
            array[...] = stored[name]
        reader.restore_values(stored)
        print(f"{reader.path.stem}: {first:,} cells are measured already", flush=True)

    def save() -> None:
        streams = {"rows": passing.stream} | by_cell.append(first)
        n_cells = {"n_cells": np.array(first)}
        saved.save(_STATE, sums | reader.seen_values() | n_cells, streams)

    is_left_out = genes.target < 0
    # a file that is read from the beginning only is not read again once it was read
    raw_blocks = reader.rows(min(options.row_block, _BLOCK), first) if first < n else iter(())
    for raw in progress(raw_blocks, f"preprocess {reader.path.stem}", n - first):
        block = select_columns(raw, genes.target, size, f"{reader.path}: columns of one gene")
        if normalisation is not None:
            block = normalisation.apply(block, first)
        rows = slice(first, first + block.shape[0])
        if is_left_out.any():
            entries = np.flatnonzero(is_left_out.take(raw.indices))
            left_out += np.bincount(raw.indices[entries], raw.data[entries], reader.n_vars)
        n_genes[rows], n_counts[rows], mito_frac[rows] = measure_block(block, genes.is_mito)
        checks = (
            ~keep[rows],
            n_counts[rows] == 0,
            n_genes[rows] < options.min_genes,
            n_counts[rows] < options.min_counts,
            mito_frac[rows] > options.max_mito_frac,
        )
        reason[rows] = np.select(checks, np.arange(len(checks)), -1)
        block = select_rows(block, reason[rows] < 0)
        detected += np.bincount(block.indices, minlength=size)
        largest[...] = max(int(largest), int(block.data.max(initial=0)))
        passing.add(block)
        first += raw.shape[0]
        if saved.is_due(raw.shape[0]):
            save()
    if saved.has_saved:
        save()  # the rows are written next
    total = float(n_counts.sum() + left_out[genes.rows].sum())
    return MeasuredCells(
        measures, reason, detected, int(largest), left_out[genes.unnamed], total, passing
    )


def measure_block(
    block: sp.csr_matrix, is_mito: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Detected genes, counts and mitochondrial fraction of each cell; `is_mito` is by column."""
    n_counts = row_sums(block.data, block.indptr)
    # few entries are mitochondrial: a search is faster than a row number for every entry
    entries = np.flatnonzero(is_mito.take(block.indices))
    cell_of_entry = np.searchsorted(block.indptr, entries, side="right") - 1
    mito_counts = np.bincount(cell_of_entry, block.data[entries], block.shape[0])
    return np.diff(block.indptr), n_counts, mito_counts / np.maximum(n_counts, 1)
