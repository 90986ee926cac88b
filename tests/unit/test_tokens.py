"""Tokens against one cell at a time in plain numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from cellmill.config.tokens import Tokens
from cellmill.data.tokens import bin_counts, empty_batch, tokenize
from cellmill.errors import DataError

LENGTHS = (0, 1, 2, 60, 0, 7, 200)


def cells(dtype: type = np.uint16, largest: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    genes = np.concatenate([rng.choice(500, n, replace=False) for n in LENGTHS]).astype(np.int32)
    counts = np.minimum(rng.geometric(0.2, len(genes)), largest).astype(dtype)
    return genes, counts, starts


def plainly(genes: np.ndarray, counts: np.ndarray, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    if tokens.tokenizer == "rank":
        values = np.arange(len(genes), dtype=np.int32)
    elif tokens.tokenizer == "binned":
        values = bin_counts(counts, tokens.bins) if len(counts) else np.empty(0, np.int32)
    else:
        values = np.log1p(counts / max(int(counts.sum()), 1) * 1e4).astype(np.float32)
    return genes[: tokens.max_tokens] + 2, values[: tokens.max_tokens]


@pytest.mark.parametrize("max_tokens", [1, 50, 2048])
@pytest.mark.parametrize("tokenizer", ["rank", "binned", "continuous"])
def test_many_cells_at_once_are_each_cell_alone(tokenizer: str, max_tokens: int) -> None:
    genes, counts, starts = cells()
    tokens = Tokens(tokenizer=tokenizer, max_tokens=max_tokens, bins=11)
    ids, values, cu = tokenize(genes, counts, starts, tokens)
    assert (ids.dtype, cu.dtype) == (np.int32, np.int32)
    assert values.dtype == (np.float32 if tokenizer == "continuous" else np.int32)
    assert np.diff(cu).tolist() == [min(n, max_tokens) for n in LENGTHS]
    for cell, (a, b) in enumerate(pairwise(starts)):
        wanted_ids, wanted = plainly(genes[a:b], counts[a:b], tokens)
        np.testing.assert_array_equal(ids[cu[cell] : cu[cell + 1]], wanted_ids)
        found = values[cu[cell] : cu[cell + 1]]
        if tokenizer == "continuous":
            np.testing.assert_allclose(found, wanted, rtol=2e-6)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("bins", [2, 3, 51, 200])
@pytest.mark.parametrize("largest", [1, 3, 40, 60_000])
def test_bins_are_numpys_quantiles_exactly(bins: int, largest: int) -> None:
    rng = np.random.default_rng(largest)
    lengths = rng.integers(1, 300, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = rng.integers(1, largest + 1, starts[-1]).astype(np.uint16)
    genes = np.zeros(len(counts), np.int32)
    _, values, _ = tokenize(genes, counts, starts, Tokens(tokenizer="binned", bins=bins))
    wanted = [np.digitize(counts[a:b], np.quantile(counts[a:b], np.linspace(0, 1, bins))) for a, b in pairwise(starts)]
    np.testing.assert_array_equal(values, np.concatenate(wanted))
    assert values.min() >= 1
    assert values.max() <= bins


def test_huge_counts_are_binned_too() -> None:
    counts = np.array([1, 2, 4_000_000_000, 1, 5], np.uint32)
    _, values, _ = tokenize(np.zeros(5, np.int32), counts, np.array([0, 3, 5]), Tokens(tokenizer="binned", bins=3))
    assert values.tolist() == [1, 2, 3, 1, 3]


def test_the_library_of_a_cell_is_summed_before_the_cut() -> None:
    counts = np.array([6, 3, 1], np.uint16)
    _, values, _ = tokenize(np.arange(3, dtype=np.int32), counts, np.array([0, 3]), Tokens(max_tokens=1))
    np.testing.assert_allclose(values, np.log1p([6000.0]), rtol=1e-6)


def test_a_cells_tokens_do_not_depend_on_its_neighbours() -> None:
    genes, counts, starts = cells()
    for tokenizer in ("rank", "binned", "continuous"):
        tokens = Tokens(tokenizer=tokenizer, max_tokens=50)
        _, together, cu = tokenize(genes, counts, starts, tokens)
        for cell, (a, b) in enumerate(pairwise(starts)):
            _, alone, _ = tokenize(genes[a:b], counts[a:b], np.array([0, b - a]), tokens)
            np.testing.assert_array_equal(together[cu[cell] : cu[cell + 1]], alone)


@pytest.mark.parametrize("tokenizer", ["rank", "binned", "continuous"])
def test_no_cells_are_a_legal_batch(tokenizer: str) -> None:
    tokens = Tokens(tokenizer=tokenizer)
    none = np.empty(0, np.int32)
    ids, values, cu = tokenize(none, none.astype(np.uint16), np.zeros(1, np.int64), tokens)
    empty = empty_batch(tokens)
    for found, wanted in ((ids, empty.genes), (values, empty.values), (cu, empty.cu_seqlens)):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_only_rank_does_without_counts() -> None:
    genes, _, starts = cells()
    assert len(tokenize(genes, None, starts, Tokens(tokenizer="rank"))[0]) == len(genes)
    with pytest.raises(DataError, match="tokenizer binned needs counts"):
        tokenize(genes, None, starts, Tokens(tokenizer="binned"))
