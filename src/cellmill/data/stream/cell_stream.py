"""Batches of tokens for one data rank.

In training the stream of batches is endless and can be resumed. Otherwise it is one epoch in a fixed order.

The stream uses threads, not processes: reading and copying release the GIL, and processes cost 1.7 times the
CPU time per tokenized cell. A few threads read the shards. One further thread makes the micro-batches of the
next steps, and puts them into a bounded queue. The state of the stream is an epoch and a step, so a resumed
run replays nothing.
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

# number of groups of steps in the queue, after the group in use. One of them is being tokenized; the others
# are tokenized already, or wait
_GROUPS_AHEAD = 3
_NO_MORE_GROUPS = object()  # result of a queued task after the last group
_TOKENS_ONLY = BatchFields()
# options of section `stream` that fix the order of cells, so a resumed run must not change them
_FIXED_OPTIONS = ("lanes", "block_cells", "window_blocks", "equal_steps", "train_frac")
# further options that fix the order of cells, but only in a run with weights
_FIXED_WEIGHT_OPTIONS = (
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
    # read at most this many cells, the first in disk order. In training, `stream.train_frac` may leave fewer
    max_cells: int | None = None  # None: all cells
    copies: LocalCopies | None = None  # a complete copy is read instead of its shard


class CellStream:
    """Cells of one split as micro-batches for one data rank. Iterating over a stream reads the cells.

    `source` says which cells are read. `order_options` says in which order, and whether the stream is for
    training. `token_options` is section `tokens` of the configuration. `micro_batch_rule` says how a step
    is split, and `fields` says what a batch has in addition to tokens.

    With `in_rank_order` the genes of every cell are in rank order. Otherwise they are in rank order only
    where `Tokenizer.tokenize` needs it. This is faster if the shards have `order: genes`.

    Attributes:

    - `n_cells`: the number of cells of an epoch
    - `steps_per_epoch`: the number of optimizer steps of an epoch
    - `levels`: the levels of the obs columns in `fields`, by column
    - `fingerprint`: a digest of the shards, and of the obs columns that batches and weights read

    Raises DataError if

    - the manifest or the index is missing or damaged, or they do not match;
    - a shard is missing or damaged. Most shards are opened only during an iteration;
    - an obs column is missing, or does not have the levels or numbers that are read;
    - the split has no cells, or, in training, fewer cells than there are data ranks;
    - `token_options` need an order of genes by variability, and the vocabulary has none.

    Raises ConfigError if `token_options` need edges of bins that are not fitted. Raises UserError if the
    teacher's vectors are missing or damaged, or were made for other shards.
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
        split = source.split
        manifest = Manifest.read(source.manifest_path)
        _assert_options_fit(
            order_options, token_options, micro_batch_rule, data_rank.n_ranks, manifest
        )
        # this compares the manifest's sizes with the index files, before arrays of these sizes are allocated
        self._shards = open_shards(manifest, split, source.copies)
        shards = manifest.entry(split).shards
        self._sha256_by_path = {manifest.shard_path(shard): shard.sha256 for shard in shards}

        self._order_rule = _make_order_rule(manifest, source, order_options)
        self.n_cells = self._order_rule.n_cells
        self.steps_per_epoch = self._order_rule.steps_per_epoch
        _check_enough_cells(manifest, split, self._order_rule, data_rank.n_ranks)

        self.levels = manifest.levels(fields.level_columns)
        is_training = order_options.is_training
        weight_columns = order_options.stream.weights_column() if is_training else {}
        columns_with_levels = sorted({*fields.level_columns, *weight_columns})
        # the obs columns that batches and weights read
        self._columns = [*columns_with_levels, *sorted(fields.number_columns)]
        self.fingerprint = manifest.fingerprint_with(columns_with_levels, fields.number_columns)

        self._step_reader = StepReader(
            self._shards, self._order_rule, data_rank, order_options.stream.io_threads
        )
        # without training, draws of tokens are the same for every seed
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

        # epoch of the next batches, and their step in this epoch
        self._epoch = 0
        self._step = 0
        # the thread that tokenizes for the current iteration; None if no iteration is in progress
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step, the list of this data rank's micro-batches.

        All ranks yield the same number of micro-batches in a step, so some may be empty.

        In training the iterator is endless. It begins at the state that was loaded last, or where the last
        iteration ended. Otherwise the iterator yields one epoch, always from the start of the epoch.

        A new iteration ends an earlier iteration when its first step is read. A loop over the earlier
        iteration then ends without an error.
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
        """Yield the micro-batches of each group of steps.

        While a group is in use, the thread of `pool` makes the micro-batches of the next `_GROUPS_AHEAD` groups.
        The iterator ends early if `_stop_tokenizing` shuts `pool` down.
        """
        # each `next` reads a group and tokenizes it
        tokenized = map(self._batch_maker.make_micro_batches, groups)
        queue = deque[Future[Any]]()  # tasks of the next group, and of the groups after it
        while True:
            try:
                while len(queue) <= _GROUPS_AHEAD:
                    queue.append(pool.submit(next, tokenized, _NO_MORE_GROUPS))
                batches_by_step = queue.popleft().result()
            except (RuntimeError, CancelledError):
                if self._pool is pool:
                    raise
                return  # `pool` takes no more groups, or has cancelled this group
            if batches_by_step is _NO_MORE_GROUPS:
                return
            yield batches_by_step

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` needs to continue.

        The state has

        - the epoch of the next batches, and their step in this epoch;
        - the options that fix the order of cells;
        - the method that rounds the expected reads of weights to whole numbers;
        - the obs columns that batches and weights read;
        - the fingerprint.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            **_find_fixed_options(self._order_rule),
            "rounding": ROUNDING if self._order_rule.level_sampler else None,
            "columns": self._columns,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`. The state may come from a run with another number of ranks.

        An iteration in progress is ended: a loop over it ends without an error.

        Raises ConfigError if

        - this stream is not for training;
        - an option that fixes the order of cells differs;
        - the state is of an earlier version, which rounded the expected reads of weights differently;
        - other obs columns are read.

        Raises DataError if

        - `state` is incomplete;
        - the shards differ, or the contents of the obs columns;
        - an epoch of this split does not have the step of `state`.
        """
        if not self._order_rule.options.is_training:
            raise ConfigError(
                "expected a stream for training, got one that reads its split from the start; load the state "
                "into a stream for training (split train of a TensorStream)"
            )
        # a state of an earlier version may lack an option. That version behaved as the option's default does now
        has_weights = state.get("weight_by") is not None
        defaults = _find_fixed_stream_options(Stream.model_validate({}), has_weights)
        # earlier versions rounded up the reads of the levels with the largest remainders, in every epoch
        rounding = "largest remainders" if has_weights else None
        state = {"columns": self._columns, "rounding": rounding} | defaults | state
        self._check_options(state)
        self._check_data(state)
        self._check_position(state)
        self._stop_tokenizing()
        self._epoch = state["epoch"]
        self._step = state["step"]

    def _check_options(self, state: dict[str, Any]) -> None:
        """Raise DataError if `state` is incomplete, and ConfigError if an option of the order differs."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(
                f"expected a state that state_dict has returned for this split, got one without {min(missing)}; "
                "load another checkpoint, or start a new run"
            )
        for name, now in _find_fixed_options(self._order_rule).items():
            before = state[name]
            if before != now:
                section = "train" if name in ("seed", "global_batch") else "stream"
                raise ConfigError(
                    f"{section}.{name}: expected {as_yaml(before)}, as in the checkpoint, because it fixes the order "
                    f"of cells, got {as_yaml(now)}; set it back to {as_yaml(before)}, or start a new run"
                )

    def _check_data(self, state: dict[str, Any]) -> None:
        """Raise an error if `state` is of other cells, other obs columns, or another rounding of reads.

        The options were checked before: a changed `weight_by` also changes the columns and the rounding, but
        the error of the option says more.
        """
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

    def _check_position(self, state: dict[str, Any]) -> None:
        """Raise DataError if an epoch of this split does not have the step of `state`."""
        epoch = state["epoch"]
        step = state["step"]
        are_integers = type(epoch) is int and type(step) is int
        if not are_integers or epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise DataError(
                f"expected a state of step 0 to {self.steps_per_epoch - 1:,} of an epoch, got step {step!r} of epoch "
                f"{epoch!r}; load one that state_dict has returned for this split"
            )

    def name_cells(self, cell_ids: np.ndarray) -> list[str]:
        """Name cells for error messages. `cell_ids`, `(cells,)`, are ids of cells of this split."""
        return name_cells(self._shards, cell_ids)

    def find_needed_shards(
        self, ranks: Collection[int], global_start: int, global_stop: int
    ) -> dict[Path, str]:
        """Find the shards that data ranks `ranks` need. Returns the SHA-256 of each shard by its path.

        In training, these are the shards for global steps `global_start:global_stop`. Otherwise they are the
        shards for the whole epoch.
        """
        per_epoch = self.steps_per_epoch
        if not self._order_rule.options.is_training:
            global_start = 0
            global_stop = per_epoch
        lanes = self._step_reader.lanes_by_rank[[*ranks]].ravel().tolist()
        n_readable = self._order_rule.count_readable_shards()
        needed = set[int]()  # numbers of the shards
        for epoch in range(global_start // per_epoch, -(-global_stop // per_epoch)):
            # steps start:stop of this epoch are among the global steps
            start = max(global_start - epoch * per_epoch, 0)
            stop = min(global_stop - epoch * per_epoch, per_epoch)
            epoch_order = make_epoch_order(self._order_rule, epoch)
            needed |= epoch_order.find_shards(lanes, start, stop)
            if len(needed) == n_readable:  # further epochs need no further shards
                break
        shards = enumerate(self._sha256_by_path.items())
        return {path: sha256 for number, (path, sha256) in shards if number in needed}

    def close(self) -> None:
        """End all threads. A loop in progress ends without an error.

        This method may be called at any time, and more than once.
        """
        self._closed = True
        self._stop_tokenizing()
        self._step_reader.close()
        # the shards share one cache of open files, so this closes the files of all
        self._shards[0].close()

    def _stop_tokenizing(self) -> None:
        """End the current iteration, if there is one, and wait until its thread has ended."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _assert_options_fit(
    order_options: OrderOptions,
    token_options: Tokens,
    micro_batch_rule: MicroBatchRule,
    n_ranks: int,
    manifest: Manifest,
) -> None:
    """Assert that the options fit each other and the shards. The configuration was checked for this before."""
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
    """Make the rule for the order of a split's cells. For a run with weights, read the cells' levels."""
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


def _check_enough_cells(
    manifest: Manifest, split: str, order_rule: OrderRule, n_ranks: int
) -> None:
    """Raise DataError if, in training, the split has fewer cells than there are data ranks."""
    if not order_rule.options.is_training or order_rule.n_cells >= n_ranks:
        return
    train_frac = order_rule.options.stream.train_frac
    remedy = "use fewer processes"
    if train_frac < 1:
        remedy = "raise stream.train_frac, or use fewer processes"
    raise DataError(
        f"{manifest.path}: {split}: {order_rule.n_cells} of {manifest.entry(split).n_obs:,} cells "
        f"(stream.train_frac {train_frac:g}) for {n_ranks} data ranks; {remedy}"
    )


def _find_fixed_options(order_rule: OrderRule) -> dict[str, Any]:
    """Return, by name, the options that a resumed run must not change, because they fix the order of cells."""
    options = order_rule.options
    has_weights = order_rule.level_sampler is not None
    stream_options = _find_fixed_stream_options(options.stream, has_weights)
    return {"seed": options.seed, **stream_options, "global_batch": options.global_batch}


def _find_fixed_stream_options(stream: Stream, has_weights: bool) -> dict[str, Any]:
    """Return, by name, the options of section `stream` that a resumed run must not change.

    Options of weights are None in a run without weights.
    """
    options = {name: getattr(stream, name) for name in _FIXED_OPTIONS + _FIXED_WEIGHT_OPTIONS}
    if not has_weights:
        options |= dict.fromkeys(_FIXED_WEIGHT_OPTIONS)
    return options
