"""Making the micro-batches of a data rank from the packed cells of its steps."""

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
from cellmill.data.stream.micro_batches import MicroBatchRule, cut_greedily
from cellmill.data.stream.step_reader import StepGroup
from cellmill.data.stream.unpacker import CellUnpacker
from cellmill.data.stream.windows import StreamCells

_GENES_PER_CALL = 1 << 20  # small micro-batches are tokenized together, up to this number of genes


@dataclass(frozen=True)
class BatchFields:
    """What batches have in addition to token ids and values."""

    with_counts: bool = False  # counts of the tokens
    # levels and numbers of obs columns; values are the options that name the columns, for messages
    level_columns: Mapping[str, str] = field(default_factory=dict)
    number_columns: Mapping[str, str] = field(default_factory=dict)
    # vectors of a teacher come from this folder (`data.shards.index`)
    teacher_folder: str | None = None

    def open_cell_arrays(self, manifest: Manifest, split: str) -> dict[str, Any]:
        """Open the arrays over cell ids from which batches get their further fields, by field."""
        arrays: dict[str, Any] = {}
        if self.level_columns:
            arrays["levels"] = CellColumns(manifest, split, "levels", self.level_columns)
        if self.number_columns:
            arrays["numbers"] = CellColumns(manifest, split, "numbers", self.number_columns)
        if self.teacher_folder is not None:
            _, vectors = open_vectors(Path(self.teacher_folder), manifest)
            arrays["teacher"] = vectors[split]
        return arrays


@dataclass(frozen=True)
class BatchMaker:
    """Makes the micro-batches of a data rank."""

    micro_batch_rule: MicroBatchRule
    rank: int
    unpacker: CellUnpacker
    tokenizer: BatchTokenizer
    with_counts: bool
    cell_arrays: Mapping[str, Any]  # further fields of batches: arrays over cell ids, by field

    @cached_property
    def _empty_batch(self) -> Batch:
        return empty_batch(self.tokenizer.dtype, self.with_counts).with_cell_fields(
            self.cell_arrays
        )

    def make_micro_batches(self, group: StepGroup) -> list[list[Batch]]:
        """Make this rank's micro-batches of each step.

        Every rank has equally many in a step: some may be empty.
        """
        n_tokens = self.tokenizer.count_tokens(group.genes_per_cell)
        cuts = self.micro_batch_rule.cut_steps(n_tokens, group.n_cells, self.rank)
        filled = iter(self._tokenize(group.local, cuts.offsets, group.epoch))
        batches_of_steps = []
        for n_filled, n_batches in zip(cuts.n_filled, cuts.n_batches):
            n_empty = n_batches - n_filled
            batches_of_steps.append([*islice(filled, n_filled), *[self._empty_batch] * n_empty])
        return batches_of_steps

    def _tokenize(self, cells: StreamCells, offsets: list[int], epoch: int) -> list[Batch]:
        """Make the micro-batches of `cells`: those between each two of `offsets`.

        Small micro-batches are tokenized together, then cut apart.
        """
        micro_batches = []
        # micro-batches start_batch:stop_batch are tokenized at once
        genes_per_batch = np.diff(row_offsets(cells.packed.lengths)[offsets])
        for start_batch, stop_batch in pairwise(cut_greedily(genes_per_batch, _GENES_PER_CALL)):
            first_cell = offsets[start_batch]
            part = cells.select(slice(first_cell, offsets[stop_batch]))
            counts = self.unpacker.unpack(part)
            batch = self.tokenizer.make_batch(counts, part.ids, self.with_counts, epoch)
            batch = batch.with_cell_fields(self.cell_arrays)
            for start, stop in pairwise(offsets[start_batch : stop_batch + 1]):
                micro_batches.append(batch.cut(start - first_cell, stop - first_cell))
        return micro_batches
