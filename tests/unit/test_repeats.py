"""Weighted reading: exact repeats in each epoch; micro-batches, of which every rank knows how many the others cut."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pandas as pd
import pytest
import small_corpus
from small_corpus import write_corpus
from test_stream import cells_of, take

from cellmill.config.run import Stream as StreamOptions
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch import Batch, cut_batch, micro_batches_of_ranks, split_batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.order import Epoch, EpochLayout, Repeats, epoch_order, weights
from cellmill.data.stream.prefetch import LaneLengths, Prefetch
from cellmill.errors import ConfigError, DataError

CELLS = 533
WEIGHTED = {"weight_by": "kind", "max_repeats": 6.0}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    kinds = np.random.default_rng(0).choice(["a", "b", "c", "d"], CELLS, p=[0.7, 0.2, 0.08, 0.02])
    return write_corpus(tmp_path_factory.mktemp("repeats"), CELLS, obs={"kind": kinds})


def repeats_of(manifest: Manifest, stream: StreamOptions) -> Repeats:
    numbers = CellColumns(manifest, "train", "levels", ["kind"])
    return Repeats(numbers[:][:, 0], stream)


def stream_of(manifest: Manifest, rank: int = 0, world: int = 1, lanes: int = 4, **changes: Any) -> CellStream:
    return small_corpus.stream_of(manifest, rank, world, {"lanes": lanes} | WEIGHTED | changes, seed=3)


def taken(stream: CellStream, steps: int) -> list[list[int]]:
    """Cells of each step."""
    return [cells_of(step) for step in take(stream, steps)]


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("equal_steps", [False, True])
def test_each_epoch_has_exactly_its_repeats(manifest: Manifest, lanes: int, equal_steps: bool) -> None:
    stream = stream_of(manifest, lanes=lanes, equal_steps=equal_steps)
    repeats, steps = repeats_of(manifest, StreamOptions.model_validate(WEIGHTED)), stream.steps_per_epoch
    assert steps == stream_of(manifest, lanes=lanes, weight_by=None, equal_steps=equal_steps).steps_per_epoch
    seen = taken(stream, 3 * steps)
    epochs = [Counter(cell for step in seen[e * steps : (e + 1) * steps] for cell in step) for e in range(3)]
    for epoch, found in enumerate(epochs):
        expected = repeats.counts(3, epoch, epoch * steps)
        assert [found[cell] for cell in range(CELLS)] == expected.tolist()
        assert expected.sum() == CELLS
    assert epochs[0] != epochs[1]


def test_repeats_of_a_level_are_its_weight_and_differ_by_one_cell(manifest: Manifest) -> None:
    repeats = repeats_of(manifest, StreamOptions.model_validate(WEIGHTED | {"weight_exponent": 1}))
    sizes = np.bincount(repeats.levels, minlength=5)
    assert sizes[0] == 0
    counts, own = repeats.counts(0, 0, 0), weights(sizes, 1.0, 6.0)
    assert own[sizes.argmin() if sizes.min() else 4] == 6.0, "the rarest is capped"
    for level in range(1, 5):
        of_level = counts[repeats.levels == level]
        assert of_level.max() - of_level.min() <= 1
        assert abs(of_level.sum() - sizes[level] * own[level]) <= 1
    # below the cap every level is read equally often
    free = [int(counts[repeats.levels == level].sum()) for level in range(1, 5) if own[level] < 6]
    assert len(free) >= 2
    assert max(free) - min(free) <= 1


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_weights_are_those_of_the_formula(exponent: float) -> None:
    sizes = np.array([700, 0, 200, 80, 20, 1])
    for most in (1.0, 2.5, 1000.0):
        found = weights(sizes, exponent, most)
        assert (found * sizes).sum() == pytest.approx(sizes.sum())
        assert found[sizes > 0].max() <= most
        free = (found < most) & (sizes > 0)
        scaled = found[free] * sizes[free] ** exponent
        assert scaled.max(initial=0) == pytest.approx(scaled.min(initial=np.inf) if free.any() else 0)


@pytest.mark.parametrize("done", [0, 1, 9, 17, 25])
def test_a_run_goes_on_at_any_step_in_another_number_of_ranks(manifest: Manifest, done: int) -> None:
    first = stream_of(manifest)
    whole = taken(stream_of(manifest), done + 12)
    assert taken(first, done) == whole[:done]
    rest = []
    for rank in range(4):
        stream = stream_of(manifest, rank, 4)
        stream.load_state_dict(first.state_dict())
        rest.append(taken(stream, 12))
    assert [sorted(chain(*parts)) for parts in zip(*rest)] == [sorted(step) for step in whole[done:]]


def test_a_curriculum_goes_from_one_exponent_to_another_and_resumes_in_it(manifest: Manifest) -> None:
    options = {"weight_exponent": 0.0, "weight_start_exponent": 1.0, "weight_warmup_steps": 34}
    stream, steps = stream_of(manifest, **options), 17
    seen = taken(stream, 3 * steps)
    epochs = [Counter(chain(*seen[e * steps : (e + 1) * steps])) for e in range(3)]
    full = repeats_of(manifest, StreamOptions.model_validate(WEIGHTED | {"weight_exponent": 1.0}))
    assert [epochs[0][cell] for cell in range(CELLS)] == full.counts(3, 0, 0).tolist()
    assert epochs[2] == Counter(range(CELLS))
    read = [Counter(full.levels[list(epoch.elements())].tolist()) for epoch in epochs]
    for level in range(1, 5):
        assert read[1][level] == pytest.approx((read[0][level] + read[2][level]) / 2, abs=1)
    later = stream_of(manifest, **options)
    taken(stream := stream_of(manifest, **options), 25)
    later.load_state_dict(stream.state_dict())
    assert taken(later, 20) == seen[25:45]


def test_copies_of_a_cell_are_spread_over_the_epoch(manifest: Manifest) -> None:
    seen = taken(stream_of(manifest), 17)
    places: dict[int, list[int]] = {}
    for step, cells in enumerate(seen):
        for cell in cells:
            places.setdefault(cell, []).append(step)
    gaps = [gap for steps in places.values() if len(steps) > 3 for gap in np.diff(sorted(steps))]
    assert len(gaps) > 50
    assert np.mean(gaps) > 2  # of 17 steps with up to 6 copies; next to each other they would have gaps of 0


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A fifth of the cells have a label: many a, fewer b, six c."""
    kinds = np.random.default_rng(1).choice(["a", "b"], CELLS, p=[0.8, 0.2]).astype(object)
    kinds[np.random.default_rng(2).random(CELLS) < 0.8] = None
    kinds[[3, 4, 70, 200, 400, 532]] = "c"
    return write_corpus(tmp_path_factory.mktemp("labelled"), CELLS, obs={"kind": pd.Categorical(kinds)})


def kinds_of(manifest: Manifest) -> np.ndarray:
    names = np.array(["", *manifest.levels({"kind": "test"})["kind"]])
    return names[CellColumns(manifest, "train", "levels", ["kind"])[:][:, 0]]


@pytest.mark.parametrize("lanes", [1, 4])
def test_labelled_cells_are_read_evenly_and_the_others_fill_the_rest(labelled: Manifest, lanes: int) -> None:
    kinds = kinds_of(labelled)
    sizes = Counter(kinds.tolist())
    assert sizes["<missing>"] > 400
    for frac, most, share in ((1.0, 10.0, 0.0), (0.5, 10.0, 0.5), (0.25, 10.0, 0.75), (1.0, 2.0, 0.0)):
        stream = stream_of(labelled, lanes=lanes, labelled_frac=frac, max_repeats=most)
        steps = stream.steps_per_epoch
        assert steps == -(-CELLS // 32)
        seen = taken(stream, 2 * steps)
        for epoch in range(2):
            found = Counter(chain(*seen[epoch * steps : (epoch + 1) * steps]))
            assert found.total() == CELLS
            read = Counter(kinds[list(found.elements())].tolist())
            assert read["<missing>"] == pytest.approx(share * CELLS, abs=1)
            mean = (CELLS - read["<missing>"]) / (CELLS - sizes["<missing>"])  # times that a labelled cell is read
            expected = min(read[kind] for kind in "abc")
            if most == 10:
                assert max(read[kind] for kind in "abc") - expected <= 1, "labels are read equally often"
            else:
                assert read["c"] == pytest.approx(2 * mean * sizes["c"], abs=1), "a rare label is capped"
            for kind in sizes:
                times = [found[cell] for cell in np.flatnonzero(kinds == kind)]
                assert max(times) - min(times) <= 1, (kind, epoch)


def test_where_every_cell_has_a_label_or_none_has_every_cell_is_read(manifest: Manifest, labelled: Manifest) -> None:
    weighted, steps = stream_of(manifest), 17
    assert taken(stream_of(manifest, labelled_frac=0.5), steps) == taken(weighted, steps)
    options = StreamOptions.model_validate(WEIGHTED | {"labelled_frac": 1})
    assert Repeats(np.zeros(9, np.int32), options).counts(0, 0, 0).tolist() == 9 * [1]


def test_a_part_of_the_cells_is_weighted_like_a_corpus_of_these_alone(labelled: Manifest) -> None:
    stream, kinds = stream_of(labelled, labelled_frac=1, train_frac=0.3), kinds_of(labelled)
    n = stream.n_cells
    assert n == 160
    found = Counter(chain(*taken(stream, stream.steps_per_epoch)))
    assert max(found) < n
    assert found.total() == n
    assert "<missing>" not in kinds[list(found)]


def test_few_labelled_cells_among_many_are_read_very_often() -> None:
    stream = StreamOptions.model_validate({"weight_by": "kind", "labelled_frac": 1})
    levels = np.zeros(400_000, np.int32)
    levels[[7, 250_000]] = 1, 2
    layout = EpochLayout((300_000, 100_000), 4, 64, 16, 1000, 0, True, repeats=Repeats(levels, stream))
    order, read = epoch_order(layout, 0), Counter[tuple[int, int]]()
    for lane in range(4):
        runs = order.window_runs(lane, 0)
        read.update((shard, first) for shard, first, _ in runs.tolist())
    assert order.lane_cells == 4 * [100_000]
    assert set(read) == {(0, 7), (0, 250_000)}
    assert min(read.values()) > 0.4 * read.total()


def test_without_weights_the_order_is_that_of_earlier_versions() -> None:
    digest = hashlib.sha256()
    for shards, lanes, equal in (((100, 37, 64), 4, False), ((500,), 8, True)):
        layout = EpochLayout(shards, lanes, 8, 3, 16, seed=5, shuffle=True, equal_steps=equal)
        for epoch in (0, 3):
            order = Epoch(layout, epoch)
            for lane in range(lanes):
                for window in range(len(order.borders[lane]) - 1):
                    runs = order.window_runs(lane, window)
                    for part in (*runs.T, order.window_order(lane, window)):
                        digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() == "67ee7b613c1469aa0d8de8663255442df6cbf9131efa6cc11fbfa4cfe1a572ad"


def test_weights_are_part_of_the_order_and_of_the_data(manifest: Manifest) -> None:
    stream, plain = stream_of(manifest), stream_of(manifest, weight_by=None)
    state = plain.state_dict()
    assert state["fingerprint"] == manifest.fingerprint
    assert "weight_by" not in state
    with pytest.raises(DataError, match="expected shards of fingerprint"):
        stream.load_state_dict(state)
    for name in ("max_repeats", "labelled_frac", "weight_start_exponent"):
        with pytest.raises(ConfigError, match=rf"stream\.{name} is \S+, but 0\.25 in the checkpoint"):
            stream.load_state_dict(stream.state_dict() | {name: 0.25})
    for each in (stream, plain):
        each.close()


def test_a_column_that_is_not_there_is_named_with_its_option(manifest: Manifest) -> None:
    with pytest.raises(DataError, match=r"no obs column 'kidn' \(stream\.weight_by\); did you mean 'kind'"):
        stream_of(manifest, weight_by="kidn")


class Lengths:
    """A shard of cells of random lengths, whose genes nothing looks at."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.indptr, self.dtype = np.concatenate([[0], np.cumsum(lengths)]), np.dtype(np.uint16)

    def scatter(self, start: int, genes: np.ndarray, counts: None) -> None: ...


def lengths_of_lane(shards: list[Lengths], layout: EpochLayout, lane: int) -> Iterator[int]:
    """Lengths of the lane's cells, one by one, over epochs."""
    epoch = 0
    while True:
        order = Epoch(layout, epoch)
        for window in range(len(order.borders[lane]) - 1):
            runs = order.window_runs(lane, window)
            cells = [(s, f + i) for s, f, n in runs.tolist() for i in range(n)]
            for at in order.window_order(lane, window):
                shard, row = cells[at]
                yield int(shards[shard].indptr[row + 1] - shards[shard].indptr[row])
        epoch += 1


def cuts_of_ranks(lengths: list[np.ndarray], world: int, budget: int) -> list[int]:
    """Micro-batches of each rank; `lengths` are those of each lane."""
    ranks = [np.concatenate(lengths[rank::world]) for rank in range(world)]
    return [len(cut_batch(rank, budget)) - 1 for rank in ranks]


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
    rows = Prefetch(shards, layout, rank, world, max_genes=1, io_threads=1)  # type: ignore[arg-type]
    alone = [lengths_of_lane(shards, layout, lane) for lane in range(lanes)]
    for lane, n in zip(alone, layout.lanes_before(first)):
        list(islice(lane, int(n)))
    grouped = ((together, at) for together in rows.steps(0, first) for at in range(len(together.n_cells)))
    for (together, at), number in zip(grouped, range(first, first + 2 * steps + 3)):
        n_cells, before = together.n_cells[at], int(together.n_cells[:at].sum())
        of_step = together.lengths[before : before + int(n_cells.sum())]
        n = layout.lanes_before(number % steps + 1) - layout.lanes_before(number % steps)
        expected = [np.array(list(islice(lane, int(k))) if k else [], np.int64) for lane, k in zip(alone, n)]
        assert n_cells.tolist() == [sum(map(len, expected[r::world])) for r in range(world)]
        assert of_step.tolist() == [x for r in range(world) for lane in expected[r::world] for x in lane.tolist()]
        for budget in (1, 30, 77):
            assert micro_batches_of_ranks(of_step, n_cells, budget).tolist() == cuts_of_ranks(expected, world, budget)
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
        assert (lengths.take(np.ones(lanes, np.int64)) == np.arange(lanes)).all()
        most, before = max(most, looked_up - before), looked_up
    assert most == lanes // window


def test_micro_batches_are_filled_greedily_in_order_and_a_cell_above_the_budget_is_one_of_its_own() -> None:
    assert cut_batch(np.array([5, 5, 1, 9, 10, 2]), 10) == [0, 2, 4, 5, 6]
    assert cut_batch(np.array([3, 30, 40, 4, 5]), 12) == [0, 1, 2, 3, 5]
    assert cut_batch(np.array([], int), 10) == [0]


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
