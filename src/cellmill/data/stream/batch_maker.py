"""Micro-batches of a data rank, made of the packed cells of its steps."""

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
from cellmill.data.stream.cell_tokenizer import CellTokenizer
from cellmill.data.stream.micro_batches import MicroBatchRule, cut_greedily
from cellmill.data.stream.step_reader import StepGroup
from cellmill.data.stream.unpacker import CellUnpacker
from cellmill.data.stream.windows import StreamCells

_TOKENS_PER_CALL = 1 << 20  # small micro-batches are made together, up to this number


@dataclass(frozen=True)
class BatchFields:
    """What batches have in addition to token ids and values."""

    with_counts: bool = False  # the counts of the tokens
    # obs columns with levels and with numbers, and the option that names each
    level_columns: Mapping[str, str] = field(default_factory=dict)
    number_columns: Mapping[str, str] = field(default_factory=dict)
    teacher_folder: str | None = None  # has the teacher's vectors (`data.shards.index`)

    def open_rows(self, manifest: Manifest, split: str) -> dict[str, Any]:
        """Open the arrays that fill further fields of batches, indexed by cell id; by field."""
        rows: dict[str, Any] = {}
        if self.level_columns:
            rows["levels"] = CellColumns(manifest, split, "levels", self.level_columns)
        if self.number_columns:
            rows["numbers"] = CellColumns(manifest, split, "numbers", self.number_columns)
        if self.teacher_folder is not None:
            rows["teacher"] = open_vectors(Path(self.teacher_folder), manifest)[1][split]
        return rows


@dataclass(frozen=True)
class BatchMaker:
    """Makes the micro-batches of a data rank."""

    micro_batches: MicroBatchRule
    rank: int
    unpacker: CellUnpacker
    tokenizer: CellTokenizer
    with_counts: bool
    rows: Mapping[str, Any]  # further fields of the batches, each indexed by cell id

    @cached_property
    def _empty_batch(self) -> Batch:
        return empty_batch(self.tokenizer.dtype, self.with_counts).with_rows(self.rows)

    def make(self, group: StepGroup) -> list[list[Batch]]:
        """Make this rank's micro-batches of each step, as many as on every other rank.

        A step is filled up with empty micro-batches.
        """
        n_tokens = self.tokenizer.count_tokens(group.genes_per_cell)
        cuts = self.micro_batches.cut_steps(n_tokens, group.n_cells, self.rank)
        filled = iter(self._tokenize(group.local, cuts.offsets, group.epoch))
        return [
            [*islice(filled, n_filled), *[self._empty_batch] * (n_batches - n_filled)]
            for n_filled, n_batches in zip(cuts.n_filled, cuts.n_batches)
        ]

    def _tokenize(self, cells: StreamCells, offsets: list[int], epoch: int) -> list[Batch]:
        """Make the micro-batches of `cells`, which begin at `offsets`.

        Small ones are tokenized together, then cut apart.
        """
        batches = []
        n_genes = np.diff(row_offsets(cells.packed.lengths)[offsets])
        for first, last in pairwise(cut_greedily(n_genes, _TOKENS_PER_CALL)):
            start = offsets[first]
            part = cells.select(slice(start, offsets[last]))
            counts = self.unpacker.unpack(part)
            batch = self.tokenizer.make_batch(counts, part.ids, self.with_counts, epoch)
            batch = batch.with_rows(self.rows)
            for low, high in pairwise(offsets[first : last + 1]):
                batches.append(batch.cut(low - start, high - start))
        return batches
