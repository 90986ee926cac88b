"""Order of the tokens of a cell: shards of either gene order give the same batches where it matters."""

from dataclasses import replace
from itertools import chain, islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_corpus import genes_named, random_counts, vocabulary_of, write_dataset

from cellmill.config.corpus import Shard
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards, read_medians
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.batch import Batch
from cellmill.evaluate.training_shards import read_gene_statistics
from cellmill.models.batch import to_tensors
from cellmill.train.tensor_stream import TensorStream
from cellmill.train.worker import build_streams
from tests.models import FAMILIES, initialized, objective_of, random_cells, spec, train_options

N_GENES = 50
MODELS = {"hf": {"architecture": {"model_type": "esm"}, "weights": "random"}}
READ_ORDER = {"autoregressive", "bert", "hf"}
# 9 tokens cut most cells, 60 cut none
TOKENS: list[dict[str, Any]] = [
    {"tokenizer": tokenizer, "truncation": truncation, "max_tokens": max_tokens}
    for tokenizer, truncation, max_tokens in product(
        ("continuous", "binned", "rank"), ("top", "random", "variable"), (9, 60)
    )
]
TOKENS += [
    {"tokenizer": "continuous", "zero_frac": 0.5, "max_tokens": 24},
    {"tokenizer": "binned", "binning": "uniform", "zero_frac": 0.25, "max_tokens": 12},
]
CASES = [
    pytest.param(family, tokens, id="-".join(map(str, (family, *tokens.values()))))
    for family, options in FamilyConfig.built_in().items()
    for tokens in TOKENS
    if Tokens.model_validate(tokens).value_kind in options.value_kinds
]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """The same cells in shards that list genes by rank, and in shards that list them ascending."""
    folder = tmp_path_factory.mktemp("orders")
    ids = genes_named(N_GENES)
    path = write_dataset(folder / "cells.h5ad", random_counts(200, N_GENES), ids)
    variability = np.random.default_rng(3).permutation(N_GENES).astype(np.int32)
    vocabulary = replace(vocabulary_of(ids), variability=variability)
    made = []
    for order in ("rank", "genes"):
        options = Shard(cells_per_shard=64, val_frac=0.3, test_frac=0, order=order)
        made.append(write_shards([path], vocabulary, options, folder / order / "manifest.json"))
    return made


def read_training(manifest: Manifest, family: str, tokens: dict[str, Any]) -> list[Batch]:
    """Batches of an epoch of training, then of validation, as a run reads them."""
    options = train_options(
        model={"family": family} | MODELS.get(family, {}),
        tokens=tokens,
        stream={"lanes": 2, "block_cells": 8, "window_blocks": 2},
        train={"steps": 1, "global_batch": 32},
    )
    mesh: Any = SimpleNamespace(dp_rank=0, dp_world=1)
    train, val, _ = build_streams(options, manifest, mesh)
    assert val is not None
    steps = [*islice(train, train.steps_per_epoch), *val]
    train.close()
    val.close()
    return list(chain.from_iterable(steps))


def in_gene_order(batch: Batch) -> Batch:
    """Sort the tokens of each cell, the slow way."""
    order = []
    for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
        order += sorted(range(start, stop), key=lambda token: batch.token_ids[token])
    return batch.map(lambda axis, array: array[order] if axis.name == "token" else array)


@pytest.mark.parametrize(("family", "tokens"), CASES)
def test_both_orders_of_shards_give_a_family_the_same_tokens(
    manifests: list[Manifest], family: str, tokens: dict[str, Any]
) -> None:
    by_rank, by_genes = (read_training(manifest, family, tokens) for manifest in manifests)
    is_ordered = family in READ_ORDER or tokens["tokenizer"] == "rank"
    for one, other in zip(by_rank, by_genes, strict=True):
        first, second = (one, other) if is_ordered else map(in_gene_order, (one, other))
        for name in ("token_ids", "values", "cu_seqlens", "cell_ids"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_the_built_in_families_that_read_order_are_these() -> None:
    families = FamilyConfig.built_in().items()
    assert {name for name, options in families if options.reads_token_order} == READ_ORDER


@pytest.mark.parametrize("family", sorted({*FAMILIES} - READ_ORDER))
def test_other_families_give_moved_tokens_the_same_vector(family: str) -> None:
    tokenizer, options = FAMILIES[family]
    tokens = Tokens.model_validate({"tokenizer": tokenizer})
    objective = "query_decoding" if family == "autoencoder" else "masked_value"
    if family == "profile":
        objective = "cell_decoding"
    model = initialized(spec(N_GENES, tokens, objective=objective, **options)).eval()
    batch = random_cells([9, 1, 14], tokens, N_GENES)
    with torch.no_grad():
        one, other = (model.embed(to_tensors(cells)) for cells in (batch, in_gene_order(batch)))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_both_orders_of_shards_give_the_same_statistics(
    manifests: list[Manifest], tokens: dict[str, Any]
) -> None:
    parsed = Tokens.model_validate(tokens)
    objective = objective_of(parsed, "denoise")
    by_rank, by_genes = (
        vars(read_gene_statistics(manifest, objective, seed=0)) for manifest in manifests
    )
    assert by_rank.pop("shown") is None
    for name, expected in by_rank.items():
        np.testing.assert_allclose(by_genes[name], expected, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("shards", [0, 1], ids=["rank", "genes"])
@pytest.mark.parametrize("max_tokens", [1, 9, 60])
def test_statistics_count_the_genes_of_highest_rank(
    manifests: list[Manifest], shards: int, max_tokens: int
) -> None:
    manifest = manifests[shards]
    expected = np.zeros((max_tokens.bit_length(), N_GENES), np.int64)
    for shard in open_shards(manifest, "train"):
        inverse = np.float32(1) / read_medians(shard.path)
        for row in range(shard.n_obs):
            _, genes, counts = shard.read(row, 1)
            key = dict(zip(genes.tolist(), (counts.astype(np.float32) * inverse[genes]).tolist()))
            ranked = sorted(key, key=lambda gene: (-key[gene], gene))
            for position, gene in enumerate(ranked[:max_tokens]):
                expected[(position + 1).bit_length() - 1, gene] += 1
    objective = objective_of(Tokens.model_validate({"max_tokens": max_tokens}))
    statistics = read_gene_statistics(manifest, objective, seed=0)
    np.testing.assert_array_equal(statistics.by_rank, expected)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_loop_of_ones_own_gets_rank_order(manifests: list[Manifest], split: Any) -> None:
    def read(manifest: Manifest, rank_order: bool) -> list[dict[str, torch.Tensor]]:
        options = {"lanes": 2, "block_cells": 8}
        stream = TensorStream(
            manifest.path, split, stream=options, global_batch=32, rank_order=rank_order
        )
        batches = list(stream)
        stream.close()
        return batches

    by_rank, by_genes = (read(manifest, True) for manifest in manifests)
    for one, other in zip(by_rank, by_genes, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for batch in read(manifests[1], False):  # whole cells stay as the shards have them
        starts = batch["cu_seqlens"][:-1].long()
        ascends = batch["token_ids"].diff() > 0
        ascends[starts[1:] - 1] = True
        assert ascends.all()
