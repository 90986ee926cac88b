"""Batches of tokens for one rank: endless, shuffled and resumable at any step.

Uses threads, not processes: reading and copying release the GIL, and processes cost 1.7 times the
CPU time per tokenized cell. One thread cuts and tokenizes the next steps into a bounded queue; a
few other threads read the shards. The state is a handful of integers, counted in batches handed out;
resuming seeks and replays nothing.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream as StreamOptions
from cellmill.data.arrays import inverse_medians
from cellmill.data.packing.cells import CellKind
from cellmill.data.packing.codec import DamagedPart
from cellmill.data.packing.rank_order import RankOrder
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.data.shards.index import CellColumns, open_vectors
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.data.shards.reader import open_shards, read_medians, read_names
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.data.stream.cell_tokenizer import CellTokenizer
from cellmill.data.stream.micro_batches import count_greedy, even_borders, greedy_borders
from cellmill.data.stream.order import EpochLayout, EpochOrder, epoch_order
from cellmill.data.stream.repeats import read_repeats
from cellmill.data.stream.step_reader import StepGroup, StepReader
from cellmill.data.stream.windows import StreamCells
from cellmill.errors import ConfigError, DataError

# groups of steps in the queue: the thread tokenizes one, the others are done or wait for it
_QUEUED_GROUPS = 3
_TOKENS_TOGETHER = 1 << 20  # tokens of small micro-batches that are made at once
# options that fix the order of cells; those of weights and the fraction only if the run has them
_ORDER_OPTIONS = ("lanes", "block_cells", "window_blocks", "equal_steps")
_WEIGHT_OPTIONS = (
    "weight_by",
    "labelled_frac",
    "weight_exponent",
    "max_repeats",
    "weight_warmup_steps",
    "weight_start_exponent",
)
_TRAIN_FRAC = "train_frac"


class Cuts(NamedTuple):
    """Micro-batches into which this rank cuts its cells of some steps."""

    # first cell of each micro-batch that is not empty, and the number of cells
    borders: list[int]
    n_filled: list[int]  # micro-batches of each step that are not empty
    n_batches: list[int]  # all micro-batches of each step, as many on every rank


class CellStream:
    """Cells of one split as micro-batches for one rank; see `__iter__`.

    `rank` and `world` are data-parallel; tensor- and pipeline-parallel peers share them.
    `global_batch`, the cells per optimizer step over all ranks, is a multiple of `stream.lanes`.

    A micro-batch has at most `token_budget` tokens. A step has at least `min_microbatches` of them
    and a multiple of `microbatch_multiple`; if either is above 1 (pipelines), cells are spread
    evenly. With `shuffle` the stream is endless, over `stream.train_frac` of the cells; else it is
    one epoch in disk order of the first `max_cells` cells.

    Batches have the counts of their tokens if `with_counts`. `columns` and `number_columns` map obs
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
        with_counts: bool = False,
        columns: Mapping[str, str] = MappingProxyType({}),
        number_columns: Mapping[str, str] = MappingProxyType({}),
        teacher: str | None = None,
        copies: LocalCopies | None = None,
    ):
        assert stream.lanes % world == 0, f"{stream.lanes} lanes for {world} ranks"
        assert global_batch % stream.lanes == 0, f"{global_batch} cells in {stream.lanes} lanes"
        assert tokens.max_tokens <= token_budget, f"{tokens.max_tokens} tokens in {token_budget}"
        self._manifest_path = manifest
        opened = Manifest.read(manifest)
        assert tokens.sequences == (opened.ordered and not opened.ranked), (
            f"{manifest}: not for {tokens.tokenizer}"
        )
        entry = opened.entry(split)
        self._sha256 = {opened.shard_path(shard): shard.sha256 for shard in entry.shards}
        # checks the manifest's numbers before memory is taken
        self._shards = open_shards(opened, split, copies)

        # order of the cells
        if shuffle and stream.train_frac < 1:
            max_cells = stream.train_cells(entry.n_obs)
        weight_columns = stream.weights_column() if shuffle else {}
        repeats = read_repeats(opened, split, stream, max_cells) if weight_columns else None
        sizes = tuple(shard.n_obs for shard in entry.shards)
        self._layout = EpochLayout(sizes, stream, global_batch, seed, shuffle, max_cells, repeats)
        self._order_options = _order_options(self._layout)
        self.n_cells = self._layout.n_cells
        self.steps_per_epoch = self._layout.steps_per_epoch
        self.levels = opened.levels(columns)
        self.fingerprint = opened.fingerprint_with(
            sorted({*columns, *weight_columns}), number_columns
        )
        if shuffle and self.n_cells < world:
            raise DataError(
                f"{manifest}: {split}: {self.n_cells} cells for {world} ranks; use fewer ranks"
            )

        # from cells to micro-batches
        self._budget = token_budget
        self._rank = rank
        self._world = world
        self._min_microbatches = min_microbatches
        self._microbatch_multiple = microbatch_multiple
        self._with_counts = with_counts
        self._tokenizer = CellTokenizer(
            tokens, opened.n_genes, seed if shuffle else 0, opened.variability
        )
        self._per_cell = _open_per_cell(opened, split, self.levels, number_columns, teacher)
        self._empty_batch = empty_batch(self._tokenizer.dtype, with_counts).with_rows(
            self._per_cell
        )

        # from packed cells to cells in rank order
        self._reader = StepReader(self._shards, self._layout, rank, world, stream.io_threads)
        dtype = np.result_type(*(shard.kind.dtype for shard in self._shards))
        self._kind = CellKind(opened.order, opened.n_genes, dtype)
        self._max_genes = self._tokenizer.max_genes(with_counts)
        self._rank_order: RankOrder | None = None
        if opened.order == "genes":
            self._max_genes = None
            sorts_above = self._tokenizer.sorts_cells_above()
            if sorts_above is not None:
                medians = read_medians(self._shards[0].path)
                self._rank_order = RankOrder(inverse_medians(medians), sorts_above)

        # where the stream is
        self._epoch = 0
        self._step = 0
        self._pool: ThreadPoolExecutor | None = None  # the thread that tokenizes
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
        self._stop_tokenizing()
        groups = map(self._micro_batches, self._reader.steps(self._epoch, self._step))
        pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-stream")
        self._pool = pool
        queue = deque(pool.submit(next, groups, None) for _ in range(_QUEUED_GROUPS))
        try:
            while queue:
                try:
                    group = queue.popleft().result()
                except CancelledError:
                    return  # another thread has stopped the stream
                if group is None:
                    return
                # a pool that another thread has stopped takes no tasks
                with suppress(RuntimeError):
                    queue.append(pool.submit(next, groups, None))
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
        """Return `epoch`, `step` (batches of the epoch handed out), the options that define the
        order, and the fingerprint of the cells.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            **self._order_options,
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
        for name in ("seed", *_ORDER_OPTIONS, *_WEIGHT_OPTIONS, _TRAIN_FRAC, "global_batch"):
            default = 1.0 if name == _TRAIN_FRAC else None
            before = state.get(name, default)
            now = self._order_options.get(name, default)
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
        self._stop_tokenizing()
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
                shard_numbers.update(order.window_runs(lane, window).shards.tolist())
            if len(shard_numbers) == len(self._sha256):
                break
        shards = enumerate(self._sha256.items())
        return {path: sha256 for number, (path, sha256) in shards if number in shard_numbers}

    def names(self, cells: np.ndarray) -> list[str]:
        """`dataset:name (file row)` of cells by id, read from the shards; for error messages."""
        offsets = row_offsets(self._layout.shard_cells)
        numbers = np.searchsorted(offsets, cells, side="right") - 1
        rows = cells - offsets[numbers]
        names = []
        for number, row in zip(numbers.tolist(), rows.tolist()):
            path = self._shards[number].path
            names.append(f"{read_names(path, 'obs')[row]} ({path.name} row {row})")
        return names

    def close(self) -> None:
        """End all threads; may be called at any time, and again."""
        self._closed = True
        self._stop_tokenizing()
        self._reader.close()
        self._shards[0].close()  # they share their open files

    def _stop_tokenizing(self) -> None:
        """End the thread that tokenizes, and wait for it."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _micro_batches(self, steps: StepGroup) -> list[list[Batch]]:
        """This rank's micro-batches of each step, as many as on every other rank."""
        cuts = self._cut_steps(steps)
        filled = iter(self._tokenize(steps.local, cuts.borders, steps.epoch))
        return [
            self._pad_step([*islice(filled, n)], n_batches)
            for n, n_batches in zip(cuts.n_filled, cuts.n_batches)
        ]

    def _cut_steps(self, steps: StepGroup) -> Cuts:
        """Cut this rank's cells of each step into micro-batches.

        Every rank computes the cuts of all ranks from known lengths, so they agree without
        communication.
        """
        lengths = self._tokenizer.count_tokens(steps.n_genes)
        n_cells = steps.n_cells
        # numbers of micro-batches, (steps, ranks) and (steps,)
        n_greedy = count_greedy(lengths, n_cells.ravel(), self._budget).reshape(n_cells.shape)
        n_needed = np.maximum(n_greedy.max(1), self._min_microbatches)
        multiple = self._microbatch_multiple
        n_batches: list[int] = (-(-n_needed // multiple) * multiple).tolist()
        is_even = multiple > 1 or self._min_microbatches > 1
        borders = [0]
        n_filled = []
        # cells of this rank in each step, and their end among those of all steps and ranks
        n_local = n_cells[:, self._rank].tolist()
        ends = n_cells.cumsum().reshape(n_cells.shape)[:, self._rank].tolist()
        n_greedy_local = n_greedy[:, self._rank].tolist()
        steps_of_rank = zip(n_local, ends, n_greedy_local, n_batches)
        for n, end, n_greedy_step, n_step_batches in steps_of_rank:
            if is_even:
                borders_in_step = even_borders(lengths[end - n : end], n_step_batches)
            elif n_greedy_step == 1:
                borders_in_step = [0, n]
            else:
                borders_in_step = greedy_borders(lengths[end - n : end], self._budget)
            start = borders[-1]
            borders += [start + border for border in borders_in_step[1:]]
            n_filled.append(len(borders_in_step) - 1)
        return Cuts(borders, n_filled, n_batches)

    def _tokenize(self, cells: StreamCells, borders: list[int], epoch: int) -> list[Batch]:
        """Micro-batches of `cells` between `borders`; small ones are made together and cut apart."""
        batches = []
        n_genes = np.diff(row_offsets(cells.packed.lengths)[borders])
        for first, last in pairwise(greedy_borders(n_genes, _TOKENS_TOGETHER)):
            start = borders[first]
            part = cells.select(slice(start, borders[last]))
            batch = self._tokenizer.batch(
                self._unpack(part), part.ids, self._with_counts, epoch
            ).with_rows(self._per_cell)
            for low, high in pairwise(borders[first : last + 1]):
                batches.append(batch.cut(low - start, high - start))
        return batches

    def _unpack(self, cells: StreamCells) -> SparseCounts:
        """Genes and counts of cells, in rank order where their tokens depend on it."""
        try:
            unpacked = cells.packed.unpack(self._kind, self._max_genes)
        except DamagedPart as error:
            [name] = self.names(cells.ids[error.part : error.part + 1])
            raise DataError(f"{self._manifest_path}: {name}: damaged: {error}; {REMEDY}") from None
        if self._rank_order is not None:
            self._rank_order.sort(unpacked)
        return unpacked

    def _pad_step(self, batches: list[Batch], n_batches: int) -> list[Batch]:
        """Add empty micro-batches up to `n_batches`."""
        return batches + [self._empty_batch] * (n_batches - len(batches))


def _order_options(layout: EpochLayout) -> dict[str, Any]:
    """Options that fix the order of cells, and are compared on resume."""
    names = [*_ORDER_OPTIONS]
    if layout.repeats is not None:
        names += _WEIGHT_OPTIONS
    if layout.shuffle and layout.stream.train_frac < 1:
        names.append(_TRAIN_FRAC)
    options = {name: getattr(layout.stream, name) for name in names}
    return {"seed": layout.seed, **options, "global_batch": layout.global_batch}


def _open_per_cell(
    manifest: Manifest,
    split: str,
    levels: Collection[str],
    number_columns: Collection[str],
    teacher: str | None,
) -> dict[str, Any]:
    """Open arrays indexed by cell id, by field of the batch."""
    per_cell: dict[str, Any] = {}
    if levels:
        per_cell["levels"] = CellColumns(manifest, split, "levels", levels)
    if number_columns:
        per_cell["numbers"] = CellColumns(manifest, split, "numbers", number_columns)
    if teacher is not None:
        per_cell["teacher"] = open_vectors(Path(teacher), manifest)[1][split]
    return per_cell


def _windows_read(
    order: EpochOrder, lanes: list[int], first: np.ndarray, last: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Lane and number of each window of `lanes` with cells from `first` up to `last` of its lane.

    `first` and `last` are `(lanes,)` int64, of all lanes.
    """
    for lane in lanes:
        for window, (start, stop) in enumerate(pairwise(order.window_offsets[lane].tolist())):
            if stop > first[lane] and start < last[lane]:
                yield lane, window
