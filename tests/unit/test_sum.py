"""sum: each part's loss is that of its objective alone, over its own targets; what one hides no
other shows.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import check_options
from cellmill.config.parallel import Parallel
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.objectives import SumConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.counter_rng import host_state, keyed_token_bits
from cellmill.models.objective import GeneStatistics, Objective
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.classification import Classification
from cellmill.models.objectives.masked_gene import MaskedGene
from cellmill.models.objectives.next_gene import NextGene
from cellmill.models.objectives.shared import masking, views
from cellmill.models.objectives.sum import Sum
from cellmill.parallel.step import ParallelModel
from cellmill.train.step_report import LossParts
from tests.checks import gradients_by_name, refused
from tests.models import KEYS, initialized, prepare, random_cells, spec

N_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
PARTS: dict[str, Any] = {
    "cell_decoding": {"decoder_hidden": None},
    "masked_value": {"weight": 0.3, "mask_frac": 0.4},
}


def _model(**objective: Any) -> Any:
    """A model with the initial values of seed 0, which depend on the names of parameters alone."""
    return initialized(
        spec(N_GENES, TOKENS, hidden=16, layers=1, heads=2, dropout=0.1, **objective)
    ).train()


def _cells(lengths: tuple[int, ...] = (20, 31, 1, 14, 2), seed: int = 0) -> Batch:
    return to_tensors(random_cells(lengths, TOKENS, N_GENES, seed=seed))


def test_each_part_equals_its_objective_on_the_shared_view() -> None:
    model = _model(objective="sum", parts=PARTS)
    batch = _cells()
    prepared = prepare(model, batch, 128)
    losses = model(prepared)
    masked = _model(objective="masked_value", mask_frac=0.4)
    masked.objective.in_view = True
    of_view = masked.prepare(pad_batch(model.view(batch, **KEYS), 128), **KEYS)
    assert torch.equal(losses[1], masked(of_view))
    assert int(of_view.n_targets) == int(prepared.n_targets[1]) != int(prepared.n_targets[0])
    decoding = _model(objective="cell_decoding", decoder_hidden=None)
    decoding.hidden_value = masked.hidden_value
    assert torch.equal(losses[0], decoding(prepared.part_batches[0]))
    shown = prepare(decoding, batch, 128)
    assert torch.equal(prepared.part_batches[0].entry_targets, shown.entry_targets)
    assert not torch.equal(decoding(shown), losses[0]), (
        "the cell's vector saw values that are hidden"
    )


def test_a_mask_shares_no_draw_with_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are recorded as states: equal keys have equal states."""
    states: dict[str, set[int]] = {"view": set(), "mask": set()}

    def view_state(*keys: Any, **state: Any) -> Any:
        folded = host_state(*keys, **state)
        states["view"] |= {*(folded >> np.uint64(1)).astype(np.int64).tolist()}
        return folded

    def mask_bits(*keys: Any) -> torch.Tensor:
        bits = keyed_token_bits(*keys)
        states["mask"] |= {*bits.tolist()}
        return bits

    monkeypatch.setattr(views, "host_state", view_state)
    monkeypatch.setattr(masking, "keyed_token_bits", mask_bits)
    for view in ("drop", "thin", "drop_thin"):
        parts = PARTS | {"cell_decoding": PARTS["cell_decoding"] | {"view": view}}
        prepare(_model(objective="sum", parts=parts), _cells(), 128)
        assert len(states["view"]) > 5
        assert len(states["mask"]) > 5
        assert not states["view"] & states["mask"]


def test_a_mask_without_a_view_has_the_keys_of_its_objective() -> None:
    batch = _cells()
    parts = {"masked_value": PARTS["masked_value"]}
    summed = prepare(_model(objective="sum", parts=parts), batch, 128)
    alone = prepare(_model(objective="masked_value", mask_frac=0.4), batch, 128)
    assert torch.equal(summed.part_batches[0].target_tokens, alone.target_tokens)


@pytest.mark.parametrize(
    ("base", "former", "name"),
    [
        (Objective, "tensor", "tensor_parallel_styles"),
        (Objective, "rows", "coupled_rows"),
        (Objective, "leaves", "parts_by_name"),
        (CellDecoding, "decode", "decoder_features"),
        (CellDecoding, "rows", "coupled_rows"),
        (Classification, "labels", "label_names"),
        (NextGene, "gene_logits", "predict_gene_logits"),
        (MaskedGene, "hide", "corrupt"),
    ],
)
def test_former_names_of_attributes_are_refused(base: type, former: str, name: str) -> None:
    with refused(f"{__name__}.Old.{former}: expected {name}, its new name; rename it"):
        type("Old", (base,), {former: {}, "__module__": __name__})


def test_second_views_add_no_cells_to_other_parts() -> None:
    paired = PARTS | {"cell_decoding": PARTS["cell_decoding"] | {"view_loss": "vicreg"}}
    batch = _cells()
    plain = _model(objective="sum", parts=PARTS)
    model = _model(objective="sum", parts=paired)
    one = prepare(plain, batch, 128)
    both = prepare(model, batch, 128)
    assert torch.equal(both.n_targets, one.n_targets)
    assert torch.equal(both.part_batches[1].target_tokens, one.part_batches[1].target_tokens)
    assert torch.equal(both.part_batches[1].targets, one.part_batches[1].targets)
    assert both.part_batches[0].pairs.numel() > 0
    # the second views stand after the first ones, and padding after them
    n_first = len(plain.view(batch, **KEYS).token_ids)
    views = model.view(batch, **KEYS)
    n_tokens = len(views.token_ids)
    assert n_first < n_tokens < 128
    for field in (both.token_ids, both.values, both.token_keys):
        assert len(field) == 128
    assert len(both.lengths) > 2 * len(batch.lengths)
    assert len(both.cell_keys) == len(both.lengths)
    assert len(both.cu_seqlens) == len(both.lengths) + 1
    assert torch.equal(both.values[n_first:n_tokens], views.values[n_first:])
    masked = both.value_hidden.nonzero().flatten()
    assert masked.tolist() == one.part_batches[1].target_tokens.tolist()
    torch.testing.assert_close(model.eval()(both), plain.eval()(one))


def test_gradients_equal_the_weighted_sum_of_means() -> None:
    model = _model(objective="sum", parts=PARTS)
    first = prepare(model, _cells(seed=0, lengths=(9,)), 128)
    second = prepare(model, _cells(seed=1, lengths=(9, 30)), 128)
    n_targets = first.n_targets + second.n_targets
    means = (model(first) + model(second)) / n_targets
    expected = gradients_by_name(model, means[0] + 0.3 * means[1])
    model.zero_grad()
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), dp_world=1, model_parallel_size=1)
    parts = LossParts(model.objective, mesh.device)
    losses = ParallelModel(model, Parallel(), mesh).forward_backward(
        [first, second], parts.divisors(n_targets), parts.weights
    )
    torch.testing.assert_close(losses, means.detach().double())
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7, msg=name)
    line = parts.name_losses("loss", losses.tolist())
    assert line.keys() == {"loss_cell_decoding", "loss_masked_value"}


def test_a_part_without_targets_has_zero_loss() -> None:
    model = _model(objective="sum", parts=PARTS)
    parts = LossParts(model.objective, torch.device("cpu"))
    losses = torch.tensor([2.0, 0.0]) / parts.divisors(torch.tensor([4, 0]))
    assert (losses * parts.weights).sum().item() == 0.5
    # a validation without any target has no loss: 0 would be the best of the run for ever
    none = torch.zeros(2, dtype=torch.float64)
    assert (none / parts.divisors(none)).isnan().all()
    # nor has one whose only targets are of a part that it leaves out
    assert parts.validation_loss(torch.tensor([2.0, 1.0]), torch.tensor([4, 4])) == pytest.approx(
        2.3
    )
    parts.is_validated = torch.tensor([True, False])
    assert parts.validation_loss(torch.tensor([2.0, 1.0]), torch.tensor([4, 4])) == 2.0
    assert math.isnan(parts.validation_loss(torch.tensor([0.0, 1.0]), torch.tensor([0, 4])))


def test_tensors_of_all_parts_are_copied_once() -> None:
    model = _model(objective="sum", parts=PARTS)
    copied = copy_to_device(prepare(model, _cells(), 128), torch.device("meta"))
    for part in (copied, *copied.part_batches):
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                assert value.is_meta
        assert part.token_ids is copied.token_ids


def _observe(objective: Any, model: Any, batches: list[Any]) -> list[np.ndarray]:
    """What an objective observes of all batches, one array after the other."""
    by_batch = [objective.observe(model, batch) for batch in batches]
    return [torch.cat(tensors).numpy() for tensors in zip(*by_batch)]


def test_verdicts_of_a_sum_are_those_of_its_parts() -> None:
    model = _model(objective="sum", parts=PARTS).eval()
    means = np.linspace(1, 2, N_GENES)
    profile = means / means.sum()
    shown = GeneStatistics(np.arange(N_GENES), means, 1.5, 100)
    whole = GeneStatistics(shown.n_tokens, means + 1, 2.5, 100, None, None, profile, shown)
    with torch.no_grad():
        prepared = [prepare(model, _cells(seed=seed), 128) for seed in (0, 1)]
        observed = _observe(model.objective, model, prepared)
        figures, verdicts = model.objective.judge(*observed, statistics=whole)
        for index, (name, part) in enumerate(model.objective.parts_by_name().items()):
            batches_of_part = [batch.part_batches[index] for batch in prepared]
            observed_by_part = _observe(part, model, batches_of_part)
            statistics = shown if name == "masked_value" else whole
            figures_of_part, verdicts_of_part = part.judge(*observed_by_part, statistics=statistics)
            for key, value in figures_of_part.items():
                assert figures[f"{name}.{key}"] == value
            assert set(verdicts_of_part) <= set(verdicts)
    assert [verdict.compared for verdict in verdicts] == [
        "prediction of the hidden expression",
        "prediction of masked values",
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sum": {}}, "parts: sum: a sum cannot be part of a sum; list its parts in its place"),
        (
            {"masked_valu": {}},
            "parts: unknown objective 'masked_valu'; did you mean 'masked_value'?",
        ),
        (
            {"masked_value": {"weigth": 1}},
            "parts: masked_value: unknown key 'weigth'; did you mean 'weight'?",
        ),
        (
            {"masked_value": {"weight": 0}},
            "parts: masked_value.weight: input should be greater than 0, got 0",
        ),
        (
            {"masked_value": {}, "masked_gene": {}},
            "parts: masked_value and masked_gene hide tokens or read them as targets, and the model is given one "
            "batch; keep one",
        ),
        (
            {"cell_decoding": {}, "denoise": {}},
            "parts: cell_decoding and denoise draw a view, and the model is given one; keep one",
        ),
        (
            {"cell_decoding": {}, "next_gene": {}},
            "parts: next_gene predicts where whole cells end, and another part draws a view; keep one",
        ),
        (
            {"2nd": {"name": "denoise"}},
            "parts: expected a name that starts with a letter and has only letters, digits and _, got 2nd; choose "
            "another",
        ),
    ],
)
def test_parts_that_cannot_be_summed_are_refused(parts: dict[str, Any], message: str) -> None:
    with refused(f"x: {message}"):
        check_options(ObjectiveConfig, {"name": "sum", "parts": parts}, "x")


def test_stored_options_equal_those_of_the_run() -> None:
    config = ObjectiveConfig.model_validate(
        {"name": "sum", "parts": {"masked_value": None, "cell_decoding": {}}}
    )
    assert ObjectiveConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.needs_counts
    with pytest.raises(ValueError, match="objective masked_value needs values"):
        config.check_tokens(Tokens.model_validate({"tokenizer": "rank"}))


def test_two_heads_of_one_name_are_refused() -> None:
    parts: dict[str, Any] = {}
    for name in ("masked_value", "masked_gene"):
        parts |= SumConfig.model_validate({"parts": {name: {"cell_loss_weight": 0}}}).parts
    objective = Sum(SumConfig.model_construct(name="sum", parts=parts), TOKENS)
    with refused(
        "objective.parts.masked_gene: the model already has an attribute head; leave this part out, or "
        "let its attach use another name"
    ):
        objective.attach(_model(objective="cell_decoding"), 10)


def test_an_undeclared_view_is_refused_by_the_name_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SumConfig.model_validate({"parts": {"renamed": {"name": "cell_decoding"}}})
    monkeypatch.setattr(type(config.parts["renamed"]), "draws_view", False)
    with refused(
        "objective.parts.renamed: it draws a view; its options class has to set draws_view"
    ):
        Sum(config, TOKENS)
