"""Tokenizers, rank order and compiled loops against one cell at a time in plain numpy; the choice
of a cell's genes.
"""

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from small_corpus import (
    genes_named,
    random_counts,
    stream_of,
    vocabulary_of,
    write_corpus,
    write_dataset,
)

from cellmill.config.checks import check_together
from cellmill.config.corpus import Shard
from cellmill.config.options import TrainOptions
from cellmill.config.parts.tokens import SPECIAL, BinnedTokens, ContinuousTokens, RankTokens, Tokens
from cellmill.data import compiled_loops
from cellmill.data.genes.names import GeneColumns
from cellmill.data.rank_order import inverse_medians, rank_order_rows
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream import token_values
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.data.stream.batch_tokenizer import (
    BatchTokenizer,
    count_detected_and_undetected_tokens,
)
from cellmill.data.stream.builtin_tokenizers import bin_counts
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.tokenizer import CellTokens, KeptGenes
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.embed import tokenize_blocks
from cellmill.models.batch import to_tensors
from tests.checks import quick
from tests.models import model_on_cpu

LENGTHS = (0, 1, 2, 60, 0, 7, 200)
OPTIONS = {"rank": RankTokens, "binned": BinnedTokens, "continuous": ContinuousTokens}
# largest counts and numbers of bins of `make test`
PAIRS = [
    (1, 2),
    (3, 200),
    (40, 3),
    (40, 51),
    (60_000, 51),
]
every_tokenizer = pytest.mark.parametrize("tokenizer", OPTIONS)


def cells(dtype: type = np.uint16, largest: int = 40) -> SparseCounts:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    genes_by_cell = [rng.choice(500, n, replace=False) for n in LENGTHS]
    genes = np.concatenate(genes_by_cell).astype(np.int32)
    counts = np.minimum(rng.geometric(0.2, len(genes)), largest)
    return SparseCounts(starts, genes, counts.astype(dtype))


def tokenize(cells: SparseCounts, tokens: Tokens) -> CellTokens:
    return tokens.load()(tokens).tokenize(cells)  # type: ignore[no-any-return]


def reference(
    genes: np.ndarray, counts: np.ndarray, tokens: Tokens
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and values of one cell."""
    if isinstance(tokens, RankTokens):
        values = np.arange(len(genes), dtype=np.int32)
    elif isinstance(tokens, ContinuousTokens):
        depth = max(int(counts.sum()), 1)
        values = np.log1p(counts / depth * 1e4).astype(np.float32)
    elif len(counts) == 0:
        values = np.empty(0, np.int32)
    else:
        values = bin_counts(counts, tokens.bins)  # type: ignore[attr-defined]
    return genes[: tokens.max_tokens] + 2, values[: tokens.max_tokens]


@pytest.mark.parametrize(
    ("tokenizer", "max_tokens"),
    quick(
        product(OPTIONS, (1, 50, 2048)), [*product(["rank"], (1, 2048)), *product(OPTIONS, [50])]
    ),
)
def test_a_batch_of_cells_equals_each_cell_separately(tokenizer: str, max_tokens: int) -> None:
    given = cells()
    tokens = OPTIONS[tokenizer](max_tokens=max_tokens)
    ids, values, cu = tokenize(given, tokens)
    assert (ids.dtype, cu.dtype) == (np.int32, np.int32)
    dtype = np.float32 if tokenizer == "continuous" else np.int32
    assert values.dtype == dtype
    assert tokens.load().dtype == dtype
    assert np.diff(cu).tolist() == [min(n, max_tokens) for n in LENGTHS]
    assert tokens.n_values == {"scalar": 0, "class": 52, "place": max_tokens}[tokens.value_kind]
    for cell, (start, end) in enumerate(pairwise(given.offsets)):
        genes_of_cell = given.genes[start:end]
        counts_of_cell = given.counts[start:end]
        expected_ids, expected = reference(genes_of_cell, counts_of_cell, tokens)
        in_batch = slice(cu[cell], cu[cell + 1])
        np.testing.assert_array_equal(ids[in_batch], expected_ids)
        one_cell = SparseCounts(np.array([0, end - start]), genes_of_cell, counts_of_cell)
        alone = tokenize(one_cell, tokens)
        np.testing.assert_array_equal(values[in_batch], alone[1])
        if tokenizer == "continuous":
            np.testing.assert_allclose(values[in_batch], expected, rtol=2e-6)
        else:
            np.testing.assert_array_equal(values[in_batch], expected)


@every_tokenizer
@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint64])
def test_counts_may_have_any_integer_type(tokenizer: str, dtype: type) -> None:
    tokens = OPTIONS[tokenizer](max_tokens=50)
    expected = tokenize(cells(), tokens)
    for given, array in zip(tokenize(cells(dtype=dtype), tokens), expected):
        np.testing.assert_array_equal(given, array)


@pytest.mark.parametrize(
    ("largest", "bins"),
    quick(product((1, 3, 40, 60_000), (2, 3, 51, 200)), PAIRS),
)
def test_bins_equal_numpys_quantiles_exactly(bins: int, largest: int) -> None:
    rng = np.random.default_rng(largest)
    lengths = rng.integers(1, 300, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = rng.integers(1, largest + 1, starts[-1])
    counts = counts.astype(np.uint16)
    genes = np.zeros(len(counts), np.int32)
    cells = SparseCounts(starts, genes, counts)
    _, values, _ = tokenize(cells, BinnedTokens(bins=bins))
    fractions = np.linspace(0, 1, bins)
    for start, end in pairwise(starts):
        counts_of_cell = counts[start:end]
        edges = np.quantile(counts_of_cell, fractions)
        expected = np.digitize(counts_of_cell, edges)
        np.testing.assert_array_equal(values[start:end], expected)
    assert values.min() >= 1
    assert values.max() <= bins


@pytest.mark.parametrize("binning", ["uniform", "quantile_corpus"])
def test_shared_bins_cut_the_log_normalised_values(binning: str) -> None:
    options = BinnedTokens(max_tokens=50, bins=20, binning=binning)
    quantiles = np.linspace(3, 9, 7).tolist()
    tokens = options.fitted(quantiles)
    inner = np.arange(1, 20)
    if binning == "uniform":
        edges = inner * 0.5
    else:
        edges = np.interp(inner / 20, np.arange(7) / 6, quantiles)
    ids, bins, cu = tokenize(cells(), tokens)
    expected_ids, values, expected_cu = tokenize(cells(), ContinuousTokens(max_tokens=50))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(cu, expected_cu)
    for value, number in zip(values, bins, strict=True):
        assert np.abs(value - edges).min() > 1e-6, "at an edge, rounding would decide"
        assert number == 1 + np.count_nonzero(edges <= value)
    assert bins.dtype == np.int32
    assert len(np.unique(bins)) > 5
    assert tokens.n_values == 21


def test_edges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValidationError, match="edges: expected 2 ascending numbers for 3 bins, or null"
    ):
        BinnedTokens(bins=3, binning="quantile_corpus", edges=[1.0])
    with pytest.raises(
        ValidationError, match="edges are read with binning quantile_corpus, got uniform"
    ):
        BinnedTokens(bins=3, binning="uniform", edges=[1.0, 2.0])
    with pytest.raises(ConfigError, match="no edges are fitted"):
        BinnedTokens(binning="quantile_corpus").load()(BinnedTokens(binning="quantile_corpus"))


def test_counts_too_large_for_a_table_are_binned_too() -> None:
    counts = np.array([1, 2, 4_000_000_000, 1, 5], np.uint32)
    genes = np.zeros(5, np.int32)
    cells = SparseCounts(np.array([0, 3, 5]), genes, counts)
    _, values, _ = tokenize(cells, BinnedTokens(bins=3))
    assert values.tolist() == [1, 2, 3, 1, 3]


def test_one_large_count_takes_no_large_table() -> None:
    counts = np.arange(1, 2001, dtype=np.uint32)
    counts[7] = 10_000_000
    cell = SparseCounts(np.array([0, 2000]), np.zeros(2000, np.int32), counts)
    tracemalloc.start()
    _, values, _ = tokenize(cell, BinnedTokens())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    np.testing.assert_array_equal(values, bin_counts(counts, 51)[:2000])


@every_tokenizer
def test_without_cells_the_batch_is_empty(tokenizer: str) -> None:
    tokens = OPTIONS[tokenizer]()
    genes = np.empty(0, np.int32)
    counts = np.empty(0, np.uint16)
    none = SparseCounts(np.zeros(1, np.int64), genes, counts)
    empty = empty_batch(tokens.load().dtype)
    fields = (empty.token_ids, empty.values, empty.cu_seqlens)
    for array, expected in zip(tokenize(none, tokens), fields):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_copying_an_empty_batch_reads_nothing_from_its_device() -> None:
    # a tensor on the meta device has no values that could be read
    batch = to_tensors(empty_batch(np.dtype(np.float32)), torch.device("meta"))
    assert batch.cu_seqlens.is_meta
    assert replace(batch).lengths == []


def test_values_beyond_the_edges_fall_into_the_outer_bins() -> None:
    genes = np.arange(2, dtype=np.int32)
    counts = np.array([1, 999_999], np.uint32)
    cell = SparseCounts(np.array([0, 2]), genes, counts)

    def values_of(tokens: Tokens) -> list[float]:
        _, values, _ = tokenize(cell, tokens)
        return values.tolist()  # type: ignore[no-any-return]

    edges = values_of(ContinuousTokens())
    assert values_of(BinnedTokens(binning="quantile_corpus", bins=3, edges=edges)) == [2, 3]
    assert values_of(BinnedTokens(binning="uniform", bins=4, max_value=2.0)) == [1, 4]
    assert values_of(BinnedTokens(binning="uniform", bins=4, max_value=100.0)) == [1, 1]


MOST = 700


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (np.uint16, 1),
        (np.uint16, 63),
        (np.uint16, 64),
        (np.uint16, 65_535),
        (np.uint32, 2**32 - 1),
    ],
)
def test_compiled_loops_are_bitwise_equal_to_numpy(
    dtype: type, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(largest)
    # with and without genes, cut and whole
    has_genes = rng.random(100) > 0.1
    lengths = rng.integers(0, 1_400, 100) * has_genes
    starts = np.concatenate([[0], np.cumsum(lengths)])
    exponents = rng.random(starts[-1]) ** 3
    sizes = np.exp(exponents * np.log(largest))
    counts = sizes.round().clip(1, largest).astype(dtype)
    genes = rng.integers(0, 60_000, starts[-1]).astype(np.int32)
    kept = KeptGenes(SparseCounts(starts, genes, counts), MOST)
    assert kept.cu_seqlens[-1] > token_values.LARGE_BATCH
    monkeypatch.setattr(compiled_loops, "COMPILED", compiled_loops.CompiledLoops())
    expected = token_values.make_log_tokens(kept)
    ranks = token_values.make_position_tokens(kept)
    loops = compiled_loops.load_loops()
    assert loops is not None
    monkeypatch.setattr(compiled_loops.COMPILED, "loops_for", lambda n_values: loops)
    frozen = counts.copy()
    frozen.flags.writeable = False
    # types that the loops take, and others
    given_counts = (counts, counts.astype(np.int64), frozen)
    given_genes = (genes, genes.astype(np.int64), np.repeat(genes, 2)[::2])
    for some_counts, some_genes in product(given_counts, given_genes):
        kept = KeptGenes(SparseCounts(starts, some_genes, some_counts), MOST)
        ids, values, _ = token_values.make_log_tokens(kept)
        assert (ids.dtype, values.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(ids, expected[0])
        np.testing.assert_array_equal(values.view(np.uint32), expected[1].view(np.uint32))
        by_loops = token_values.make_position_tokens(kept)
        assert by_loops.values.dtype == np.int32
        np.testing.assert_array_equal(by_loops[:2], ranks[:2])


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
def test_the_rank_order_equals_a_plain_sort_for_any_input_order(
    dtype: type, n_genes: int, factor: int
) -> None:
    rng = np.random.default_rng(0)
    inverse = inverse_medians(rng.choice([0.5, 1, 2, 4], n_genes))  # few values: many ties
    lengths = [0, 1, 0, 2, min(700, n_genes), min(33, n_genes), 0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes_by_cell = [rng.choice(n_genes, n, replace=False) for n in lengths]
    genes = np.concatenate(genes_by_cell).astype(np.int32)
    counts = factor * rng.integers(1, 20, len(genes))
    counts = counts.astype(dtype)
    _, ordered, moved = rank_order_rows(SparseCounts(starts, genes, counts), inverse)
    assert (ordered.dtype, moved.dtype) == (np.int32, dtype)
    key = counts.astype(np.float32) * inverse[genes]
    for start, end in pairwise(starts.tolist()):
        positions = sorted(range(start, end), key=lambda i: (-key[i], genes[i]))
        np.testing.assert_array_equal(ordered[start:end], genes[positions])
        np.testing.assert_array_equal(moved[start:end], counts[positions])


GENES = 300
CELLS = 40
KINDS = [
    {"tokenizer": "continuous", "truncation": "random"},
    {"tokenizer": "continuous", "zero_frac": 0.25},
    {"tokenizer": "binned", "bins": 7, "truncation": "random", "zero_frac": 0.5},
    {"tokenizer": "binned", "binning": "uniform", "zero_frac": 0.1},
    {"tokenizer": "rank", "truncation": "random"},
    {"tokenizer": "rank", "truncation": "variable"},
    {"tokenizer": "binned", "bins": 7, "truncation": "variable", "zero_frac": 0.25},
]
VARIABILITY = np.random.default_rng(3).permutation(GENES).astype(np.int32)


def cells_of() -> SparseCounts:
    """Cells in rank order, the first without genes."""
    counts = random_counts(CELLS, GENES, 0)
    counts.data[: counts.indptr[1]] = 0
    counts.eliminate_zeros()
    starts = counts.indptr.astype(np.int64)
    inverse = inverse_medians(vocabulary_of(genes_named(GENES)).medians)
    return rank_order_rows(SparseCounts(starts, counts.indices, counts.data), inverse)


def made(options: dict[str, Any], epoch: int = 0, seed: int = 0, max_tokens: int = 40) -> Batch:
    tokenizer = BatchTokenizer(
        Tokens.model_validate(options | {"max_tokens": max_tokens}), GENES, seed, VARIABILITY
    )
    return tokenizer.make_batch(cells_of(), np.arange(CELLS), with_counts=True, epoch=epoch)


def by_cell(batch: Batch, array: np.ndarray) -> list[list[Any]]:
    return [array[a:b].tolist() for a, b in pairwise(batch.cu_seqlens)]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_values_are_those_of_the_whole_cell(options: dict[str, Any]) -> None:
    batch = made(options)
    whole = made({**options, "truncation": "top", "zero_frac": 0}, max_tokens=GENES)
    share = options.get("zero_frac", 0)
    for cell in range(CELLS):
        genes = by_cell(batch, batch.token_ids)[cell]
        values = by_cell(batch, batch.values)[cell]
        counts = by_cell(batch, batch.counts)[cell]
        all_genes = by_cell(whole, whole.token_ids)[cell]
        all_values = by_cell(whole, whole.values)[cell]
        all_counts = by_cell(whole, whole.counts)[cell]
        detected = np.count_nonzero(counts)
        assert detected == min(len(all_genes), int(40 * (1 - share)))
        zeros = len(genes) - detected
        assert zeros == int(np.floor(detected * share / (1 - share)))
        assert len(set(genes)) == len(genes)
        assert len(genes) <= 40
        assert not {*genes[detected:]} & {*all_genes}, "drawn as a gene without counts"
        assert all(2 <= gene < GENES + 2 for gene in genes)
        assert not any(values[detected:])
        assert not any(counts[detected:])
        positions = [all_genes.index(gene) for gene in genes[:detected]]
        assert positions == sorted(positions), "the order of ranks stays"
        assert counts[:detected] == [all_counts[position] for position in positions]
        if options["tokenizer"] == "rank":
            assert values == list(range(len(genes)))
        else:
            assert values[:detected] == [all_values[position] for position in positions]
        if "truncation" not in options:
            assert positions == list(range(detected))
        if options.get("truncation") == "variable":
            by_variability = sorted(all_genes, key=lambda gene: VARIABILITY[gene - len(SPECIAL)])
            assert {*genes[:detected]} == {*by_variability[:detected]}
    tokens = Tokens.model_validate(options | {"max_tokens": 40})
    lengths = cells_of().lengths
    with_counts, without_counts = count_detected_and_undetected_tokens(tokens, lengths, GENES)
    expected = with_counts + without_counts
    assert np.diff(batch.cu_seqlens).tolist() == expected.tolist()


@pytest.mark.parametrize("percent", [7, 10, 30, 58, 70, 80, 90])
def test_a_fraction_of_zeros_loses_no_gene_to_rounding(percent: int) -> None:
    for max_tokens in (10, 100, 1000, 2048):
        tokens = Tokens.model_validate({"zero_frac": percent / 100, "max_tokens": max_tokens})
        lengths = np.arange(1, 3000)
        n_detected, n_undetected = count_detected_and_undetected_tokens(tokens, lengths, 100_000)
        max_detected = max(1, max_tokens * (100 - percent) // 100)
        assert n_detected.tolist() == np.minimum(lengths, max_detected).tolist()
        expected = np.minimum(n_detected * percent // (100 - percent), max_tokens - n_detected)
        assert n_undetected.tolist() == expected.tolist()


def test_every_gene_is_drawn_equally_often() -> None:
    options = {"tokenizer": "continuous", "truncation": "random", "zero_frac": 0.3}
    first = made(options).token_ids.tolist()
    assert made(options).token_ids.tolist() == first
    assert made(options, epoch=1).token_ids.tolist() != first
    assert made(options, seed=1).token_ids.tolist() != first
    lengths = cells_of().lengths
    longest = int(lengths.argmax())
    detected: Counter[int] = Counter()
    undetected: Counter[int] = Counter()
    for epoch in range(300):
        batch = made(options, epoch=epoch)
        genes = by_cell(batch, batch.token_ids)[longest]
        counts = by_cell(batch, batch.counts)[longest]
        for gene, count in zip(genes, counts):
            (detected if count else undetected)[gene] += 1
    n_detected = int(lengths.max())
    for drawn, n_per_epoch, n_genes in (
        (detected, 28, n_detected),
        (undetected, 12, GENES - n_detected),
    ):
        assert len(drawn) == n_genes, "each is drawn at some time"
        times = np.array([*drawn.values()])
        share = n_per_epoch / n_genes
        mean = 300 * share
        variance = np.square(times - mean).mean()
        assert variance == pytest.approx(mean * (1 - share), rel=0.5)


def test_the_stream_draws_the_same_genes_for_any_ranks(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 90, 40)
    tokens = Tokens.model_validate({"truncation": "random", "zero_frac": 0.25, "max_tokens": 8})

    def streamed(rank: int, world: int) -> list[dict[int, list[int]]]:
        """Genes of each cell, by epoch."""
        sizes = {"global_batch": 20, "token_budget": 30}
        stream = stream_of(manifest, rank, world, {"lanes": 4}, tokens=tokens, **sizes)
        steps = iter(stream)
        epochs: list[dict[int, list[int]]] = [{}, {}]
        for genes in epochs:
            for batch in chain.from_iterable(islice(steps, stream.steps_per_epoch)):
                genes.update(zip(batch.cell_ids.tolist(), by_cell(batch, batch.token_ids)))
        stream.close()
        return epochs

    alone = streamed(0, 1)
    ranks = [streamed(rank, 2) for rank in range(2)]
    for epoch in range(2):
        assert alone[epoch] == ranks[0][epoch] | ranks[1][epoch]
        assert len(alone[epoch]) == 90
    repeated = [cell for cell in range(90) if alone[0][cell] == alone[1][cell]]
    assert len(repeated) < 30


def test_variable_genes_come_from_the_vocabulary(tmp_path: Path) -> None:
    ids = genes_named(GENES)
    counts = random_counts(30, GENES)
    vocabulary = replace(vocabulary_of(ids), variability=VARIABILITY)
    path = write_dataset(tmp_path / "one.h5ad", counts, ids)
    shard = Shard(val_frac=0, test_frac=0)
    with_order = write_shards([path], vocabulary, shard, tmp_path / "with" / "manifest.json")
    without = write_shards(
        [path], vocabulary_of(ids), shard, tmp_path / "without" / "manifest.json"
    )
    assert "variability" not in without.vocabulary
    tokens = Tokens.model_validate({"truncation": "variable", "max_tokens": 20})

    def stream(manifest: Manifest) -> CellStream:
        return stream_of(
            manifest, options={"lanes": 1}, tokens=tokens, token_budget=2000, is_training=False
        )

    streamed = []
    for batch in chain.from_iterable(stream(with_order)):
        streamed += by_cell(batch, batch.token_ids)
    every = np.arange(GENES, dtype=np.int32)
    columns = GeneColumns(every, np.ones(GENES, bool), False)
    [batch] = tokenize_blocks([counts], columns, vocabulary, tokens)
    assert sorted(streamed) == sorted(by_cell(batch, batch.token_ids))
    with pytest.raises(
        DataError, match=r"tokens\.truncation variable: the vocabulary has no order of genes"
    ):
        stream(without)


def test_a_bin_of_genes_without_counts_is_predicted_too() -> None:
    tokens = Tokens.model_validate(
        {"tokenizer": "binned", "bins": 7, "zero_frac": 0.4, "max_tokens": 30}
    )
    sizes = {"hidden": 16, "layers": 1, "heads": 2}
    model = model_on_cpu(GENES, tokens, **sizes)
    assert model.value_out.out_features == 8  # type: ignore[union-attr]
    batch = BatchTokenizer(tokens, GENES).make_batch(cells_of(), np.arange(CELLS))
    prepared = model.prepare(to_tensors(batch), seed=0, step=0)
    assert 0 in prepared.targets
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    mean_loss = model(prepared).item() / int(prepared.n_targets)
    assert 0 < mean_loss < 10


def test_choices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ValueError, match="zero_frac: tokenizer rank has no value for a gene without counts"
    ):
        Tokens.model_validate({"tokenizer": "rank", "zero_frac": 0.1})
    with pytest.raises(ValueError, match="truncation and zero_frac are for cells"):
        Tokens.model_validate({"tokenizer": "sequence", "truncation": "random"})
    tree: dict[str, Any] = {
        "stream": {},
        "model": {},
        "parallel": {},
        "train": {"steps": 1, "global_batch": 8},
    }
    tree |= {"tokens": {"zero_frac": 0.5}}
    for objective in ("masked_value", "masked_gene"):
        check_together(TrainOptions.model_validate(tree | {"objective": {"name": objective}}))
    with pytest.raises(
        ConfigError, match=r"tokens\.zero_frac: objective cell_decoding has no use for genes"
    ):
        check_together(TrainOptions.model_validate(tree | {"objective": {"name": "cell_decoding"}}))
