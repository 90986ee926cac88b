"""Making of micro-batches: the packed cells of a data rank's steps become `Batch` objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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

# small micro-batches are tokenized together, up to this total number of genes
_MAX_GENES_PER_CALL = 1 << 20


@dataclass(frozen=True)
class BatchFields:
    """The fields that batches have in addition to token ids and values."""

    with_counts: bool = False  # True: batches have the counts of their tokens
    # obs columns of the fields `levels` and `numbers`. Each column has the option that names it, which
    # error messages show
    level_columns: Mapping[str, str] = field(default_factory=dict)
    number_columns: Mapping[str, str] = field(default_factory=dict)
    # folder with a teacher model's vectors of cells (`data.shards.index`); None: no field `teacher`
    teacher_folder: str | None = None

    def open_cell_arrays(self, manifest: Manifest, split: str) -> dict[str, Any]:
        """Open the arrays from which batches take `levels`, `numbers` and `teacher`.

        Returns the arrays by field of `Batch`. Each has an entry for every cell of the split. A field
        that is not wanted is left out. Raises DataError if the teacher has no vectors of the split.
        """
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
    with_counts: bool  # True: batches have the counts of their tokens
    cell_arrays: Mapping[str, Any]  # what `BatchFields.open_cell_arrays` has returned

    def make_micro_batches(self, group: StepGroup) -> list[list[Batch]]:
        """Make this rank's micro-batches of each step of a group.

        Returns a list of micro-batches per step. All ranks have the same number of micro-batches in a
        step, so the last micro-batches of a rank may be empty.
        """
        n_tokens = self.tokenizer.count_tokens(group.genes_per_cell)
        splits = self.micro_batch_rule.split_steps(n_tokens, group.cells_by_rank, self.data_rank)
        filled = self._make_filled_batches(group.local_cells, splits.offsets, group.epoch)
        batches_by_step = []
        start = 0  # number of filled batches in earlier steps
        for n_filled, n_batches in zip(splits.n_filled, splits.n_batches):
            empty = [self._empty_batch] * (n_batches - n_filled)
            batches_by_step.append(filled[start : start + n_filled] + empty)
            start += n_filled
        return batches_by_step

    @cached_property
    def _empty_batch(self) -> Batch:
        """Micro-batch without cells, with all fields of the other micro-batches."""
        return empty_batch(self.tokenizer.dtype, self.with_counts).with_cell_fields(
            self.cell_arrays
        )

    def _make_filled_batches(
        self, cells: StreamCells, offsets: list[int], epoch: int
    ) -> list[Batch]:
        """Make the micro-batches that are not empty. Micro-batch i has cells `offsets[i]:offsets[i + 1]`.

        Consecutive small micro-batches are tokenized together as one large batch, then sliced.
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
