"""The choice of a cell's genes: random ones, and ones without counts, the same in every layout, file and order."""

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import genes_named, random_counts, stream_of, vocabulary_of, write_corpus, write_dataset

from cellmill.config.checks import check_together
from cellmill.config.corpus import Shard
from cellmill.config.options import TrainOptions
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.arrays import inverse_medians, rank_order_rows
from cellmill.data.genes.names import GeneColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.tokenizers import CellTokenizer, token_numbers
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.embed import tokens_of
from cellmill.models.batch import to_tensors
from tests.models import model_on_cpu

GENES, CELLS = 300, 40
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
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)


def cells_of(n: int = CELLS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Genes in rank order, counts and starts of cells, the first without genes."""
    counts = random_counts(n, GENES, seed)
    counts.data[: counts.indptr[1]] = 0
    counts.eliminate_zeros()
    starts = counts.indptr.astype(np.int64)
    inverse = inverse_medians(vocabulary_of(genes_named(GENES)).medians)
    return *rank_order_rows(starts, counts.indices, counts.data, inverse), starts


def made(options: dict[str, Any], epoch: int = 0, seed: int = 0, max_tokens: int = 40) -> Batch:
    tokenizer = CellTokenizer(Tokens.model_validate(options | {"max_tokens": max_tokens}), GENES, seed, VARIABILITY)
    genes, counts, starts = cells_of()
    return tokenizer.batch(genes, counts, starts, np.arange(CELLS), counted=True, epoch=epoch)


def by_cell(batch: Batch, array: np.ndarray) -> list[list[Any]]:
    return [array[a:b].tolist() for a, b in pairwise(batch.cu_seqlens)]


@every_kind
def test_values_and_counts_are_those_of_the_whole_cell_and_zeros_have_none(options: dict[str, Any]) -> None:
    batch, whole = made(options), made({**options, "truncation": "top", "zero_frac": 0}, max_tokens=GENES)
    share = options.get("zero_frac", 0)
    columns = (batch.genes, batch.values, batch.counts, whole.genes, whole.values, whole.counts)
    for at, (genes, values, counts, all_genes, all_values, all_counts) in enumerate(
        zip(*(by_cell(batch if i < 3 else whole, array) for i, array in enumerate(columns)))
    ):
        detected = sum(count > 0 for count in counts)
        assert detected == min(len(all_genes), int(40 * (1 - share)))
        zeros = len(genes) - detected
        assert zeros == int(np.floor(detected * share / (1 - share)))
        assert len(set(genes)) == len(genes) <= 40
        assert not {*genes[detected:]} & {*all_genes}, f"cell {at}: a gene with counts is none without"
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
    expected = np.add(*token_numbers(Tokens.model_validate(options | {"max_tokens": 40}), lengths, GENES))
    assert np.diff(batch.cu_seqlens).tolist() == expected.tolist()


def test_every_gene_is_drawn_as_often_and_other_epochs_and_seeds_draw_others() -> None:
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
    for with_counts, n in ((True, 28), (False, 12)):
        times = np.array([times for (_, own), times in drawn.items() if own == with_counts])
        of = int(np.diff(cells_of()[2]).max()) if with_counts else GENES - int(np.diff(cells_of()[2]).max())
        assert len(times) == of, "each is drawn at some time"
        expected = 300 * n / of
        assert np.square(times - expected).mean() == pytest.approx(expected * (1 - n / of), rel=0.5)


def test_the_stream_draws_by_epoch_and_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 90, 40)
    tokens = Tokens.model_validate({"truncation": "random", "zero_frac": 0.25, "max_tokens": 8})

    def streamed(rank: int, world: int) -> list[dict[int, list[int]]]:
        stream = stream_of(manifest, rank, world, {"lanes": 4}, tokens=tokens, global_batch=20, token_budget=30)
        steps = list(islice(stream, 2 * stream.steps_per_epoch))
        stream.close()
        epochs: list[dict[int, list[int]]] = [{}, {}]
        for number, step in enumerate(steps):
            for batch in step:
                assert len(batch.genes) <= 30
                own = zip(batch.cells.tolist(), by_cell(batch, batch.genes))
                epochs[2 * number // len(steps)].update(own)
        return epochs

    alone, ranks = streamed(0, 1), [streamed(rank, 2) for rank in range(2)]
    for epoch in range(2):
        assert alone[epoch] == ranks[0][epoch] | ranks[1][epoch]
        assert len(alone[epoch]) == 90
    assert sum(alone[0][cell] == alone[1][cell] for cell in range(90)) < 30


def test_variable_genes_are_of_the_vocabulary_for_shards_and_files_and_refused_without(tmp_path: Path) -> None:
    ids, counts = genes_named(GENES), random_counts(30, GENES)
    vocabulary = replace(vocabulary_of(ids), variability=VARIABILITY)
    path = write_dataset(tmp_path / "one.h5ad", counts, ids)
    shard = Shard(val_frac=0, test_frac=0)
    with_order = write_shards([path], vocabulary, shard, tmp_path / "with" / "manifest.json")
    without = write_shards([path], vocabulary_of(ids), shard, tmp_path / "without" / "manifest.json")
    assert "variability" not in without.vocabulary
    tokens = Tokens.model_validate({"truncation": "variable", "max_tokens": 20})

    def stream(manifest: Manifest) -> CellStream:
        return stream_of(manifest, options={"lanes": 1}, tokens=tokens, token_budget=2000, shuffle=False)

    streamed = [genes for step in stream(with_order) for batch in step for genes in by_cell(batch, batch.genes)]
    every, totals = np.arange(GENES, dtype=np.int32), np.zeros(2, np.int64)
    columns = GeneColumns(every, np.ones(GENES, bool), False)
    [batch] = tokens_of([counts], columns, vocabulary, tokens, np.ones(30, bool), totals)
    assert sorted(streamed) == sorted(by_cell(batch, batch.genes))
    with pytest.raises(DataError, match=r"tokens\.truncation variable: the vocabulary has no order of genes"):
        stream(without)


def test_a_bin_of_genes_without_counts_is_predicted_too() -> None:
    tokens = Tokens.model_validate({"tokenizer": "binned", "bins": 7, "zero_frac": 0.4, "max_tokens": 30})
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
    with pytest.raises(ValueError, match="zero_frac: tokenizer rank has no value for a gene without counts"):
        Tokens.model_validate({"tokenizer": "rank", "zero_frac": 0.1})
    with pytest.raises(ValueError, match="truncation and zero_frac are for cells"):
        Tokens.model_validate({"tokenizer": "sequence", "truncation": "random"})
    others: dict[str, Any] = {"stream": {}, "model": {}, "parallel": {}, "train": {"steps": 1, "global_batch": 8}}
    for objective, refused in (("cell_decoding", True), ("masked_value", False), ("masked_gene", False)):
        given = TrainOptions.model_validate(others | {"tokens": {"zero_frac": 0.5}, "objective": {"name": objective}})
        if refused:
            with pytest.raises(ConfigError, match=r"tokens\.zero_frac: objective cell_decoding has no use for genes"):
                check_together(given)
        else:
            check_together(given)
