"""Weighted reading: exact repeats in each epoch."""

import hashlib
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pytest
import small_corpus
from small_corpus import write_corpus
from test_stream import BUDGET, cells_of, joined, take

from cellmill.config.run import Stream as StreamOptions
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.level_sampler import LevelSampler
from cellmill.data.stream.order import OrderOptions, OrderRule, make_epoch_order
from cellmill.errors import ConfigError, DataError

CELLS = 533
WEIGHTED = {"weight_by": "kind", "max_repeats": 6.0}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    kinds = np.random.default_rng(0).choice(["a", "b", "c", "d"], CELLS, p=[0.7, 0.2, 0.08, 0.02])
    return write_corpus(tmp_path_factory.mktemp("repeats"), CELLS, obs={"kind": kinds})


def weights_of(manifest: Manifest, stream: StreamOptions) -> LevelSampler:
    numbers = CellColumns(manifest, "train", "levels", ["kind"])
    return LevelSampler(numbers[:][:, 0], stream)


def stream_of(
    manifest: Manifest, rank: int = 0, world: int = 1, lanes: int = 4, **changes: Any
) -> CellStream:
    options = {"lanes": lanes} | WEIGHTED | changes
    return small_corpus.stream_of(manifest, rank, world, options, seed=3, token_budget=BUDGET)


def taken(stream: CellStream, steps: int) -> list[list[int]]:
    """Cells of each step."""
    return [cells_of(step) for step in take(stream, steps)]


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("equal_steps", [False, True])
def test_each_epoch_has_exactly_its_repeats(
    manifest: Manifest, lanes: int, equal_steps: bool
) -> None:
    ranks = [
        stream_of(manifest, rank, lanes, lanes, equal_steps=equal_steps) for rank in range(lanes)
    ]
    weights = weights_of(manifest, StreamOptions.model_validate(WEIGHTED))
    steps = ranks[0].steps_per_epoch
    assert (
        steps
        == stream_of(manifest, lanes=lanes, weight_by=None, equal_steps=equal_steps).steps_per_epoch
    )
    seen = joined(ranks, 3 * steps)
    epochs = [Counter(chain(*seen[e * steps : (e + 1) * steps])) for e in range(3)]
    for epoch, found in enumerate(epochs):
        expected = weights.draw_times_read(3, epoch, epoch * steps)
        assert [found[cell] for cell in range(CELLS)] == expected.tolist()
        assert expected.sum() == CELLS
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("exponent", "most", "n_free"),
    [
        (0, 1, 0),
        (0, 2.5, 5),
        (0.5, 2.5, 3),
        (0.5, 6, 4),
        (0.5, 1000, 5),
        (1, 2.5, 2),
        (1, 6, 3),
        (1, 1000, 5),
    ],
)
def test_repeats_of_a_level_follow_the_formula(exponent: float, most: float, n_free: int) -> None:
    # no cell has level 3
    names = [1, 2, 4, 5, 6]
    sizes = np.array([700, 200, 80, 19, 1])
    levels = np.repeat(names, sizes)
    options = {"weight_by": "kind", "weight_exponent": exponent, "max_repeats": most}
    times_read = LevelSampler(levels, StreamOptions.model_validate(options)).draw_times_read(
        0, 0, 0
    )
    assert all(np.ptp(times_read[levels == name]) <= 1 for name in names)
    read = np.bincount(levels, times_read)[names]
    assert read.sum() == sizes.sum()
    assert (read <= most * sizes + 1).all()
    free = read < most * sizes - 1
    assert free.sum() == n_free
    share = sizes[free] ** (1 - exponent)
    np.testing.assert_allclose(read[free], share * read[free].sum() / share.sum(), atol=1)


def reads_of_levels(sampler: LevelSampler, epochs: int) -> np.ndarray:
    """How often each level is read in each epoch, `(epochs, levels)`."""
    return np.array(
        [
            np.bincount(sampler.level_codes, sampler.draw_times_read(5, epoch, 0))
            for epoch in range(epochs)
        ]
    )


def test_rare_levels_are_read_in_turn_by_their_weight() -> None:
    # 500 cells without a level, 490 of one level, ten levels of one cell: 900, 98 and 0.2 expected reads
    levels = np.repeat(np.arange(12), [500, 490] + 10 * [1])
    options = {"weight_by": "kind", "labelled_frac": 0.1, "weight_exponent": 0}
    sampler = LevelSampler(levels, StreamOptions.model_validate(options))
    reads = reads_of_levels(sampler, 2000)
    assert (reads.sum(1) == 1000).all()
    assert (reads[:, :2] == [900, 98]).all(), "whole numbers are not rounded"
    assert reads[:, 2:].max() == 1
    # four standard errors of 2,000 draws
    np.testing.assert_allclose(reads[:, 2:].mean(0), 0.2, atol=0.036)
    assert (sampler.draw_times_read(5, 7, 0) == sampler.draw_times_read(5, 7, 0)).all()


@pytest.mark.parametrize("order", [1, -1])
def test_mean_reads_of_a_level_are_the_expected_ones(order: int) -> None:
    sizes = np.array([1, 999])[::order]
    options = {"weight_by": "kind", "weight_exponent": 1, "max_repeats": 2.5}
    sampler = LevelSampler(np.repeat([1, 2], sizes), StreamOptions.model_validate(options))
    reads = reads_of_levels(sampler, 2000)[:, 1:][:, ::order]
    assert set(reads[:, 0].tolist()) == {2, 3}
    np.testing.assert_allclose(reads.mean(0), [2.5, 997.5], atol=0.045)

    sizes = np.array([700, 0, 203, 80, 16, 1])[::order]
    options = {"weight_by": "kind", "weight_exponent": 0.5, "max_repeats": 5}
    sampler = LevelSampler(np.repeat(np.arange(6), sizes), StreamOptions.model_validate(options))
    # the single cell reaches the cap, and the others share what it leaves by the roots of their sizes
    roots = np.sqrt(sizes)
    roots[sizes == 1] = 0
    expected = np.where(sizes == 1, 5, 995 * roots / roots.sum())
    assert (expected <= 5 * sizes).all()
    reads = reads_of_levels(sampler, 2000)
    assert (reads.sum(1) == 1000).all()
    assert (np.abs(reads - expected) < 1).all()
    np.testing.assert_allclose(reads.mean(0), expected, atol=0.045)


def test_a_state_of_reads_rounded_the_same_is_refused(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    plain = stream_of(manifest, weight_by=None)
    state = stream.state_dict()
    stream.load_state_dict(state)
    del state["rounding"]  # as versions that rounded up the same levels in each epoch saved it
    with pytest.raises(
        ConfigError,
        match=r"stream\.weight_by: expected reads rounded by systematic .* by largest remainders; finish",
    ):
        stream.load_state_dict(state)
    before = plain.state_dict()
    del before["rounding"]
    plain.load_state_dict(before)
    for each in (stream, plain):
        each.close()


def test_a_curriculum_resumes_between_its_exponents(
    manifest: Manifest,
) -> None:
    options = {"weight_exponent": 0.0, "weight_start_exponent": 1.0, "weight_warmup_steps": 34}
    stream = stream_of(manifest, **options)
    steps = 17
    seen = taken(stream, 3 * steps)
    epochs = [Counter(chain(*seen[e * steps : (e + 1) * steps])) for e in range(3)]
    full = weights_of(manifest, StreamOptions.model_validate(WEIGHTED | {"weight_exponent": 1.0}))
    assert [epochs[0][cell] for cell in range(CELLS)] == full.draw_times_read(3, 0, 0).tolist()
    assert epochs[2] == Counter(range(CELLS))
    read = [Counter(full.level_codes[list(epoch.elements())].tolist()) for epoch in epochs]
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
    # of 17 steps with up to 6 copies; next to each other they would have gaps of 0
    assert np.mean(gaps) > 2


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A fifth of the cells have a label: many a, fewer b, six c."""
    kinds = np.random.default_rng(1).choice(["a", "b"], CELLS, p=[0.8, 0.2]).astype(object)
    kinds[np.random.default_rng(2).random(CELLS) < 0.8] = None
    kinds[[3, 4, 70, 200, 400, 532]] = "c"
    return write_corpus(
        tmp_path_factory.mktemp("labelled"), CELLS, obs={"kind": pd.Categorical(kinds)}
    )


def kinds_of(manifest: Manifest) -> np.ndarray:
    names = np.array(["", *manifest.levels({"kind": "test"})["kind"]])
    return names[CellColumns(manifest, "train", "levels", ["kind"])[:][:, 0]]


@pytest.mark.parametrize("lanes", [1, 4])
def test_labelled_cells_are_read_evenly(labelled: Manifest, lanes: int) -> None:
    kinds = kinds_of(labelled)
    sizes = Counter(kinds.tolist())
    assert sizes["<missing>"] > 400
    for frac, most, share in (
        (1.0, 10.0, 0.0),
        (0.5, 10.0, 0.5),
        (0.25, 10.0, 0.75),
        (1.0, 2.0, 0.0),
    ):
        stream = stream_of(labelled, lanes=lanes, labelled_frac=frac, max_repeats=most)
        steps = stream.steps_per_epoch
        assert steps == -(-CELLS // 32)
        seen = taken(stream, 2 * steps)
        for epoch in range(2):
            found = Counter(chain(*seen[epoch * steps : (epoch + 1) * steps]))
            assert found.total() == CELLS
            read = Counter(kinds[list(found.elements())].tolist())
            assert read["<missing>"] == pytest.approx(share * CELLS, abs=1)
            # times that a labelled cell is read
            mean = (CELLS - read["<missing>"]) / (CELLS - sizes["<missing>"])
            expected = min(read[kind] for kind in "abc")
            if most == 10:
                assert max(read[kind] for kind in "abc") - expected <= 1, (
                    "labels are read equally often"
                )
            else:
                assert read["c"] == pytest.approx(2 * mean * sizes["c"], abs=1), (
                    "a rare label is capped"
                )
            for kind in sizes:
                times = [found[cell] for cell in np.flatnonzero(kinds == kind)]
                assert max(times) - min(times) <= 1, (kind, epoch)


def test_every_cell_is_read_if_labels_are_all_or_none(
    manifest: Manifest, labelled: Manifest
) -> None:
    weighted = stream_of(manifest)
    steps = 17
    assert taken(stream_of(manifest, labelled_frac=0.5), steps) == taken(weighted, steps)
    options = StreamOptions.model_validate(WEIGHTED | {"labelled_frac": 1})
    assert LevelSampler(np.zeros(9, np.int32), options).draw_times_read(0, 0, 0).tolist() == 9 * [1]


def test_a_subset_is_weighted_like_a_whole_corpus(labelled: Manifest) -> None:
    stream = stream_of(labelled, labelled_frac=1, train_frac=0.3)
    kinds = kinds_of(labelled)
    n = stream.n_cells
    assert n == 160
    found = Counter(chain(*taken(stream, stream.steps_per_epoch)))
    assert max(found) < n
    assert found.total() == n
    assert "<missing>" not in kinds[list(found)]


def test_few_labelled_cells_among_many_are_read_very_often() -> None:
    order = {"lanes": 4, "block_cells": 64, "window_blocks": 16}
    stream = StreamOptions.model_validate(order | {"weight_by": "kind", "labelled_frac": 1})
    levels = np.zeros(400_000, np.int32)
    levels[[7, 250_000]] = 1, 2
    options = OrderOptions(stream, global_batch=1000, seed=0)
    rule = OrderRule(options, (300_000, 100_000), level_sampler=LevelSampler(levels, stream))
    order = make_epoch_order(rule, 0)
    read = Counter[tuple[int, int]]()
    for lane in range(4):
        spans = order.list_window_spans(lane, 0)
        read.update(zip(spans.shards.tolist(), spans.starts.tolist()))
    assert order.lane_cells == 4 * [100_000]
    assert set(read) == {(0, 7), (0, 250_000)}
    assert min(read.values()) > 0.4 * read.total()


def test_without_weights_the_order_matches_earlier_versions() -> None:
    digest = hashlib.sha256()
    for shards, lanes, equal in (((100, 37, 64), 4, False), ((500,), 8, True)):
        stream = StreamOptions(lanes=lanes, block_cells=8, window_blocks=3, equal_steps=equal)
        rule = OrderRule(OrderOptions(stream, 16, seed=5), shards)
        for epoch in (0, 3):
            order = make_epoch_order(rule, epoch)
            for lane in range(lanes):
                for window in range(len(order.window_offsets[lane]) - 1):
                    spans = order.list_window_spans(lane, window)
                    for part in (*spans, order.make_window_order(lane, window)):
                        digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() == "67ee7b613c1469aa0d8de8663255442df6cbf9131efa6cc11fbfa4cfe1a572ad"


def test_weights_are_part_of_the_order(manifest: Manifest) -> None:
    stream = stream_of(manifest)
    plain = stream_of(manifest, weight_by=None)
    state = plain.state_dict()
    assert state["fingerprint"] == manifest.fingerprint
    assert state["weight_by"] is None
    with pytest.raises(ConfigError, match=r"stream\.weight_by: expected null, .*, got kind;"):
        stream.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"stream\.weight_by: expected kind, .*, got null;"):
        plain.load_state_dict(stream.state_dict())
    for name in ("max_repeats", "labelled_frac", "weight_start_exponent"):
        with pytest.raises(ConfigError, match=rf"stream\.{name}: expected 0\.25, .*, got \S+;"):
            stream.load_state_dict(stream.state_dict() | {name: 0.25})
    before = stream.state_dict()
    del before["weight_start_exponent"]  # as versions without the option saved it
    stream.load_state_dict(before)
    for each in (stream, plain):
        each.close()


def test_a_column_that_is_not_there_is_named_with_its_option(manifest: Manifest) -> None:
    with pytest.raises(
        DataError, match=r"no obs column 'kidn' \(stream\.weight_by\); did you mean 'kind'"
    ):
        stream_of(manifest, weight_by="kidn")
