"""What holds for every family, objective and tokenizer: losses are sums over cells, in one order,
without padding.

A step on a device mixes no devices, copies nothing to it, and waits for no value. Torch without
CUDA cannot run a backward pass on fake CUDA tensors: autograd asks the driver for a stream. So the
meta device stands for the GPU, on which every value that the host would wait for is an error, as on
fake tensors. Attention's CUDA path is seen by a forward pass.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.models import blocks
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.build import build
from cellmill.parallel.apply import checkpoint_activations
from cellmill.planner.measure.size import measure_size
from cellmill.train.batch_rows import compute_shares
from tests.checks import quick
from tests.models import KEYS, initialized, prepare, random_cells, spec

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
MORE: dict[str, dict[str, Any]] = yaml.safe_load("""
view loss: {objective: cell_decoding, view_loss: vicreg}
nb, cls: {objective: cell_decoding, likelihood: nb, pooling: cls}
denoise, attention: {objective: denoise, pooling: attention, tokenizer: binned}
contrast: {objective: supervised_contrastive, label_column: assay, tokenizer: rank}
sum: {objective: sum, parts: {cell_decoding: {batch_column: assay}, masked_value: {renormalize: true}}}
labels: {objective: classification, label_column: donor}
numbers: {objective: regression, target_column: score}
teacher: {objective: distill, teacher: ./big, vectors: {width: 6, sha256: "", shards: "", model: "", supervised_by: []}}
response: {objective: perturbation_response, perturbation_column: donor, control: x, perturbed_genes: {y: [5]}}
""")
"""Rows whose loss is no sum over cells, or that differ from others in few operations."""


def row_of(row: str) -> tuple[Tokens, dict[str, Any]]:
    """The tokens of a row, and its options of model and objective."""
    given = {"family": "encoder"} | (TABLE | MORE)[row]
    tokens = {key: given.pop(key) for key in Tokens.model_fields if key in given}
    sizes = {"hidden": 16, "layers": 2} | ({} if given["family"] == "profile" else {"heads": 2})
    return Tokens.model_validate({"max_tokens": 64} | tokens), sizes | given


def spec_of(row: str, **options: Any) -> Any:
    tokens, given = row_of(row)
    return spec(N_GENES, tokens, LEVELS, **given | options)


def model_of(row: str, **options: Any) -> Any:
    """A model in training whose weights are larger than those of the start, so that what leaks is
    seen.
    """
    model = initialized(spec_of(row, **options))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                parameter += 0.2 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    return model.train()


def cells_of(row: str) -> Batch:
    levels = np.array([[1, 3], [2, 1], [1, 2], [2, 2], [1, 1], [2, 3]], np.int32)
    draws = np.random.default_rng(1)
    more = {
        "numbers": draws.normal(size=(6, 1)),
        "teacher": draws.normal(size=(6, 6)).astype(np.float32),
    }
    return to_tensors(random_cells(LENGTHS, row_of(row)[0], N_GENES, levels=levels, **more))


def run(model: Any, prepared: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss = model(prepared)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@every_row
def test_padding_changes_no_gradient(row: str) -> None:
    model = model_of(row, dropout=0.2)
    batch = cells_of(row)
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
def test_an_empty_batch_has_zero_gradients(row: str) -> None:
    model = model_of(row, dropout=0.1)
    prepared = prepare(model, cells_of(row).slice_cells(0, 0))
    loss, gradients = run(model, prepared)
    assert (loss.item(), int(prepared.n_targets)) == (0.0, 0)
    assert [
        name for name, gradient in gradients.items() if gradient is None or gradient.any()
    ] == []
    assert model.eval().embed(cells_of(row).slice_cells(0, 0)).shape == (0, model.vector_width)
    none = to_tensors(empty_batch(row_of(row)[0].load().dtype))
    assert pad_batch(none, 0) is none


@every_row
def test_the_loss_of_cells_adds_up_in_any_batching(row: str) -> None:
    model = model_of(row, dropout=0.3)
    batch = cells_of(row)
    prepared = [
        prepare(model, batch.slice_cells(*part)) for part in ((0, 6), (0, 1), (1, 4), (4, 6))
    ]
    together, *parts = (model(part).item() for part in prepared)
    assert sum(parts) == pytest.approx(together, rel=1e-5)
    assert sum(int(part.n_targets) for part in prepared[1:]) == int(prepared[0].n_targets)


@every_row
def test_an_embedding_is_independent_of_other_cells(row: str) -> None:
    model = model_of(row, dropout=0.5).eval()
    batch = cells_of(row)
    order = torch.cat(
        [start + torch.randperm(n) for start, n in zip(batch.cu_seqlens.tolist(), batch.lengths)]
    )
    with torch.no_grad():
        vectors = model.embed(batch)
        apart = torch.cat(
            [model.embed(batch.slice_cells(cell, cell + 1)) for cell in range(len(LENGTHS))]
        )
        shuffled = model.embed(
            replace(batch, token_ids=batch.token_ids[order], values=batch.values[order])
        )
    assert (vectors.shape, vectors.dtype) == ((len(LENGTHS), model.vector_width), torch.float32)
    torch.testing.assert_close(apart, vectors, rtol=1e-5, atol=1e-5)
    if not row.startswith(("autoregressive", "bert, ")):
        torch.testing.assert_close(shuffled, vectors, rtol=1e-5, atol=1e-5)


@every_row
def test_autocast_to_bf16_stays_near_float32(row: str) -> None:
    model = model_of(row)
    prepared = prepare(model, cells_of(row))
    exact = model(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        near, gradients = run(model, prepared)
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=0.05)
    assert [
        name for name, gradient in gradients.items() if gradient is None or not gradient.any()
    ] == []
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@every_row
def test_recomputed_activations_give_equal_gradients(row: str) -> None:
    how: Literal["full", "selective"] | None
    found = []
    for how in (None, "full", "selective"):
        model = model_of(row, dropout=0.2)
        if how is not None:
            checkpoint_activations(model, model.plan.blocks, how)
        loss, gradients = run(model, prepare(model, cells_of(row)))
        found.append([loss, *gradients.values()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found))


class InOneOrder(TorchDispatchMode):
    """Refuses operations whose result depends on the order of additions on a GPU, or on several CPU
    threads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        assert name not in ("index_add", "scatter_add"), f"{name} adds in any order"
        if name == "scatter_reduce":
            assert args[4] in ("amax", "amin"), f"{name} {args[4]} adds in any order"
        if (
            name in ("index_put", "index_put_impl", "unsafe_index_put")
            and len(args) > 3
            and args[3]
        ):
            self._check_alone(*args[:3])
        return func(*args, **(kwargs or {}))

    def _check_alone(self, into: torch.Tensor, indices: Any, values: torch.Tensor) -> None:
        """Several additions to one place, other than of zeros, are on several CPU threads in any
        order.
        """
        given = [index for index in indices if index is not None]
        where = torch.stack([index.flatten() for index in torch.broadcast_tensors(*given)])
        added = values.reshape(where.shape[1], -1).ne(0).any(1)
        assert where[:, added].unique(dim=1).shape[1] == added.sum(), (
            "index_put adds to one place in any order"
        )


@pytest.mark.parametrize("row", TABLE | MORE)
def test_no_sum_of_a_step_depends_on_the_order_of_threads(row: str) -> None:
    model = model_of(row, dropout=0.1)
    batch = cells_of(row)
    prepared = prepare(model, batch, sum(model.view(batch, **KEYS).lengths) + 16)
    with InOneOrder():
        if model.objective.coupled_widths:
            with torch.no_grad():
                rows = model.objective.coupled_rows(model, model.states(prepared), prepared)
            (shares,) = compute_shares(model.objective, rows, [rows], 0)
            prepared = replace(prepared, shares=shares)
        model(prepared).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


class OnDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of two devices, or copies one of them to the other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a number without dimensions is passed by value, and waits for nothing
        tensors = [
            x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.ndim
        ]
        assert len({x.device.type for x in tensors}) < 2, (
            f"{func} copies between devices or mixes them"
        )
        return out


class Lists(TorchFunctionMode):
    """Raises where numbers of Python are read to a device, which would wait for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            assert out.device.type == "cpu", "numbers of Python are copied to the device"
        return out


@pytest.mark.parametrize("row", TABLE | MORE)
def test_a_training_step_neither_mixes_devices_nor_waits(row: str) -> None:
    model = build(spec_of(row)).bfloat16()
    assert all(parameter.is_meta for parameter in model.parameters())
    prepared = copy_to_device(prepare(model, cells_of(row)), torch.device("meta"))
    with OnDevice(), Lists():
        model(prepared).sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_attention_on_cuda_reads_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_has_flash", lambda device: True)
    with FakeTensorMode(), torch.no_grad(), OnDevice(), Lists():
        q = torch.empty(10, 2, 16, dtype=torch.bfloat16, device="cuda")
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        assert blocks.attention(q, q, q, cu_seqlens, [4, 6]).device.type == "cuda"


@pytest.mark.parametrize("row", quick(TABLE, ["genes", "autoregressive", "profile"]))
def test_the_plan_counts_every_parameter(row: str) -> None:
    given = spec_of(row)
    assert measure_size(given).parameters == sum(
        parameter.numel() for parameter in build(given).parameters()
    )
