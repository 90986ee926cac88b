"""Batches of tokens for one rank of a training: endless, shuffled, and the same from any step on.

Threads, not processes: reading and copying release the interpreter's lock, and processes cost 1.7 times the CPU for
each tokenized cell. One thread plans and tokenizes ahead through a bounded queue, a few read. The state is a handful
of integers, counted in batches that were handed out; resuming seeks there and replays nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cellmill.config.checks import check_batch, check_budget, check_lanes
from cellmill.config.run import Stream as StreamOptions
from cellmill.config.tokens import Tokens
from cellmill.data.manifest import Manifest
from cellmill.data.packing import cut_batch, cut_evenly
from cellmill.data.prefetch import Prefetch, PrefetchedStep
from cellmill.data.shard_file import cell_names, open_shards
from cellmill.data.shuffle import EpochLayout
from cellmill.data.tokens import Batch, Tokenizer, empty_batch
from cellmill.errors import ConfigError, DataError

_AHEAD = 2  # steps tokenized ahead of the one that is used
_ORDER = ("seed", "lanes", "block_cells", "window_blocks", "global_batch")


class CellStream:
    """The cells of one split as micro-batches for one rank; see `__iter__`.

    Parameters
    ----------
    rank, world
        Data-parallel coordinate and size, not those of the whole job where tensor or pipeline peers share data.
    global_batch
        Cells of one optimizer step over all ranks, a multiple of `stream.lanes`.
    token_budget
        Most tokens of a micro-batch.
    min_microbatches, microbatch_multiple
        Each step has at least `min_microbatches` micro-batches, a multiple of `microbatch_multiple`, and of even sizes
        where that is not 1: what a pipeline asks for.
    shuffle
        Whether to shuffle, endlessly; else one epoch in the order on disk.
    max_cells
        Only the first so many cells of the split.

    Raises
    ------
    ConfigError
        When ranks, lanes and batch do not divide, a cell may exceed the budget, or training has fewer cells than ranks.
    DataError
        When manifest or shards are missing, damaged or not those of the manifest, or the split has no cells.
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
    ):
        check_lanes(stream.lanes, global_batch, world)
        check_batch(global_batch, stream.lanes)
        check_budget(tokens.max_tokens, token_budget)
        opened = Manifest.read(manifest)
        entry = opened.entry(split)
        sizes = tuple(shard.n_obs for shard in entry.shards)
        order = {name: getattr(stream, name) for name in ("lanes", "block_cells", "window_blocks")}
        self._layout = EpochLayout(
            sizes, **order, global_batch=global_batch, seed=seed, shuffle=shuffle, max_cells=max_cells
        )
        self.n_cells, self.steps_per_epoch = self._layout.n_cells, self._layout.steps_per_epoch
        self.fingerprint = opened.fingerprint
        if shuffle and self.n_cells < world:
            raise ConfigError(f"{world} ranks for {self.n_cells} {split} cells of {manifest}: use fewer processes")
        self._max_tokens, self._budget, self._rank, self._world = tokens.max_tokens, token_budget, rank, world
        self._min_microbatches, self._microbatch_multiple = min_microbatches, microbatch_multiple
        self._tokenizer: Tokenizer = tokens.load()(tokens)
        needs_counts = self._tokenizer.needs_counts
        self._shards = open_shards(opened, split)
        self._rows = Prefetch(
            self._shards,
            self._layout,
            list(range(rank, stream.lanes, world)),
            with_counts=needs_counts,
            max_genes=None if needs_counts else tokens.max_tokens,
            io_threads=stream.io_threads,
        )
        self._order = {"seed": seed, **order, "global_batch": global_batch}
        self._epoch = self._step = 0
        self._ahead: _Ahead | None = None
        self._closed = False

    def __iter__(self) -> Iterator[list[Batch]]:
        """For each optimizer step the micro-batches of this rank, as many as on every other rank; some may be empty.

        Endless over epochs from where the state is; without shuffling one epoch, always from its start.
        """
        if self._closed:
            raise RuntimeError("the stream is closed")
        if not self._layout.shuffle:
            self._epoch = self._step = 0
        self._stop_ahead()
        ahead = self._ahead = _Ahead(self._batches(self._epoch, self._step))
        try:
            for batches in ahead:
                self._step += 1
                if self._step == self.steps_per_epoch:
                    self._epoch, self._step = self._epoch + 1, 0
                yield batches
        finally:
            ahead.stop()

    def state_dict(self) -> dict[str, Any]:
        """`epoch` and `step`, the batches of it that were handed out, and what defines the order."""
        return {"epoch": self._epoch, "step": self._step, **self._order, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which may be of another number of ranks.

        Raises DataError when it is of other data, ConfigError when of another order.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the checkpoint's data have fingerprint {state['fingerprint']}, the shards now {self.fingerprint}; "
                "restore the shards it was trained on, or start a new run"
            )
        for name in _ORDER:
            if state[name] != self._order[name]:
                section = "stream" if name in ("lanes", "block_cells", "window_blocks") else "train"
                raise ConfigError(
                    f"{section}.{name} is {self._order[name]}, the checkpoint was written with {state[name]}, "
                    f"which defines the order of cells; set it back to {state[name]}, or start a new run"
                )
        self._stop_ahead()
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    def names(self, cells: np.ndarray) -> list[str]:
        """`dataset:name (file row)` of cells by their ids, read from the shards: for messages."""
        return cell_names(self._shards, cells)

    def close(self) -> None:
        """Ends all threads; may be called at any time and again."""
        self._closed = True
        self._stop_ahead()
        self._rows.close()
        for shard in self._shards:
            shard.close()

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _batches(self, epoch: int, step: int) -> Iterator[list[Batch]]:
        for taken in self._rows.steps(epoch, step):
            yield self._micro_batches(taken)

    def _micro_batches(self, step: PrefetchedStep) -> list[Batch]:
        # every rank cuts the batches of all ranks, from lengths it knows: nobody has to be asked how many there are
        lengths = [self._lengths(step, rank) for rank in range(self._world)]
        cuts = [cut_batch(of_rank, self._budget) for of_rank in lengths]
        number = max(self._min_microbatches, *(len(cut) - 1 for cut in cuts))
        own = cuts[self._rank]
        if self._microbatch_multiple > 1 or self._min_microbatches > 1:
            number = -(-number // self._microbatch_multiple) * self._microbatch_multiple
            own = cut_evenly(lengths[self._rank], number)
        batches = []
        for first, last in pairwise(own):
            starts = step.starts[first : last + 1]
            of = slice(starts[0], starts[-1])
            counts = step.counts[of] if step.counts is not None else None
            made = self._tokenizer.tokenize(step.genes[of], counts, starts - starts[0])
            batches.append(Batch(*made, step.cells[first:last]))
        return batches + [empty_batch(self._tokenizer.dtype) for _ in range(number - len(batches))]

    def _lengths(self, step: PrefetchedStep, rank: int) -> np.ndarray:
        return np.minimum(np.concatenate(step.lengths[rank :: self._world]), self._max_tokens)


class _Ahead:
    """An iterator that runs in a thread, a few items ahead; what it raises is raised where items are taken."""

    def __init__(self, items: Iterator[list[Batch]]):
        self._items = items
        self._queue: queue.Queue[tuple[list[Batch] | None, BaseException | None]] = queue.Queue(_AHEAD)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellmill-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        while not self._stopping.is_set():
            item, error = self._queue.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._stopping.set()
        while self._thread.is_alive():
            self._empty()
            self._thread.join(0.01)
        self._empty()
        self._queue.put((None, None))  # wakes whoever waits for an item

    def _empty(self) -> None:
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def _run(self) -> None:
        end: tuple[None, BaseException | None] = (None, None)
        try:
            for item in self._items:
                self._queue.put((item, None))
                if self._stopping.is_set():
                    return
        except BaseException as error:
            end = (None, error)
        self._queue.put(end)
