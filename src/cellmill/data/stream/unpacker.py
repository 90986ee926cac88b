"""Unpacking of the cells of micro-batches. Their genes are put in rank order where the tokens need it."""

import numpy as np

from cellmill.data.packing.cell_file import PackedCellFile
from cellmill.data.packing.cells import CellKind
from cellmill.data.packing.codec import DamagedPart
from cellmill.data.rank_order import RankOrder
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.data.shards.reader import name_cells, read_rank_order
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.data.stream.windows import StreamCells
from cellmill.errors import DataError


class CellUnpacker:
    """Unpacks the genes and counts of cells.

    The genes of all cells are in rank order if `in_rank_order`. Otherwise they are in rank order only in
    the cells in which `tokenizer` needs it.

    Counts are left out if three conditions hold: `tokenizer` does not read them, `with_counts` is False, and
    the shards have `order: rank`.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: list[PackedCellFile],
        tokenizer: BatchTokenizer,
        with_counts: bool,
        in_rank_order: bool,
    ) -> None:
        self._path = manifest.path
        self._shards = shards
        dtype = np.result_type(*(shard.kind.dtype for shard in shards))
        self._kind = CellKind(manifest.gene_order, manifest.n_genes, dtype)
        # unpack at most so many genes of each cell, without counts. None: unpack all genes and counts
        self._max_genes: int | None = None
        if manifest.gene_order == "rank":
            self._max_genes = tokenizer.find_max_genes_to_unpack(with_counts)
        # sorts the genes of cells. None: genes stay in the order in which they are stored
        self._rank_order: RankOrder | None = None
        which_cells = "all" if in_rank_order else tokenizer.which_cells_need_rank_order()
        if which_cells != "none":
            max_unsorted_genes = 0 if which_cells == "all" else tokenizer.max_detected_tokens
            self._rank_order = read_rank_order(manifest, shards[0].path, max_unsorted_genes)

    def unpack(self, cells: StreamCells) -> SparseCounts:
        """Unpack the genes of `cells`, and their counts unless they are left out.

        Raises DataError if a cell is damaged. The message names the cell.
        """
        try:
            unpacked = cells.packed.unpack(self._kind, self._max_genes)
        except DamagedPart as error:
            [name] = name_cells(self._shards, cells.ids[error.index : error.index + 1])
            raise DataError(f"{self._path}: {name}: damaged: {error}; {REMEDY}") from None
        if self._rank_order is not None:
            self._rank_order.sort(unpacked)
        return unpacked
