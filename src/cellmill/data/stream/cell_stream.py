"""Batches of tokens for one rank: endless, shuffled and resumable at any step.

Uses threads, not processes: reading and copying release the GIL, and processes cost 1.7 times the
CPU time per tokenized cell. One thread plans and tokenizes ahead through a bounded queue, a few
read. The state is a handful of integers, counted in batches handed out; resuming seeks and replays
nothing.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from cellmill.config.corpus import MISSING
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream as StreamOptions
from cellmill.data.arrays import inverse_medians
from cellmill.data.packing.cells import CellKind, Unpacked
from cellmill.data.packing.codec import DamagedPart
from cellmill.data.packing.rank_order import RankOrder
from cellmill.data.rows import row_offsets
from cellmill.data.shards.index import CellColumns, open_vectors
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.data.shards.reader import open_shards, read_medians, read_names
from cellmill.data.stream.batch import (
    Batch,
    count_greedy,
    empty_batch,
    even_borders,
    greedy_borders,
)
from cellmill.data.stream.order import Epoch, EpochLayout, epoch_order
from cellmill.data.stream.prefetch import Prefetch, PrefetchedSteps, StreamCells
from cellmill.data.stream.repeats import Repeats
from cellmill.data.stream.tokenizers import CellTokenizer
from cellmill.errors import ConfigError, DataError

_AHEAD = 3  # groups of steps tokenized in advance, with the one that is being tokenized
_TOKENS_TOGETHER = 1 << 20  # tokens of small micro-batches that are made at once
# options that fix the order of cells and are compared on resume: _ORDER always, _WEIGHTS with
# weights, _TRAIN_FRAC if it is below 1
_ORDER = ("lanes", "block_cells", "window_blocks", "equal_steps")
_WEIGHTS = (
    "weight_by",
    "labelled_frac",
    "weight_exponent",
    "max_repeats",
    "weight_warmup_steps",
    "weight_start_exponent",
)
_TRAIN_FRAC = "train_frac"


def read_repeats(
    manifest: Manifest, split: str, stream: StreamOptions, max_cells: int | None = None
) -> Repeats:
    """Repeats of the first `max_cells` cells of a split by `stream.weight_by`, a column of the
    shards.
    """
    columns = manifest.levels(stream.weights_column())
    levels = CellColumns(manifest, split, "levels", columns)[:max_cells][:, 0]
    [names] = columns.values()
    if stream.labelled_frac is not None and MISSING in names:
        levels = np.where(levels == names.index(MISSING) + 1, 0, levels)
    return Repeats(levels, stream)


def _windows_read(
    order: Epoch, lanes: list[int], first: np.ndarray, last: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Lane and number of each window of `lanes` with cells from `first` up to `last` of its lane.

    `first` and `last` are `(lanes,)` int64, of all lanes.
    """
    for lane in lanes:
        for window, (start, stop) in enumerate(pairwise(order.window_starts[lane].tolist())):
            if stop > first[lane] and start < last[lane]:
                yield lane, window


class CellStream:
    """Cells of one split as micro-batches for one rank; see `__iter__`.

    `rank` and `world` are data-parallel; tensor- and pipeline-parallel peers share them.
    `global_batch`, the cells per optimizer step over all ranks, is a multiple of `stream.lanes`.

    A micro-batch has at most `token_budget` tokens. A step has at least `min_microbatches` of them
    and a multiple of `microbatch_multiple`; if either is above 1 (pipelines), cells are spread
    evenly. With `shuffle` the stream is endless, over `stream.train_frac` of the cells; else it is
    one epoch in disk order of the first `max_cells` cells.

    Batches have the counts of their tokens if `counted`. `columns` and `number_columns` map obs
    columns, whose levels or numbers batches carry, to the option that names each; `teacher` is the
    folder of vectors that they carry (`data.shards.index`). Shards are read from `copies` once
    these are complete.

    Raises DataError when manifest or shards are missing, damaged or do not match, or the split has
    no cells.
    """

    def __init__(
        self,
        manifest: Path,
        split: Literal["train", "val", "test"],
        tokens: Tokens,
        stream: StreamOptions,
        *,
        global_batch: int,
        token_budget: int,
        rank: int,
        world: int,
        seed: int,
        min_microbatches: int = 1,
        microbatch_multiple: int = 1,
        shuffle: bool = True,
        max_cells: int | None = None,
        counted: bool = False,
        columns: Mapping[str, str] = MappingProxyType({}),
        number_columns: Mapping[str, str] = MappingProxyType({}),
        teacher: str | None = None,
        copies: LocalCopies | None = None,
    ):
        assert stream.lanes % world == 0, f"{stream.lanes} lanes for {world} ranks"
        assert global_batch % stream.lanes == 0, f"{global_batch} cells in {stream.lanes} lanes"
        assert tokens.max_tokens <= token_budget, f"{tokens.max_tokens} tokens in {token_budget}"
        opened = Manifest.read(manifest)
        self._manifest = manifest
        assert tokens.sequences == (opened.ordered and not opened.ranked), (
            f"{manifest}: not for {tokens.tokenizer}"
        )
        entry = opened.entry(split)
        # checks the manifest's numbers before memory is taken
        self._shards = open_shards(opened, split, copies)
        sizes = tuple(shard.n_obs for shard in entry.shards)
        weighted = stream.weights_column() if shuffle else {}
        weights = {name: getattr(stream, name) for name in _WEIGHTS} if weighted else {}
        if shuffle and stream.train_frac < 1:
            max_cells = stream.train_cells(entry.n_obs)
            weights = weights | {_TRAIN_FRAC: stream.train_frac}
        repeats = read_repeats(opened, split, stream, max_cells) if weighted else None
        self._layout = EpochLayout(sizes, stream, global_batch, seed, shuffle, max_cells, repeats)
        self.n_cells = self._layout.n_cells
        self.steps_per_epoch = self._layout.steps_per_epoch
        self.levels = opened.levels(columns)
        self.fingerprint = opened.fingerprint_with(sorted({*columns, *weighted}), number_columns)
        if shuffle and self.n_cells < world:
            raise DataError(
                f"{manifest}: {split}: {self.n_cells} cells for {world} ranks; use fewer ranks"
            )
        self._budget = token_budget
        self._rank = rank
        self._world = world
        self._min_microbatches = min_microbatches
        self._microbatch_multiple = microbatch_multiple
        self._tokenizer = CellTokenizer(
            tokens, opened.n_genes, seed if shuffle else 0, opened.variability
        )
        # arrays indexed by cell id, by field of the batch
        self._per_cell: dict[str, Any] = {}
        if columns:
            self._per_cell["levels"] = CellColumns(opened, split, "levels", self.levels)
        if number_columns:
            self._per_cell["numbers"] = CellColumns(opened, split, "numbers", number_columns)
        if teacher is not None:
            self._per_cell["teacher"] = open_vectors(Path(teacher), opened)[1][split]
        self._counted = counted
        self._rows = Prefetch(self._shards, self._layout, rank, world, stream.io_threads)
        dtype = np.result_type(*(shard.kind.dtype for shard in self._shards))
        self._kind = CellKind(opened.order, opened.n_genes, dtype)
        self._max_genes = self._tokenizer.max_genes(counted)
        self._rank_order: RankOrder | None = None
        if opened.order == "genes":
            self._max_genes = None
            most_genes = self._tokenizer.max_genes_in_any_order()
            if most_genes is not None:
                medians = read_medians(self._shards[0].path)
                self._rank_order = RankOrder(inverse_medians(medians), most_genes)
        self._sha256 = {opened.shard_path(shard): shard.sha256 for shard in entry.shards}
        order = {name: getattr(stream, name) for name in _ORDER}
        self._order = {"seed": seed, **order, **weights, "global_batch": global_batch}
        self._epoch = 0
        self._step = 0
        self._pool: ThreadPoolExecutor | None = None  # the thread that tokenizes ahead
        self._closed = False

    def __iter__(self) -> Iterator[list[Batch]]:
        """Micro-batches of this rank for each optimizer step, as many as on every other rank.

        Some may be empty. Endless over epochs, starting at the state; without shuffling one epoch,
        always from its start.
        """
        if self._closed:
            raise RuntimeError("the stream is closed")
        if not self._layout.shuffle:
            self._epoch = 0
            self._step = 0
        self._stop_ahead()
        groups = map(self._micro_batches, self._rows.steps(self._epoch, self._step))
        pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-stream")
        self._pool = pool
        ahead = deque(pool.submit(next, groups, None) for _ in range(_AHEAD))
        try:
            while ahead:
                try:
                    group = ahead.popleft().result()
                except CancelledError:  # another thread stopped the stream
                    return
                if group is None:
                    return
                with suppress(RuntimeError):  # the same: a stopped pool takes no tasks
                    ahead.append(pool.submit(next, groups, None))
                for batches in group:
                    if self._pool is not pool:
                        return
                    self._step += 1
                    if self._step == self.steps_per_epoch:
                        self._epoch = self._epoch + 1
                        self._step = 0
                    yield batches
        finally:
            pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Return `epoch`, `step` (batches of the epoch handed out), and the options that define
        the order.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            **self._order,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, which may come from another number of ranks.

        Raises DataError if the shards differ or it is not a state of this split, ConfigError if the
        order differs or the stream is not shuffled.
        """
        if not self._layout.shuffle:
            raise ConfigError(
                "a split that is not shuffled is always read from its start; load a state of split train"
            )
        fingerprint = state.get("fingerprint")
        if fingerprint != self.fingerprint:
            raise DataError(
                f"expected shards of fingerprint {fingerprint}, as in the checkpoint, got {self.fingerprint}: "
                "restore the shards it was trained on, or start a new run"
            )
        for name in ("seed", *_ORDER, *_WEIGHTS, _TRAIN_FRAC, "global_batch"):
            default = 1.0 if name == _TRAIN_FRAC else None
            before = state.get(name, default)
            now = self._order.get(name, default)
            if before != now:
                section = "train" if name in ("seed", "global_batch") else "stream"
                raise ConfigError(
                    f"{section}.{name} is {now}, but {before} in the checkpoint, and defines the order of cells; set "
                    f"it back to {before}, or start a new run"
                )
        epoch = int(state.get("epoch", -1))
        step = int(state.get("step", -1))
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise DataError(
                f"expected a state of step 0 to {self.steps_per_epoch - 1:,} of an epoch, got step {step:,} of epoch "
                f"{epoch:,}; load one that state_dict has returned for this split"
            )
        self._stop_ahead()
        self._epoch = epoch
        self._step = step

    def shards_read(self, ranks: Collection[int], step: int, stop: int) -> dict[Path, str]:
        """SHA-256 of the shards, by path, that `ranks` read in steps `step` to `stop`, counted over
        all epochs.

        Without shuffling, the steps do not matter: the stream has one epoch.
        """
        layout = self._layout
        per_epoch = self.steps_per_epoch
        if not layout.shuffle:
            step = 0
            stop = per_epoch
        lanes = [lane for lane in range(layout.stream.lanes) if lane % self._world in ranks]
        shard_numbers = set[int]()
        for epoch in range(step // per_epoch, -(-stop // per_epoch)):
            order = epoch_order(layout, epoch)
            # cells of each lane before the first of these steps in the epoch, and after the last
            first = layout.cells_before(max(step - epoch * per_epoch, 0))
            last = layout.cells_before(min(stop - epoch * per_epoch, per_epoch))
            for lane, window in _windows_read(order, lanes, first, last):
                shard_numbers.update(order.window_runs(lane, window)[:, 0].tolist())
            if len(shard_numbers) == len(self._sha256):
                break
        shards = enumerate(self._sha256.items())
        return {path: sha256 for number, (path, sha256) in shards if number in shard_numbers}

    def names(self, cells: np.ndarray) -> list[str]:
        """`dataset:name (file row)` of cells by id, read from the shards; for error messages."""
        starts = np.cumsum([0, *(shard.n_obs for shard in self._shards)])
        numbers = np.searchsorted(starts, cells, side="right") - 1
        names = []
        for cell, number in zip(cells.tolist(), numbers.tolist()):
            path = self._shards[number].path
            row = cell - int(starts[number])
            names.append(f"{read_names(path, 'obs')[row]} ({path.name} row {row})")
        return names

    def close(self) -> None:
        """End all threads; may be called at any time, and again."""
        self._closed = True
        self._stop_ahead()
        self._rows.close()
        self._shards[0].close()  # they share their open files

    def _stop_ahead(self) -> None:
        """End the thread that tokenizes ahead, and wait for it."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _unpack(self, cells: StreamCells) -> Unpacked:
        """Genes and counts of cells, in rank order where their tokens depend on it."""
        try:
            unpacked = cells.packed.unpack(self._kind, self._max_genes)
        except DamagedPart as error:
            [name] = self.names(cells.ids[error.part : error.part + 1])
            raise DataError(f"{self._manifest}: {name}: damaged: {error}; {REMEDY}") from None
        starts, genes, counts = unpacked
        if self._rank_order is not None and counts is not None:
            self._rank_order.sort(starts[:-1], np.diff(starts), genes, counts)
        return unpacked

    def _micro_batches(self, steps: PrefetchedSteps) -> list[list[Batch]]:
        """This rank's micro-batches of each step, as many as on every other rank."""
        # (steps, ranks): every rank computes the cuts of all ranks from known lengths, so
        # they agree without communication
        lengths = self._tokenizer.numbers(steps.lengths)
        n_cells = steps.n_cells
        cuts = count_greedy(lengths, n_cells.ravel(), self._budget).reshape(n_cells.shape)
        most = np.maximum(cuts.max(1), self._min_microbatches)
        multiple = self._microbatch_multiple
        # micro-batches in each step
        batches_in_step = (-(-most // multiple) * multiple).tolist()
        is_even = multiple > 1 or self._min_microbatches > 1
        # borders of this rank's micro-batches, in cells, and how many of each step are not empty
        borders = [0]
        n_filled = []
        local_cells = n_cells[:, self._rank].tolist()
        local_cuts = cuts[:, self._rank].tolist()
        ends = n_cells.cumsum().reshape(n_cells.shape)[:, self._rank].tolist()
        for end, n, n_cuts, n_batches in zip(ends, local_cells, local_cuts, batches_in_step):
            if is_even:
                borders_in_step = even_borders(lengths[end - n : end], n_batches)
            elif n_cuts == 1:
                borders_in_step = [0, n]
            else:
                borders_in_step = greedy_borders(lengths[end - n : end], self._budget)
            start = borders[-1]
            borders += [start + border for border in borders_in_step[1:]]
            n_filled.append(len(borders_in_step) - 1)
        # tokenize several micro-batches at once, then cut them apart
        filled: list[Batch] = []
        genes_of_batches = np.diff(row_offsets(steps.local.packed.n_genes)[borders])
        for first, last in pairwise(greedy_borders(genes_of_batches, _TOKENS_TOGETHER)):
            start = borders[first]
            part = steps.local.select(slice(start, borders[last]))
            starts, genes, counts = self._unpack(part)
            batch = self._tokenizer.batch(
                genes, counts, starts, part.ids, self._counted, steps.epoch
            ).with_rows(self._per_cell)
            for low, high in pairwise(borders[first : last + 1]):
                filled.append(batch.cut(low - start, high - start))
        empty = empty_batch(self._tokenizer.dtype, self._counted).with_rows(self._per_cell)
        rest = iter(filled)
        batches_of_steps = []
        for n, n_batches in zip(n_filled, batches_in_step):
            batches_of_steps.append([*islice(rest, n), *[empty] * (n_batches - n)])
        return batches_of_steps
