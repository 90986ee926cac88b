"""Batches of tokens for one data rank: endless and resumable in training, else one epoch in a fixed order.

Uses threads, not processes: reading and copying release the GIL, and processes cost 1.7 times the
CPU time per tokenized cell. A few threads read the shards, and one thread splits and tokenizes the next
steps into a bounded queue. The state is an epoch and a step, so resuming replays nothing.
"""

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream
from cellmill.data.shards.local_copies import LocalCopies
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import name_cells, open_shards
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.batch_maker import BatchFields, BatchMaker
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.data.stream.level_sampler import ROUNDING, read_level_sampler
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import (
    ONLY_RANK,
    DataRank,
    OrderOptions,
    OrderRule,
    make_epoch_order,
)
from cellmill.data.stream.step_reader import StepGroup, StepReader
from cellmill.data.stream.unpacker import CellUnpacker
from cellmill.errors import ConfigError, DataError, as_yaml

# groups of steps after the one in use: one is being tokenized, the others are done or wait
_GROUPS_AHEAD = 3
_NO_MORE_GROUPS = object()  # result of a queued task after the last group
_TOKENS_ONLY = BatchFields()
# options of section `stream` that fix the order of cells in any run
_STATE_OPTIONS = ("lanes", "block_cells", "window_blocks", "equal_steps", "train_frac")
# further ones that fix it in a run with weights
_STATE_WEIGHT_OPTIONS = (
    "weight_by",
    "labelled_frac",
    "weight_exponent",
    "max_repeats",
    "weight_warmup_steps",
    "weight_start_exponent",
)


@dataclass(frozen=True)
class SplitSource:
    """The cells that a stream reads, and their files."""

    manifest_path: Path
    split: Literal["train", "val", "test"]
    # at most this many cells, the first in disk order; `stream.train_frac` may leave fewer. None for all
    max_cells: int | None = None
    copies: LocalCopies | None = None  # each is read instead of its shard once it is complete


def _assert_options_fit(
    order_options: OrderOptions,
    token_options: Tokens,
    micro_batch_rule: MicroBatchRule,
    n_ranks: int,
    manifest: Manifest,
) -> None:
    """Assert what the checks of a configuration and of its shards have made sure of."""
    lanes = order_options.stream.lanes
    assert lanes % n_ranks == 0, f"{lanes} lanes for {n_ranks} ranks"
    assert order_options.global_batch % lanes == 0, (
        f"{order_options.global_batch} cells in {lanes} lanes"
    )
    assert token_options.max_tokens <= micro_batch_rule.token_budget, (
        f"{token_options.max_tokens} tokens for {micro_batch_rule}"
    )
    assert token_options.sequences == manifest.has_sequences, (
        f"sequences in shards: {manifest.has_sequences}, in tokens: {token_options.sequences}"
    )


def _make_order_rule(manifest: Manifest, source: SplitSource, options: OrderOptions) -> OrderRule:
    """Make the rule for the order of a split's cells; read their levels if options weigh them."""
    stream = options.stream
    entry = manifest.entry(source.split)
    max_cells = entry.n_obs if source.max_cells is None else source.max_cells
    level_sampler = None
    if options.is_training:
        max_cells = min(max_cells, stream.train_cells(entry.n_obs))
        if stream.weights_column():
            level_sampler = read_level_sampler(manifest, source.split, stream, max_cells)
    return OrderRule(
        options, tuple(shard.n_obs for shard in entry.shards), max_cells, level_sampler
    )


def _stream_options_in_state(stream: Stream, has_weights: bool) -> dict[str, Any]:
    """Return, by name, the options of section `stream` that fix the order of cells.

    Options of weights are None in a run without weights.
    """
    options = {name: getattr(stream, name) for name in _STATE_OPTIONS + _STATE_WEIGHT_OPTIONS}
    if not has_weights:
        options |= dict.fromkeys(_STATE_WEIGHT_OPTIONS)
    return options


def _options_in_state(order_rule: OrderRule) -> dict[str, Any]:
    """Return, by name, the options that `state_dict` has because they fix the order of cells."""
    options = order_rule.options
    has_weights = order_rule.level_sampler is not None
    stream_options = _stream_options_in_state(options.stream, has_weights)
    return {"seed": options.seed, **stream_options, "global_batch": options.global_batch}


class CellStream:
    """Cells of one split as micro-batches for one data rank; see `__iter__`.

    `OrderOptions.is_training` says which cells are read, in which order, and whether the stream ends.
    `token_options` is section `tokens`. `micro_batch_rule` says how a step is split, and `fields`
    what a batch has in addition to tokens. With `in_rank_order` the tokens of every cell are
    in rank order; otherwise only where `Tokenizer.tokenize` needs it, which is faster if shards have
    `order: genes`.

    Attributes: `n_cells`, the cells of an epoch; `steps_per_epoch`; `levels`, the levels of the obs
    columns of `fields`; `fingerprint`, a digest of the shards and of the obs columns that batches and
    weights read.

    Raises DataError if

    - manifest or shards are missing, damaged or do not match;
    - an obs column is missing;
    - the split has no cells, or, in training, fewer cells than there are data ranks;
    - `token_options` need an order of genes by variability that the vocabulary lacks.

    Raises ConfigError if `token_options` lack fitted edges.
    """

    def __init__(
        self,
        source: SplitSource,
        order_options: OrderOptions,
        token_options: Tokens,
        micro_batch_rule: MicroBatchRule,
        *,
        fields: BatchFields = _TOKENS_ONLY,
        data_rank: DataRank = ONLY_RANK,
        in_rank_order: bool = True,
    ):
        manifest_path = source.manifest_path
        split = source.split
        n_ranks = data_rank.n_ranks
        stream_options = order_options.stream
        is_training = order_options.is_training
        manifest = Manifest.read(manifest_path)
        _assert_options_fit(order_options, token_options, micro_batch_rule, n_ranks, manifest)
        # this compares the manifest's sizes with the index files, before arrays of these sizes are allocated
        self._shards = open_shards(manifest, split, source.copies)
        shards = manifest.entry(split).shards
        self._sha256 = {manifest.shard_path(shard): shard.sha256 for shard in shards}
        self._order_rule = _make_order_rule(manifest, source, order_options)
        self.n_cells = self._order_rule.n_cells
        self.steps_per_epoch = self._order_rule.steps_per_epoch
        if is_training and self.n_cells < n_ranks:
            n_all = manifest.entry(split).n_obs
            remedy = "use fewer processes"
            if stream_options.train_frac < 1:
                remedy = "raise stream.train_frac, or use fewer processes"
            raise DataError(
                f"{manifest_path}: {split}: {self.n_cells} of {n_all:,} cells (stream.train_frac "
                f"{stream_options.train_frac:g}) for {n_ranks} data ranks; {remedy}"
            )
        self.levels = manifest.levels(fields.level_columns)
        weight_columns = stream_options.weights_column() if is_training else {}
        columns_with_levels = sorted({*fields.level_columns, *weight_columns})
        self._columns = [*columns_with_levels, *sorted(fields.number_columns)]
        self.fingerprint = manifest.fingerprint_with(columns_with_levels, fields.number_columns)
        self._step_reader = StepReader(
            self._shards, self._order_rule, data_rank, stream_options.io_threads
        )
        # without training, the tokens drawn are the same for every seed
        draws_seed = order_options.seed if is_training else 0
        tokenizer = BatchTokenizer(
            token_options, manifest.n_genes, draws_seed, manifest.variability
        )
        unpacker = CellUnpacker(
            manifest, self._shards, tokenizer, fields.with_counts, in_rank_order
        )
        self._batch_maker = BatchMaker(
            micro_batch_rule,
            data_rank.rank,
            unpacker,
            tokenizer,
            fields.with_counts,
            fields.open_cell_arrays(manifest, split),
        )
        # epoch of the next batches, and their step in it
        self._epoch = 0
        self._step = 0
        # the thread that tokenizes for the current iteration; None if it was ended
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step, the list of this data rank's micro-batches.

        Every rank yields equally many per step, so some may be empty. In training the stream is endless,
        and starts at the state that was loaded last, or where the last iteration ended. Otherwise it is
        one epoch, always from the start. The first step of a new iteration ends an earlier one.
        """
        if not self._order_rule.options.is_training:
            self._epoch = 0
            self._step = 0
        self._stop_tokenizing()
        groups = self._step_reader.read_steps(self._epoch, self._step)
        pool = ThreadPoolExecutor(1, thread_name_prefix="cellmill-stream")
        self._pool = pool
        # `close` in another thread either finds this pool, and ends it, or is seen here
        if self._closed:
            self._stop_tokenizing()
            raise RuntimeError("the stream is closed")
        try:
            for batches_by_step in self._tokenize_ahead(groups, pool):
                for batches in batches_by_step:
                    if self._pool is not pool:  # `_stop_tokenizing` has ended this iteration
                        return
                    self._step += 1
                    if self._step == self.steps_per_epoch:
                        self._epoch += 1
                        self._step = 0
                    yield batches
        finally:
            pool.shutdown(cancel_futures=True)

    def _tokenize_ahead(
        self, groups: Iterator[StepGroup], pool: ThreadPoolExecutor
    ) -> Iterator[list[list[Batch]]]:
        """Yield the micro-batches of each group, which the thread of `pool` reads and tokenizes ahead.

        Ends early once `_stop_tokenizing` has shut `pool` down.
        """
        # lazy: each `next` reads and tokenizes a group
        tokenized = map(self._batch_maker.make_micro_batches, groups)
        queue = deque[Future[Any]]()  # the next group, then those ahead
        while True:
            try:
                while len(queue) <= _GROUPS_AHEAD:
                    queue.append(pool.submit(next, tokenized, _NO_MORE_GROUPS))
                batches_by_step = queue.popleft().result()
            except (RuntimeError, CancelledError):
                if self._pool is pool:
                    raise
                return  # `pool` takes no more groups, or has cancelled this one
            if batches_by_step is _NO_MORE_GROUPS:
                return
            yield batches_by_step

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue.

        These are the epoch of the next batches, their step in it, the options that fix the order of
        cells, how reads by weights are rounded, the obs columns that batches and weights read, and the
        fingerprint.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            **_options_in_state(self._order_rule),
            "rounding": ROUNDING if self._order_rule.level_sampler else None,
            "columns": self._columns,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, which may come from a run with another number of ranks.

        Ends an iteration in progress: a loop over it ends without an error. Raises ConfigError if an
        option that fixes the order differs, if an earlier version has rounded the reads by weights, if
        other obs columns are read, or if this stream is not for training. Raises DataError if `state` is
        incomplete, the shards or the contents of obs columns differ, or an epoch of this split has no such
        step.
        """
        if not self._order_rule.options.is_training:
            raise ConfigError(
                "expected a stream for training, got one that reads its split from the start; load the state "
                "into a stream for training (split train of a TensorStream)"
            )
        # an option that a state of an earlier version lacks had the effect of its default
        has_weights = state.get("weight_by") is not None
        defaults = _stream_options_in_state(Stream.model_validate({}), has_weights)
        # earlier versions rounded up the same levels, of the largest remainders, in each epoch
        rounding = "largest remainders" if has_weights else None
        state = {"columns": self._columns, "rounding": rounding} | defaults | state
        self._check_state(state)
        self._stop_tokenizing()
        self._epoch = state["epoch"]
        self._step = state["step"]

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise the errors of `load_state_dict` for a state that this stream cannot continue."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(
                f"expected a state that state_dict has returned for this split, got one without {min(missing)}; "
                "load another checkpoint, or start a new run"
            )
        for name, now in _options_in_state(self._order_rule).items():
            before = state[name]
            if before != now:
                section = "train" if name in ("seed", "global_batch") else "stream"
                raise ConfigError(
                    f"{section}.{name} is {as_yaml(now)}, but {as_yaml(before)} in the checkpoint, and defines the "
                    f"order of cells; set it back to {as_yaml(before)}, or start a new run"
                )
        # checked after the options: a changed `weight_by` changes the following too, and its own error is
        # clearer
        rounding = self.state_dict()["rounding"]
        if state["rounding"] != rounding:
            raise ConfigError(
                f"stream.weight_by: expected reads rounded by {rounding} sampling, got a checkpoint of an earlier "
                f"version of cellmill, which rounded by {state['rounding']}; finish the run with that version, or "
                "start a new run"
            )
        if state["columns"] != self._columns:
            raise ConfigError(
                f"expected obs columns {state['columns']}, as in the checkpoint, got {self._columns}; read the same "
                "columns, or start a new run"
            )
        fingerprint = state["fingerprint"]
        if fingerprint != self.fingerprint:
            raise DataError(
                f"expected cells and obs columns of fingerprint {fingerprint}, as in the checkpoint, got "
                f"{self.fingerprint}: restore the shards and columns that the run was trained on, or start a new run"
            )
        epoch = state["epoch"]
        step = state["step"]
        are_integers = type(epoch) is int and type(step) is int
        if not are_integers or epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise DataError(
                f"expected a state of step 0 to {self.steps_per_epoch - 1:,} of an epoch, got step {step!r} of epoch "
                f"{epoch!r}; load one that state_dict has returned for this split"
            )

    def name_cells(self, cell_ids: np.ndarray) -> list[str]:
        """Name cells by id; see `data.shards.reader.name_cells`."""
        return name_cells(self._shards, cell_ids)

    def find_needed_shards(
        self, ranks: Collection[int], global_start: int, global_stop: int
    ) -> dict[Path, str]:
        """Find the shards that data ranks `ranks` need; return the SHA-256 of each by path.

        In training, these are the shards for global steps `global_start:global_stop`, else for the epoch.
        """
        per_epoch = self.steps_per_epoch
        if not self._order_rule.options.is_training:
            global_start = 0
            global_stop = per_epoch
        lanes = self._step_reader.lanes_by_rank[[*ranks]].ravel().tolist()
        needed = set[int]()  # numbers of the shards
        for epoch in range(global_start // per_epoch, -(-global_stop // per_epoch)):
            # the steps start:stop of this epoch are among the global steps
            start = max(global_start - epoch * per_epoch, 0)
            stop = min(global_stop - epoch * per_epoch, per_epoch)
            epoch_order = make_epoch_order(self._order_rule, epoch)
            needed |= epoch_order.find_shards(lanes, start, stop)
            if len(needed) == self._order_rule.n_shards:
                break
        shards = enumerate(self._sha256.items())
        return {path: sha256 for number, (path, sha256) in shards if number in needed}

    def close(self) -> None:
        """End all threads; may be called at any time, and again. A loop in progress ends without an error."""
        self._closed = True
        self._stop_tokenizing()
        self._step_reader.close()
        # the shards share one cache of open files, so this closes the files of all
        self._shards[0].close()

    def _stop_tokenizing(self) -> None:
        """End the current iteration: end the thread that tokenizes for it, and wait for it."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
