"""Unpacking of the cells of micro-batches, with their genes in rank order where tokens depend on it."""

import numpy as np

from cellmill.data.packing.cell_file import PackedCellFile
from cellmill.data.packing.cells import CellKind
from cellmill.data.packing.codec import DamagedPart
from cellmill.data.rank_order import RankOrder, inverse_medians
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.data.shards.reader import name_cells, read_medians
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.data.stream.windows import StreamCells
from cellmill.errors import DataError


class CellUnpacker:
    """Unpacks the genes of cells, in rank order where their tokens depend on it.

    Counts are unpacked if `tokenizer` reads them, if `with_counts`, or if genes must be sorted.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: list[PackedCellFile],
        tokenizer: BatchTokenizer,
        with_counts: bool,
    ) -> None:
        self._path = manifest.path
        self._shards = shards
        dtype = np.result_type(*(shard.kind.dtype for shard in shards))
        self._kind = CellKind(manifest.gene_order, manifest.n_genes, dtype)
        # None: all genes are unpacked, and their counts
        self._max_genes: int | None = None
        # None: genes stay in the order in which they are stored
        self._rank_order: RankOrder | None = None
        max_unsorted_genes = tokenizer.max_unsorted_genes()
        if manifest.gene_order == "rank":
            self._max_genes = tokenizer.max_genes_to_unpack(with_counts)
        elif max_unsorted_genes is not None:
            # genes are stored in the order of the vocabulary; larger cells are put in rank order
            medians = read_medians(shards[0].path)
            self._rank_order = RankOrder(inverse_medians(medians), max_unsorted_genes)

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
