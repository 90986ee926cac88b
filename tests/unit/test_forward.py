"""What holds for every family, objective and tokenizer: a loss is a sum over cells, and padding is no cell."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.models.batch import padded, to_tensors
from cellmill.models.build import build
from cellmill.parallel.apply import checkpoint_activations
from cellmill.planner.size import measure
from tests.models import KEYS, initialized, prepare, random_cells, spec
from tests.tiers import quick

N_GENES = 60
LEVELS = {"assay": ("a", "b"), "donor": ("x", "y", "z")}
LENGTHS = (20, 31, 1, 14, 2, 40)
TABLE: dict[str, dict[str, Any]] = yaml.safe_load("""
values: {objective: masked_value}
genes: {objective: masked_gene, mask_frac: 0.3, random_frac: 0.2, keep_frac: 0.2}
bins: {objective: masked_value, tokenizer: binned}
genes of bins: {objective: masked_gene, tokenizer: binned}
ranks: {objective: masked_gene, tokenizer: rank}
decoding: {objective: cell_decoding}
decoding, cls: {objective: cell_decoding, pooling: cls}
values, cls: {objective: masked_value, pooling: cls}
decoding, attention: {objective: cell_decoding, pooling: attention}
values, attention: {objective: masked_value, pooling: attention}
covariates, decoding: {objective: cell_decoding, covariates: [donor, assay]}
covariates, values: {objective: masked_value, covariates: [donor, assay]}
covariates, genes: {objective: masked_gene, covariates: [donor, assay]}
batches: {objective: cell_decoding, batch_column: assay, batch_adversary: 0.5}
queries: {objective: query_decoding, decoder_hidden: 12, decoder_layers: 1}
bert: {family: bert, ends: none, objective: masked_gene, tokenizer: rank}
bert, ends: {family: bert, ends: cls_eos, objective: masked_gene, pooling: cls, tokenizer: rank}
bert, decoding: {family: bert, ends: cls_eos, objective: cell_decoding, view: drop, tokenizer: rank}
scgpt: {family: scgpt, ends: cls, objective: masked_value, pooling: cls, activation: gelu, tokenizer: binned}
scgpt, decoding: {family: scgpt, ends: cls, objective: cell_decoding, pooling: cls, norm_eps: 1.0e-6, tokenizer: binned}
autoencoder: {family: autoencoder, latent: 6, objective: query_decoding, decoder_hidden: 12, decoder_layers: 1}
autoregressive: {family: autoregressive, objective: next_gene}
autoregressive, bins: {family: autoregressive, objective: next_gene, tokenizer: binned}
autoregressive, ranks: {family: autoregressive, objective: next_gene, tokenizer: rank}
profile: {family: profile, objective: cell_decoding}
profile, batches: {family: profile, objective: cell_decoding, batch_column: assay, batch_adversary: 0.5}
profile, queries: {family: profile, objective: query_decoding, decoder_hidden: 12, decoder_layers: 1}
""")
every_row = pytest.mark.parametrize("row", TABLE)


def tokens_of(row: str) -> Tokens:
    return Tokens.model_validate({"max_tokens": 64} | {k: v for k, v in TABLE[row].items() if k in Tokens.model_fields})


def spec_of(row: str, **options: Any) -> Any:
    sizes = {"hidden": 16, "layers": 2} | ({} if TABLE[row].get("family") == "profile" else {"heads": 2})
    given = {"family": "encoder"} | sizes | {k: v for k, v in TABLE[row].items() if k not in Tokens.model_fields}
    return spec(N_GENES, tokens_of(row), LEVELS, **given | options)


def model_of(row: str, **options: Any) -> Any:
    """A model in training whose weights are larger than those of the start, so that what leaks is seen."""
    model = initialized(spec_of(row, **options))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model.train()


def cells_of(row: str) -> Batch:
    levels = np.array([[1, 3], [2, 1], [1, 2], [2, 2], [1, 1], [2, 3]], np.int32)
    return to_tensors(random_cells(LENGTHS, tokens_of(row), N_GENES, levels=levels))


def run(model: Any, prepared: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss = model(prepared)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@every_row
def test_padding_changes_no_loss_and_no_gradient(row: str) -> None:
    model, batch = model_of(row, dropout=0.2), cells_of(row)
    plain = prepare(model, batch)
    loss, gradients = run(model, plain)
    for more in (8, 700):
        longer = prepare(model, batch, sum(model.view(batch, **KEYS).lengths) + more)
        assert sum(longer.lengths) == sum(plain.lengths) + more
        assert int(longer.n_targets) == int(plain.n_targets) > 0
        padded_loss, of_padded = run(model, longer)
        torch.testing.assert_close(padded_loss, loss, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_padded[name], gradient, rtol=1e-5, atol=2e-5, msg=name)


@every_row
def test_no_cells_have_no_loss_and_a_zero_gradient_of_every_parameter(row: str) -> None:
    model = model_of(row, dropout=0.1)
    prepared = prepare(model, cells_of(row).cut(0, 0))
    loss, gradients = run(model, prepared)
    assert (loss.item(), int(prepared.n_targets)) == (0.0, 0)
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.any()] == []
    assert model.eval().embed(cells_of(row).cut(0, 0)).shape == (0, model.vector_width)
    none = to_tensors(empty_batch(tokens_of(row).load().dtype))
    assert padded(none, 0) is none


@every_row
def test_the_loss_of_cells_is_the_sum_of_their_losses_in_any_batching(row: str) -> None:
    model, batch = model_of(row, dropout=0.3), cells_of(row)
    prepared = [prepare(model, batch.cut(*part)) for part in ((0, 6), (0, 1), (1, 4), (4, 6))]
    together, *parts = (model(part).item() for part in prepared)
    assert sum(parts) == pytest.approx(together, rel=1e-5)
    assert sum(int(part.n_targets) for part in prepared[1:]) == int(prepared[0].n_targets)


@every_row
def test_an_embedding_depends_on_neither_other_cells_nor_the_order_of_genes(row: str) -> None:
    model, batch = model_of(row, dropout=0.5).eval(), cells_of(row)
    order = torch.cat([start + torch.randperm(n) for start, n in zip(batch.cu_seqlens.tolist(), batch.lengths)])
    with torch.no_grad():
        vectors = model.embed(batch)
        apart = torch.cat([model.embed(batch.cut(cell, cell + 1)) for cell in range(len(LENGTHS))])
        shuffled = model.embed(replace(batch, genes=batch.genes[order], values=batch.values[order]))
    assert (vectors.shape, vectors.dtype) == ((len(LENGTHS), model.vector_width), torch.float32)
    torch.testing.assert_close(apart, vectors, rtol=1e-5, atol=1e-5)
    if not row.startswith(("autoregressive", "bert, ")):
        torch.testing.assert_close(shuffled, vectors, rtol=1e-5, atol=1e-5)


@every_row
def test_autocast_to_bf16_stays_near_float32_and_every_parameter_is_trained(row: str) -> None:
    model = model_of(row)
    prepared = prepare(model, cells_of(row))
    exact = model(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        near, gradients = run(model, prepared)
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=0.05)
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@every_row
def test_recomputed_activations_give_the_same_gradients_with_dropout(row: str) -> None:
    how: Literal["full", "selective"] | None
    found = []
    for how in (None, "full", "selective"):
        model = model_of(row, dropout=0.2)
        if how is not None:
            checkpoint_activations(model, model.plan.blocks, how)
        loss, gradients = run(model, prepare(model, cells_of(row)))
        found.append([loss, *gradients.values()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found))


@pytest.mark.parametrize("row", quick(TABLE, ["genes", "autoregressive", "profile"]))
def test_the_plan_counts_every_parameter(row: str) -> None:
    given = spec_of(row)
    assert measure(given).parameters == sum(parameter.numel() for parameter in build(given).parameters())
