"""Sums of a training step have one order: on a GPU, and on several threads of a CPU, they are the same each time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import padded, to_tensors
from cellmill.models.build import build
from cellmill.models.family import Model
from cellmill.parallel.vocab_parallel import rows_at, segment_sum
from cellmill.train.batch_rows import shares_of
from tests.models import random_cells, spec

LENGTHS = (20, 31, 1, 14, 2, 9)
LEVELS = {"kind": ("a", "b"), "batch": ("x", "y", "z")}


class InOneOrder(TorchDispatchMode):
    """Refuses operations whose result depends on the order of additions on a GPU, or on several CPU threads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        assert name not in ("index_add", "scatter_add"), f"{name} adds in any order"
        if name == "scatter_reduce":
            assert args[4] in ("amax", "amin"), f"{name} {args[4]} adds in any order"
        if name in ("index_put", "index_put_impl", "unsafe_index_put") and len(args) > 3 and args[3]:
            self._check_alone(*args[:3])
        return func(*args, **(kwargs or {}))

    def _check_alone(self, into: torch.Tensor, indices: Any, values: torch.Tensor) -> None:
        """Several additions to one place, other than of zeros, are on several CPU threads in any order."""
        given = [index for index in indices if index is not None]
        where = torch.stack([index.flatten() for index in torch.broadcast_tensors(*given)])
        added = values.reshape(where.shape[1], -1).ne(0).any(1)
        assert where[:, added].unique(dim=1).shape[1] == added.sum(), "index_put adds to one place in any order"


def _batch(tokens: Tokens) -> Batch:
    levels = np.random.default_rng(0).integers(1, 3, (len(LENGTHS), 2)).astype(np.int32)
    return to_tensors(random_cells(LENGTHS, tokens, 60, first=0, levels=levels))


def _step(model: Model, tokens: Tokens) -> None:
    """The forward and backward pass of a step, on what is drawn on the CPU beforehand."""
    view = model.view(_batch(tokens), seed=3, step=4)
    prepared = model.prepare(padded(view, len(view.genes) + 16), seed=3, step=4)
    with InOneOrder():
        if model.objective.row_widths:
            with torch.no_grad():
                rows = model.objective.rows(model, model.states(prepared), prepared)  # type: ignore[operator]
            (shares,) = shares_of(model.objective, rows, [rows], 0)
            object.__setattr__(prepared, "shares", shares)
        model(prepared).sum().backward()


ENCODER = {"family": "encoder", "heads": 2, "layers": 1}
SUM = {"cell_decoding": {"batch_column": "batch"}, "masked_value": {"renormalize": True}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "profile": ("continuous", {}, {"family": "profile", "layers": 1, "objective": "cell_decoding"}),
    "view loss": ("continuous", {}, ENCODER | {"objective": "cell_decoding", "view_loss": "vicreg"}),
    "nb, cls": ("continuous", {}, ENCODER | {"objective": "cell_decoding", "likelihood": "nb", "pooling": "cls"}),
    "denoise, attention": ("binned", {}, ENCODER | {"objective": "denoise", "pooling": "attention"}),
    "adversary": (
        "continuous",
        {"covariates": ["kind"]},
        ENCODER | {"objective": "cell_decoding", "batch_column": "batch", "batch_adversary": 0.1},
    ),
    "query": ("continuous", {}, {"family": "autoencoder", "heads": 2, "layers": 1, "objective": "query_decoding"}),
    "contrast": ("rank", {}, ENCODER | {"objective": "supervised_contrastive", "label_column": "kind"}),
    "masked gene": ("rank", {}, {"family": "bert", "heads": 2, "layers": 1, "objective": "masked_gene"}),
    "masked value": ("continuous", {}, ENCODER | {"objective": "masked_value"}),
    "scgpt": ("binned", {}, {"family": "scgpt", "heads": 2, "layers": 1, "objective": "masked_value"}),
    "next gene": (
        "binned",
        {},
        {"family": "autoregressive", "heads": 2, "layers": 1, "objective": "next_gene", "dropout": 0.1},
    ),
    "sum": ("continuous", {}, ENCODER | {"objective": "sum", "parts": SUM}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_sum_of_a_step_depends_on_the_order_of_threads(case: str) -> None:
    tokenizer, covariates, options = CASES[case]
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64} | covariates)
    model = build(spec(60, tokens, LEVELS, hidden=8, **options)).to_empty(device="cpu").train()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1, generator=generator)
    _step(model, tokens)
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


@pytest.fixture
def two_threads() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(kept)


def test_sums_are_those_of_torch_on_one_thread_bit_by_bit_on_any_number(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 700, 1, 2000, 0, 317, 0])
    cell = torch.repeat_interleave(lengths)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    index = cell[torch.randperm(len(cell), generator=generator)]
    rows, few = torch.randn(len(cell), 64, generator=generator), torch.randn(7, 64, generator=generator)

    def ours() -> list[torch.Tensor]:
        x, y = rows.clone().requires_grad_(), few.clone().requires_grad_()
        summed, spread = segment_sum(x, cell, starts), rows_at(y, index)
        ((summed * few).sum() + (spread * rows).sum()).backward()
        assert x.grad is not None
        assert y.grad is not None
        return [summed.detach(), x.grad, spread.detach(), y.grad, segment_sum(rows[:, 0], cell, starts)]

    found = ours()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(found, ours()))
    torch.set_num_threads(1)
    into = torch.zeros(7, 64)
    expected = [into.index_add(0, cell, rows), few[cell], few[index], into.index_add(0, index, rows)]
    expected.append(torch.zeros(7).index_add(0, cell, rows[:, 0]))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
