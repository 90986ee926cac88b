"""Epochs whose cells are spread evenly over their steps: each cell once, the same batches for any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from small_corpus import write_corpus

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import layout
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Stream as StreamOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.order import Epoch, EpochLayout
from cellmill.planner.work import Cells, detected_genes, measure_work

CELLS, LANES, BATCH = 533, 8, 32  # 17 steps; without the option the last has 21 cells


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_corpus(tmp_path_factory.mktemp("equal"), CELLS)


def stream_of(manifest: Manifest, rank: int = 0, world: int = 1, **more: Any) -> CellStream:
    options = StreamOptions(lanes=LANES, block_cells=4, window_blocks=3, io_threads=2, equal_steps=True)
    given = {"global_batch": BATCH, "token_budget": 60, "seed": 0, "rank": rank, "world": world} | more
    return CellStream(manifest.path, "train", ContinuousTokens(max_tokens=12), options, **given)


def cells_of(stream: CellStream, steps: int) -> list[list[int]]:
    """Cells of each step."""
    try:
        return [[int(cell) for batch in step for cell in batch.cells] for step in islice(stream, steps)]
    finally:
        stream.close()


@pytest.mark.parametrize("n_cells", [1, 3, 8, 9, 63, 64, 65, 517, 533, 4096])
@pytest.mark.parametrize(("lanes", "batch"), [(1, 1), (8, 32), (12, 36), (8, 8)])
@pytest.mark.parametrize("equal", [True, False])
def test_lanes_have_all_their_cells_and_no_more_than_their_part_of_a_batch(
    n_cells: int, lanes: int, batch: int, equal: bool
) -> None:
    order = EpochLayout((n_cells,), lanes, 4, 3, batch, seed=0, shuffle=True, equal_steps=equal)
    epoch, steps = Epoch(order, 0), order.steps_per_epoch
    borders = [[int(order.lanes_before(step)[lane]) for step in range(steps + 1)] for lane in range(lanes)]
    assert [lane[-1] for lane in borders] == epoch.lane_cells
    taken = [[b - a for a, b in pairwise(lane)] for lane in borders]
    assert all(0 <= n <= batch // lanes for lane in taken for n in lane)
    sizes = [sum(of_lanes) for of_lanes in zip(*taken)]
    assert max(sizes) == order.most_cells
    assert sum(sizes) == n_cells == order.before(steps)
    if equal:
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_cell_comes_once_an_epoch_in_equal_steps_that_are_those_of_one_rank(
    manifest: Manifest, world: int
) -> None:
    alone = stream_of(manifest)
    steps = alone.steps_per_epoch
    assert steps == 17
    expected = cells_of(alone, 2 * steps)
    ranks = [cells_of(stream_of(manifest, rank, world), 2 * steps) for rank in range(world)]
    found = [[cell for rank in ranks for cell in rank[step]] for step in range(2 * steps)]
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    assert {len(step) for step in found} == {31, 32}
    for epoch in (found[:steps], found[steps:]):
        assert Counter(cell for step in epoch for cell in step) == Counter(range(CELLS))


@pytest.mark.parametrize("at", [1, 8, 16, 17, 20])
def test_a_resumed_stream_goes_on_with_the_same_steps(manifest: Manifest, at: int) -> None:
    expected = cells_of(stream_of(manifest), at + 4)[at:]
    resumed = stream_of(manifest)
    epoch, step = divmod(at, resumed.steps_per_epoch)
    resumed.load_state_dict(resumed.state_dict() | {"epoch": epoch, "step": step})
    assert cells_of(resumed, 4) == expected


def test_the_plan_knows_the_cells_of_equal_steps(manifest: Manifest, tmp_path: Path) -> None:
    tree = {"tokens": {"max_tokens": 12}, "stream": {"lanes": LANES}, "model": {}, "parallel": {}, "plan": {}}
    train = {"global_batch": BATCH, "steps": 20, "token_budget": 60}
    cells = Cells(detected_genes(manifest), manifest.n_genes)
    found = {}
    for equal in (False, True):
        stream = tree["stream"] | {"equal_steps": equal}
        options = PlanOptions.model_validate(tree | {"stream": stream, "train": train})
        work = measure_work(options, cells, layout(options.parallel, 1, 1))
        found[equal] = work.steps_per_epoch, work.cells_per_step, work.cells_seen
    assert found[False] == (17, 32, CELLS + 3 * 32)
    assert found[True] == (17, 32, CELLS + 3 * CELLS // 17)
