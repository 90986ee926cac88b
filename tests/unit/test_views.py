"""Random numbers by key; views of cells, whose shown and hidden part together are the cell; VICReg
of both parts.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.parts.objectives import CellDecodingConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, empty_batch, make_batch, split_batch
from cellmill.models.batch import to_tensors
from cellmill.models.counter_rng import (
    host_state,
    keyed_bits,
    keyed_dropout,
    keyed_state,
    keyed_token_bits,
    threshold,
)
from cellmill.models.objectives.terms import vicreg
from cellmill.models.objectives.views import HIDE, ViewBatch, draw_share, draw_view
from cellmill.planner.size import measure
from tests.checks import check_gradients, loss_by_shares
from tests.models import KEYS, ONE_LAYER, initialized, prepare, random_cells, spec

N_GENES = 200
LONG_CELLS = Tokens.model_validate({"max_tokens": 128})
EVERY_VIEW = pytest.mark.parametrize("view", ["drop", "thin", "drop_thin"])


def _config(view: str, **options: Any) -> CellDecodingConfig:
    return CellDecodingConfig.model_validate({"name": "cell_decoding", "view": view} | options)


def _batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 100, 40)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes = np.concatenate([rng.permutation(N_GENES)[:n] for n in lengths]).astype(np.int32)
    counts = rng.integers(1, 30, len(genes)).astype(np.uint16)
    tokenizer = LONG_CELLS.load()(LONG_CELLS)
    return make_batch(
        tokenizer, genes, counts, starts, np.arange(40) * 7 + 3, LONG_CELLS.max_tokens
    )


def _view(batch: Batch, view: str, step: int = 0, **options: Any) -> ViewBatch:
    tokenizer = LONG_CELLS.load()(LONG_CELLS)
    return draw_view(to_tensors(batch), tokenizer, _config(view, **options), seed=1, step=step)


def _dense(
    cells: torch.Tensor, genes: torch.Tensor, counts: torch.Tensor, n_cells: int
) -> torch.Tensor:
    return torch.zeros(n_cells, N_GENES + 2, dtype=torch.int64).index_put_(
        (cells, genes), counts, accumulate=True
    )


def _whole(batch: Batch) -> torch.Tensor:
    tensors = to_tensors(batch)
    cell = torch.repeat_interleave(tensors.cu_seqlens.diff().long())
    assert tensors.counts is not None
    return _dense(cell, tensors.genes, tensors.counts, len(tensors.lengths))


def _hidden(view: ViewBatch) -> torch.Tensor:
    return _dense(view.profile_cell, view.profile_gene, view.profile_count, len(view.lengths))


@EVERY_VIEW
def test_values_of_a_view_come_only_from_its_shown_counts(view: str) -> None:
    batch = _batch()
    drawn = _view(batch, view)
    shown = _whole(batch) - _hidden(_view(batch, view))
    for index, (genes, values) in enumerate(
        zip(drawn.genes.split(drawn.lengths), drawn.values.split(drawn.lengths))
    ):
        assert sorted(genes.tolist()) == shown[index].nonzero().flatten().tolist()
        counts = shown[index][genes].double()
        torch.testing.assert_close(
            values.double(), (1e4 * counts / counts.sum()).log1p(), rtol=1e-5, atol=1e-5
        )


def test_a_dropped_gene_is_hidden_with_all_its_counts() -> None:
    whole = _whole(_batch())
    hidden = _hidden(_view(_batch(), "drop"))
    assert ((hidden == 0) | (hidden == whole)).all()
    thinned = _hidden(_view(_batch(), "thin"))
    assert ((thinned >= 0) & (thinned <= whole)).all()
    assert ((thinned > 0) & (thinned < whole)).any(1).float().mean() > 0.9


def test_dropping_and_thinning_have_separate_shares() -> None:
    whole = _whole(_batch())
    options = {"min_hidden_frac": 0.3, "max_hidden_frac": 0.9}
    hidden = [_hidden(_view(_batch(), "drop_thin", step, **options)) for step in range(60)]
    shown = torch.stack([1 - each.sum(1) / whole.sum(1) for each in hidden])
    # of one share for both it would be 0.19
    assert shown.mean().item() == pytest.approx(0.4 * 0.4, abs=0.012)
    assert all(
        ((each > 0) & (each < whole)).any() and (each[whole > 20] == whole[whole > 20]).any()
        for each in hidden
    )


@pytest.mark.parametrize("view", ["drop", "thin"])
def test_shares_of_cells_are_even_between_the_bounds(view: str) -> None:
    batch = _batch()
    shares = []
    for step in range(60):
        hidden = _hidden(_view(batch, view, step, min_hidden_frac=0.3, max_hidden_frac=0.9))
        whole = _whole(batch)
        if view == "drop":
            hidden = hidden > 0
            whole = whole > 0
        shares.append(hidden.sum(1) / whole.sum(1))
    found = torch.stack(shares)[:, torch.tensor(_batch().cu_seqlens).diff() > 60]
    assert found.mean().item() == pytest.approx(0.6, abs=0.02)
    assert found.std().item() == pytest.approx((0.6**2 / 12 + 0.003) ** 0.5, abs=0.02)


@EVERY_VIEW
def test_a_view_depends_only_on_seed_step_and_cell(view: str) -> None:
    batch = _batch()
    whole = _hidden(_view(_batch(), view))
    parts = [_hidden(_view(part, view)) for part in split_batch(batch, 300)]
    assert len(parts) > 3
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(_hidden(_view(batch, view, step=1)), whole)
    other = _hidden(_view(replace(batch, cells=batch.cells + 1), view))
    assert (other != whole).any(1).float().mean() > 0.9


def test_a_thinned_cell_is_drawn_by_a_separate_generator() -> None:
    batch = to_tensors(_batch())
    view = _view(_batch(), "thin", step=3)
    shares = draw_share(host_state(batch.cells.numpy(), 1, 3), _config("thin")).tolist()
    expected = []
    keys = keyed_bits(batch.cells, 1, 3, HIDE).tolist()
    for counts, share, key in zip(batch.counts.split(batch.lengths), shares, keys):
        expected.append(
            np.random.Generator(np.random.Philox(key=key)).binomial(counts.numpy(), share)
        )
    hidden = np.concatenate(expected)
    assert view.profile_count.tolist() == hidden[hidden > 0].tolist()


@EVERY_VIEW
def test_the_target_may_be_the_whole_cell(view: str) -> None:
    batch = _batch()
    drawn = _view(batch, view, target="all")
    hidden = _view(batch, view)
    assert torch.equal(_hidden(drawn), _whole(batch))
    assert torch.equal(drawn.genes, hidden.genes)


FEW_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
WEIGHTS = {"invariance_weight": 2.0, "variance_weight": 3.0, "covariance_weight": 0.5}


def _spec(family: str, **options: Any) -> Any:
    return spec(FEW_GENES, TOKENS, objective="cell_decoding", **ONE_LAYER[family], **options)


def _model(family: str, **options: Any) -> Any:
    return initialized(_spec(family, **options)).train()


def _cells(lengths: tuple[int, ...], first: int = 0) -> Batch:
    return to_tensors(
        random_cells(lengths, TOKENS, FEW_GENES, rng=np.random.default_rng(first), first=first)
    )


def _reference(
    first: torch.Tensor, second: torch.Tensor, invariance: float, variance: float, covariance: float
) -> Any:
    """The paper's equations on all vectors at once."""
    loss = invariance * F.mse_loss(first, second)
    for z in (first, second):
        matrix = torch.cov(z.T)
        loss = loss + variance * (1 - (matrix.diagonal() + 1e-4).sqrt()).clamp(min=0).mean()
        loss = loss + covariance * (matrix - matrix.diagonal().diag()).square().sum() / z.shape[1]
    return loss


def test_the_loss_of_rows_equals_that_of_the_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    first = (
        torch.randn(9, 5, generator=generator, dtype=torch.float64)
        * torch.tensor([0.1, 0.5, 1, 2, 3])
        + 7
    )
    second = first + torch.randn(9, 5, generator=generator, dtype=torch.float64)
    rows = torch.cat([torch.ones(9, 1), first, second], dim=1)
    table = torch.zeros(16, 11, dtype=torch.float64).index_copy(0, torch.arange(15, 6, -1), rows)
    torch.testing.assert_close(vicreg(table, (2, 3, 0.5)), 9 * _reference(first, second, 2, 3, 0.5))


@pytest.mark.parametrize("family", ONE_LAYER)
def test_gradients_of_micro_batches_equal_the_whole_batch(family: str) -> None:
    model = _model(family, view_loss="vicreg", **WEIGHTS)
    batches = [_cells(*given) for given in (((20, 31, 1, 14), 0), ((2, 1, 25), 10), ((9,), 20))]
    batches.append(to_tensors(empty_batch(np.dtype(np.float32), counted=True)))
    prepared = [prepare(model, batch, 200) for batch in batches]
    loss = loss_by_shares(model, prepared)
    vectors = [model.cell_vectors(model.states(part), part) for part in prepared]
    first, second = (
        torch.cat([z[part.pairs[i]] for z, part in zip(vectors, prepared)]).double() for i in (0, 1)
    )
    expected = sum(model(part) for part in prepared) + len(first) * _reference(
        first, second, *WEIGHTS.values()
    )
    assert 5 <= len(first) <= 8
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    check_gradients(model, loss, expected)


@pytest.mark.parametrize("view", ["drop", "thin"])
def test_the_second_views_are_the_hidden_parts(view: str) -> None:
    batch = _cells((20, 31, 1, 14, 2))
    plain, paired = (
        _model("profile", view=view, view_loss=on).view(batch, **KEYS) for on in (None, "vicreg")
    )
    n = len(batch.lengths)
    shown = len(plain.genes)
    assert paired.lengths[:n] == plain.lengths
    assert torch.equal(paired.genes[:shown], plain.genes)
    assert torch.equal(paired.values[:shown], plain.values)
    of_token = torch.repeat_interleave(torch.tensor(paired.lengths[n:]))
    dense = torch.zeros(n, FEW_GENES + 2).index_put(
        (of_token, paired.genes[shown:]), paired.values[shown:]
    )
    hidden = torch.zeros(n, FEW_GENES + 2).index_put(
        (plain.profile_cell, plain.profile_gene), plain.profile_count.float()
    )
    depth = hidden.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(dense, (1e4 * hidden / depth).log1p(), rtol=1e-5, atol=1e-5)


def test_the_plan_counts_both_views() -> None:
    one, two = (
        measure(_spec("encoder", view="drop", max_hidden_frac=0.8, view_loss=on))
        for on in (None, "vicreg")
    )
    # half of a cell in one forward and one backward pass, or all of it in two and one
    assert two.flops.block / one.flops.block == pytest.approx(2 * 4 / 3, rel=0.1)
    assert two.flops.finish == pytest.approx(one.flops.finish, rel=0.02)


WORD = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One step, from the constants of the paper, in Python's unbounded integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_bits_are_splitmix64_folded_over_the_keys() -> None:
    assert _splitmix64(0) == 0xE220A8397B1DCDAF, "the published first number"
    keys = [0, 1, 2**31, 2**63 - 1, -1, -(2**63)]
    found = keyed_bits(torch.tensor(keys), 7, -1).tolist()
    expected = [_splitmix64(_splitmix64(_splitmix64(key & WORD) ^ 7) ^ WORD) >> 1 for key in keys]
    assert found == expected
    assert (host_state(np.array(keys), 7, -1) >> np.uint64(1)).tolist() == expected


def test_bits_of_tokens_depend_on_all_their_keys() -> None:
    cells = torch.tensor([2**40, -3, 9])
    cell = torch.tensor([0, 0, 1, 2, 2])
    place = torch.tensor([0, 1, 0, 0, 1])
    assert torch.equal(
        keyed_token_bits(cells, cell, 5, -1, place, 3), keyed_bits(cells[cell], 5, -1, place, 3)
    )


def test_a_share_of_the_bits_lies_below_the_threshold() -> None:
    draws = keyed_bits(torch.arange(100_000), 1)
    for share in (0.0, 0.15, 0.5, 1.0):
        assert abs((draws < threshold(share)).double().mean().item() - share) < 0.005


def test_dropout_is_independent_of_the_batch() -> None:
    keys = keyed_bits(torch.arange(64), 9)
    x = torch.ones(64, 32)
    states = keyed_state(keys, 3)
    whole = keyed_dropout(x, 0.25, states)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_dropout(x[order], 0.25, states[order]), whole[order])
    assert torch.equal(keyed_dropout(x[5:9], 0.25, states[5:9]), whole[5:9])
    assert not torch.equal(keyed_dropout(x, 0.25, keyed_state(keys, 4)), whole)
    assert whole.unique().tolist() == [0.0, torch.tensor(1 / 0.75).item()]
    assert abs((whole == 0).double().mean().item() - 0.25) < 0.03
