"""query_decoding: hidden genes are a fair draw, do not reach the model, and its loss is the definition."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import check_config
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import to_tensors
from cellmill.models.build import build
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.query_decoding import QueryView
from cellmill.planner.size import measure
from tests.checks import refused
from tests.models import KEYS, initialized, prepare, random_cells, spec

N_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
ENCODER = {"hidden": 16, "layers": 2, "heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "autoencoder": ENCODER | {"family": "autoencoder", "latent": 6},
    "encoder": ENCODER | {"family": "encoder"},
    "profile": {"family": "profile", "hidden": 16, "layers": 1},
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
DECODER = {"decoder_hidden": 12, "decoder_layers": 1}


def _spec(family: str, **options: Any) -> Any:
    return spec(N_GENES, TOKENS, objective="query_decoding", **FAMILIES[family] | DECODER | options)


def _model(family: str, **options: Any) -> Any:
    return initialized(_spec(family, **options))


def _cells(lengths: tuple[int, ...] = (20, 31, 1, 14, 2, N_GENES)) -> Batch:
    return random_cells(lengths, TOKENS, N_GENES)


def _view(batch: Batch, step: int = 4, **options: Any) -> QueryView:
    view = build(_spec("profile", **options)).view(batch, seed=3, step=step)
    assert isinstance(view, QueryView)
    return view


def test_queried_genes_are_hidden_ones_with_the_values_of_the_whole_cell() -> None:
    batch = to_tensors(_cells())
    view = _view(batch, max_asked=8, undetected_ratio=2)
    shown = torch.repeat_interleave(torch.tensor(view.lengths))
    given = {(int(cell), int(gene)) for cell, gene in zip(shown, view.genes)}
    whole = torch.repeat_interleave(torch.tensor(batch.lengths))
    values = {(int(cell), int(gene)): float(v) for cell, gene, v in zip(whole, batch.genes, batch.values)}
    asked = [(int(cell), int(gene)) for cell, gene in zip(view.query_cell, view.query_genes)]
    assert not given & set(asked)
    assert view.query_values.tolist() == [values.get(query, 0.0) for query in asked]
    assert {gene for _, gene in asked} <= set(range(2, N_GENES + 2))
    for cell, length in enumerate(batch.lengths):
        detected = [query for query in asked if query[0] == cell and query in values]
        hidden = length - view.lengths[cell]
        assert len(detected) == len(set(detected)) == min(hidden, 8)
        undetected = sum(query[0] == cell for query in asked) - len(detected)
        assert undetected == (0 if length == N_GENES else 2 * len(detected))


def test_undetected_genes_are_drawn_evenly() -> None:
    batch = to_tensors(_cells((20,)))
    drawn = torch.cat([_view(batch, step=step, undetected_ratio=50).query_genes for step in range(40)])
    absent = torch.ones(N_GENES + 2, dtype=torch.bool)
    absent[:2] = absent[batch.genes] = False
    counts = torch.bincount(drawn, minlength=N_GENES + 2)[absent].double()
    expected = counts.mean()
    assert len(counts) == N_GENES - 20
    # chi-squared of 39 degrees of freedom: mean 39, standard deviation 9
    assert ((counts - expected).square() / expected).sum() < 39 + 4 * 9


def test_weights_count_the_hidden_genes_of_the_vocabulary() -> None:
    batch = to_tensors(_cells((30,) * 400))
    view = _view(batch, max_asked=5, undetected_ratio=0.5, min_hidden_frac=0.4, max_hidden_frac=0.4)
    detected = view.query_values > 0
    sums = [float(view.query_weights[at].double().sum()) for at in (detected, ~detected)]
    assert sums[0] == pytest.approx(400 * 30 - sum(view.lengths))  # each hidden one, though 5 of a cell are asked
    assert sums[1] == pytest.approx(400 * 0.4 * (N_GENES - 30))


@EVERY_FAMILY
def test_hidden_genes_do_not_reach_the_cell_vector(family: str) -> None:
    model, batch = _model(family), to_tensors(_cells())
    shown = model.view(batch, **KEYS)
    key = batch.genes + 1000 * torch.repeat_interleave(torch.tensor(batch.lengths))
    seen = torch.isin(key, shown.genes + 1000 * torch.repeat_interleave(torch.tensor(shown.lengths)))
    assert batch.counts is not None
    louder = replace(batch, counts=torch.where(seen, batch.counts, 50 * batch.counts), values=batch.values + 1)
    one, other = (prepare(model, given) for given in (batch, louder))
    assert torch.equal(*(model.cell_vectors(model.states(prepared), prepared) for prepared in (one, other)))
    assert not torch.equal(one.query_values, other.query_values)


@EVERY_FAMILY
def test_loss_is_the_squared_error_over_hidden_genes_in_the_measure_of_asked_ones(family: str) -> None:
    model = _model(family, undetected_ratio=0.5)
    view = model.view(to_tensors(_cells()), **KEYS)
    prepared = model.prepare(view, **KEYS)
    errors = (model.objective.answers(model, model.states(prepared), prepared) - view.query_values).square().double()
    expected = 0.0
    for cell in view.query_cell.unique():
        own = view.query_cell == cell
        mean = (view.query_weights[own] * errors[own]).sum() / view.query_weights[own].sum()
        expected += int(own.sum()) * mean.item()
    assert model(prepared).item() == pytest.approx(expected, rel=1e-5)
    assert int(prepared.n_targets) == len(view.query_cell) > 50
    assert prepared.query_weights.max() > 1.2


@pytest.mark.full
def test_the_plan_counts_the_decoder() -> None:
    plain, wide = (measure(_spec("autoencoder", decoder_layers=n)) for n in (1, 2))
    assert wide.parameters - plain.parameters == 8 * 12**2 + 7 * 12
    asked = [measure(_spec("autoencoder", max_asked=n)) for n in (2, 10)]
    assert asked[0].workspace_of(1 << 14) + asked[0].finish.activations_per_token * (1 << 14) < 0.7 * (
        asked[1].workspace_of(1 << 14) + asked[1].finish.activations_per_token * (1 << 14)
    )


def test_a_model_is_judged_against_the_mean_with_zeros() -> None:
    objective = _model("profile").objective
    train = GeneStatistics(np.array([59, 0]), np.array([2.0, 1.0]), 2.0, 118)  # means 1 and 0
    genes, values, weights = np.array([0, 0, 1]), np.array([3.0, 0.0, 0.0]), np.array([2.0, 1.0, 1.0])
    figures, [verdict] = objective.judge(genes, values, np.array([2.0, 0.5, 0.5]), weights, train=train)
    own, base = (2 * 1.0 + 0.25 + 0.25) / 4, (2 * 4.0 + 1.0 + 0.0) / 4
    assert (figures["mse"], figures["mse_gene_mean"]) == pytest.approx((own, base))
    assert (figures["r2_over_gene_mean"], figures["detected_frac"]) == pytest.approx((1 - own / base, 0.5))
    assert (verdict.outcome, verdict.difference) == ("ahead", pytest.approx(1 - own / base))
    assert objective.judge(genes, means := np.array([1.0, 1.0, 0.0]), means, weights, train=train)[1] == []


def test_tokens_without_numbers_are_refused() -> None:
    tree = {"corpora": {"a": {}}, "runs": {"x": {"corpus": "a"}}, "train": {"steps": 1}}
    chosen = {"objective": {"name": "query_decoding"}, "tokens": {"tokenizer": "binned"}}
    with refused("config.yaml: runs.x: objective query_decoding needs numbers, got binned; choose continuous"):
        check_config(tree | chosen, "config.yaml")


@pytest.mark.parametrize(
    ("key", "place"),
    [("decoder_layers", "objective.decoder_layers"), ("decoder_dim", "objective.decoder_hidden")],
)
def test_the_decoder_of_an_autoencoder_is_named_where_it_stands(key: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'; set {place}"):
        FamilyConfig.model_validate({"family": "autoencoder", key: 4})
