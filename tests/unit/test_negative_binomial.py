"""The chunked negative binomial loss equals torch's distribution; denoise is cell_decoding of thinned counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import NegativeBinomial

from cellmill.config.parts.tokens import Tokens
from cellmill.models.batch import to_tensors
from cellmill.models.objective import GeneStatistics
from cellmill.parallel import chunked_loss
from cellmill.parallel.likelihoods import nb_loss
from tests.models import KEYS, prepare, spec
from tests.unit.test_cell_decoding import _cells, _model

ROWS, HIDDEN = 40, 6
ENTRIES = [3, 1, 40, 7, 12]
STARTS = torch.tensor([0, 3, 4, 44, 51, 63])


def _numbers() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """States, table, bias and dispersion; genes and counts."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(ENTRIES), HIDDEN), (ROWS, HIDDEN), (ROWS,), (ROWS,))
    numbers = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    genes = torch.cat([torch.randperm(ROWS, generator=generator)[:n] for n in ENTRIES])
    return numbers, genes, torch.randint(1, 60, (len(genes),), generator=generator).float()


def _torchs(numbers: list[torch.Tensor], genes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    states, table, bias, dispersion = (x.double() for x in numbers)
    cell = torch.repeat_interleave(torch.tensor(ENTRIES))
    dense = torch.zeros(len(ENTRIES), ROWS, dtype=torch.float64).index_put((cell, genes), counts.double())
    mean = dense.sum(1, keepdim=True) * (states @ table.T + bias).softmax(1)
    inverse = dispersion.exp()
    likelihood = NegativeBinomial(total_count=inverse, logits=mean.log() - inverse.log()).log_prob(dense)
    return -(likelihood.sum(1) / dense.sum(1)).sum()


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_loss_and_gradients_are_torchs_whatever_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(chunked_loss.ELEMENTS, "cpu", chunk * ROWS)
    numbers, genes, counts = _numbers()
    found, expected = nb_loss(*numbers, ENTRIES, STARTS, genes, counts), _torchs(numbers, genes, counts)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for own, reference in zip(torch.autograd.grad(2 * found, numbers), torch.autograd.grad(2 * expected, numbers)):
        torch.testing.assert_close(own, reference, atol=1e-5, rtol=1e-5)


def test_the_loss_of_a_model_is_that_of_its_hidden_counts() -> None:
    model, batch = _model("profile", likelihood="nb"), to_tensors(_cells())
    prepared, view = prepare(model, batch), model.view(batch, **KEYS)
    assert torch.equal(prepared.weights, view.profile_count.float())
    vectors = model.decoder(model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells])
    numbers = [vectors, model.profile_genes.weight, model.profile_bias, model.profile_dispersion]
    expected = nb_loss(*numbers, prepared.entries, prepared.starts, view.profile_gene, view.profile_count.float())
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
