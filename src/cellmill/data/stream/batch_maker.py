"""Micro-batches of a data rank, made from the packed cells of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import CellColumns, open_vectors
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.data.stream.micro_batches import MicroBatchRule, split_greedily
from cellmill.data.stream.step_reader import StepGroup
from cellmill.data.stream.unpacker import CellUnpacker
from cellmill.data.stream.windows import StreamCells
from cellmill.errors import DataError

_MAX_GENES_PER_CALL = 1 << 20  # small micro-batches are tokenized together, up to this many genes


@dataclass(frozen=True)
class BatchFields:
    """The fields of batches in addition to token ids and values."""

    with_counts: bool = False  # counts of the tokens
    # obs columns of the fields `levels` and `numbers`, each with the option that names it, for messages
    level_columns: Mapping[str, str] = field(default_factory=dict)
    number_columns: Mapping[str, str] = field(default_factory=dict)
    # folder with the vectors of a teacher (`data.shards.index`)
    teacher_folder: str | None = None

    def open_cell_arrays(self, manifest: Manifest, split: str) -> dict[str, Any]:
        """Open, for each of these fields per cell, the array of its values for all cells of the split."""
        arrays: dict[str, Any] = {}
        if self.level_columns:
            arrays["levels"] = CellColumns(manifest, split, "levels", self.level_columns)
        if self.number_columns:
            arrays["numbers"] = CellColumns(manifest, split, "numbers", self.number_columns)
        if self.teacher_folder is not None:
            _, vectors = open_vectors(Path(self.teacher_folder), manifest)
            if split not in vectors:
                raise DataError(
                    f"{self.teacher_folder}: no vectors of split {split}; read {' or '.join(vectors)}"
                )
            arrays["teacher"] = vectors[split]
        return arrays


@dataclass(frozen=True)
class BatchMaker:
    """Makes the micro-batches of a data rank."""

    micro_batch_rule: MicroBatchRule
    data_rank: int
    unpacker: CellUnpacker
    tokenizer: BatchTokenizer
    with_counts: bool
    cell_arrays: Mapping[str, Any]  # `BatchFields.open_cell_arrays`

    @cached_property
    def _empty_batch(self) -> Batch:
        return empty_batch(self.tokenizer.dtype, self.with_counts).with_cell_fields(
            self.cell_arrays
        )

    def make_micro_batches(self, group: StepGroup) -> list[list[Batch]]:
        """Make this rank's micro-batches of each step of a group.

        Every rank makes equally many in a step, so some may be empty.
        """
        n_tokens = self.tokenizer.count_tokens(group.genes_per_cell)
        splits = self.micro_batch_rule.split_steps(n_tokens, group.cells_by_rank, self.data_rank)
        filled = iter(self._make_filled(group.local_cells, splits.offsets, group.epoch))
        batches_by_step = []
        for n_filled, n_batches in zip(splits.n_filled, splits.n_batches):
            n_empty = n_batches - n_filled
            batches_by_step.append(list(islice(filled, n_filled)) + [self._empty_batch] * n_empty)
        return batches_by_step

    def _make_filled(self, cells: StreamCells, offsets: list[int], epoch: int) -> list[Batch]:
        """Make the micro-batches that have cells: one of the cells between each offset and the next.

        Small micro-batches are tokenized together, then sliced.
        """
        micro_batches = []
        genes_per_batch = np.diff(row_offsets(cells.packed.lengths)[offsets])
        # micro-batches first_batch:stop_batch are tokenized together
        for first_batch, stop_batch in pairwise(
            split_greedily(genes_per_batch, _MAX_GENES_PER_CALL)
        ):
            first_cell = offsets[first_batch]
            selected = cells.select(slice(first_cell, offsets[stop_batch]))
            unpacked = self.unpacker.unpack(selected)
            batch = self.tokenizer.make_batch(unpacked, selected.ids, self.with_counts, epoch)
            batch = batch.with_cell_fields(self.cell_arrays)
            for start, stop in pairwise(offsets[first_batch : stop_batch + 1]):
                micro_batches.append(batch.slice_cells(start - first_cell, stop - first_cell))
        return micro_batches
