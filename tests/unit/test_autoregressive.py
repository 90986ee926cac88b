"""Family autoregressive with next_gene: the loss is a chain of likelihoods; drawn cells are those
of full passes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.cli import main
from cellmill.config.checks import check_together
from cellmill.config.parts.tokens import Tokens
from cellmill.data.rank_order import rank_buckets
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError
from cellmill.evaluate.training_shards import read_gene_statistics
from cellmill.models.batch import EncoderBatch, to_tensors
from cellmill.models.families.autoregressive import (
    GeneratedCell,
    Sampling,
    draw_ends,
    draw_genes,
    draw_values,
    generate_cells,
)
from cellmill.models.objective import GeneStatistics
from tests.checks import check_gradients, refused
from tests.models import KEYS, initialized, objective_of, random_cells, spec, train_options
from tests.unit.exported import export_model
from tests.unit.small_corpus import genes_named, vocabulary_of, write_corpus

N_GENES = 60
MAX_TOKENS = 32
FAMILY = {
    "family": "autoregressive",
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "objective": "next_gene",
}
TOKENIZERS = pytest.mark.parametrize("tokenizer", ["continuous", "binned", "rank"])


def tokenize_blocks(tokenizer: str) -> Tokens:
    return Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": MAX_TOKENS})


def model_of(tokenizer: str = "continuous", **options: Any) -> Any:
    """A model with initial values, but gene embeddings large enough for unequal logits."""
    model: Any = initialized(spec(N_GENES, tokenize_blocks(tokenizer), **FAMILY | options))
    with torch.no_grad():
        model.gene_embedding.weight.mul_(20)
    return model


def batch_of(tokenizer: str = "continuous", lengths: tuple[int, ...] = (20, 31, 1, 40, 2)) -> Batch:
    """Random cells, the fourth of which is cut."""
    return to_tensors(random_cells(lengths, tokenize_blocks(tokenizer), N_GENES, with_counts=False))


@TOKENIZERS
def test_the_loss_is_the_chain_of_likelihoods(tokenizer: str) -> None:
    model = model_of(tokenizer, value_loss_weight=0.5)
    batch = batch_of(tokenizer)
    prepared = model.prepare(batch, **KEYS)
    states = model.states(prepared)
    expected = torch.zeros(())

    def end(state: torch.Tensor) -> torch.Tensor:
        return (model.end(state) - np.log(MAX_TOKENS))[0]

    for cell, start in enumerate(batch.cu_seqlens[:-1].tolist()):
        before = model.start
        for at in range(start, start + batch.lengths[cell]):
            gene = int(batch.token_ids[at])
            logits = model.gene_embedding.weight @ before + model.gene_bias
            expected = expected - logits.log_softmax(0)[gene] - F.logsigmoid(-end(before))
            if tokenizer != "rank":
                query = torch.cat([before, model.gene_embedding.weight[gene]])
                value = model.value_out(model.value_head(query))
                answer = batch.values[at]
                own = (
                    (value[0] - answer) ** 2
                    if tokenizer == "continuous"
                    else -value.log_softmax(0)[answer - 1]
                )
                expected = expected + 0.5 * own
            before = states[at]
        if batch.lengths[cell] < MAX_TOKENS:
            expected = expected - F.logsigmoid(end(before))
    loss = model(prepared)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert int(prepared.n_targets) == len(batch.token_ids)
    check_gradients(model, loss, expected, rtol=1e-3, atol=1e-4)


def test_a_cell_is_the_mean_or_the_last_of_its_states() -> None:
    mean = model_of().eval()
    last = model_of(pooling="last").eval()
    batch = batch_of()
    beginning = Batch(
        batch.token_ids[:7], batch.values[:7], torch.tensor([0, 7]).int(), torch.tensor([0])
    )
    with torch.no_grad():
        states = mean.states(EncoderBatch.from_batch(batch)).split(batch.lengths)
        torch.testing.assert_close(
            mean.embed(batch), torch.stack([cell.mean(0) for cell in states])
        )
        torch.testing.assert_close(last.embed(batch), torch.stack([cell[-1] for cell in states]))
        torch.testing.assert_close(last.embed(beginning)[0], states[0][6], rtol=1e-5, atol=1e-5)


def test_every_tensor_with_a_row_per_token_is_matched_by_gene() -> None:
    model = model_of()
    assert {
        name for name, p in model.named_parameters() if p.shape[0] == N_GENES + 2
    } == model.gene_rows


def test_rank_buckets_are_logarithms_of_the_rank() -> None:
    places = np.arange(1 << 12)
    expected = [(place + 1).bit_length() - 1 for place in places.tolist()]
    assert rank_buckets(places).tolist() == expected
    model = model_of("rank")
    genes = torch.full((1 << 12,), 7)
    x = model.inputs(genes, genes, torch.from_numpy(places)) - model.gene_embedding.weight[7]
    ranks = model.rank_embedding.weight[[min(bucket, 5) for bucket in expected]]
    torch.testing.assert_close(x, ranks, rtol=0, atol=1e-6)


def test_statistics_count_genes_at_each_rank(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 50)
    objective = objective_of(Tokens.model_validate({"max_tokens": 8}), "next_gene")
    statistics = read_gene_statistics(manifest, objective, seed=0)
    by_rank = statistics.by_rank
    assert by_rank is not None
    assert by_rank.shape == (4, manifest.n_genes)
    assert (by_rank.sum(0) == statistics.n_tokens).all()
    assert by_rank[0].sum() == 50


def test_genes_are_scored_among_those_not_yet_generated() -> None:
    model = model_of().eval()
    batch = batch_of()
    prepared = model.prepare(batch, **KEYS)
    with torch.no_grad():
        observed = [tensor.numpy() for tensor in model.objective.observe(model, prepared)]
        prior_states = model.objective.select_prior_states(model, model.states(prepared), prepared)
        logits = (prior_states @ model.gene_embedding.weight.T + model.gene_bias)[:, 2:].double()
    by_rank = np.random.default_rng(1).integers(0, 9, (6, N_GENES))
    statistics = GeneStatistics(by_rank.sum(0), np.full(N_GENES, 2.0), 2.0, 9, by_rank)
    overall = (by_rank.sum(0) + 1) / (by_rank.sum() + N_GENES)
    entropies = []
    hits = []
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        left = np.ones(N_GENES, bool)
        for place in range(length):
            gene = int(batch.token_ids[start + place]) - 2
            smoothed = by_rank[(place + 1).bit_length() - 1] + N_GENES * overall
            own = logits[start + place].numpy()
            rows = np.flatnonzero(left)
            of_model = own[rows] - np.log(np.exp(own[rows]).sum())
            frequency = np.log(smoothed[rows] / smoothed[rows].sum())
            at = rows.tolist().index(gene)
            entropies.append((-of_model[at], -frequency[at]))
            hits.append((of_model.argmax() == at, frequency.argmax() == at))
            left[gene] = False
    figures, verdicts = model.objective.judge(*observed, statistics=statistics)
    names = ("cross_entropy", "cross_entropy_rank_frequency", "accuracy", "accuracy_rank_frequency")
    expected = [*np.mean(entropies, axis=0), *np.mean(hits, axis=0)]
    assert [figures[name] for name in names] == pytest.approx(expected, rel=1e-5)
    truth, predicted = observed[4:]
    assert figures["value_r2_over_gene_mean"] == pytest.approx(
        1 - np.square(truth - predicted).sum() / np.square(truth - 2).sum(), rel=1e-4
    )
    assert len(verdicts) == 2


def test_sequences_whose_residues_repeat_are_refused() -> None:
    options = train_options(
        model={"family": "autoregressive"},
        objective={"name": "next_gene"},
        tokens={"tokenizer": "sequence"},
    )
    with refused(
        "objective next_gene needs tokens that differ within a cell, but residues of sequences repeat; "
        "use family encoder and objective masked_gene"
    ):
        check_together(options)


def test_an_encoder_which_sees_later_genes_is_refused() -> None:
    refusal = "family encoder cannot be trained with next_gene, only with cell_decoding, "
    with pytest.raises(ConfigError, match=rf"^objective: {refusal}"):
        check_together(train_options(objective={"name": "next_gene"}, model={"family": "encoder"}))
    parts = {"order": {"name": "next_gene"}}
    with pytest.raises(ConfigError, match=rf"^objective.parts.order: {refusal}"):
        check_together(
            train_options(objective={"name": "sum", "parts": parts}, model={"family": "encoder"})
        )


CELLS = range(40, 52)


def generator(tokenizer: str = "continuous") -> Any:
    return model_of(tokenizer, hidden=32).double().eval()


def states_of(model: Any, genes: list[int], values: torch.Tensor) -> torch.Tensor:
    """(N, H): the states of a full forward pass over vocabulary rows `genes`."""
    batch = Batch(
        torch.tensor(genes) + 2, values, torch.tensor([0, len(genes)]).int(), torch.tensor([0])
    )
    states: torch.Tensor = model.states(EncoderBatch.from_batch(batch))
    return states


@torch.no_grad()
def uncached(model: Any, sampling: Sampling, number: int) -> GeneratedCell:
    """One cell, by a full forward pass for each of its genes."""
    cell = torch.tensor([number])
    genes = []
    objective = model.objective
    values = torch.zeros(
        0, dtype=torch.int64 if objective.tokens.value_kind != "scalar" else torch.float32
    )
    while True:
        state = states_of(model, genes, values)[-1:] if genes else model.start[None]
        place = len(genes)
        ends = bool(draw_ends(model, state, cell, sampling, place))
        if ends or place == sampling.max_genes:
            return GeneratedCell(genes, values.tolist() if objective.has_value_head else None, ends)
        listed = torch.tensor([genes], dtype=torch.int64) + 2
        gene = draw_genes(model, state, listed, cell, sampling)
        values = torch.cat([values, draw_values(model, state, gene, cell, sampling, place)])
        genes = [*genes, int(gene) - 2]


@pytest.mark.parametrize(
    ("tokenizer", "sampling"),
    [
        pytest.param("continuous", Sampling(MAX_TOKENS, seed=1), marks=pytest.mark.full),
        ("continuous", Sampling(20, temperature=0.5, top_k=5, seed=2, prompt=(7, 3))),
        pytest.param("binned", Sampling(MAX_TOKENS, seed=3), marks=pytest.mark.full),
        pytest.param("rank", Sampling(MAX_TOKENS, temperature=0), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_generated_cells_equal_full_forward_passes(tokenizer: str, sampling: Sampling) -> None:
    model = generator(tokenizer)
    found = generate_cells(model, sampling, CELLS)
    expected = [uncached(model, sampling, number) for number in CELLS]
    for own, reference in zip(found, expected):
        assert (own.genes, own.ended) == (reference.genes, reference.ended)
        assert (own.values is None) == (tokenizer == "rank")
        np.testing.assert_allclose(own.values or 0, reference.values or 0, rtol=1e-6)
        assert len(set(own.genes)) == len(own.genes)
        assert tuple(own.genes[: len(sampling.prompt)]) == sampling.prompt
    if sampling.temperature:
        assert len({len(cell.genes) for cell in found}) > 2, "cells of one length test no leaving"
        assert len({tuple(cell.genes) for cell in found}) == len(CELLS)
        assert generate_cells(model, replace(sampling, seed=6), CELLS) != found


def test_greedy_genes_are_the_likeliest_of_one_full_forward_pass() -> None:
    model = generator()
    [cell] = generate_cells(model, Sampling(25, temperature=0), range(1))
    genes, values, n = torch.tensor(cell.genes) + 2, torch.tensor(cell.values), len(cell.genes)
    assert n == 25
    with torch.no_grad():
        before = torch.cat([model.start[None], states_of(model, cell.genes, values)[:-1]])
        logits = before @ model.gene_embedding.weight.T + model.gene_bias
        predicted = model.objective.predict_values(model, before, genes)
    logits[:, :2] = -torch.inf
    for place in range(n):
        assert int(logits[place].argmax()) == int(genes[place])
        logits[place + 1 :, genes[place]] = -torch.inf
    torch.testing.assert_close(predicted, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (1.0, 5)])
def test_genes_are_drawn_from_the_softmax(temperature: float, top_k: int | None) -> None:
    model = generator()
    n = 4000
    with torch.no_grad():
        model.start.mul_(4)
        logits = (model.gene_embedding.weight @ model.start + model.gene_bias)[2:] / temperature
    cells = generate_cells(model, Sampling(1, temperature, top_k, seed=1), range(n))
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = n * logits.softmax(0).detach().numpy()
    found = np.bincount([cell.genes[0] for cell in cells], minlength=N_GENES)
    assert (found[expected == 0] == 0).all()
    likely = expected > 0
    chi2 = (np.square(found - expected)[likely] / expected[likely]).sum()
    assert chi2 < likely.sum() + 5 * np.sqrt(2 * likely.sum())


def exported(folder: Path, **options: Any) -> Path:
    genes = folder / "genes.tsv"
    vocabulary_of(genes_named(40)).write(genes)
    family = {"family": "autoregressive", "objective": "next_gene"}
    return export_model(folder / "model", genes, {"max_tokens": 16}, **(family | options))


def test_the_file_has_genes_in_generated_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported(tmp_path)
    command = f"generate --model {model} --cells 10 --prompt g7,ENSG00000000003 --seed 4"
    for out, batch in (("a", 64), ("b", 3)):
        assert main(f"{command} --out {tmp_path / out}.h5ad --batch-cells {batch}".split()) == 0
    a, b = (ad.read_h5ad(tmp_path / f"{name}.h5ad") for name in "ab")
    for own, other in ((a.X, b.X), (a.layers["rank"], b.layers["rank"])):
        for part in ("data", "indices", "indptr"):
            assert (getattr(own, part) == getattr(other, part)).all()
    assert (a.n_obs, a.n_vars) == (10, 40)
    assert list(a.var["symbol"].iloc[[7, 3]]) == ["g7", "g3"]
    for cell in range(10):
        genes = a.X.indices[a.X.indptr[cell] : a.X.indptr[cell + 1]]
        assert genes[:2].tolist() == [7, 3]
        assert len(set(genes)) == len(genes) == a.obs["n_genes"].iloc[cell] <= 16
        rank = a.layers["rank"][cell].toarray()[0]
        assert (rank[genes] == np.arange(1, len(genes) + 1)).all()
    assert a.obs["ended"][a.obs["n_genes"] < 16].all()
    assert a.uns["cellmill"]["prompt"].tolist() == ["ENSG00000000007", "ENSG00000000003"]
    assert "10 cells, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "options", "text"),
    [
        (
            "--prompt g7,g99",
            {},
            "--prompt: 'g99' is not a gene of the model; did you mean 'g9'?",
        ),
        ("--prompt g7,g7", {}, "--prompt: 'g7' is there twice"),
        (
            "--max-genes 17",
            {},
            "--max-genes: expected 1 (genes of --prompt) to 16 (tokens.max_tokens of the model)",
        ),
        (
            f"--prompt {','.join(f'g{i}' for i in range(17))}",
            {},
            "--prompt: expected at most 16 genes (tokens.max_tok",
        ),
        ("--seed -1", {}, "--seed: expected 0 to 2147483647, got -1"),
        ("--temperature -1", {}, "--temperature: expected 0 or more, got -1"),
        (
            "",
            {"family": "encoder", "objective": "masked_gene"},
            "train one of model.family autoregressive",
        ),
    ],
)
def test_requests_that_cannot_be_generated_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    options: dict[str, Any],
    text: str,
) -> None:
    model = exported(tmp_path, **options)
    assert main(f"generate --model {model} --out {tmp_path / 'a.h5ad'} {flags}".split()) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "a.h5ad").exists()
