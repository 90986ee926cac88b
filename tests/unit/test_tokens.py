"""Tokenizers, rank order and compiled loops against one cell at a time in plain numpy; the choice
of a cell's genes.
"""

from collections import Counter
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from cellmill.data.arrays import inverse_medians, rank_order_rows
from cellmill.data.genes.names import GeneColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream import log_values
from cellmill.data.stream.batch import Batch, Prefixes, empty_batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.tokenizers import CellTokenizer, bin_counts, token_numbers
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.embed import tokens_of
from cellmill.models.batch import to_tensors
from tests.models import model_on_cpu

LENGTHS = (0, 1, 2, 60, 0, 7, 200)
OPTIONS = {"rank": RankTokens, "binned": BinnedTokens, "continuous": ContinuousTokens}
# largest counts and numbers of bins of `make test`
PAIRS = [(1, 2), (3, 200), (40, 3), (40, 51), (60_000, 51)]
every_tokenizer = pytest.mark.parametrize("tokenizer", OPTIONS)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def cells(dtype: type = np.uint16, largest: int = 40) -> Arrays:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    genes = np.concatenate([rng.choice(500, n, replace=False) for n in LENGTHS]).astype(np.int32)
    counts = np.minimum(rng.geometric(0.2, len(genes)), largest).astype(dtype)
    return genes, counts, starts


def tokenize(
    genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray, tokens: Tokens
) -> Arrays:
    return tokens.load()(tokens).tokenize(genes, counts, starts)  # type: ignore[no-any-return]


def reference(
    genes: np.ndarray, counts: np.ndarray, tokens: Tokens
) -> tuple[np.ndarray, np.ndarray]:
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
        pytest.param(
            tokenizer, limit, marks=() if limit == 50 or tokenizer == "rank" else pytest.mark.full
        )
        for tokenizer in OPTIONS
        for limit in (1, 50, 2048)
    ],
)
def test_a_batch_of_cells_equals_each_cell_separately(tokenizer: str, max_tokens: int) -> None:
    genes, counts, starts = cells()
    tokens = OPTIONS[tokenizer](max_tokens=max_tokens)
    ids, values, cu = tokenize(genes, counts, starts, tokens)
    assert (ids.dtype, cu.dtype) == (np.int32, np.int32)
    assert (
        values.dtype
        == tokens.load().dtype
        == (np.float32 if tokenizer == "continuous" else np.int32)
    )
    assert np.diff(cu).tolist() == [min(n, max_tokens) for n in LENGTHS]
    assert tokens.n_values == {"scalar": 0, "class": 52, "place": max_tokens}[tokens.value_kind]
    for cell, (a, b) in enumerate(pairwise(starts)):
        expected_ids, expected = reference(genes[a:b], counts[a:b], tokens)
        np.testing.assert_array_equal(ids[cu[cell] : cu[cell + 1]], expected_ids)
        own = values[cu[cell] : cu[cell + 1]]
        np.testing.assert_array_equal(
            own, tokenize(genes[a:b], counts[a:b], np.array([0, b - a]), tokens)[1]
        )
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
    _, values, _ = tokenize(
        np.zeros(len(counts), np.int32), counts, starts, BinnedTokens(bins=bins)
    )
    quantiles = [np.quantile(counts[a:b], np.linspace(0, 1, bins)) for a, b in pairwise(starts)]
    expected = [
        np.digitize(counts[a:b], edges) for (a, b), edges in zip(pairwise(starts), quantiles)
    ]
    np.testing.assert_array_equal(values, np.concatenate(expected))
    assert values.min() >= 1
    assert values.max() <= bins


@pytest.mark.parametrize("binning", ["uniform", "quantile_corpus"])
def test_shared_bins_cut_the_log_normalised_values(binning: str) -> None:
    genes, counts, starts = cells()
    options = BinnedTokens(max_tokens=50, bins=20, binning=binning)
    quantiles = np.linspace(3, 9, 7).tolist()
    tokens = options.fitted(quantiles)
    inner = np.arange(1, 20)
    edges = (
        inner * 0.5 if binning == "uniform" else np.interp(inner / 20, np.arange(7) / 6, quantiles)
    )
    ids, bins, cu = tokenize(genes, counts, starts, tokens)
    continuous = tokenize(genes, counts, starts, ContinuousTokens(max_tokens=50))
    np.testing.assert_array_equal(ids, continuous[0])
    np.testing.assert_array_equal(cu, continuous[2])
    assert np.abs(continuous[1][:, None] - edges).min() > 1e-6, (
        "no value at an edge, where rounding decides"
    )
    np.testing.assert_array_equal(
        bins, [1 + sum(value >= edge for edge in edges) for value in continuous[1]]
    )
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
    _, values, _ = tokenize(
        np.zeros(5, np.int32), counts, np.array([0, 3, 5]), BinnedTokens(bins=3)
    )
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


def test_values_beyond_the_edges_fall_into_the_outer_bins() -> None:
    counts = np.array([1, 999_999], np.uint32)
    edges = tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), ContinuousTokens())[
        1
    ].tolist()
    at_edges = BinnedTokens(binning="quantile_corpus", bins=3, edges=edges)
    assert tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), at_edges)[
        1
    ].tolist() == [2, 3]
    for top, expected in ((2.0, [1, 4]), (100.0, [1, 1])):
        options = BinnedTokens(binning="uniform", bins=4, max_value=top)
        assert (
            tokenize(np.arange(2, dtype=np.int32), counts, np.array([0, 2]), options)[1].tolist()
            == expected
        )


MOST = 700


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(np.uint16, 1), (np.uint16, 63), (np.uint16, 64), (np.uint16, 65_535), (np.uint32, 2**32 - 1)],
)
def test_loops_make_the_bits_of_numpy(
    dtype: type, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(largest)
    # with and without genes, cut and whole
    lengths = rng.integers(0, 1_400, 100) * (rng.random(100) > 0.1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = (
        np.exp(rng.random(starts[-1]) ** 3 * np.log(largest)).round().clip(1, largest).astype(dtype)
    )
    genes = rng.integers(0, 60_000, starts[-1]).astype(np.int32)
    kept = Prefixes(starts, MOST)
    assert kept.cu_seqlens[-1] > log_values.LARGE_BATCH
    loops = log_values.CompiledLoops()
    monkeypatch.setattr(log_values, "COMPILED", loops)
    expected = log_values.log_tokens(kept, genes, counts, starts)
    assert loops.get(wait=True) is not None
    loops.n_tokens = log_values.WORTH_COMPILING
    frozen = counts.copy()
    frozen.flags.writeable = False
    for given in (counts, counts.astype(np.int64), frozen):  # types that the loops take, and others
        for of_type in (genes, genes.astype(np.int64), np.repeat(genes, 2)[::2]):
            made = log_values.log_tokens(kept, of_type, given, starts)
            assert [array.dtype for array in made] == [np.int32, np.float32]
            np.testing.assert_array_equal(made[0], expected[0])
            np.testing.assert_array_equal(made[1].view(np.uint32), expected[1].view(np.uint32))


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
    lengths = np.minimum([0, 1, 0, 2, 700, 33, 0], n_genes)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes = np.concatenate([rng.choice(n_genes, n, replace=False) for n in lengths]).astype(
        np.int32
    )
    counts = (factor * rng.integers(1, 20, len(genes))).astype(dtype)
    ordered, moved = rank_order_rows(starts, genes, counts, inverse)
    assert (ordered.dtype, moved.dtype) == (np.int32, dtype)
    key = counts.astype(np.float32) * inverse[genes]
    for a, b in pairwise(starts.tolist()):
        places = sorted(range(a, b), key=lambda i: (-key[i], genes[i]))
        np.testing.assert_array_equal(ordered[a:b], genes[places])
        np.testing.assert_array_equal(moved[a:b], counts[places])


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


def cells_of(n: int = CELLS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Genes in rank order, counts and starts of cells, the first without genes."""
    counts = random_counts(n, GENES, seed)
    counts.data[: counts.indptr[1]] = 0
    counts.eliminate_zeros()
    starts = counts.indptr.astype(np.int64)
    inverse = inverse_medians(vocabulary_of(genes_named(GENES)).medians)
    return *rank_order_rows(starts, counts.indices, counts.data, inverse), starts


def made(options: dict[str, Any], epoch: int = 0, seed: int = 0, max_tokens: int = 40) -> Batch:
    tokenizer = CellTokenizer(
        Tokens.model_validate(options | {"max_tokens": max_tokens}), GENES, seed, VARIABILITY
    )
    genes, counts, starts = cells_of()
    return tokenizer.batch(genes, counts, starts, np.arange(CELLS), counted=True, epoch=epoch)


def by_cell(batch: Batch, array: np.ndarray) -> list[list[Any]]:
    return [array[a:b].tolist() for a, b in pairwise(batch.cu_seqlens)]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_values_are_those_of_the_whole_cell(
    options: dict[str, Any],
) -> None:
    batch = made(options)
    whole = made({**options, "truncation": "top", "zero_frac": 0}, max_tokens=GENES)
    share = options.get("zero_frac", 0)
    chosen, every = (
        zip(*(by_cell(b, array) for array in (b.genes, b.values, b.counts))) for b in (batch, whole)
    )
    for (genes, values, counts), (all_genes, all_values, all_counts) in zip(
        chosen, every, strict=True
    ):
        detected = sum(count > 0 for count in counts)
        assert detected == min(len(all_genes), int(40 * (1 - share)))
        zeros = len(genes) - detected
        assert zeros == int(np.floor(detected * share / (1 - share)))
        assert len(set(genes)) == len(genes) <= 40
        assert not {*genes[detected:]} & {*all_genes}, "a gene with counts is none without"
        assert all(2 <= gene < GENES + 2 for gene in genes)
        assert {*values[detected:], *counts[detected:]} <= {0}
        places = [all_genes.index(gene) for gene in genes[:detected]]
        assert places == sorted(places), "the order of ranks stays"
        assert counts[:detected] == [all_counts[place] for place in places]
        if options["tokenizer"] == "rank":
            assert values == list(range(len(genes)))
        else:
            assert values[:detected] == [all_values[place] for place in places]
        if "truncation" not in options:
            assert places == list(range(detected))
        if options.get("truncation") == "variable":
            most = sorted(all_genes, key=lambda gene: VARIABILITY[gene - len(SPECIAL)])[:detected]
            assert {*genes[:detected]} == {*most}
    lengths = np.diff(cells_of()[2])
    expected = np.add(
        *token_numbers(Tokens.model_validate(options | {"max_tokens": 40}), lengths, GENES)
    )
    assert np.diff(batch.cu_seqlens).tolist() == expected.tolist()


def test_every_gene_is_drawn_equally_often() -> None:
    options = {"tokenizer": "continuous", "truncation": "random", "zero_frac": 0.3}
    first = made(options)
    assert first.genes.tolist() == made(options).genes.tolist()
    assert first.genes.tolist() != made(options, epoch=1).genes.tolist()
    assert first.genes.tolist() != made(options, seed=1).genes.tolist()
    longest = int(np.diff(cells_of()[2]).argmax())
    drawn: Counter[tuple[int, bool]] = Counter()
    for epoch in range(300):
        batch = made(options, epoch=epoch)
        assert batch.counts is not None
        span = slice(*batch.cu_seqlens[longest : longest + 2])
        drawn.update(zip(batch.genes[span].tolist(), (batch.counts[span] > 0).tolist()))
    detected = int(np.diff(cells_of()[2]).max())
    for with_counts, n, of in ((True, 28, detected), (False, 12, GENES - detected)):
        times = np.array([times for (_, own), times in drawn.items() if own == with_counts])
        assert len(times) == of, "each is drawn at some time"
        expected = 300 * n / of
        assert np.square(times - expected).mean() == pytest.approx(expected * (1 - n / of), rel=0.5)


def test_the_stream_draws_the_same_genes_for_any_ranks(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 90, 40)
    tokens = Tokens.model_validate({"truncation": "random", "zero_frac": 0.25, "max_tokens": 8})

    def streamed(rank: int, world: int) -> list[dict[int, list[int]]]:
        """Genes of each cell, by epoch."""
        stream = stream_of(
            manifest, rank, world, {"lanes": 4}, tokens=tokens, global_batch=20, token_budget=30
        )
        steps = iter(stream)
        epochs = []
        for _ in range(2):
            batches = chain.from_iterable(islice(steps, stream.steps_per_epoch))
            epochs.append(
                {int(c): g for b in batches for c, g in zip(b.cells, by_cell(b, b.genes))}
            )
        stream.close()
        return epochs

    alone = streamed(0, 1)
    ranks = [streamed(rank, 2) for rank in range(2)]
    for epoch in range(2):
        assert alone[epoch] == ranks[0][epoch] | ranks[1][epoch]
        assert len(alone[epoch]) == 90
    assert sum(alone[0][cell] == alone[1][cell] for cell in range(90)) < 30


def test_variable_genes_come_from_the_vocabulary(
    tmp_path: Path,
) -> None:
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
            manifest, options={"lanes": 1}, tokens=tokens, token_budget=2000, shuffle=False
        )

    streamed = [
        genes
        for step in stream(with_order)
        for batch in step
        for genes in by_cell(batch, batch.genes)
    ]
    every = np.arange(GENES, dtype=np.int32)
    totals = np.zeros(2, np.int64)
    columns = GeneColumns(every, np.ones(GENES, bool), False)
    [batch] = tokens_of([counts], columns, vocabulary, tokens, np.ones(30, bool), totals)
    assert sorted(streamed) == sorted(by_cell(batch, batch.genes))
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
    genes, counts, starts = cells_of()
    batch = CellTokenizer(tokens, GENES).batch(genes, counts, starts, np.arange(CELLS))
    prepared = model.prepare(to_tensors(batch), seed=0, step=0)
    assert 0 in prepared.answers
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    assert 0 < model(prepared).item() / int(prepared.n_targets) < 10


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
