"""Rank order against a plain sort, on ties and wide numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from cellmill.data.arrays import inverse_medians, rank_order_rows


def rank_order(genes: np.ndarray, counts: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank order of one cell."""
    return rank_order_rows(np.array([0, len(genes)]), genes, counts, inverse)


def plainly(genes: np.ndarray, counts: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    key = counts.astype(np.float32) * inverse[genes]
    return np.array(sorted(range(len(genes)), key=lambda i: (-key[i], genes[i])), dtype=int)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_the_rank_order_equals_a_plain_sort_for_any_input_order(dtype: type) -> None:
    rng = np.random.default_rng(0)
    inverse = inverse_medians(rng.choice([0.5, 1, 2, 4], 5000))  # few values: many ties
    for size in (0, 1, 2, 700):
        genes = rng.choice(5000, size, replace=False).astype(np.int32)
        counts = rng.integers(1, 20, size).astype(dtype)
        place = plainly(genes, counts, inverse)
        ordered, moved = rank_order(genes, counts, inverse)
        assert ordered.dtype == np.int32
        assert moved.dtype == dtype
        np.testing.assert_array_equal(ordered, genes[place])
        np.testing.assert_array_equal(moved, counts[place])


def test_genes_and_counts_beyond_16_bits_are_exact() -> None:
    genes = np.array([5, 70_000, 99_999], np.int32)
    counts = np.array([65_536, 4_000_000_000, 65_537], np.uint32)
    ordered, moved = rank_order(genes, counts, np.ones(100_000, np.float32))
    assert ordered.tolist() == [70_000, 99_999, 5]
    assert moved.tolist() == [4_000_000_000, 65_537, 65_536]


def test_rows_of_a_block_are_ordered_as_each_row_alone_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    inverse = inverse_medians(rng.lognormal(0, 1, 300))
    lengths = np.array([0, 5, 0, 120, 1, 33, 0])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes = np.concatenate([rng.choice(300, n, replace=False) for n in lengths]).astype(np.int32)
    counts = rng.integers(1, 5, len(genes)).astype(np.uint16)
    together = rank_order_rows(starts, genes, counts, inverse)
    for a, b in pairwise(starts):
        for part, alone in zip(together, rank_order(genes[a:b], counts[a:b], inverse)):
            np.testing.assert_array_equal(part[a:b], alone)


def test_library_size_does_not_change_the_order() -> None:
    genes, counts = np.arange(50, dtype=np.int32), np.random.default_rng(2).integers(1, 9, 50).astype(np.uint32)
    inverse = inverse_medians(np.random.default_rng(3).lognormal(0, 1, 50))
    np.testing.assert_array_equal(rank_order(genes, counts, inverse)[0], rank_order(genes, counts * 8, inverse)[0])


def geneformers(counts: np.ndarray, medians: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Genes of one cell in Geneformer's order, and their values, in its arithmetic (Theodoris et al. 2023, Methods).

    Counts over the cell's sum, times 10,000, over the gene's median of nonzero values, in float64; zeros are left out,
    and the sort is descending. Ties, whose order its unstable sort leaves open, are in the order of the columns.
    """
    values = counts / counts.sum() * 10_000 / medians
    detected = np.flatnonzero(values)
    order = detected[np.argsort(-values[detected], kind="stable")]
    return order, values[order]


def test_the_order_is_that_of_geneformers_rank_values_with_ties_in_the_order_of_genes() -> None:
    rng = np.random.default_rng(4)
    for medians in (rng.choice([0.5, 1, 1.5, 3], 400), rng.lognormal(0, 1, 400)):
        medians = medians.astype(np.float32).astype(np.float64)
        inverse = inverse_medians(medians)
        counts = rng.poisson(1.5, 400)
        genes = np.flatnonzero(counts).astype(np.int32)
        expected, values = geneformers(counts, medians)
        found, _ = rank_order(genes, counts[genes], inverse)
        differ = np.flatnonzero(found != expected)
        own = counts / counts.sum() * 10_000 / medians
        # equal values that rounding parts: 3 counts at a median of 1.5, and 2 at 1
        np.testing.assert_allclose(own[found[differ]], values[differ], rtol=1e-6)
        alike = (np.diff(counts[found]) == 0) & (np.diff(medians[found]) == 0)
        assert (np.diff(found)[alike] > 0).all()
        if len(np.unique(medians)) == 400:
            np.testing.assert_array_equal(found, expected)
        else:
            assert alike.sum() > 100
