"""Micro-batches: every cell once within the token budget, and every rank knows how many the others cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from cellmill.data.stream.batch import Batch, cut_batch, most_micro_batches, split_batch
from cellmill.data.stream.cell_stream import of_ranks
from cellmill.data.stream.order import Epoch, EpochLayout
from cellmill.data.stream.prefetch import LaneLengths, Prefetch


class Lengths:
    """A shard of cells of random lengths, whose genes nothing looks at."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.indptr, self.dtype = np.concatenate([[0], np.cumsum(lengths)]), np.dtype(np.uint16)

    def scatter_genes(self, start: int, table: np.ndarray) -> None: ...


def lengths_of_lane(shards: list[Lengths], layout: EpochLayout, lane: int) -> Iterator[int]:
    """Lengths of the lane's cells, one by one, over epochs."""
    epoch = 0
    while True:
        order = Epoch(layout, epoch)
        for window in range(len(order.borders[lane]) - 1):
            runs = order.window_runs(lane, window)
            cells = [(s, f + i) for s, f, n in zip(runs.shard, runs.first, runs.n) for i in range(n)]
            for at in order.window_order(lane, window):
                shard, row = cells[at]
                yield int(shards[shard].indptr[row + 1] - shards[shard].indptr[row])
        epoch += 1


def cuts_of_ranks(lengths: list[np.ndarray], world: int, budget: int) -> int:
    """Most micro-batches of a rank; `lengths` are those of each lane."""
    ranks = [np.concatenate(lengths[rank::world]) for rank in range(world)]
    return max(len(cut_batch(rank, budget)) - 1 for rank in ranks)


@pytest.mark.parametrize("seed", range(40))
def test_lengths_and_cuts_of_all_ranks_are_those_of_each_lane_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = int(rng.choice([1, 2, 3, 8]))
    lanes = world * int(rng.integers(1, 4))
    sizes = tuple(int(n) for n in rng.integers(1, 60, rng.integers(1, 5)))
    if seed % 5 == 0:
        sizes = (int(rng.integers(1, lanes + 2)),)  # lanes without cells
    shards = [Lengths(rng.integers(0, 30, n)) for n in sizes]
    batch, equal = lanes * int(rng.integers(1, 6)), bool(rng.integers(2))
    layout = EpochLayout(sizes, lanes, int(rng.integers(1, 9)), int(rng.integers(1, 5)), batch, 3, True, None, equal)
    rank, steps = int(rng.integers(world)), layout.steps_per_epoch
    first = int(rng.integers(steps))
    rows = Prefetch(shards, layout, list(range(rank, lanes, world)), max_genes=1, io_threads=1)  # type: ignore[arg-type]
    alone = [lengths_of_lane(shards, layout, lane) for lane in range(lanes)]
    for lane, n in zip(alone, layout.lanes_before(first)):
        list(islice(lane, int(n)))
    for step, number in zip(rows.steps(0, first), range(first, first + 2 * steps + 3)):
        n = layout.lanes_before(number % steps + 1) - layout.lanes_before(number % steps)
        expected = [np.array(list(islice(lane, int(k))) if k else [], np.int64) for lane, k in zip(alone, n)]
        assert step.n_cells.tolist() == [len(lane) for lane in expected]
        for lane, row in zip(expected, step.lengths):
            assert row.tolist() == lane.tolist() + [0] * (len(row) - len(lane))
        lengths, n_cells = of_ranks(step.lengths, step.n_cells, world)
        assert lengths.tolist() == [x for r in range(world) for lane in expected[r::world] for x in lane.tolist()]
        for budget in (1, 30, 77):
            assert most_micro_batches(lengths, n_cells, budget) == cuts_of_ranks(expected, world, budget)
    rows.close()


def test_windows_of_lanes_that_end_together_are_looked_up_one_after_another() -> None:
    lanes, window, looked_up = 64, 32, 0

    def windows(lane: int) -> Iterator[np.ndarray]:
        nonlocal looked_up
        for _ in range(9):
            looked_up += 1
            yield np.full(window, lane)

    lengths = LaneLengths([windows(lane) for lane in range(lanes)], [0] * lanes)
    most, before = 0, looked_up
    for _ in range(8 * window):
        assert (lengths.take(np.ones(lanes, np.int64)) == np.arange(lanes)[:, None]).all()
        most, before = max(most, looked_up - before), looked_up
    assert most == lanes // window


def test_micro_batches_are_filled_greedily_in_order() -> None:
    assert cut_batch(np.array([5, 5, 1, 9, 10, 2]), 10) == [0, 2, 4, 5, 6]
    assert cut_batch(np.array([], int), 10) == [0]


def test_a_cell_above_the_budget_is_a_micro_batch_of_its_own() -> None:
    assert cut_batch(np.array([3, 30, 40, 4, 5]), 12) == [0, 1, 2, 3, 5]


def test_parts_of_a_batch_have_every_cell_once_within_the_budget() -> None:
    lengths = np.array([3, 9, 2, 2, 1, 30, 4])
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = Batch(np.arange(cu[-1], dtype=np.int32), np.arange(cu[-1], dtype=np.float32), cu, np.arange(7))
    parts = list(split_batch(batch, 12))
    assert [part.cells.tolist() for part in parts] == [[0, 1], [2, 3, 4], [5], [6]]
    for name in ("genes", "values"):
        assert (np.concatenate([getattr(part, name) for part in parts]) == getattr(batch, name)).all()
    assert all(part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == len(part.genes) for part in parts)
    assert list(split_batch(Batch(batch.genes[:0], batch.values[:0], cu[:1], batch.cells[:0]), 12)) == []
