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
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.data.stream.micro_batches import split_batch
from cellmill.data.stream.tokenizer import tokenize_to_batch
from cellmill.models.batch import to_tensors
from cellmill.models.counter_rng import (
    host_state,
    keyed_bits,
    keyed_dropout,
    keyed_state,
    keyed_token_bits,
    threshold,
)
from cellmill.models.draws import HIDDEN_FRAC_KEY, HIDE_KEY
from cellmill.models.objectives.shared.vicreg import vicreg_loss_sum
from cellmill.models.objectives.shared.views import (
    ViewBatch,
    draw_hidden_frac,
    draw_view,
)
from cellmill.planner.measure.size import measure_size
from tests.checks import assert_near, check_gradients, loss_by_shares
from tests.models import (
    FAMILIES,
    KEYS,
    ONE_LAYER,
    initialized,
    prepare,
    random_cells,
    seeded,
    spec,
)

N_GENES = 200
LONG_CELLS = Tokens.model_validate({"max_tokens": 128})
EVERY_VIEW = pytest.mark.parametrize("view", ["drop", "thin", "drop_thin"])


def _config(view: str, **options: Any) -> CellDecodingConfig:
    return CellDecodingConfig.model_validate({"name": "cell_decoding", "view": view} | options)


def _batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 100, 40)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes_by_cell = [rng.permutation(N_GENES)[:n] for n in lengths]
    genes = np.concatenate(genes_by_cell).astype(np.int32)
    counts = rng.integers(1, 30, len(genes)).astype(np.uint16)
    cells = np.arange(40) * 7 + 3
    tokenizer = LONG_CELLS.load()(LONG_CELLS)
    return tokenize_to_batch(tokenizer, SparseCounts(starts, genes, counts), cells, True)


def _view(batch: Batch, view: str, step: int = 0, **options: Any) -> ViewBatch:
    tokenizer = LONG_CELLS.load()(LONG_CELLS)
    config = _config(view, **options)
    return draw_view(to_tensors(batch), tokenizer, config, seed=1, step=step)


def _add_up(
    cells: torch.Tensor, genes: torch.Tensor, counts: torch.Tensor, n_cells: int
) -> torch.Tensor:
    """(cells, genes) int64: counts of each cell, added one after the other."""
    table = np.zeros((n_cells, N_GENES + 2), np.int64)
    for cell, gene, count in zip(cells.tolist(), genes.tolist(), counts.tolist()):
        table[cell, gene] += count
    return torch.from_numpy(table)


def _whole(batch: Batch) -> torch.Tensor:
    """(cells, genes) int64: all counts of each cell."""
    tensors = to_tensors(batch)
    assert tensors.counts is not None
    cell = torch.repeat_interleave(torch.tensor(tensors.lengths))
    return _add_up(cell, tensors.token_ids, tensors.counts, len(tensors.lengths))


def _hidden(view: ViewBatch) -> torch.Tensor:
    """(cells, genes) int64: counts that the view hides."""
    n_cells = len(view.lengths)
    return _add_up(view.entry_cells, view.entry_token_ids, view.entry_counts, n_cells)


@EVERY_VIEW
def test_values_of_a_view_come_only_from_its_shown_counts(view: str) -> None:
    batch = _batch()
    drawn = _view(batch, view)
    shown = _whole(batch) - _hidden(drawn)
    genes_by_cell = drawn.token_ids.split(drawn.lengths)
    values_by_cell = drawn.values.split(drawn.lengths)
    for counts, genes, values in zip(shown, genes_by_cell, values_by_cell):
        assert sorted(genes.tolist()) == counts.nonzero().flatten().tolist()
        frequencies = counts[genes].double() / counts.sum()
        expected = torch.log1p(1e4 * frequencies)
        assert_near(values.double(), expected)


def test_a_dropped_gene_is_hidden_with_all_its_counts() -> None:
    whole = _whole(_batch())
    hidden = _hidden(_view(_batch(), "drop"))
    is_dropped = hidden == whole
    assert (is_dropped | (hidden == 0)).all()
    thinned = _hidden(_view(_batch(), "thin"))
    assert ((thinned >= 0) & (thinned <= whole)).all()
    is_thinned = (thinned > 0) & (thinned < whole)
    assert is_thinned.any(1).float().mean() > 0.9


def test_dropping_and_thinning_have_separate_shares() -> None:
    batch = _batch()
    whole = _whole(batch)
    is_large = whole > 20
    shown_fracs = []
    for step in range(60):
        view = _view(batch, "drop_thin", step, min_hidden_frac=0.3, max_hidden_frac=0.9)
        hidden = _hidden(view)
        shown_fracs.append(1 - hidden.sum(1) / whole.sum(1))
        is_thinned = (hidden > 0) & (hidden < whole)
        is_dropped = hidden[is_large] == whole[is_large]
        assert is_thinned.any()
        assert is_dropped.any()
    shown_frac = torch.stack(shown_fracs).mean().item()
    # with one share for both it would be 0.19
    assert shown_frac == pytest.approx(0.4 * 0.4, abs=0.012)


@pytest.mark.parametrize("view", ["drop", "thin"])
def test_shares_of_cells_are_even_between_the_bounds(view: str) -> None:
    batch = _batch()
    is_long = torch.tensor(batch.lengths) > 60
    shares = []
    for step in range(60):
        drawn = _view(batch, view, step, min_hidden_frac=0.3, max_hidden_frac=0.9)
        hidden = _hidden(drawn)
        whole = _whole(batch)
        if view == "drop":  # a share of the genes, not of the counts
            hidden = hidden > 0
            whole = whole > 0
        shares.append(hidden.sum(1) / whole.sum(1))
    by_step = torch.stack(shares)[:, is_long]
    mean = by_step.mean().item()
    deviation = by_step.std().item()
    variance = (0.9 - 0.3) ** 2 / 12 + 0.003  # of the uniform share, and of the draw by it
    assert mean == pytest.approx(0.6, abs=0.02)
    assert deviation == pytest.approx(variance**0.5, abs=0.02)


@EVERY_VIEW
def test_a_view_depends_only_on_seed_step_and_cell(view: str) -> None:
    batch = _batch()
    whole = _hidden(_view(batch, view))
    parts = [*split_batch(batch, 300)]
    assert len(parts) > 3
    hidden_by_part = [_hidden(_view(part, view)) for part in parts]
    assert torch.equal(torch.cat(hidden_by_part), whole)
    next_step = _hidden(_view(batch, view, step=1))
    assert not torch.equal(next_step, whole)
    renamed = replace(batch, cell_ids=batch.cell_ids + 1)
    differs = _hidden(_view(renamed, view)) != whole
    assert differs.any(1).float().mean() > 0.9


def test_a_thinned_cell_is_drawn_by_a_separate_generator() -> None:
    batch = to_tensors(_batch())
    view = _view(_batch(), "thin", step=3)
    state = host_state(batch.cell_ids.numpy(), 1, 3)
    hidden_fracs = draw_hidden_frac(state, _config("thin"), HIDDEN_FRAC_KEY).tolist()
    keys = keyed_bits(batch.cell_ids, 1, 3, HIDE_KEY).tolist()
    counts_by_cell = batch.counts.split(batch.lengths)
    expected = []
    for counts, hidden_frac, key in zip(counts_by_cell, hidden_fracs, keys):
        bits = np.random.Philox(key=key)
        hidden = np.random.Generator(bits).binomial(counts.numpy(), hidden_frac)
        expected += hidden[hidden > 0].tolist()
    assert view.entry_counts.tolist() == expected


@EVERY_VIEW
def test_the_target_may_be_the_whole_cell(view: str) -> None:
    batch = _batch()
    drawn = _view(batch, view, target="all")
    hidden = _view(batch, view)
    assert torch.equal(_hidden(drawn), _whole(batch))
    assert torch.equal(drawn.token_ids, hidden.token_ids)


FEW_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
WEIGHTS = {"invariance_weight": 2.0, "variance_weight": 3.0, "covariance_weight": 0.5}


def _spec(family: str, **options: Any) -> Any:
    return spec(FEW_GENES, TOKENS, objective="cell_decoding", **ONE_LAYER[family], **options)


def _model(family: str, **options: Any) -> Any:
    return initialized(_spec(family, **options)).train()


def _cells(lengths: tuple[int, ...], first: int = 0) -> Batch:
    batch = random_cells(lengths, TOKENS, FEW_GENES, seed=first, first=first)
    return to_tensors(batch)


def _reference(
    first: torch.Tensor, second: torch.Tensor, invariance: float, variance: float, covariance: float
) -> Any:
    """VICReg of two views (cells, columns): equations 1 to 6 of the paper, a column at a time."""
    loss = invariance * F.mse_loss(first, second)
    n_columns = first.shape[1]
    for view in (first, second):
        matrix = torch.cov(view.T)
        for i in range(n_columns):
            spread = torch.sqrt(matrix[i, i] + 1e-4)
            loss = loss + variance * F.relu(1 - spread) / n_columns
            for j in range(n_columns):
                if i != j:
                    loss = loss + covariance * matrix[i, j] ** 2 / n_columns
    return loss


def test_the_loss_of_rows_equals_that_of_the_vectors() -> None:
    noise = torch.randn(2, 9, 5, generator=seeded(0), dtype=torch.float64)
    spread = torch.tensor([0.1, 0.5, 1, 2, 3])
    first = noise[0] * spread + 7
    second = first + noise[1]
    # the row of a cell is 1, its first and its second view; other slots are empty
    is_cell = torch.ones(9, 1)
    rows = torch.cat([is_cell, first, second], dim=1)
    table = torch.zeros(16, 11, dtype=torch.float64)
    table[torch.arange(15, 6, -1)] = rows
    loss = vicreg_loss_sum(table, (2, 3, 0.5))
    mean = _reference(first, second, 2, 3, 0.5)
    torch.testing.assert_close(loss, 9 * mean)


@pytest.mark.parametrize("family", ONE_LAYER)
def test_gradients_of_micro_batches_equal_the_whole_batch(family: str) -> None:
    model = _model(family, view_loss="vicreg", **WEIGHTS)
    batches = [
        _cells((20, 31, 1, 14), first=0),
        _cells((2, 1, 25), first=10),
        _cells((9,), first=20),
        to_tensors(empty_batch(np.dtype(np.float32), with_counts=True)),
    ]
    prepared = [prepare(model, batch, 200) for batch in batches]
    loss = loss_by_shares(model, prepared)
    first_views = []
    second_views = []
    expected = torch.zeros(())
    for part in prepared:
        vectors = model.cell_vectors(model.states(part), part)
        first_views.append(vectors[part.pairs[0]])
        second_views.append(vectors[part.pairs[1]])
        expected = expected + model(part)
    first = torch.cat(first_views).double()
    second = torch.cat(second_views).double()
    view_loss = _reference(first, second, *WEIGHTS.values())
    expected = expected + len(first) * view_loss
    assert 5 <= len(first) <= 8
    assert_near(loss.double(), expected)
    check_gradients(model, loss, expected)


@pytest.mark.parametrize("view", ["drop", "thin"])
def test_the_second_views_are_the_hidden_parts(view: str) -> None:
    batch = _cells((20, 31, 1, 14, 2))
    plain_model = _model("profile", view=view, view_loss=None)
    paired_model = _model("profile", view=view, view_loss="vicreg")
    plain = plain_model.view(batch, **KEYS)
    paired = paired_model.view(batch, **KEYS)
    n_cells = len(batch.lengths)
    n_shown = len(plain.token_ids)
    assert paired.lengths[:n_cells] == plain.lengths
    assert torch.equal(paired.token_ids[:n_shown], plain.token_ids)
    assert torch.equal(paired.values[:n_shown], plain.values)
    second_lengths = paired.lengths[n_cells:]
    genes_by_cell = paired.token_ids[n_shown:].split(second_lengths)
    values_by_cell = paired.values[n_shown:].split(second_lengths)
    for cell in range(n_cells):
        is_of_cell = plain.entry_cells == cell
        counts = plain.entry_counts[is_of_cell]
        frequencies = counts / counts.sum()
        assert torch.equal(genes_by_cell[cell], plain.entry_token_ids[is_of_cell])
        assert_near(values_by_cell[cell], torch.log1p(1e4 * frequencies))


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ({"covariates": ["batch"]}, ONE_LAYER["encoder"]),
        ({}, ONE_LAYER["encoder"] | {"pooling": "cls"}),
        ({"tokenizer": "rank"}, FAMILIES["bert"][1]),
    ],
    ids=["covariates", "cls", "ends"],
)
def test_a_pair_has_genes_in_both_views(tokens: dict[str, Any], options: dict[str, Any]) -> None:
    given = Tokens.model_validate({"max_tokens": 64} | tokens)
    levels = {"batch": ("a", "b")}
    paired = {"objective": "cell_decoding", "view_loss": "vicreg", "view": "drop"}
    model = initialized(spec(FEW_GENES, given, levels, **paired, **options))
    lengths = (1, 1, 2, 1, 3, 30, 2, 1)
    codes = np.ones((len(lengths), 1), np.int64)
    batch = to_tensors(random_cells(lengths, given, FEW_GENES, levels=codes))
    prepared = prepare(model, batch, 200)

    def has_gene(view: int) -> bool:
        start, end = prepared.cu_seqlens[view : view + 2].tolist()
        return any(token >= len(SPECIAL) for token in prepared.token_ids[start:end].tolist())

    expected = []
    for first_view in range(len(lengths)):
        second_view = len(lengths) + first_view
        if has_gene(first_view) and has_gene(second_view):
            expected.append((first_view, second_view))
    assert 0 < len(expected) < len(lengths)
    assert [tuple(pair) for pair in prepared.pairs.T.tolist()] == expected


def test_the_plan_counts_both_views() -> None:
    options = {"view": "drop", "max_hidden_frac": 0.8}
    plain = measure_size(_spec("encoder", **options, view_loss=None)).flops
    paired = measure_size(_spec("encoder", **options, view_loss="vicreg")).flops
    # half of a cell in one forward and one backward pass, or all of it in two and one
    assert paired.block_per_token / plain.block_per_token == pytest.approx(2 * 4 / 3, rel=0.1)
    assert paired.finish_per_token == pytest.approx(plain.finish_per_token, rel=0.02)


WORD = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One step, from the constants of the paper, in Python's unbounded integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_bits_are_splitmix64_folded_over_the_keys() -> None:
    assert _splitmix64(0) == 0xE220A8397B1DCDAF, "the published first number"
    largest = 2**63 - 1
    keys = [0, 1, 2**31, largest, -1, -largest - 1]
    expected = []
    for key in keys:
        state = _splitmix64(key & WORD)
        state = _splitmix64(state ^ 7)
        state = _splitmix64(state ^ WORD)  # -1 in two's complement
        expected.append(state >> 1)
    bits = keyed_bits(torch.tensor(keys), 7, -1)
    assert bits.tolist() == expected
    states = host_state(np.array(keys), 7, -1)
    assert (states >> np.uint64(1)).tolist() == expected


def test_bits_of_tokens_depend_on_all_their_keys() -> None:
    cells = torch.tensor([2**40, -3, 9])
    cell = torch.tensor([0, 0, 1, 2, 2])
    position = torch.tensor([0, 1, 0, 0, 1])
    bits = keyed_token_bits(cells, cell, 5, -1, position, 3)
    expected = keyed_bits(cells[cell], 5, -1, position, 3)
    assert torch.equal(bits, expected)


def test_a_share_of_the_bits_lies_below_the_threshold() -> None:
    draws = keyed_bits(torch.arange(100_000), 1)
    for share in (0.0, 0.15, 0.5, 1.0):
        is_below = draws < threshold(share)
        assert is_below.double().mean().item() == pytest.approx(share, abs=0.005)


def test_dropout_is_independent_of_the_batch() -> None:
    keys = keyed_bits(torch.arange(64), 9)
    x = torch.ones(64, 32)
    states = keyed_state(keys, 3)
    whole = keyed_dropout(x, 0.25, states)
    shuffled = torch.randperm(64, generator=seeded(0))
    some = torch.arange(5, 9)
    for rows in (shuffled, some):
        dropped = keyed_dropout(x[rows], 0.25, states[rows])
        assert torch.equal(dropped, whole[rows])
    next_layer = keyed_dropout(x, 0.25, keyed_state(keys, 4))
    assert not torch.equal(next_layer, whole)
    scale = torch.tensor(1 / 0.75).item()
    assert whole.unique().tolist() == [0.0, scale]
    is_dropped = whole == 0
    assert is_dropped.double().mean().item() == pytest.approx(0.25, abs=0.03)
