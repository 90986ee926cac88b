"""cell_decoding, its likelihoods and denoise: losses written out, and what hidden expression may reach."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import NegativeBinomial
from torch.nn import functional as F

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import to_tensors
from cellmill.models.objective import GeneStatistics
from cellmill.parallel import likelihoods
from cellmill.parallel.likelihoods import profile_loss
from tests.checks import check_gradients
from tests.models import KEYS, initialized, prepare, random_cells, spec

N_GENES = 60
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2},
    "encoder without blocks": {"family": "encoder", "hidden": 16, "layers": 0, "heads": 2},
    "profile": {"family": "profile", "hidden": 16, "layers": 1},
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def _model(family: str, **options: Any) -> Any:
    given = {"objective": "cell_decoding"} | FAMILIES[family] | options
    return initialized(spec(N_GENES, Tokens.model_validate({"max_tokens": 64}), **given))


def _cells(lengths: tuple[int, ...] = (20, 31, 1, 14, 2, 1)) -> Batch:
    return random_cells(lengths, Tokens.model_validate({"max_tokens": 64}), N_GENES)


def _dense_targets(prepared: Any) -> torch.Tensor:
    cell = torch.repeat_interleave(torch.tensor(prepared.entries))
    dense = torch.zeros(len(prepared.entries), N_GENES + 2)
    return dense.index_put((cell, prepared.genes_hidden), prepared.weights)


@EVERY_FAMILY
@pytest.mark.parametrize("decoder_hidden", [None, 24])
def test_loss_is_the_cross_entropy_of_the_hidden_profile(family: str, decoder_hidden: int | None) -> None:
    model = _model(family, decoder_hidden=decoder_hidden)
    prepared = prepare(model, to_tensors(_cells()))
    targets = _dense_targets(prepared)
    torch.testing.assert_close(targets.sum(1), torch.ones(len(targets)))
    vectors = model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
    logits = model.decoder(vectors) @ model.profile_genes.weight.T + model.profile_bias
    expected = -(targets * logits.log_softmax(1)).sum()
    loss = model(prepared)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert int(prepared.n_targets) == len(targets)
    check_gradients(model, loss, expected)


def test_weights_are_log_counts_or_counts() -> None:
    batch = to_tensors(_cells((30,)))
    for weights, of in (("counts", torch.Tensor.double), ("log1p", torch.log1p)):
        model = _model("profile", weights=weights)
        view = model.view(batch, **KEYS)
        expected = of(view.profile_count)
        torch.testing.assert_close(model.prepare(view, **KEYS).weights, (expected / expected.sum()).float())


@EVERY_FAMILY
def test_hidden_expression_does_not_reach_the_cell_vector(family: str) -> None:
    model, batch = _model(family, view="drop"), to_tensors(_cells())
    view = model.view(batch, **KEYS)
    assert batch.counts is not None
    hidden = torch.zeros(len(batch.lengths), N_GENES + 2, dtype=torch.bool)
    hidden[view.profile_cell, view.profile_gene] = True
    cell = torch.repeat_interleave(torch.tensor(batch.lengths))
    of_token = hidden[cell, batch.genes]
    louder = replace(batch, counts=torch.where(of_token, 50 * batch.counts, batch.counts), values=batch.values + 1)
    one, other = (prepare(model, given) for given in (batch, louder))
    vectors = [model.cell_vectors(model.states(prepared), prepared) for prepared in (one, other)]
    assert torch.equal(*vectors)
    assert not torch.equal(one.weights, other.weights)


def test_the_profile_encoder_is_a_perceptron_on_the_log_normalised_profile() -> None:
    model, batch = _model("profile"), to_tensors(_cells())
    dense = torch.zeros(len(batch.lengths), N_GENES + 2)
    dense[torch.repeat_interleave(torch.tensor(batch.lengths)), batch.genes] = batch.values
    x = dense @ model.gene_embedding.weight
    x = x + model.blocks[0].down(F.gelu(model.blocks[0].up(model.blocks[0].norm(x))))
    torch.testing.assert_close(model.embed(batch), model.norm(x), rtol=1e-4, atol=1e-5)


def test_a_model_is_judged_against_the_mean_profile() -> None:
    objective = _model("profile").objective
    train = GeneStatistics(np.array([99, 0, 49]), np.array([1.0, 1.0, 2.0]), 1.0, 100)  # 1/2, 1/200 and 99/200
    genes, weights, per_cell = np.array([0, 2, 0]), np.array([0.5, 0.5, 1.0]), np.array([0.5, 0.5, 1.0])
    log_p = np.log([0.6, 0.3, 0.6])
    figures, verdicts = objective.judge(genes, log_p, weights, per_cell, train=train)
    own = -(0.5 * np.log(0.6) + 0.5 * np.log(0.3) + np.log(0.6)) / 2
    base = -(0.5 * np.log(0.5) + 0.5 * np.log(99 / 200) + np.log(0.5)) / 2
    assert figures["cross_entropy"] == pytest.approx(own)
    assert figures["cross_entropy_mean_profile"] == pytest.approx(base)
    assert figures["saved_frac"] == pytest.approx(1 - own / base)
    assert [verdict.outcome for verdict in verdicts] == ["behind" if own > base else "ahead"]


ROWS, HIDDEN = 40, 6
ENTRIES = [3, 1, 40, 7, 12]
STARTS = torch.tensor([0, 3, 4, 44, 51, 63])


def _torchs(numbers: list[torch.Tensor], genes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    states, table, bias, *dispersion = (x.double() for x in numbers)
    cell = torch.repeat_interleave(torch.tensor(ENTRIES))
    dense = torch.zeros(len(ENTRIES), ROWS, dtype=torch.float64).index_put((cell, genes), weights.double())
    logits = states @ table.T + bias
    if not dispersion:
        return F.cross_entropy(logits, dense, reduction="sum")
    mean, inverse = dense.sum(1, keepdim=True) * logits.softmax(1), dispersion[0].exp()
    likelihood = NegativeBinomial(total_count=inverse, logits=mean.log() - inverse.log()).log_prob(dense)
    return -(likelihood.sum(1) / dense.sum(1)).sum()


@pytest.mark.parametrize("likelihood", ["softmax", "nb"])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_loss_and_gradients_are_torchs_whatever_the_chunk(
    monkeypatch: pytest.MonkeyPatch, chunk: int, likelihood: str
) -> None:
    monkeypatch.setitem(likelihoods.ELEMENTS, "cpu", chunk * ROWS)
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(ENTRIES), HIDDEN), (ROWS, HIDDEN), (ROWS,), (ROWS,))[: 4 if likelihood == "nb" else 3]
    numbers = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    genes = torch.cat([torch.randperm(ROWS, generator=generator)[:n] for n in ENTRIES])
    weights = torch.randint(1, 60, (len(genes),), generator=generator).float()
    if likelihood == "softmax":
        weights = torch.cat([part / part.sum() for part in weights.split(ENTRIES)])
    found = profile_loss(*numbers[:3], ENTRIES, STARTS, genes, weights, *numbers[3:])
    expected = _torchs(numbers, genes, weights)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for own, reference in zip(torch.autograd.grad(2 * found, numbers), torch.autograd.grad(2 * expected, numbers)):
        torch.testing.assert_close(own, reference, atol=1e-5, rtol=1e-5)


def test_the_loss_of_a_model_is_that_of_its_hidden_counts() -> None:
    model, batch = _model("profile", likelihood="nb"), to_tensors(_cells())
    prepared, view = prepare(model, batch), model.view(batch, **KEYS)
    assert torch.equal(prepared.weights, view.profile_count.float())
    vectors = model.decoder(model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells])
    numbers = [vectors, model.profile_genes.weight, model.profile_bias]
    hidden = prepared.entries, prepared.starts, view.profile_gene, view.profile_count.float()
    expected = profile_loss(*numbers, *hidden, model.profile_dispersion)
    assert torch.equal(model(prepared), expected)
    assert "profile_dispersion" in model.gene_rows & set(model.plan.finish)


def test_means_are_judged_like_those_of_counts() -> None:
    multinomial, nb = (_model("profile", **given) for given in ({"weights": "counts"}, {"likelihood": "nb"}))
    train = GeneStatistics(np.ones(60, np.int64), np.ones(60), 1.0, 10)
    figures = []
    for model in (multinomial, nb):
        observed = model.objective.observe(model, prepare(model, to_tensors(_cells())))
        figures.append(model.objective.judge(*(x.detach().numpy() for x in observed), train=train)[0])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


def test_denoise_is_cell_decoding_of_thinned_counts_that_predicts_the_whole_cell() -> None:
    batch = to_tensors(_cells())
    preset = _model("encoder", objective="denoise", decoder_hidden=None)
    same = _model("encoder", view="thin", target="all", decoder_hidden=None)
    prepared, expected = (prepare(model, batch) for model in (preset, same))
    assert torch.equal(preset(prepared), same(expected))
    assert torch.equal(prepared.genes_hidden, batch.genes), "the whole cell is predicted"
    assert sum(prepared.lengths) < len(batch.genes), "and a part of it shown"
    with pytest.raises(ValueError, match="objective denoise needs values made from counts"):
        spec(9, objective="denoise").objective.check_tokens(Tokens.model_validate({"tokenizer": "rank"}))
