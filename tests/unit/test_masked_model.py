"""The masked encoder: hidden content reaches nothing, masks are fair, and losses judge the
predictions.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import load_config
from cellmill.config.parts.objectives import MaskedGeneConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import tokenize_to_batch
from cellmill.models.batch import pad_batch, to_tensors
from cellmill.models.objectives.masked_value import MaskedValue
from cellmill.models.objectives.shared.masking import MaskedBatch
from tests.checks import quick
from tests.models import initialized, random_cells, seeded, spec

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
    quick(KINDS, [KINDS[0], KINDS[3], KINDS[4]]),
)


def _tokens(tokenizer: str) -> Tokens:
    bins = {"bins": 7} if tokenizer == "binned" else {}
    return Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64} | bins)


def _model(tokenizer: str, objective: str, **options: Any) -> Any:
    given = {"hidden": 16, "layers": 2, "heads": 2, "objective": objective} | options
    model = initialized(spec(N_GENES, _tokens(tokenizer), **given))
    with torch.no_grad():  # larger weights than the initial ones, so that a leak is seen
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                noise = torch.randn(parameter.shape, generator=seeded(len(name)))
                parameter += 0.2 * noise
    return model


def _tensors(tokenizer: str, lengths: tuple[int, ...] = (9, 14, 1, 14)) -> Batch:
    return to_tensors(random_cells(lengths, _tokens(tokenizer), N_GENES))


def _predicted(model: Any, prepared: MaskedBatch) -> torch.Tensor:
    """Predictions from the states of masked tokens."""
    states = model.states(prepared)[prepared.target_tokens]
    return model.objective.predict_from_head(model, model.head(states), prepared)


def _judged(model: Any, prepared: MaskedBatch) -> list[tuple[torch.Tensor, float]]:
    """Every prediction that the loss judges, and its loss."""
    judged = []
    objective = model.objective
    head_loss = objective.head_loss

    def listen(*given: Any) -> torch.Tensor:
        loss: torch.Tensor = head_loss(*given)
        predictions = objective.predict_from_head(*given)
        judged.append((predictions, loss.item()))
        return loss

    objective.head_loss = listen
    model(prepared)
    objective.head_loss = head_loss
    return judged


@every_kind
def test_hidden_values_do_not_change_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective)
    batch = _tensors(tokenizer)
    prepared = model.prepare(batch, seed=1, step=2)
    judged = _judged(model, prepared)
    assert len(judged) == 2  # by the token's state and by the cell's embedding
    field = "token_ids" if objective == "masked_gene" else "values"
    content = getattr(batch, field).clone()
    content[prepared.target_tokens] = content[prepared.target_tokens] % 5 + 1
    changed = model.prepare(replace(batch, **{field: content}), seed=1, step=2)
    assert torch.equal(changed.target_tokens, prepared.target_tokens)
    assert not torch.equal(changed.targets, prepared.targets)
    for (predictions, _), (expected, _) in zip(_judged(model, changed), judged):
        assert torch.equal(predictions, expected)


@every_kind
def test_visible_values_change_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective)
    batch = _tensors(tokenizer)
    prepared = model.prepare(batch, seed=1, step=2)
    expected = _predicted(model, prepared)

    def predicted_with(field: str, content: torch.Tensor) -> torch.Tensor:
        changed = replace(batch, **{field: content})  # type: ignore[arg-type]
        return _predicted(model, model.prepare(changed, seed=1, step=2))

    positions = set(range(len(batch.token_ids)))
    visible = min(positions - set(prepared.target_tokens.tolist()))
    for field in ("token_ids", "values"):
        content = getattr(batch, field).clone()
        step = 1.5 if content.is_floating_point() else 1
        content[visible] = content[visible] % 5 + step
        assert not torch.equal(predicted_with(field, content), expected)
    # a masked gene still shows its value, and a masked value its gene
    field = "values" if objective == "masked_gene" else "token_ids"
    content = getattr(batch, field).clone()
    content[prepared.target_tokens] = (content[prepared.target_tokens] + 1) % 8
    assert not torch.equal(predicted_with(field, content), expected)


def test_masks_leave_every_cell_a_target() -> None:
    model = _model("continuous", "masked_value")
    batch = _tensors("continuous", lengths=(1, 2, 3, 40, 40, 60))

    def targets(**keys: int) -> list[int]:
        return model.prepare(batch, **keys).target_tokens.tolist()

    first = targets(seed=0, step=0)
    assert first == targets(seed=0, step=0)
    assert first != targets(seed=1, step=0)
    assert first != targets(seed=0, step=1)
    assert first != targets(seed=0, step=-1)
    twins = replace(batch, cell_ids=batch.cell_ids + 1)
    assert first != model.prepare(twins, seed=0, step=0).target_tokens.tolist()
    for step in range(50):
        chosen = set(targets(seed=0, step=step))
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            assert chosen & set(range(start, end)), "a cell without a target"


def test_a_share_of_mask_frac_is_hidden() -> None:
    model = _model("continuous", "masked_value", mask_frac=0.3, dropout=0.2)
    batch = _tensors("continuous", lengths=(60,) * 40)
    n_targets = 0
    for step in range(20):
        n_targets += int(model.prepare(batch, seed=0, step=step).n_targets)
    assert n_targets / (20 * 2400) == pytest.approx(0.3, abs=0.01)


def test_training_leaves_the_generator_of_torch_alone() -> None:
    model = _model("continuous", "masked_value", dropout=0.2)
    state = torch.get_rng_state()
    model(model.prepare(_tensors("continuous"), seed=0, step=0)).backward()
    assert torch.equal(torch.get_rng_state(), state)


@every_kind
def test_the_loss_is_computed_from_the_predictions(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective, cell_loss_weight=0)
    prepared = model.prepare(_tensors(tokenizer), seed=0, step=0)
    predictions = _predicted(model, prepared)
    loss = model(prepared)
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    assert prepared.n_targets.dtype == torch.int64
    expected = 0.0
    for prediction, answer in zip(predictions, prepared.targets.tolist(), strict=True):
        if predictions.ndim == 1:
            expected += (prediction.item() - answer) ** 2
        else:
            first_class = 1 if objective == "masked_value" else 0  # bins count from 1
            expected -= prediction.log_softmax(0)[answer - first_class].item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@every_kind
def test_the_cell_loss_scores_what_the_embedding_predicts(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective, cell_loss_weight=1)
    twice = _model(tokenizer, objective, cell_loss_weight=2)
    prepared = model.prepare(_tensors(tokenizer), seed=0, step=0)
    (predictions, by_token), (_, by_cell) = _judged(model, prepared)
    assert model(prepared).item() == pytest.approx(by_token + by_cell, rel=1e-5)
    assert twice(prepared).item() == pytest.approx(by_token + 2 * by_cell, rel=1e-5)
    assert torch.equal(predictions, _predicted(model, prepared))


def test_the_embedding_of_a_cell_without_tokens_is_zero() -> None:
    model = _model("continuous", "masked_value").eval()
    batch = _tensors("continuous", lengths=(4, 0, 3))
    with torch.no_grad():
        vectors = model.embed(batch)
        first = model.embed(batch.slice_cells(0, 1))
        last = model.embed(batch.slice_cells(2, 3))
    torch.testing.assert_close(vectors[:1], first)
    torch.testing.assert_close(vectors[2:], last)
    assert not vectors[1].any()


def test_tensor_parallel_shards_only_existing_modules() -> None:
    model = _model("continuous", "masked_value")
    names = dict(model.named_modules())
    for name in model.plan.tensor:
        assert name.replace("*", "0") in names


def test_dropout_changes_with_the_step() -> None:
    model = _model("continuous", "masked_value", dropout=0.3)
    batch = _tensors("continuous")
    prepared = model.prepare(batch, seed=0, step=0)
    loss = model(prepared).item()
    assert model(prepared).item() == loss
    next_step = replace(prepared, dropout_keys=(0, 1))
    assert model(next_step).item() != loss


def test_dropout_is_off_in_evaluation() -> None:
    model = _model("continuous", "masked_value", dropout=0.3)
    plain = _model("continuous", "masked_value")
    prepared = model.prepare(_tensors("continuous"), seed=0, step=0)
    loss = model(prepared).item()
    assert model.eval()(prepared).item() == plain.eval()(prepared).item()
    assert model(prepared).item() != loss


def test_first_weights_have_the_spread_of_gpt_2() -> None:
    model = initialized(spec(N_GENES, _tokens("continuous"), hidden=16, layers=8, heads=2))
    first = model.state_dict()
    spread_of_embedding = first["gene_embedding.weight"].std().item()
    spread_of_output = first["blocks.0.out.weight"].std().item()
    assert spread_of_embedding == pytest.approx(0.02, rel=0.1)
    assert spread_of_output == pytest.approx(0.02 / 4, rel=0.1)
    assert (first["blocks.1.ffn_norm.weight"] == 1).all()
    assert not first["blocks.1.up.bias"].any()


@every_kind
def test_masked_tokens_are_replaced_by_the_split(tokenizer: str, objective: str) -> None:
    split = {"mask_frac": 0.5, "random_frac": 0.2, "keep_frac": 0.3}
    model = _model(tokenizer, objective, **split)
    plain = _model(tokenizer, objective, mask_frac=0.5)
    batch = _tensors(tokenizer, lengths=(32,) * 60)
    prepared = model.prepare(batch, seed=1, step=2)
    hidden = plain.prepare(batch, seed=1, step=2)
    targets = prepared.target_tokens
    assert torch.equal(targets, hidden.target_tokens)
    assert torch.equal(prepared.targets, hidden.targets)
    assert torch.equal(prepared.center, hidden.center), "only visible tokens count"
    field = "token_ids" if objective == "masked_gene" else "values"
    content = getattr(batch, field)
    prepared_content = getattr(prepared, field)
    is_visible = torch.ones(len(content), dtype=torch.bool)
    is_visible[targets] = False
    assert torch.equal(prepared_content[is_visible], content[is_visible])
    shown = prepared_content[targets]
    is_kept = shown == content[targets]
    is_masked = shown == 1 if objective == "masked_gene" else prepared.value_hidden[targets]
    is_random = ~is_masked & ~is_kept
    assert is_masked.float().mean() == pytest.approx(0.5, abs=0.06)
    # a random bin is often the cell's own
    assert is_kept.float().mean() == pytest.approx(0.3, abs=0.1)
    if objective == "masked_gene":
        assert not prepared.value_hidden.any()
        assert shown[~is_masked].min() >= 2, "no special token"
        assert len(shown[is_random].unique()) > 45
        assert shown[is_random].max() == N_GENES + 1
    else:  # random values are visible ones of the same cell
        values = shown[is_random].tolist()
        for position, value in zip(targets[is_random].tolist(), values, strict=True):
            is_of_cell = prepared.token_cells == prepared.token_cells[position]
            assert value in content[is_of_cell & is_visible].tolist()
    model.eval()
    without_split = model.prepare(batch, seed=1, step=2)
    assert torch.equal(getattr(without_split, field), getattr(hidden, field))


@every_kind
def test_the_cell_loss_is_computed_with_every_target_hidden(tokenizer: str, objective: str) -> None:
    model = _model(tokenizer, objective, random_frac=0.3, keep_frac=0.3)
    plain = _model(tokenizer, objective)
    batch = _tensors(tokenizer, lengths=(30, 1, 30))
    prepared = model.prepare(batch, seed=0, step=1)
    hidden = plain.prepare(batch, seed=0, step=1)
    targets = prepared.target_tokens
    expected = model.inputs(hidden, targets)
    queried = prepared.with_all_hidden(objective == "masked_gene")
    assert torch.equal(model.inputs(queried, targets), expected)
    assert not torch.equal(model.inputs(prepared, targets), expected)
    queries: list[torch.Tensor] = []
    model.cell_head.register_forward_hook(lambda head, inputs, _: queries.append(inputs[0]))
    model(prepared)
    assert torch.equal(queries[0][:, model.width :], expected)


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
    config = spec(60, tokens, objective="masked_value", renormalize=renormalize).objective
    objective = MaskedValue(config, tokens)
    cells = random_cells((20, 31, 1, 14, 2), tokens, 60)

    def prepared(counts: np.ndarray) -> tuple[Any, Batch]:
        starts = cells.cu_seqlens.astype(np.int64)
        tokenizer = tokens.load()(tokens)
        given = SparseCounts(starts, cells.token_ids - 2, counts)
        batch = tokenize_to_batch(tokenizer, given, cells.cell_ids, True)
        tensors = pad_batch(to_tensors(batch), 80)
        return objective.prepare(tensors, seed=3, step=4), tensors

    before, batch = prepared(cells.counts)
    louder = cells.counts.copy()
    louder[before.target_tokens.numpy()] *= 10
    after, _ = prepared(louder)
    assert torch.equal(before.targets, batch.values[before.target_tokens]), "values of whole cells"
    assert torch.equal(before.values, after.values) == renormalize
    is_same_center = renormalize or tokenizer == "binned"
    assert torch.equal(before.center, after.center) == is_same_center


def test_all_shipped_configurations_hide_the_library_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped = [ROOT / "config" / "config.yaml", *(ROOT / "config" / "examples").glob("*.yaml")]
    n_found = 0
    for path in shipped:
        if "masked_value" not in path.read_text(encoding="utf-8"):
            continue
        for run in load_config(path).runs.values():
            for part in run.objective.all_parts():
                if part.name == "masked_value":
                    assert part.needs_counts, path
                    n_found += 1
    assert n_found >= 4
