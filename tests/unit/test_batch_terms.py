"""Batch terms and adversary of cell_decoding against their definitions, and the batch's share of the embedding."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import to_tensors
from cellmill.models.export import write_tensors
from cellmill.train.validation import Monitor
from tests.models import config_json, genes_of, initialized, prepare, random_cells, spec

N_GENES = 60
LEVELS = {"assay": ("a", "b"), "batch": ("x", "y", "z")}
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 16, "layers": 1, "heads": 2},
    "profile": {"family": "profile", "hidden": 16, "layers": 1},
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def _model(family: str = "profile", levels: Any = LEVELS, init_from: Path | None = None, **options: Any) -> Any:
    given = {"batch_column": "batch"} | options
    tokens = Tokens.model_validate({"max_tokens": 64})
    return initialized(spec(N_GENES, tokens, levels, objective="cell_decoding", **FAMILIES[family], **given), init_from)


def _randomized(model: Any) -> Any:
    with torch.no_grad():
        model.batch_terms.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def _cells() -> Batch:
    levels = np.array([[1, 3], [2, 1], [1, 2], [2, 2], [1, 1], [2, 3]], np.int32)
    return random_cells((20, 31, 1, 14, 2, 9), Tokens.model_validate({"max_tokens": 64}), N_GENES, levels=levels)


def _parts(model: Any, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding loss, and cross-entropy of the adversary without reversal."""
    vectors = model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
    numbers = prepared.levels[prepared.target_cells, 1]
    terms = model.batch_terms.weight - model.batch_terms.weight.mean(0)
    decoded = model.decoder(vectors) + terms[numbers - 1]
    cell = torch.repeat_interleave(torch.tensor(prepared.entries))
    dense = torch.zeros(len(prepared.entries), N_GENES + 2).index_put((cell, prepared.genes_hidden), prepared.weights)
    logits = decoded @ model.profile_genes.weight.T + model.profile_bias
    guess = model.batch_adversary if hasattr(model, "batch_adversary") else None
    entropy = logits.new_zeros(())
    if guess is not None:
        entropy = F.cross_entropy(guess.out(F.gelu(guess.inner(vectors))), numbers - 1, reduction="sum")
    return -(dense * logits.log_softmax(1)).sum(), entropy


@EVERY_FAMILY
@pytest.mark.parametrize("decoder_hidden", [None, 24])
def test_the_decoder_adds_the_term_of_the_cell_s_batch(family: str, decoder_hidden: int | None) -> None:
    model = _model(family, decoder_hidden=decoder_hidden)
    prepared = prepare(model, to_tensors(_cells()))
    torch.testing.assert_close(
        _model(family, batch_column=None, decoder_hidden=decoder_hidden)(prepared), model(prepared)
    )
    loss = _randomized(model)(prepared)
    torch.testing.assert_close(loss, _parts(model, prepared)[0], rtol=1e-5, atol=1e-5)
    loss.backward()
    assert model.batch_terms.weight.grad.abs().sum() > 1e-3


def test_an_unknown_batch_has_no_term() -> None:
    model, batch = _randomized(_model()), to_tensors(_cells())
    unknown = replace(batch, levels=torch.zeros_like(batch.levels))  # type: ignore[arg-type]
    plain = _model(batch_column=None)
    torch.testing.assert_close(model(prepare(model, unknown)), plain(prepare(plain, batch)))
    known = prepare(model, batch)
    assert not torch.allclose(model.objective.observe(model, known)[1], plain.objective.observe(plain, known)[1])


@EVERY_FAMILY
def test_the_adversary_s_gradient_is_reversed_for_the_encoder_alone(family: str) -> None:
    model = _randomized(_model(family, batch_adversary=0.5, batch_adversary_scale=3.0))
    prepared = prepare(model, to_tensors(_cells()))
    decoding, entropy = _parts(model, prepared)
    loss = model(prepared)
    torch.testing.assert_close(loss, decoding + 0.5 * entropy, rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    of_decoding, of_entropy = (
        torch.autograd.grad(part, list(parameters.values()), retain_graph=True, allow_unused=True)
        for part in (decoding, entropy)
    )
    loss.backward()
    for (name, parameter), one, other in zip(parameters.items(), of_decoding, of_entropy):
        factor = 0.5 if name.startswith("batch_adversary") else -1.5
        none = torch.zeros_like(parameter)
        expected = (none if one is None else one) + factor * (none if other is None else other)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(prepared), decoding, rtol=1e-5, atol=1e-5)


def test_first_weights_of_a_batch_are_those_of_its_name(tmp_path: Path) -> None:
    source = _randomized(_model(batch_adversary=1.0))
    write_tensors(tmp_path / "model.safetensors", source.state_dict())
    genes_of(N_GENES).write(tmp_path / "vocabulary.tsv")
    (tmp_path / "config.json").write_text(config_json(levels=LEVELS))
    given = {"batch": ("new", "x", "z")}
    model, fresh = (_model(levels=given, init_from=path, batch_adversary=1.0) for path in (tmp_path, None))
    for name in ("batch_terms.weight", "batch_adversary.out.weight", "batch_adversary.out.bias"):
        ours, theirs, first = (dict(m.named_parameters())[name] for m in (model, source, fresh))
        assert torch.equal(ours[1:], theirs[[0, 2]])
        assert torch.equal(ours[0], first[0])


def test_an_adversary_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_adversary requires batch_column"):
        _model(batch_column=None, batch_adversary=1.0)


def test_the_share_of_the_batch_is_that_of_an_analysis_of_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    n, width = 200, 6
    numbers = torch.randint(1, 4, (n, 2), generator=generator)
    z = torch.randn(n, width, generator=generator) + torch.tensor([0.0, 0.7, -1])[numbers[:, 1] - 1, None]
    objective = SimpleNamespace(leaves=dict)
    model: Any = SimpleNamespace(vector_width=width, kept_vectors=None, objective=objective)
    mesh: Any = SimpleNamespace(device="cpu", pp=SimpleNamespace(size=lambda: 1), sum=lambda tensor: tensor)
    monitor = Monitor(model, LEVELS, "batch")
    for cells in torch.arange(n).split(70):
        ends = torch.arange(len(cells) + 1, dtype=torch.int32)
        ones = torch.ones(len(cells))
        batch = Batch(ones.long(), ones, ends, cells, levels=numbers[cells])
        with monitor.watching([batch]):
            model.kept_vectors.append(torch.cat([z[cells], torch.full((3, width), 1e6)]))  # and cells of padding
    centered = (z - z.mean(0)).double()
    within = sum(
        (own - own.mean(0)).square().sum() for level in (1, 2, 3) for own in [z[numbers[:, 1] == level].double()]
    )
    line = monitor.line(mesh)
    assert line["batch_r2"] == pytest.approx(float(1 - within / centered.square().sum()))
    assert 0.1 < line["batch_r2"] < 0.9
    assert "batch_r2" not in Monitor(model).line(mesh)
