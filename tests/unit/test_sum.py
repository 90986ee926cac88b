"""sum: each part's loss is that of its objective alone, over its own targets; what one hides no
other shows.
"""

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
from cellmill.models.batch import on_device, padded, to_tensors
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.sum import Sum
from cellmill.parallel.step import ParallelModel
from cellmill.train.loop import LossParts
from tests.checks import refused
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
    return to_tensors(random_cells(lengths, TOKENS, N_GENES, rng=np.random.default_rng(seed)))


def test_each_part_equals_its_objective_on_the_shared_view() -> None:
    model = _model(objective="sum", parts=PARTS)
    batch = _cells()
    prepared = prepare(model, batch, 128)
    losses = model(prepared)
    masked = _model(objective="masked_value", mask_frac=0.4)
    of_view = masked.prepare(padded(model.view(batch, **KEYS), 128), **KEYS)
    assert torch.equal(losses[1], masked(of_view))
    assert int(of_view.n_targets) == int(prepared.n_targets[1]) != int(prepared.n_targets[0])
    decoding = _model(objective="cell_decoding", decoder_hidden=None)
    decoding.hidden_value = masked.hidden_value
    assert torch.equal(losses[0], decoding(prepared.parts[0]))
    shown = prepare(decoding, batch, 128)
    assert torch.equal(prepared.parts[0].weights, shown.weights)
    assert not torch.equal(decoding(shown), losses[0]), (
        "the cell's vector saw values that are hidden"
    )


def test_second_views_add_no_cells_to_other_parts() -> None:
    paired = PARTS | {"cell_decoding": PARTS["cell_decoding"] | {"view_loss": "vicreg"}}
    batch = _cells()
    plain, model = (_model(objective="sum", parts=parts) for parts in (PARTS, paired))
    one, both = (prepare(made, batch, 128) for made in (plain, model))
    shown = plain.view(batch, **KEYS)
    n = len(batch.lengths)
    assert torch.equal(both.n_targets, one.n_targets)
    assert torch.equal(both.parts[1].targets, one.parts[1].targets)
    assert torch.equal(both.parts[1].answers, one.parts[1].answers)
    assert both.parts[0].pairs.numel() > 0
    second = model.view(batch, **KEYS)
    assert (
        len(both.genes)
        == len(both.values)
        == len(both.token_keys)
        == 128
        > len(second.genes)
        > len(shown.genes)
    )
    assert len(both.cell_keys) == len(both.lengths) == len(both.cu_seqlens) - 1 > 2 * n
    assert torch.equal(
        both.values[len(shown.genes) : len(second.genes)], second.values[len(shown.genes) :]
    )
    assert both.value_hidden.nonzero().flatten().tolist() == one.parts[1].targets.tolist()
    torch.testing.assert_close(model.eval()(both), plain.eval()(one))


def test_gradients_equal_the_weighted_sum_of_means() -> None:
    model = _model(objective="sum", parts=PARTS)
    micro = [prepare(model, _cells(seed=seed, lengths=(9, 30)[: seed + 1]), 128) for seed in (0, 1)]
    n = torch.stack([prepared.n_targets for prepared in micro]).sum(0)
    losses = torch.stack([model(prepared) for prepared in micro]).sum(0) / n
    expected = torch.autograd.grad(losses[0] + 0.3 * losses[1], list(model.parameters()))
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), dp_world=1, model_parallel_size=1)
    parts = LossParts(model.objective, mesh.device)
    found = ParallelModel(model, Parallel(), mesh).forward_backward(
        micro, parts.targets(n), parts.weights
    )
    torch.testing.assert_close(found, losses.detach().double())
    for (name, parameter), gradient in zip(model.named_parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert parts.line("loss", found.tolist()).keys() == {"loss_cell_decoding", "loss_masked_value"}


def test_a_part_without_targets_has_zero_loss() -> None:
    model = _model(objective="sum", parts=PARTS)
    parts = LossParts(model.objective, torch.device("cpu"))
    losses = torch.tensor([2.0, 0.0]) / parts.targets(torch.tensor([4, 0]))
    assert parts.total(losses).item() == 0.5
    # a validation without any target has no loss: 0 would be the best of the run for ever
    none = torch.zeros(2, dtype=torch.float64)
    assert parts.total(none / parts.targets(none)).isnan()


def test_tensors_of_all_parts_are_copied_once() -> None:
    model = _model(objective="sum", parts=PARTS)
    copied = on_device(prepare(model, _cells(), 128), torch.device("meta"))
    tensors = [
        value
        for part in (copied, *copied.parts)
        for value in vars(part).values()
        if hasattr(value, "is_meta")
    ]
    assert all(tensor.is_meta for tensor in tensors)
    assert copied.parts[0].genes is copied.parts[1].genes is copied.genes


def test_verdicts_of_a_sum_are_those_of_its_parts() -> None:
    model = _model(objective="sum", parts=PARTS).eval()
    train = GeneStatistics(np.arange(N_GENES), np.linspace(1, 2, N_GENES), 1.5, 100)
    with torch.no_grad():
        batches = [prepare(model, _cells(seed=seed), 128) for seed in (0, 1)]
        observed = [model.objective.observe(model, prepared) for prepared in batches]
        figures, verdicts = model.objective.judge(*map(np.concatenate, zip(*observed)), train=train)
        for index, (name, part) in enumerate(model.objective.leaves().items()):
            alone = [part.observe(model, prepared.parts[index]) for prepared in batches]
            own, said = part.judge(*map(np.concatenate, zip(*alone)), train=train)
            assert {f"{name}.{key}": value for key, value in own.items()}.items() <= figures.items()
            assert set(said) <= set(verdicts)
    assert len(verdicts) == 2


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
            "parts: masked_value and masked_gene both hide tokens, and the model is given one batch; keep one",
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
        "objective.parts.masked_gene: its head head has the name of another part's; leave one of them out"
    ):
        objective.attach(_model(objective="cell_decoding"), 10)
