"""Batches of tensors for your own training loop, in the order of a run: `cellmill.stream`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from cellmill.config.checks import check_rows
from cellmill.config.corpus import MISSING
from cellmill.config.load import check_options
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream, Train
from cellmill.data.shards.manifest import (
    TRAINING_SPLITS,
    Manifest,
    record_verified,
    stamp_files,
    verify,
    verify_changed,
)
from cellmill.data.stream.batch_maker import BatchFields
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import DataRank, OrderOptions
from cellmill.errors import ConfigError
from cellmill.models.batch import to_tensors

NONE: Mapping[str, Any] = MappingProxyType({})
FIELDS = ("token_ids", "values", "cu_seqlens", "cell_ids", "counts", "levels", "numbers")


class TensorStream:
    """Cells of one split as CPU tensors: this rank's share of `global_batch` cells a step.

    `for batch in stream` gives the rest of an epoch, and the next `for` the next epoch. Split
    `train` is shuffled and has no end; `val` and `test` are read in a fixed order, from the start.
    `tokens` and `stream` are the sections of the configuration with these names. `columns` are obs
    columns whose level codes a batch has, 0 for a missing value, with the names of the levels in `levels`;
    `number_columns` are obs columns whose numbers it has. The genes of a cell are in rank order; with
    `rank_order=False` they may be in any order where `tokens` do not need one. Shards that no training has hashed are
    hashed first. Raises ConfigError, or DataError for shards that are damaged or have no such cells
    or columns.
    """

    def __init__(
        self,
        manifest: Path,
        split: Literal["train", "val", "test"] = "train",
        *,
        rank: int = 0,
        world_size: int = 1,
        tokens: Mapping[str, Any] = NONE,
        stream: Mapping[str, Any] = NONE,
        global_batch: int = Train.model_fields["global_batch"].default,
        seed: int = Train.model_fields["seed"].default,
        columns: Sequence[str] = (),
        number_columns: Sequence[str] = (),
        counts: bool = False,
        rank_order: bool = True,
    ) -> None:
        parsed = check_options(Tokens, dict(tokens), "tokens")
        order = check_options(Stream, dict(stream), "stream")
        section = {"global_batch": global_batch, "seed": seed, "epochs": 1}
        train = check_options(Train, section, "train")
        opened = Manifest.read(manifest)
        check_rows(parsed, opened, str(manifest), counts)
        lanes = order.lanes
        splits = ", ".join(opened.splits)
        checks = (
            (
                parsed.needs_quantiles,
                "tokens.edges: expected the edges of the bins, which only a run fits, got null",
            ),
            (
                parsed.covariates,
                f"tokens.covariates: expected none, got {parsed.covariates}; name them in columns",
            ),
            (
                global_batch % lanes,
                f"global_batch: expected a multiple of stream.lanes {lanes}, got {global_batch}",
            ),
            (
                world_size < 1 or lanes % world_size,
                f"world_size: expected a divisor of stream.lanes {lanes}, got {world_size}",
            ),
            (
                not 0 <= rank < world_size,
                f"rank: expected 0 to {world_size - 1}, below world_size, got {rank}",
            ),
            (split not in opened.splits, f"split: expected one of {splits}, got {split!r}"),
            (isinstance(columns, str), f"columns: expected a list of obs columns, got {columns!r}"),
        )
        for is_wrong, message in checks:
            if is_wrong:
                raise ConfigError(message)
        if split not in TRAINING_SPLITS:
            verify(opened, opened.files([split]))
        else:
            stamps = stamp_files(opened)
            if verify_changed(opened, stamps) and rank == 0:
                record_verified(opened, stamps)
        self._cells = CellStream(
            SplitSource(manifest, split),
            OrderOptions(order, global_batch, train.seed, is_training=split == "train"),
            parsed,
            MicroBatchRule(global_batch * parsed.max_tokens),  # so that no step is split
            data_rank=DataRank(rank, world_size),
            fields=BatchFields(
                with_counts=counts,
                level_columns=dict.fromkeys(columns, "columns"),
                number_columns=dict.fromkeys(number_columns, "number_columns"),
            ),
            in_rank_order=rank_order,
        )
        self._is_endless = split == "train"
        self.n_genes = opened.n_genes
        # without the last level of a column with missing values, whose code becomes 0
        self.levels: dict[str, tuple[str, ...]] = {}
        for column, levels in self._cells.levels.items():
            self.levels[column] = tuple(level for level in levels if level != MISSING)
        self._n_levels = torch.tensor([len(levels) for levels in self.levels.values()])
        self.state_dict = self._cells.state_dict
        self.load_state_dict = self._cells.load_state_dict
        self.close = self._cells.close

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._cells.steps_per_epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # without shuffling always from the start
        done = self.state_dict()["step"] if self._is_endless else 0
        for [batch] in islice(self._cells, len(self) - done):
            tensors = to_tensors(batch)
            arrays = {name: getattr(tensors, name) for name in FIELDS}
            if tensors.levels is not None:
                arrays["levels"] = tensors.levels.masked_fill(tensors.levels > self._n_levels, 0)
            yield {name: array for name, array in arrays.items() if array is not None}
