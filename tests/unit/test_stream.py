"""The stream's promises: every cell once, the same batches for any number of ranks, resume at any step, no hang."""

import threading
from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import small_corpus
import torch
from small_corpus import random_counts, write_corpus

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import layout
from cellmill.config.parts.tokens import ContinuousTokens, Tokens
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.batch import Batch, recycled_empty
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.order import Epoch, EpochLayout
from cellmill.errors import ConfigError, DataError
from cellmill.planner.work import Cells, detected_genes, measure_work

CELLS = 533  # prime to everything: short blocks, short windows, a short last batch, lanes that differ by one


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_corpus(tmp_path_factory.mktemp("stream"), CELLS)


def stream_of(manifest: Manifest, rank: int = 0, world: int = 1, **changes: Any) -> CellStream:
    return small_corpus.stream_of(manifest, rank, world, **{"token_budget": 60} | changes)


def take(stream: CellStream, steps: int) -> list[list[Batch]]:
    try:
        return list(islice(stream, steps))
    finally:
        stream.close()


def cells_of(step: list[Batch]) -> list[int]:
    return [int(cell) for batch in step for cell in batch.cells]


def same(one: list[list[Batch]], other: list[list[Batch]]) -> bool:
    fields = ("genes", "values", "cu_seqlens", "cells")
    return [len(step) for step in one] == [len(step) for step in other] and all(
        getattr(a, field).tobytes() == getattr(b, field).tobytes()
        for x, y in zip(one, other)
        for a, b in zip(x, y)
        for field in fields
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("equal", [False, True])
def test_every_cell_is_seen_once_an_epoch_in_the_global_batches_of_one_rank(
    manifest: Manifest, world: int, equal: bool
) -> None:
    options = {"equal_steps": equal}
    alone = stream_of(manifest, options=options)
    steps = alone.steps_per_epoch
    streams = [stream_of(manifest, rank, world, options=options) for rank in range(world)]
    assert {stream.steps_per_epoch for stream in streams} == {steps}
    assert steps == -(-67 // 4)  # the longest lane has 67 of 533 cells and gives 4 to a batch
    expected = [sorted(cells_of(step)) for step in take(alone, 3 * steps)]
    for step, ranks in zip(expected, zip(*(take(stream, 3 * steps) for stream in streams)), strict=True):
        assert sorted(cell for row in ranks for cell in cells_of(row)) == step
        assert len({len(row) for row in ranks}) == 1, "ranks differ in their number of micro-batches"
    for epoch in range(3):
        assert sorted(chain(*expected[epoch * steps : (epoch + 1) * steps])) == list(range(CELLS))
    if equal:
        assert {len(step) for step in expected} == {31, 32}


def test_a_micro_batch_keeps_to_the_token_budget_and_is_filled(manifest: Manifest) -> None:
    for step in take(stream_of(manifest), 20):
        sizes = [len(batch.genes) for batch in step]
        assert max(sizes) <= 60
        for batch, after in pairwise(step):
            assert len(batch.genes) + int(after.cu_seqlens[1]) > 60


def test_a_rank_without_cells_gets_as_many_batches_all_empty(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 9)
    rows = [take(stream_of(manifest, rank, 8, global_batch=8), 2) for rank in range(8)]
    assert sorted(cell for row in rows for step in row for cell in cells_of(step)) == list(range(9))
    last = [row[1] for row in rows]
    assert [len(step) for step in last] == [1] * 8
    assert sum(len(step[0].cells) == 0 for step in last) == 7
    assert all(step[0].cu_seqlens.tolist() == [0] for step in last if not len(step[0].cells))


@pytest.mark.parametrize("n_cells", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("shuffle", [True, False])
def test_tiny_corpora_lose_no_cell(tmp_path: Path, n_cells: int, shuffle: bool) -> None:
    manifest = write_corpus(tmp_path, n_cells)
    stream = stream_of(manifest, shuffle=shuffle)
    steps = take(stream, stream.steps_per_epoch)
    assert sorted(cell for step in steps for cell in cells_of(step)) == list(range(n_cells))


def test_epochs_differ_and_so_do_seeds(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    steps = stream.steps_per_epoch
    both = [cells_of(step) for step in take(stream, 2 * steps)]
    assert both[:steps] != both[steps:]
    assert sorted(both[0]) != sorted(both[steps])
    other = [cells_of(step) for step in take(stream_of(manifest, seed=1), steps)]
    assert other != both[:steps]
    assert [cells_of(step) for step in take(stream_of(manifest), steps)] == both[:steps]


@pytest.mark.parametrize("tokenizer", ["rank", "binned", "continuous"])
def test_tokens_are_those_of_the_cells_in_the_shards(manifest: Manifest, tokenizer: str) -> None:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 9})
    stream, alone = stream_of(manifest, tokens=tokens), tokens.load()(tokens)
    expected = {}
    for rows in open_shards(manifest, "train"):
        for start, stop in pairwise(rows.indptr.tolist()):
            genes, counts = rows.read_genes(start, stop), rows.read_counts(start, stop)
            expected[len(expected)] = alone.tokenize(genes, counts, np.array([0, stop - start]))
    for step in take(stream, stream.steps_per_epoch):
        for batch in step:
            assert (batch.cells.dtype, batch.cu_seqlens.dtype, batch.genes.dtype) == (np.int64, np.int32, np.int32)
            for cell, a, b in zip(batch.cells, batch.cu_seqlens, batch.cu_seqlens[1:]):
                genes, values, _ = expected[int(cell)]
                np.testing.assert_array_equal(batch.genes[a:b], genes)
                np.testing.assert_array_equal(batch.values[a:b], values)


def test_shards_of_different_count_types_stream_together(tmp_path: Path) -> None:
    counts = random_counts(100, 20)
    counts.data[5] = 70_000
    manifest = write_corpus(tmp_path, counts, cells_per_shard=64)
    assert len({shard.dtype for shard in manifest.splits["train"].shards}) == 2
    stream = stream_of(manifest, tokens=ContinuousTokens(max_tokens=50))
    steps = take(stream, stream.steps_per_epoch)
    assert Counter(cell for step in steps for cell in cells_of(step)) == Counter(range(100))
    library = np.asarray(counts.sum(axis=1)).ravel()
    highest = np.log1p(counts.multiply(1e4 / library[:, None]).max())
    assert np.isclose(max(batch.values.max() for step in steps for batch in step), highest, rtol=1e-5)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("at", [0, 1, 8, 16, 17, 18, 34, 40])
def test_resuming_equals_never_stopping_bit_for_bit(manifest: Manifest, at: int, equal: bool) -> None:
    whole, first, second = (stream_of(manifest, options={"equal_steps": equal}) for _ in range(3))
    before = list(islice(first, at))
    state = first.state_dict()
    first.close()
    assert (state["epoch"], state["step"]) == divmod(at, first.steps_per_epoch)
    second.load_state_dict(state)
    assert same(before + take(second, 20), take(whole, at + 20))


def test_iterating_again_repeats_no_cell(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    parts = list(islice(stream, 7)) + list(islice(stream, 13))
    stream.close()
    assert same(parts, take(stream_of(manifest), 20))


def test_state_of_other_data_or_another_order_is_refused_with_both_values(manifest: Manifest, tmp_path: Path) -> None:
    state = stream_of(manifest).state_dict()
    other = write_corpus(tmp_path, 100)
    with pytest.raises(DataError, match=rf"{manifest.fingerprint}.*{other.fingerprint}"):
        stream_of(other).load_state_dict(state)
    for change, message in (
        ({"seed": 4}, "train.seed is 4, but 0 in the checkpoint"),
        ({"global_batch": 64}, "train.global_batch is 64, but 32 in"),
        ({"options": {"lanes": 4}}, "stream.lanes is 4, but 8 in"),
        ({"options": {"block_cells": 2}}, "stream.block_cells is 2, but 4 in"),
        ({"options": {"window_blocks": 1}}, "stream.window_blocks is 1, but 3 in"),
        ({"options": {"train_frac": 0.5}}, "stream.train_frac is 0.5, but 1.0 in"),
    ):
        with pytest.raises(ConfigError, match=message):
            stream_of(manifest, **change).load_state_dict(state)


def test_validation_is_one_epoch_in_a_fixed_order_of_the_first_cells(manifest: Manifest) -> None:
    stream = stream_of(manifest, shuffle=False, max_cells=150, seed=7)
    assert stream.n_cells == 150
    first, second = list(stream), list(stream)
    stream.close()
    assert len(first) == stream.steps_per_epoch
    assert same(first, second)
    assert sorted(cell for step in first for cell in cells_of(step)) == list(range(150))
    assert same(first, take(stream_of(manifest, shuffle=False, max_cells=150, seed=8), 100))
    some = stream_of(manifest, shuffle=False, max_cells=150)
    next(iter(some))
    assert same(take(some, 100), first)
    everything = stream_of(manifest, shuffle=False, max_cells=10**6)
    assert everything.n_cells == CELLS
    everything.close()


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(("cellmill-stream", "cellmill-read"))}


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
    manifest, before = write_corpus(tmp_path, 400), threads()
    stream = stream_of(manifest)
    batches = iter(stream)
    next(batches)
    for shard in manifest.splits["train"].shards:
        with open(manifest.shard_path(shard), "r+b") as file:
            file.truncate(100)
    with pytest.raises(DataError, match=r"train-0000\d\.h5ad: damaged: short read: .* truncated while open"):
        list(islice(batches, 100))
    stream.close()
    assert threads() <= before


def test_a_window_smaller_than_a_lanes_share_is_fine(manifest: Manifest) -> None:
    options = {"options": {"block_cells": 1, "window_blocks": 1}, "global_batch": 256}
    stream = stream_of(manifest, **options)
    seen = Counter(cell for step in take(stream, stream.steps_per_epoch) for cell in cells_of(step))
    assert seen == Counter(range(CELLS))


def test_donors_are_mixed_as_by_a_true_shuffle_though_the_file_is_sorted(tmp_path: Path) -> None:
    n_donors, each, rng = 16, 128, np.random.default_rng(0)
    manifest = write_corpus(tmp_path, n_donors * each, 10, cells_per_shard=512)
    shards = [ad.read_h5ad(manifest.shard_path(shard)) for shard in manifest.splits["train"].shards]
    names = np.array([int(name.split(":cell")[1]) for shard in shards for name in shard.obs_names])
    stream = stream_of(manifest, options={"block_cells": 16, "window_blocks": 4}, global_batch=64)
    steps = take(stream, stream.steps_per_epoch)
    found = np.mean([_entropy(names[cells_of(step)] // each) for step in steps])
    true = np.mean([_entropy(rng.choice(n_donors * each, 64, replace=False) // each) for _ in range(200)])
    assert abs(found - true) < 0.05


def _entropy(values: np.ndarray) -> float:
    p = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(p * np.log2(p)).sum())


def test_a_fraction_of_the_cells_is_a_part_of_every_larger_one(manifest: Manifest) -> None:
    seen = []
    for fraction, n in ((0.1, 53), (0.5, 266), (1.0, CELLS)):
        streams = [stream_of(manifest, rank, 2, options={"train_frac": fraction}) for rank in range(2)]
        assert streams[0].n_cells == n
        rows = [take(stream, 2 * stream.steps_per_epoch) for stream in streams]
        counts = Counter(cell for row in rows for step in row for cell in cells_of(step))
        assert set(counts.values()) == {2}
        seen.append({*counts})
        assert len(counts) == n
    assert seen[0] < seen[1] < seen[2]


@pytest.mark.parametrize(
    "sizes", [(1,), (3,), (8,), (9,), (63,), (100, 37, 5), (64,) * 9 + (1,), (533,), (4096,)], ids=sum
)
@pytest.mark.parametrize(("lanes", "batch"), [(1, 1), (8, 32), (12, 36), (8, 8)])
@pytest.mark.parametrize("equal", [True, False])
def test_lanes_and_windows_lose_no_cell_and_lanes_give_no_more_than_their_part_of_a_batch(
    sizes: tuple[int, ...], lanes: int, batch: int, equal: bool
) -> None:
    order = EpochLayout(sizes, lanes, 4, 3, batch, seed=0, shuffle=True, equal_steps=equal)
    epoch, steps = Epoch(order, 0), order.steps_per_epoch
    borders = [[int(order.lanes_before(step)[lane]) for step in range(steps + 1)] for lane in range(lanes)]
    assert [lane[-1] for lane in borders] == epoch.lane_cells
    taken = [[b - a for a, b in pairwise(lane)] for lane in borders]
    assert all(0 <= n <= batch // lanes for lane in taken for n in lane)
    given = [sum(of_lanes) for of_lanes in zip(*taken)]
    assert max(given) == order.most_cells
    assert sum(given) == sum(sizes)
    if equal:
        assert max(given) - min(given) <= 1
        assert min(given) > 0
    assert max(epoch.lane_cells) - min(epoch.lane_cells) <= 1
    for lane in range(lanes):
        for window, (start, stop) in enumerate(pairwise(epoch.borders[lane].tolist())):
            assert int(epoch.window_runs(lane, window)[:, 2].sum()) == stop - start
            assert sorted(epoch.window_order(lane, window)) == list(range(stop - start))


def test_the_plan_knows_the_cells_of_equal_steps(manifest: Manifest) -> None:
    tree = {"tokens": {"max_tokens": 12}, "model": {}, "parallel": {}, "plan": {}}
    tree["train"] = {"global_batch": 32, "steps": 20, "token_budget": 60}
    cells = Cells(detected_genes(manifest), manifest.n_genes)
    for equal, seen in ((False, CELLS + 3 * 32), (True, CELLS + 3 * CELLS // 17)):
        options = PlanOptions.model_validate(tree | {"stream": {"lanes": 8, "equal_steps": equal}})
        work = measure_work(options, cells, layout(options.parallel, 1, 1))
        assert (work.steps_per_epoch, work.cells_per_step, work.cells_seen) == (17, 32, seen)


def test_memory_of_batches_is_used_again_only_after_the_last_view_or_tensor_over_it_is_gone() -> None:
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
