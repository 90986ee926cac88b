"""Family autoregressive with next_gene: the loss is the chain of likelihoods, and nothing of later genes reaches it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.checks import check_together
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.arrays import rank_buckets
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError
from cellmill.evaluate.task import read_gene_statistics
from cellmill.models.batch import EncoderBatch, to_tensors
from cellmill.models.build import ModelSpec
from cellmill.models.objective import GeneStatistics
from tests.checks import check_gradients
from tests.models import KEYS, initialized, random_cells, train_options
from tests.unit.small_corpus import write_corpus

N_GENES, MAX_TOKENS = 60, 32
FAMILY = {"family": "autoregressive", "hidden": 16, "layers": 2, "heads": 2}
TOKENIZERS = pytest.mark.parametrize("tokenizer", ["continuous", "binned", "rank"])


def tokens_of(tokenizer: str) -> Tokens:
    return Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": MAX_TOKENS})


def spec_of(tokenizer: str = "continuous", objective: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    return ModelSpec(
        FamilyConfig.model_validate(FAMILY | options),
        ObjectiveConfig.model_validate({"name": "next_gene"} | (objective or {})),
        tokens_of(tokenizer),
        N_GENES,
    )


def model_of(tokenizer: str = "continuous", objective: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model with initial values, but gene embeddings large enough for unequal logits."""
    model: Any = initialized(spec_of(tokenizer, objective, **options))
    with torch.no_grad():
        model.gene_embedding.weight.mul_(20)
    return model


def batch_of(tokenizer: str = "continuous", lengths: tuple[int, ...] = (20, 31, 1, 40, 2)) -> Batch:
    """Random cells, the fourth of which is cut."""
    return to_tensors(random_cells(lengths, tokens_of(tokenizer), N_GENES, counted=None))


@TOKENIZERS
def test_loss_is_the_chain_of_likelihoods_of_genes_values_and_ends(tokenizer: str) -> None:
    model, batch = model_of(tokenizer, {"value_loss_weight": 0.5}), batch_of(tokenizer)
    prepared = model.prepare(batch, **KEYS)
    states, expected = model.states(prepared), torch.zeros(())

    def end(state: torch.Tensor) -> torch.Tensor:
        return (model.end(state) - np.log(MAX_TOKENS))[0]

    for cell, start in enumerate(batch.cu_seqlens[:-1].tolist()):
        before = model.start
        for at in range(start, start + batch.lengths[cell]):
            gene = int(batch.genes[at])
            logits = model.gene_embedding.weight @ before + model.gene_bias
            expected = expected - logits.log_softmax(0)[gene] - F.logsigmoid(-end(before))
            if tokenizer != "rank":
                query = torch.cat([before, model.gene_embedding.weight[gene]])
                value = model.value_out(model.value_head(query))
                answer = batch.values[at]
                own = (value[0] - answer) ** 2 if tokenizer == "continuous" else -value.log_softmax(0)[answer - 1]
                expected = expected + 0.5 * own
            before = states[at]
        if batch.lengths[cell] < MAX_TOKENS:
            expected = expected - F.logsigmoid(end(before))
    loss = model(prepared)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert int(prepared.n_targets) == len(batch.genes)
    check_gradients(model, loss, expected, rtol=1e-3, atol=1e-4)


def test_a_cell_is_the_mean_of_its_states_or_the_last_one_which_knows_no_later_gene() -> None:
    mean, last, batch = model_of().eval(), model_of(pooling="last").eval(), batch_of()
    cut = batch_of(lengths=(20,))
    with torch.no_grad():
        states = mean.states(EncoderBatch.prepared(batch)).split(batch.lengths)
        torch.testing.assert_close(mean.embed(batch), torch.stack([cell.mean(0) for cell in states]))
        torch.testing.assert_close(last.embed(batch), torch.stack([cell[-1] for cell in states]))
        shorter = replace(cut, genes=batch.genes[:20], values=batch.values[:20])
        prefix = [getattr(shorter, name)[:7] for name in ("genes", "values")]
        part = replace(shorter, genes=prefix[0], values=prefix[1], cu_seqlens=torch.tensor([0, 7]).int(), lengths=[7])
        torch.testing.assert_close(last.embed(part)[0], states[0][6], rtol=1e-5, atol=1e-5)


def test_every_tensor_with_a_row_per_token_is_matched_by_gene() -> None:
    model = model_of()
    assert {name for name, p in model.named_parameters() if p.shape[0] == N_GENES + 2} == model.gene_rows


def test_rank_buckets_are_logarithms_of_the_place() -> None:
    places = np.arange(1 << 12)
    expected = [(place + 1).bit_length() - 1 for place in places.tolist()]
    assert rank_buckets(places).tolist() == expected
    model, genes = model_of("rank"), torch.full((1 << 12,), 7)
    x = model.inputs(genes, genes, torch.from_numpy(places)) - model.gene_embedding.weight[7]
    ranks = model.rank_embedding.weight[[min(bucket, 5) for bucket in expected]]
    torch.testing.assert_close(x, ranks, rtol=0, atol=1e-6)


def test_statistics_count_genes_at_each_rank(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 50)
    statistics = read_gene_statistics(manifest, Tokens.model_validate({"max_tokens": 8}))
    by_rank = statistics.by_rank
    assert by_rank is not None
    assert by_rank.shape == (4, manifest.n_genes)
    assert (by_rank.sum(0) == statistics.n).all()
    assert by_rank[0].sum() == 50


def test_genes_are_judged_among_those_that_the_cell_does_not_have_yet() -> None:
    model, batch = model_of().eval(), batch_of()
    prepared = model.prepare(batch, **KEYS)
    with torch.no_grad():
        observed = [tensor.numpy() for tensor in model.objective.observe(model, prepared)]
        before = model.objective.before(model, model.states(prepared), prepared)
        logits = (before @ model.gene_embedding.weight.T + model.gene_bias)[:, 2:].double()
    by_rank = np.random.default_rng(1).integers(0, 9, (6, N_GENES))
    train = GeneStatistics(by_rank.sum(0), np.full(N_GENES, 2.0), 2.0, 9, by_rank)
    overall = (by_rank.sum(0) + 1) / (by_rank.sum() + N_GENES)
    entropies, hits = [], []
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        left = np.ones(N_GENES, bool)
        for place in range(length):
            gene = int(batch.genes[start + place]) - 2
            smoothed = by_rank[(place + 1).bit_length() - 1] + N_GENES * overall
            own = logits[start + place].numpy()
            rows = np.flatnonzero(left)
            of_model = own[rows] - np.log(np.exp(own[rows]).sum())
            frequency = np.log(smoothed[rows] / smoothed[rows].sum())
            at = rows.tolist().index(gene)
            entropies.append((-of_model[at], -frequency[at]))
            hits.append((of_model.argmax() == at, frequency.argmax() == at))
            left[gene] = False
    figures, verdicts = model.objective.judge(*observed, train=train)
    names = ("cross_entropy", "cross_entropy_rank_frequency", "accuracy", "accuracy_rank_frequency")
    expected = [*np.mean(entropies, axis=0), *np.mean(hits, axis=0)]
    assert [figures[name] for name in names] == pytest.approx(expected, rel=1e-5)
    truth, predicted = observed[4:]
    assert figures["value_r2_over_gene_mean"] == pytest.approx(
        1 - np.square(truth - predicted).sum() / np.square(truth - 2).sum(), rel=1e-4
    )
    assert len(verdicts) == 2


def test_an_encoder_which_sees_later_genes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^objective.name next_gene: family encoder serves "):
        check_together(train_options(objective={"name": "next_gene"}, model={"family": "encoder"}))
