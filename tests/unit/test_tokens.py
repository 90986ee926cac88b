"""Tokenizers, rank order and compiled loops against one cell at a time in plain numpy."""

from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from cellmill.config.parts.tokens import BinnedTokens, ContinuousTokens, RankTokens, Tokens
from cellmill.data.arrays import inverse_medians, rank_order_rows
from cellmill.data.stream import tokenizers as module
from cellmill.data.stream.batch import Prefixes, empty_batch
from cellmill.data.stream.tokenizers import bin_counts, log_tokens
from cellmill.errors import ConfigError

LENGTHS = (0, 1, 2, 60, 0, 7, 200)
OPTIONS = {"rank": RankTokens, "binned": BinnedTokens, "continuous": ContinuousTokens}
PAIRS = [(1, 2), (3, 200), (40, 3), (40, 51), (60_000, 51)]  # largest counts and numbers of bins of `make test`
every_tokenizer = pytest.mark.parametrize("tokenizer", OPTIONS)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def cells(dtype: type = np.uint16, largest: int = 40) -> Arrays:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    genes = np.concatenate([rng.choice(500, n, replace=False) for n in LENGTHS]).astype(np.int32)
    counts = np.minimum(rng.geometric(0.2, len(genes)), largest).astype(dtype)
    return genes, counts, starts


def tokenize(genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray, tokens: Tokens) -> Arrays:
    return tokens.load()(tokens).tokenize(genes, counts, starts)  # type: ignore[no-any-return]


def reference(genes: np.ndarray, counts: np.ndarray, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(tokens, RankTokens):
        values = np.arange(len(genes), dtype=np.int32)
    elif isinstance(tokens, BinnedTokens):
        values = bin_counts(counts, tokens.bins) if len(counts) else np.empty(0, np.int32)
    else:
        values = np.log1p(counts / max(int(counts.sum()), 1) * 1e4).astype(np.float32)
    return genes[: tokens.max_tokens] + 2, values[: tokens.max_tokens]


@pytest.mark.parametrize(
    ("tokenizer", "max_tokens"),
    [
        pytest.param(tokenizer, limit, marks=() if limit == 50 or tokenizer == "rank" else pytest.mark.full)
        for tokenizer in OPTIONS
        for limit in (1, 50, 2048)
    ],
)
def test_many_cells_at_once_equal_each_cell_alone(tokenizer: str, max_tokens: int) -> None:
    genes, counts, starts = cells()
    tokens = OPTIONS[tokenizer](max_tokens=max_tokens)
    ids, values, cu = tokenize(genes, counts, starts, tokens)
    assert (ids.dtype, cu.dtype) == (np.int32, np.int32)
    assert values.dtype == tokens.load().dtype == (np.float32 if tokenizer == "continuous" else np.int32)
    assert np.diff(cu).tolist() == [min(n, max_tokens) for n in LENGTHS]
    assert tokens.n_values == {"scalar": 0, "class": 52, "place": max_tokens}[tokens.value_kind]
    for cell, (a, b) in enumerate(pairwise(starts)):
        expected_ids, expected = reference(genes[a:b], counts[a:b], tokens)
        np.testing.assert_array_equal(ids[cu[cell] : cu[cell + 1]], expected_ids)
        own = values[cu[cell] : cu[cell + 1]]
        np.testing.assert_array_equal(own, tokenize(genes[a:b], counts[a:b], np.array([0, b - a]), tokens)[1])
        if tokenizer == "continuous":
            np.testing.assert_allclose(own, expected, rtol=2e-6)
        else:
            np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(
    ("largest", "bins"),
    [
        pytest.param(largest, bins, marks=() if (largest, bins) in PAIRS else pytest.mark.full)
        for largest in (1, 3, 40, 60_000)
        for bins in (2, 3, 51, 200)
    ],
)
def test_bins_equal_numpys_quantiles_exactly(bins: int, largest: int) -> None:
    rng = np.random.default_rng(largest)
    lengths = rng.integers(1, 300, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = rng.integers(1, largest + 1, starts[-1]).astype(np.uint16)
    _, values, _ = tokenize(np.zeros(len(counts), np.int32), counts, starts, BinnedTokens(bins=bins))
    quantiles = [np.quantile(counts[a:b], np.linspace(0, 1, bins)) for a, b in pairwise(starts)]
    expected = [np.digitize(counts[a:b], edges) for (a, b), edges in zip(pairwise(starts), quantiles)]
    np.testing.assert_array_equal(values, np.concatenate(expected))
    assert values.min() >= 1
    assert values.max() <= bins


@pytest.mark.parametrize("binning", ["uniform", "quantile_corpus"])
def test_shared_bins_are_those_of_the_log_normalised_values(binning: str) -> None:
    genes, counts, starts = cells()
    options = BinnedTokens(max_tokens=50, bins=20, binning=binning)
    quantiles = np.linspace(3, 9, 7).tolist()
    tokens = options.fitted(quantiles)
    inner = np.arange(1, 20)
    edges = inner * 0.5 if binning == "uniform" else np.interp(inner / 20, np.arange(7) / 6, quantiles)
    ids, bins, cu = tokenize(genes, counts, starts, tokens)
    continuous = tokenize(genes, counts, starts, ContinuousTokens(max_tokens=50))
    np.testing.assert_array_equal(ids, continuous[0])
    np.testing.assert_array_equal(cu, continuous[2])
    assert np.abs(continuous[1][:, None] - edges).min() > 1e-6, "no value at an edge, where rounding decides"
    np.testing.assert_array_equal(bins, [1 + sum(value >= edge for edge in edges) for value in continuous[1]])
    assert bins.dtype == np.int32
    assert len(np.unique(bins)) > 5
    assert tokens.n_values == 21


def test_edges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match="edges: expected 2 ascending numbers for 3 bins, or null"):
        BinnedTokens(bins=3, binning="quantile_corpus", edges=[1.0])
    with pytest.raises(ValidationError, match="edges are read with binning quantile_corpus, got uniform"):
        BinnedTokens(bins=3, binning="uniform", edges=[1.0, 2.0])
    with pytest.raises(ConfigError, match="no edges are fitted"):
        BinnedTokens(binning="quantile_corpus").load()(BinnedTokens(binning="quantile_corpus"))


def test_counts_too_large_for_a_table_are_binned_too() -> None:
    counts = np.array([1, 2, 4_000_000_000, 1, 5], np.uint32)
    _, values, _ = tokenize(np.zeros(5, np.int32), counts, np.array([0, 3, 5]), BinnedTokens(bins=3))
    assert values.tolist() == [1, 2, 3, 1, 3]


@every_tokenizer
def test_no_cells_are_an_empty_batch(tokenizer: str) -> None:
    tokens = OPTIONS[tokenizer]()
    none = np.empty(0, np.int32)
    made = tokenize(none, none.astype(np.uint16), np.zeros(1, np.int64), tokens)
    empty = empty_batch(tokens.load().dtype)
    for array, expected in zip(made, (empty.genes, empty.values, empty.cu_seqlens)):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_values_above_the_last_bin_are_in_it_small_ones_in_the_first_and_one_at_an_edge_above_it() -> None:
    counts = np.array([1, 999_999], np.uint32)
    edges = tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), ContinuousTokens())[1].tolist()
    at_edges = BinnedTokens(binning="quantile_corpus", bins=3, edges=edges)
    assert tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), at_edges)[1].tolist() == [2, 3]
    for top, expected in ((2.0, [1, 4]), (100.0, [1, 1])):
        options = BinnedTokens(binning="uniform", bins=4, max_value=top)
        assert tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), options)[1].tolist() == expected


MOST = 700


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(np.uint16, 1), (np.uint16, 63), (np.uint16, 64), (np.uint16, 65_535), (np.uint32, 2**32 - 1)],
)
def test_loops_make_the_bits_of_numpy(dtype: type, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(largest)
    lengths = rng.integers(0, 1_400, 100) * (rng.random(100) > 0.1)  # with and without genes, cut and whole
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.exp(rng.random(starts[-1]) ** 3 * np.log(largest)).round().clip(1, largest).astype(dtype)
    genes = rng.integers(0, 60_000, starts[-1]).astype(np.int32)
    kept = Prefixes(starts, MOST)
    assert kept.cu_seqlens[-1] > module._MANY
    monkeypatch.setattr(module, "_made", 0)
    expected = log_tokens(kept, genes, counts, starts)
    module._compiling().result()
    monkeypatch.setattr(module, "_made", module._WORTH)
    frozen = counts.copy()
    frozen.flags.writeable = False
    for given in (counts, counts.astype(np.int64), frozen):  # types that the loops take, and others
        for of_type in (genes, genes.astype(np.int64), np.repeat(genes, 2)[::2]):
            made = log_tokens(kept, of_type, given, starts)
            assert [array.dtype for array in made] == [np.int32, np.float32]
            np.testing.assert_array_equal(made[0], expected[0])
            np.testing.assert_array_equal(made[1].view(np.uint32), expected[1].view(np.uint32))


def rank_order(genes: np.ndarray, counts: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank order of one cell."""
    return rank_order_rows(np.array([0, len(genes)]), genes, counts, inverse)


@pytest.mark.parametrize(
    ("dtype", "n_genes", "factor"),
    [
        (np.uint16, 5000, 1),
        (np.uint32, 5000, 1),
        (np.int64, 1 << 16, 3000),
        (np.int64, 70_000, 1),
        (np.uint32, 9, 9999),
        (np.uint32, 70_000, 200_000_000),
    ],
)
def test_the_rank_order_equals_a_plain_sort_for_any_input_order(dtype: type, n_genes: int, factor: int) -> None:
    rng = np.random.default_rng(0)
    inverse = inverse_medians(rng.choice([0.5, 1, 2, 4], n_genes))  # few values: many ties
    lengths = np.minimum([0, 1, 0, 2, 700, 33, 0], n_genes)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes = np.concatenate([rng.choice(n_genes, n, replace=False) for n in lengths]).astype(np.int32)
    counts = (factor * rng.integers(1, 20, len(genes))).astype(dtype)
    ordered, moved = rank_order_rows(starts, genes, counts, inverse)
    assert (ordered.dtype, moved.dtype) == (np.int32, dtype)
    key = counts.astype(np.float32) * inverse[genes]
    for a, b in pairwise(starts.tolist()):
        places = sorted(range(a, b), key=lambda i: (-key[i], genes[i]))
        np.testing.assert_array_equal(ordered[a:b], genes[places])
        np.testing.assert_array_equal(moved[a:b], counts[places])


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
