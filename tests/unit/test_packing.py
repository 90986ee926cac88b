"""Micro-batches: every cell once, in order, within the token budget."""

from __future__ import annotations

import numpy as np

from cellmill.data.stream.batch import Batch, cut_batch, split_batch


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
