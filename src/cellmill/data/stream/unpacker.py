"""Unpacking of the cells of micro-batches, with their genes in rank order where that matters."""

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
    """Unpacks the genes of cells, in rank order if `in_rank_order` or if their tokens depend on it.

    Counts are unpacked if `tokenizer` reads them, if `with_counts`, and always from shards with
    `order: genes`.
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
        # None: all genes are unpacked, and their counts
        self._max_genes: int | None = None
        if manifest.gene_order == "rank":
            self._max_genes = tokenizer.max_genes_to_unpack(with_counts)
        # None: genes stay in the order in which they are stored
        self._rank_order: RankOrder | None = None
        ranked_cells = "all" if in_rank_order else tokenizer.cells_in_rank_order()
        if ranked_cells != "none":
            max_unsorted_genes = 0 if ranked_cells == "all" else tokenizer.max_detected_tokens
            self._rank_order = read_rank_order(manifest, shards[0].path, max_unsorted_genes)

    def unpack(self, cells: StreamCells) -> SparseCounts:
        """Unpack `cells`. Raises DataError with the name of a damaged cell."""
        try:
            unpacked = cells.packed.unpack(self._kind, self._max_genes)
        except DamagedPart as error:
            [name] = name_cells(self._shards, cells.ids[error.index : error.index + 1])
            raise DataError(f"{self._path}: {name}: damaged: {error}; {REMEDY}") from None
        if self._rank_order is not None:
            self._rank_order.sort(unpacked)
        return unpacked
