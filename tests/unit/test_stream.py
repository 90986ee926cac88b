"""The stream's promises: every cell once, the same batches for any number of ranks, resume at any
step, no hang.
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_corpus
import torch
from small_corpus import random_counts, read_obs, write_corpus

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import divide_processes
from cellmill.config.parts.tokens import ContinuousTokens, Tokens
from cellmill.data.recycled import recycled_empty
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream import cell_stream
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.genes_per_cell import GenesPerCellQueue
from cellmill.data.stream.micro_batches import count_greedy_batches, split_batch, split_greedily
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.planner.step_counts import CorpusSize, count_detected_genes, count_steps

BUDGET = 30  # tokens of a micro-batch: two to four cells
# prime to everything: short blocks, short windows, a short last batch, lanes that differ by one
CELLS = 533


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_corpus(tmp_path_factory.mktemp("stream"), CELLS)


def stream_of(manifest: Manifest, rank: int = 0, world: int = 1, **changes: Any) -> CellStream:
    return small_corpus.stream_of(manifest, rank, world, **{"token_budget": BUDGET} | changes)


def take(stream: CellStream, steps: int) -> list[list[Batch]]:
    try:
        return list(islice(stream, steps))
    finally:
        stream.close()


def cells_of(step: list[Batch]) -> list[int]:
    cells: list[int] = []
    for batch in step:
        cells += batch.cell_ids.tolist()
    return cells


def same(steps: list[list[Batch]], others: list[list[Batch]]) -> bool:
    return digests_of(steps) == digests_of(others)


def digests_of(steps: list[list[Batch]]) -> list[list[tuple[bytes, ...]]]:
    """Bytes of every batch, step by step."""
    digests = []
    for step in steps:
        of_step = []
        for batch in step:
            fields = (batch.token_ids, batch.values, batch.cu_seqlens, batch.cell_ids)
            of_step.append(tuple(array.tobytes() for array in fields))
        digests.append(of_step)
    return digests


def test_micro_batches_are_filled_greedily_in_order() -> None:
    assert split_greedily(np.array([5, 5, 1, 9, 10, 2]), 10) == [0, 2, 4, 5, 6]
    assert split_greedily(np.array([3, 30, 40, 4, 5]), 12) == [0, 1, 2, 3, 5]
    assert split_greedily(np.array([], int), 10) == [0]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n_cells = rng.integers(0, 9, rng.integers(1, 9))
        lengths = rng.integers(0, 30, n_cells.sum())
        for budget in (1, 30, 77):
            alone = [
                len(split_greedily(part, budget)) - 1
                for part in np.split(lengths, n_cells.cumsum()[:-1])
            ]
            assert count_greedy_batches(lengths, n_cells, budget).tolist() == alone


def test_parts_of_a_batch_have_every_cell_once_within_the_budget() -> None:
    cu = np.cumsum([0, 3, 9, 2, 2, 1, 30, 4]).astype(np.int32)
    batch = Batch(
        np.arange(cu[-1], dtype=np.int32), np.arange(cu[-1], dtype=np.float32), cu, np.arange(7)
    )
    parts = list(split_batch(batch, 12))
    assert [part.cell_ids.tolist() for part in parts] == [[0, 1], [2, 3, 4], [5], [6]]
    for name in ("token_ids", "values"):
        assert (
            np.concatenate([getattr(part, name) for part in parts]) == getattr(batch, name)
        ).all()
    assert all(
        part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == len(part.token_ids) for part in parts
    )
    assert list(split_batch(batch.slice_cells(0, 0), 12)) == []


def ranks_of(manifest: Manifest, world: int, **changes: Any) -> list[CellStream]:
    return [stream_of(manifest, rank, world, **changes) for rank in range(world)]


def joined(ranks: list[CellStream], steps: int) -> list[list[int]]:
    """Sorted cells of each step over all ranks, which have as many micro-batches each, filled to
    the budget.
    """
    found = []
    for step in zip(*(take(stream, steps) for stream in ranks), strict=True):
        assert len({len(batches) for batches in step}) == 1
        found.append(sorted(chain.from_iterable(map(cells_of, step))))
        for batches in step:
            assert all(len(batch.token_ids) <= BUDGET for batch in batches)
            assert all(len(batch.cell_ids) or batch.cu_seqlens.tolist() == [0] for batch in batches)
            for batch, after in pairwise(batch for batch in batches if len(batch.cell_ids)):
                assert len(batch.token_ids) + int(after.cu_seqlens[1]) > BUDGET
    return found


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "options", [{}, {"equal_steps": True}, {"block_cells": 1, "window_blocks": 1}], ids=str
)
def test_every_cell_is_read_once_per_epoch(
    manifest: Manifest, world: int, options: dict[str, Any]
) -> None:
    steps = 17  # the longest lane has 67 of 533 cells and gives 4 to a batch
    ranks = ranks_of(manifest, world, options=options)
    assert {stream.steps_per_epoch for stream in ranks} == {steps}
    found = joined(ranks, 3 * steps)
    assert found == joined([stream_of(manifest, options=options)], 3 * steps)
    for epoch in range(3):
        assert sorted(chain(*found[epoch * steps : (epoch + 1) * steps])) == list(range(CELLS))
    if "equal_steps" in options:
        assert {len(step) for step in found} == {31, 32}


@pytest.mark.parametrize("n_cells", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize(("world", "is_training"), [(1, True), (1, False), (8, False)])
def test_tiny_corpora_lose_no_cell(
    tmp_path: Path, n_cells: int, world: int, is_training: bool
) -> None:
    manifest = write_corpus(tmp_path, n_cells)
    for equal in (False, True):
        ranks = ranks_of(
            manifest, world, is_training=is_training, global_batch=8, options={"equal_steps": equal}
        )
        steps = joined(ranks, ranks[0].steps_per_epoch)
        assert sorted(chain(*steps)) == list(range(n_cells))


def test_epochs_and_seeds_give_different_orders(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    steps = stream.steps_per_epoch
    both = [cells_of(step) for step in take(stream, 2 * steps)]
    assert both[:steps] != both[steps:]
    assert sorted(both[0]) != sorted(both[steps])
    other = [cells_of(step) for step in take(stream_of(manifest, seed=1), steps)]
    assert other != both[:steps]
    assert [cells_of(step) for step in take(stream_of(manifest), steps)] == both[:steps]


@pytest.mark.parametrize("tokenizer", ["rank", "binned", "continuous"])
def test_tokens_equal_those_of_the_cells_in_the_shards(manifest: Manifest, tokenizer: str) -> None:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 9})
    stream = stream_of(manifest, tokens=tokens)
    alone = tokens.load()(tokens)
    expected = {}
    for rows in open_shards(manifest, "train"):
        for row in range(rows.n_obs):
            expected[len(expected)] = alone.tokenize(rows.read(row, 1))
    for step in take(stream, stream.steps_per_epoch):
        for batch in step:
            assert (batch.cell_ids.dtype, batch.cu_seqlens.dtype, batch.token_ids.dtype) == (
                np.int64,
                np.int32,
                np.int32,
            )
            for cell, a, b in zip(batch.cell_ids, batch.cu_seqlens, batch.cu_seqlens[1:]):
                genes, values, _ = expected[int(cell)]
                np.testing.assert_array_equal(batch.token_ids[a:b], genes)
                np.testing.assert_array_equal(batch.values[a:b], values)


def test_shards_of_different_count_types_stream_together(tmp_path: Path) -> None:
    counts = random_counts(100, 20)
    counts.data[5] = 70_000
    manifest = write_corpus(tmp_path, counts, cells_per_shard=64)
    assert len({shard.dtype for shard in manifest.splits["train"].shards}) == 2
    stream = stream_of(manifest, tokens=ContinuousTokens(max_tokens=50), token_budget=60)
    steps = take(stream, stream.steps_per_epoch)
    assert sorted(chain.from_iterable(map(cells_of, steps))) == list(range(100))
    library = np.asarray(counts.sum(axis=1)).ravel()
    highest = np.log1p(counts.multiply(1e4 / library[:, None]).max())
    largest = max(batch.values.max() for batch in chain.from_iterable(steps))
    assert largest == pytest.approx(highest, rel=1e-5)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("at", [0, 1, 8, 16, 17, 18, 34, 40])
def test_resuming_equals_never_stopping_bit_for_bit(
    manifest: Manifest, at: int, equal: bool
) -> None:
    options = {"options": {"equal_steps": equal}}
    whole, first, second = (stream_of(manifest, **options) for _ in range(3))
    before = list(islice(first, at))
    state = first.state_dict()
    first.close()
    assert (state["epoch"], state["step"]) == divmod(at, first.steps_per_epoch)
    second.load_state_dict(state)
    after = take(second, 20)
    assert same(before + after, take(whole, at + 20))
    ranks = ranks_of(manifest, 4, **options)
    for stream in ranks:
        stream.load_state_dict(state)
    assert joined(ranks, 20) == [sorted(cells_of(step)) for step in after]


def test_iterating_again_repeats_no_cell(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    parts = list(islice(stream, 7)) + list(islice(stream, 13))
    stream.close()
    assert same(parts, take(stream_of(manifest), 20))


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        (
            {"seed": 4},
            {},
            "train.seed: expected 0, as in the checkpoint, because it fixes the order of cells, got 4; set it back",
        ),
        ({"global_batch": 64}, {}, "train.global_batch: expected 32, .*, got 64;"),
        ({"options": {"lanes": 4}}, {}, "stream.lanes: expected 8, .*, got 4;"),
        ({"options": {"block_cells": 2}}, {}, "stream.block_cells: expected 4, .*, got 2;"),
        ({"options": {"window_blocks": 1}}, {}, "stream.window_blocks: expected 3, .*, got 1;"),
        ({"options": {"train_frac": 0.5}}, {}, "stream.train_frac: expected 1.0, .*, got 0.5;"),
        (
            {},
            {"fingerprint": "of others"},
            r"fingerprint of others, as in the checkpoint, got \w{64}: ",
        ),
        ({}, {"step": 17}, "expected a state of step 0 to 16 of an epoch, got step 17 of epoch 0"),
        ({}, {"step": -1}, "got step -1 of epoch 0"),
        ({}, {"epoch": -1}, "got step 0 of epoch -1"),
        ({}, {"epoch": "x"}, "got step 0 of epoch 'x'; load one that"),
        ({}, {"step": None}, "got step None of epoch 0; load"),
        ({}, {"step": 3.7}, "of an epoch, got step 3.7 of epoch 0; load"),
        ({}, {"step": True}, "got step True of epoch 0; load"),
    ],
    ids=str,
)
def test_a_state_of_another_stream_is_refused_with_both_values(
    manifest: Manifest, changes: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    stream = stream_of(manifest, **changes)
    given = stream_of(manifest).state_dict() | state
    with pytest.raises(UserError, match=message):
        stream.load_state_dict(given)
    assert len(take(stream, 20)) == 20


def test_an_option_that_a_state_lacks_had_its_default(manifest: Manifest) -> None:
    state = stream_of(manifest).state_dict()
    for name in ("equal_steps", "train_frac", "weight_by", "max_repeats", "columns"):
        del state[name]
    stream = stream_of(manifest)
    stream.load_state_dict(state)
    equal = stream_of(manifest, options={"equal_steps": True})
    with pytest.raises(ConfigError, match=r"equal_steps: expected false, .* back to false"):
        equal.load_state_dict(state)
    assert len(take(stream, 20)) == len(take(equal, 20))


@pytest.mark.parametrize("name", ["epoch", "step", "seed", "global_batch", "fingerprint"])
def test_a_state_without_what_all_states_have_is_refused(manifest: Manifest, name: str) -> None:
    stream = stream_of(manifest)
    state = stream.state_dict()
    del state[name]
    with pytest.raises(DataError, match=rf"a state that state_dict .* got one without {name}"):
        stream.load_state_dict(state)
    stream.close()


def test_validation_reads_the_first_cells_in_a_fixed_order(manifest: Manifest) -> None:
    stream = stream_of(manifest, is_training=False, max_cells=150, seed=7)
    assert stream.n_cells == 150
    first = list(stream)
    second = list(stream)
    stream.close()
    assert len(first) == stream.steps_per_epoch
    assert same(first, second)
    assert sorted(chain.from_iterable(map(cells_of, first))) == list(range(150))
    assert same(first, take(stream_of(manifest, is_training=False, max_cells=150, seed=8), 100))
    some = stream_of(manifest, is_training=False, max_cells=150)
    next(iter(some))
    assert same(take(some, 100), first)
    everything = stream_of(manifest, is_training=False, max_cells=10**6)
    assert everything.n_cells == CELLS
    everything.close()


def threads() -> set[threading.Thread]:
    return {
        t for t in threading.enumerate() if t.name.startswith(("cellmill-stream", "cellmill-read"))
    }


def test_close_ends_every_thread_at_any_moment(manifest: Manifest) -> None:
    before = threads()  # a stream that another test did not close may live until it is collected
    for steps in (0, 1, 5):
        stream = stream_of(manifest)
        batches = iter(stream)
        for _ in range(steps):
            next(batches)
        stream.close()
        stream.close()
        assert threads() <= before
        assert steps == 0 or next(batches, None) is None
        with pytest.raises(RuntimeError, match="closed"):
            next(iter(stream))


def test_a_stream_closed_as_its_iteration_begins_ends_it(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads()
    streams: list[CellStream] = []

    class ClosingPool(ThreadPoolExecutor):
        """Closes the stream when the iteration's pool is made."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if streams:
                streams[0].close()

    class LaterClosingPool(ThreadPoolExecutor):
        """Closes the stream when the iteration submits its first group."""

        def submit(self, *args: Any) -> Any:
            streams[0].close()
            return super().submit(*args)

    monkeypatch.setattr(cell_stream, "ThreadPoolExecutor", ClosingPool)
    streams.append(stream_of(manifest))
    with pytest.raises(RuntimeError, match=r"^the stream is closed$"):
        next(iter(streams[0]))
    monkeypatch.setattr(cell_stream, "ThreadPoolExecutor", LaterClosingPool)
    streams[0] = stream_of(manifest)
    assert list(streams[0]) == []
    assert threads() <= before


def test_leaving_a_loop_ends_the_thread_that_reads_ahead(manifest: Manifest) -> None:
    before = threads()
    stream = stream_of(manifest)
    for _ in stream:
        break
    for thread in threads() - before:
        if thread.name.startswith("cellmill-stream"):
            thread.join(60)
            assert not thread.is_alive()
    stream.close()


def test_an_error_in_a_thread_is_raised_to_the_consumer(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 400)
    before = threads()
    stream = stream_of(manifest)
    batches = iter(stream)
    next(batches)
    for shard in manifest.splits["train"].shards:
        with open(manifest.shard_path(shard), "r+b") as file:
            file.truncate(100)
    with pytest.raises(
        DataError, match=r"train-0000\d\.h5ad: damaged: short read: .* truncated while open"
    ):
        list(islice(batches, 100))
    stream.close()
    assert threads() <= before


def test_sorted_donors_are_mixed_as_by_a_true_shuffle(tmp_path: Path) -> None:
    n_donors = 16
    each = 128
    rng = np.random.default_rng(0)
    manifest = write_corpus(tmp_path, n_donors * each, 10, cells_per_shard=512)
    names = np.array([int(name.split(":cell")[1]) for name in read_obs(manifest, "train").index])
    stream = stream_of(manifest, options={"block_cells": 16, "window_blocks": 4}, global_batch=64)
    steps = take(stream, stream.steps_per_epoch)
    found = np.mean([_entropy(names[cells_of(step)] // each) for step in steps])
    true = np.mean(
        [_entropy(rng.choice(n_donors * each, 64, replace=False) // each) for _ in range(200)]
    )
    assert abs(found - true) < 0.05


def _entropy(values: np.ndarray) -> float:
    p = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(p * np.log2(p)).sum())


def test_a_fraction_of_the_cells_is_a_part_of_every_larger_one(manifest: Manifest) -> None:
    seen = []
    for fraction, n in ((0.1, 53), (0.5, 266), (1.0, CELLS)):
        ranks = ranks_of(manifest, 2, options={"train_frac": fraction})
        assert ranks[0].n_cells == n
        counts = Counter(chain(*joined(ranks, 2 * ranks[0].steps_per_epoch)))
        assert set(counts.values()) == {2}
        seen.append({*counts})
        assert len(counts) == n
    assert seen[0] < seen[1] < seen[2]
    for max_cells, n in ((40, 40), (100, 53)):
        stream = stream_of(manifest, options={"train_frac": 0.1}, max_cells=max_cells)
        assert stream.n_cells == n, "the smaller of both limits holds"


def test_the_plan_knows_the_cells_of_equal_steps(manifest: Manifest) -> None:
    tree = {"tokens": {"max_tokens": 12}, "model": {}, "parallel": {}, "plan": {}}
    tree["train"] = {"global_batch": 40, "steps": 20, "token_budget": 60}
    cells = CorpusSize(count_detected_genes(manifest), manifest.n_genes)
    for equal, largest, more in ((False, 40, 6 * 40), (True, 39, 6 * CELLS // 14)):
        options = PlanOptions.model_validate(tree | {"stream": {"lanes": 8, "equal_steps": equal}})
        work = count_steps(options, cells, divide_processes(options.parallel, 1, 1))
        assert (work.steps_per_epoch, work.max_cells_per_step, work.cells_seen) == (
            14,
            largest,
            CELLS + more,
        )


def test_batch_memory_is_reused_only_after_its_last_view() -> None:
    size = 1_000_003  # no other test asks for blocks of this size

    def address(array: np.ndarray) -> int:
        return int(array.__array_interface__["data"][0])

    first = recycled_empty(size, np.float64)
    first[:] = 1
    memory = address(first)
    tensor = torch.from_numpy(first[10:20].reshape(2, 5))
    del first
    second = recycled_empty(size, np.float64)
    assert address(second) != memory
    second[:] = 2
    assert tensor.tolist() == [[1.0] * 5] * 2
    del tensor
    third = recycled_empty(2 * size - 5, np.int32)  # another type and size of the same block
    assert address(third) == memory
    assert third.shape == (2 * size - 5,)
    assert third.dtype == np.int32
    assert third.flags.writeable
    assert recycled_empty(7, np.int16).base is None, "small arrays are the allocator's"


def test_look_ahead_does_not_grow_with_the_epochs() -> None:
    epochs = 300
    windows = [iter([np.ones(10, np.int32)] * (2 * epochs))]
    # as many cells, in one window more per epoch
    windows.append(iter([np.ones(n, np.int32) for _ in range(epochs) for n in (7, 7, 6)]))
    queue = GenesPerCellQueue(windows, n_skipped=[0, 0])
    for _ in range(1000):
        queue.take(np.array([4, 4]))
    not_taken = 20 * epochs - 4 * 1000
    assert not_taken - sum(map(len, windows[0])) <= 3 * 10
