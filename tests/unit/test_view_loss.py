"""view_loss vicreg: the paper's loss of both parts of the cells, and its gradients from rows of the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.models.batch import padded, to_tensors
from cellmill.models.objectives.terms import vicreg
from cellmill.planner.size import measure
from cellmill.train.batch_rows import shares_of
from tests.models import KEYS, initialized, random_cells, spec

N_GENES, H = 60, 16
TOKENS = Tokens.model_validate({"max_tokens": 64})
WEIGHTS = {"invariance_weight": 2.0, "variance_weight": 3.0, "covariance_weight": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": H, "layers": 1, "heads": 2, "dropout": 0.2},
    "profile": {"family": "profile", "hidden": H, "layers": 1, "dropout": 0.2},
}


def _spec(family: str, **options: Any) -> Any:
    return spec(N_GENES, TOKENS, objective="cell_decoding", **FAMILIES[family], **options)


def _model(family: str, **options: Any) -> Any:
    return initialized(_spec(family, **options)).train()


def _cells(lengths: tuple[int, ...], first: int = 0) -> Batch:
    return random_cells(lengths, TOKENS, N_GENES, rng=np.random.default_rng(first), first=first)


def _reference(first: torch.Tensor, second: torch.Tensor, invariance: float, variance: float, covariance: float) -> Any:
    """The paper's equations on all vectors at once."""
    loss = invariance * F.mse_loss(first, second)
    for z in (first, second):
        matrix = torch.cov(z.T)
        loss = loss + variance * (1 - (matrix.diagonal() + 1e-4).sqrt()).clamp(min=0).mean()
        loss = loss + covariance * (matrix - matrix.diagonal().diag()).square().sum() / z.shape[1]
    return loss


def test_the_loss_of_rows_is_that_of_the_vectors_in_any_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(9, 5, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1, 2, 3]) + 7
    second = first + torch.randn(9, 5, generator=generator, dtype=torch.float64)
    rows = torch.cat([torch.ones(9, 1), first, second], dim=1)
    table = torch.zeros(16, 11, dtype=torch.float64).index_copy(0, torch.arange(15, 6, -1), rows)
    torch.testing.assert_close(vicreg(table, (2, 3, 0.5)), 9 * _reference(first, second, 2, 3, 0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_micro_batches_are_those_of_the_whole_batch_at_once(family: str) -> None:
    model = _model(family, view_loss="vicreg", **WEIGHTS)
    batches = [to_tensors(_cells(*given)) for given in (((20, 31, 1, 14), 0), ((2, 1, 25), 10), ((9,), 20))]
    batches.append(to_tensors(empty_batch(np.dtype(np.float32), counted=True)))
    prepared = [model.prepare(padded(model.view(batch, **KEYS), 200), **KEYS) for batch in batches]
    with torch.no_grad():
        rows = [model.objective.rows(model, model.states(part), part) for part in prepared]
    table = torch.cat([torch.zeros(3, 1 + 2 * H), *(own for (own,) in rows), torch.zeros(2, 1 + 2 * H)])
    shares = shares_of(model.objective, [table], rows, first=3)
    loss = sum(model(replace(part, shares=own)) for part, own in zip(prepared, shares))
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    vectors = [model.cell_vectors(model.states(part), part) for part in prepared]
    first, second = (torch.cat([z[part.pairs[i]] for z, part in zip(vectors, prepared)]).double() for i in (0, 1))
    expected = sum(model(part) for part in prepared) + len(first) * _reference(first, second, *WEIGHTS.values())
    assert 5 <= len(first) <= 8
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("view", ["drop", "thin"])
def test_the_second_views_are_the_hidden_parts(view: str) -> None:
    batch = to_tensors(_cells((20, 31, 1, 14, 2)))
    plain, paired = (_model("profile", view=view, view_loss=on).view(batch, **KEYS) for on in (None, "vicreg"))
    n, shown = len(batch.lengths), len(plain.genes)
    assert paired.lengths[:n] == plain.lengths
    assert torch.equal(paired.genes[:shown], plain.genes)
    assert torch.equal(paired.values[:shown], plain.values)
    of_token = torch.repeat_interleave(torch.tensor(paired.lengths[n:]))
    dense = torch.zeros(n, N_GENES + 2).index_put((of_token, paired.genes[shown:]), paired.values[shown:])
    hidden = torch.zeros(n, N_GENES + 2).index_put(
        (plain.profile_cell, plain.profile_gene), plain.profile_count.float()
    )
    depth = hidden.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(dense, (1e4 * hidden / depth).log1p(), rtol=1e-5, atol=1e-5)


def test_without_shares_the_loss_is_the_cross_entropy_alone() -> None:
    batch = to_tensors(_cells((20, 31, 1, 14)))
    losses = []
    for view_loss in (None, "vicreg"):
        model = _model("encoder", view_loss=view_loss).eval()
        losses.append(model(model.prepare(model.view(batch, **KEYS), **KEYS)))
    torch.testing.assert_close(losses[1], losses[0])


def test_the_plan_counts_both_parts_and_their_second_forward_pass() -> None:
    one, two = (measure(_spec("encoder", view="drop", view_loss=on)) for on in (None, "vicreg"))
    # half of a cell in one forward and one backward pass, or all of it in two and one
    assert two.block.flops_per_token / one.block.flops_per_token == pytest.approx(2 * 4 / 3, rel=0.1)
    assert two.finish.flops_per_token == pytest.approx(one.finish.flops_per_token, rel=0.02)
