"""The masked encoder: hidden content reaches nothing, masks are fair, and losses judge the
predictions.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import load_config
from cellmill.config.parts.objectives import MaskedGeneConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, make_batch
from cellmill.models.batch import padded, to_tensors
from cellmill.models.objectives.masked import MaskedBatch, MaskedValue
from tests.models import initialized, random_cells, spec

N_GENES = 60
KINDS = [
    ("continuous", "masked_value"),
    ("continuous", "masked_gene"),
    ("binned", "masked_value"),
    ("binned", "masked_gene"),
    ("rank", "masked_gene"),
]
every_kind = pytest.mark.parametrize(
    ("tokenizer", "objective"),  # each tokenizer and each objective in `make test`
    [
        pytest.param(*kind, marks=() if kind in (KINDS[0], KINDS[3]) else pytest.mark.full)
        for kind in KINDS[:4]
    ]
    + [KINDS[4]],
)


def _tokens(tokenizer: str) -> Tokens:
    bins = {"bins": 7} if tokenizer == "binned" else {}
    return Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64} | bins)


def _model(tokenizer: str, objective: str, **options: Any) -> Any:
    given = {"hidden": 16, "layers": 2, "heads": 2, "objective": objective} | options
    model = initialized(spec(N_GENES, _tokens(tokenizer), **given))
    with torch.no_grad():  # larger weights than those of the start, so that what leaks is seen
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                parameter += 0.2 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    return model


def _tensors(tokenizer: str, lengths: tuple[int, ...] = (9, 14, 1, 14)) -> Batch:
    return to_tensors(random_cells(lengths, _tokens(tokenizer), N_GENES))


def _predicted(model: Any, prepared: MaskedBatch) -> torch.Tensor:
    """Predictions from the states of masked tokens."""
    return model.objective.predict(
        model, model.head(model.states(prepared)[prepared.targets]), prepared
    )


def _judged(model: Any, prepared: MaskedBatch) -> list[tuple[torch.Tensor, float]]:
    """Every prediction that the loss judges, and its loss."""
    judged = []
    objective, loss_of = model.objective, model.objective.loss_of

    def listen(*given: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(*given)
        judged.append((objective.predict(*given), loss.item()))
        return loss

    objective.loss_of = listen
    model(prepared)
    objective.loss_of = loss_of
    return judged


@every_kind
def test_hidden_values_do_not_change_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective)
    batch = _tensors(tokenizer)
    prepared = model.prepare(batch, seed=1, step=2)
    said = _judged(model, prepared)
    assert len(said) == 2  # by the token's state and by the cell's embedding
    field = "genes" if objective == "masked_gene" else "values"
    content = getattr(batch, field).clone()
    content[prepared.targets] = content[prepared.targets] % 5 + 1
    other = model.prepare(replace(batch, **{field: content}), seed=1, step=2)
    assert torch.equal(other.targets, prepared.targets)
    assert not torch.equal(other.answers, prepared.answers)
    assert all(
        torch.equal(now, before) for (now, _), (before, _) in zip(_judged(model, other), said)
    )


@every_kind
def test_visible_values_change_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective)
    batch = _tensors(tokenizer)
    prepared = model.prepare(batch, seed=1, step=2)
    shown = next(
        place for place in range(len(batch.genes)) if place not in prepared.targets.tolist()
    )
    for field in ("genes", "values"):
        content = getattr(batch, field).clone()
        content[shown] = (
            content[shown] % 5 + 1.5 if content.is_floating_point() else content[shown] % 5 + 1
        )
        other = model.prepare(replace(batch, **{field: content}), seed=1, step=2)
        assert not torch.equal(_predicted(model, other), _predicted(model, prepared))
    # at a target the half of the token that is not asked for is seen
    kept = "values" if objective == "masked_gene" else "genes"
    content = getattr(batch, kept).clone()
    content[prepared.targets] = (content[prepared.targets] + 1) % 8
    other = model.prepare(replace(batch, **{kept: content}), seed=1, step=2)
    assert not torch.equal(_predicted(model, other), _predicted(model, prepared))


def test_masks_leave_every_cell_a_target() -> None:
    model = _model("continuous", "masked_value")
    batch = _tensors("continuous", lengths=(1, 2, 3, 40, 40, 60))

    def targets(**keys: int) -> list[int]:
        return model.prepare(batch, **keys).targets.tolist()

    first = targets(seed=0, step=0)
    assert first == targets(seed=0, step=0)
    assert first != targets(seed=1, step=0)
    assert first != targets(seed=0, step=1)
    assert first != targets(seed=0, step=-1)
    twins = replace(batch, cells=batch.cells + 1)
    assert first != model.prepare(twins, seed=0, step=0).targets.tolist()
    edges = batch.cu_seqlens.tolist()
    for step in range(50):
        chosen = np.array(targets(seed=0, step=step))
        assert all(
            ((chosen >= low) & (chosen < high)).any() for low, high in itertools.pairwise(edges)
        )


def test_a_share_of_mask_frac_is_hidden() -> None:
    model = _model("continuous", "masked_value", mask_frac=0.3, dropout=0.2)
    batch = _tensors("continuous", lengths=(60,) * 40)
    state = torch.get_rng_state()
    shares = [model.prepare(batch, seed=0, step=step).n_targets.item() / 2400 for step in range(20)]
    assert abs(np.mean(shares) - 0.3) < 0.01
    model(model.prepare(batch, seed=0, step=0)).backward()
    assert torch.equal(torch.get_rng_state(), state)


@every_kind
def test_the_loss_is_computed_from_the_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective, cell_loss_weight=0)
    prepared = model.prepare(_tensors(tokenizer), seed=0, step=0)
    said = _predicted(model, prepared)
    loss = model(prepared)
    assert loss.dtype == said.dtype == torch.float32
    assert loss.ndim == 0
    assert prepared.n_targets.dtype == torch.int64
    if said.ndim == 1:
        expected = sum((a - b) ** 2 for a, b in zip(said.tolist(), prepared.answers.tolist()))
    else:
        rows = prepared.answers - (1 if objective == "masked_value" else 0)  # bins count from 1
        expected = -said.log_softmax(1)[torch.arange(len(rows)), rows].sum().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@every_kind
def test_the_cell_loss_scores_what_the_embedding_predicts(tokenizer: str, objective: str) -> None:
    model, twice = (_model(tokenizer, objective, cell_loss_weight=weight) for weight in (1, 2))
    prepared = model.prepare(_tensors(tokenizer), seed=0, step=0)
    (said, by_token), (_, by_cell) = _judged(model, prepared)
    assert model(prepared).item() == pytest.approx(by_token + by_cell, rel=1e-5)
    assert twice(prepared).item() == pytest.approx(by_token + 2 * by_cell, rel=1e-5)
    assert torch.equal(said, _predicted(model, prepared))


def test_the_embedding_of_a_cell_without_tokens_is_zero() -> None:
    model = _model("continuous", "masked_value").eval()
    batch = _tensors("continuous", lengths=(4, 0, 3))
    with torch.no_grad():
        found = model.embed(batch)
        apart = torch.cat([model.embed(batch.cut(cell, cell + 1)) for cell in (0, 2)])
    torch.testing.assert_close(found[[0, 2]], apart)
    assert torch.equal(found[1], torch.zeros(16))


def test_what_tensor_parallel_cuts_is_in_the_model() -> None:
    model = _model("continuous", "masked_value")
    names = {name for name, _ in model.named_modules()}
    assert {name.replace("*", "0") for name in model.plan.tensor} <= names


def test_dropout_changes_with_the_step() -> None:
    model = _model("continuous", "masked_value", dropout=0.3)
    batch = _tensors("continuous")
    prepared = model.prepare(batch, seed=0, step=0)
    dropped = model(prepared).item()
    assert dropped == model(prepared).item()
    still = _model("continuous", "masked_value").eval()
    assert model.eval()(prepared).item() == still(prepared).item() != dropped
    other = replace(prepared, keys=(0, 1))
    assert model.train()(other).item() != dropped


def test_first_weights_have_the_spread_of_gpt_2() -> None:
    first = initialized(
        spec(N_GENES, _tokens("continuous"), hidden=16, layers=8, heads=2)
    ).state_dict()
    assert first["gene_embedding.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert first["blocks.0.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert (first["blocks.1.ffn_norm.weight"] == 1).all()
    assert not first["blocks.1.up.bias"].any()


@every_kind
def test_masked_tokens_are_replaced_by_the_split(tokenizer: str, objective: str) -> None:
    split = {"mask_frac": 0.5, "random_frac": 0.2, "keep_frac": 0.3}
    model = _model(tokenizer, objective, **split)
    plain = _model(tokenizer, objective, mask_frac=0.5)
    batch = _tensors(tokenizer, lengths=(32,) * 60)
    prepared, hidden = (m.prepare(batch, seed=1, step=2) for m in (model, plain))
    at = prepared.targets
    assert torch.equal(at, hidden.targets)
    assert torch.equal(prepared.answers, hidden.answers)
    field = "genes" if objective == "masked_gene" else "values"
    shown = getattr(prepared, field)[at]
    own = getattr(batch, field)[at]
    masked = shown == 1 if objective == "masked_gene" else prepared.value_hidden[at]
    assert masked.float().mean() == pytest.approx(0.5, abs=0.06)
    # a random bin is often the same
    assert (shown == own).float().mean() == pytest.approx(0.3, abs=0.1)
    others = ~torch.isin(torch.arange(len(batch.genes)), at)
    assert torch.equal(getattr(prepared, field)[others], getattr(batch, field)[others])
    if objective == "masked_gene":
        assert not prepared.value_hidden.any()
        assert shown[~masked].min() >= 2, "no special token"
        random = shown[~masked & (shown != own)]
        assert len(random.unique()) > 45
        assert random.max() == N_GENES + 1
    else:
        in_cell = (prepared.cell[at][:, None] == prepared.cell[None]) & others
        assert (
            ((shown[:, None] == batch.values[None]) & in_cell)
            .any(1)[~masked & (shown != own)]
            .all()
        )
    model.eval()
    assert torch.equal(getattr(model.prepare(batch, seed=1, step=2), field), getattr(hidden, field))
    assert torch.equal(prepared.center, hidden.center), "of tokens that are no targets alone"


@every_kind
def test_the_cell_loss_is_computed_with_every_target_hidden(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective, random_frac=0.3, keep_frac=0.3)
    plain = _model(tokenizer, objective)
    batch = _tensors(tokenizer, lengths=(30, 1, 30))
    prepared, hidden = (m.prepare(batch, seed=0, step=1) for m in (model, plain))
    at = prepared.targets
    asked = prepared.hiding_targets(objective == "masked_gene")
    assert torch.equal(model.inputs(asked, at), model.inputs(hidden, at))
    assert not torch.equal(model.inputs(prepared, at), model.inputs(hidden, at))
    queries: list[torch.Tensor] = []
    model.cell_head.register_forward_hook(lambda head, given, out: queries.append(given[0]))
    model(prepared)
    assert torch.equal(queries[0][:, model.width :], model.inputs(hidden, at))


def test_a_split_that_hides_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"random_frac \+ keep_frac = 1 hides none of the masked tokens"
    ):
        MaskedGeneConfig(random_frac=0.5, keep_frac=0.5)


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokenizer", ["continuous", "binned"])
def test_hidden_counts_change_inputs_only_without_renormalize(
    tokenizer: str, renormalize: bool
) -> None:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    objective = MaskedValue(
        spec(60, tokens, objective="masked_value", renormalize=renormalize).objective, tokens
    )
    cells = random_cells((20, 31, 1, 14, 2), tokens, 60)

    def prepared(counts: np.ndarray) -> tuple[Any, Batch]:
        starts = cells.cu_seqlens.astype(np.int64)
        batch = make_batch(tokens.load()(tokens), cells.genes - 2, counts, starts, cells.cells, 64)
        tensors = padded(to_tensors(batch), 80)
        return objective.prepare(tensors, seed=3, step=4), tensors

    one, batch = prepared(cells.counts)
    louder = cells.counts.copy()
    louder[one.targets.numpy()] *= 10
    other, _ = prepared(louder)
    assert torch.equal(one.answers, batch.values[one.targets]), (
        "the answers are the whole cell's values"
    )
    assert torch.equal(one.values, other.values) == renormalize
    assert torch.equal(one.center, other.center) == (renormalize or tokenizer == "binned")


def test_all_shipped_configurations_hide_the_library_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped = [ROOT / "config" / "config.yaml", *(ROOT / "config" / "examples").glob("*.yaml")]
    named = [path for path in shipped if "masked_value" in path.read_text(encoding="utf-8")]
    runs = [run for path in named for run in load_config(path).runs.values()]
    parts = [part for run in runs for part in run.objective.each() if part.name == "masked_value"]
    assert len(parts) >= 4
    assert all(part.needs_counts for part in parts)
