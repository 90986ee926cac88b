"""cell_decoding with all that belongs to it, denoise and query_decoding: losses written out, and
what they may see.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.load import check_config
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import to_tensors
from cellmill.models.build import build
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.query_decoding import QueryView
from cellmill.parallel.likelihoods import profile_loss
from cellmill.planner.size import measure
from cellmill.train.validation import Monitor
from tests.checks import check_gradients, refused
from tests.models import KEYS, initialized, prepare, random_cells, spec

N_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
LEVELS = {"assay": ("a", "b"), "batch": ("x", "y", "z")}
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2},
    "encoder without blocks": {"family": "encoder", "hidden": 16, "layers": 0, "heads": 2},
    "profile": {"family": "profile", "hidden": 16, "layers": 1},
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def decoding_model(family: str, **options: Any) -> Any:
    """A model of cell_decoding whose batch terms, if it has any, are not zero."""
    model = initialized(
        spec(N_GENES, TOKENS, LEVELS, **{"objective": "cell_decoding"} | FAMILIES[family] | options)
    )
    if hasattr(model, "batch_terms"):
        torch.nn.init.normal_(model.batch_terms.weight, generator=torch.Generator().manual_seed(1))
    return model


def cells_of(lengths: tuple[int, ...] = (20, 31, 1, 14, 2, 9)) -> Batch:
    levels = np.resize(
        np.array([[1, 3], [2, 1], [1, 2], [2, 2], [1, 1], [2, 3]], np.int32), (len(lengths), 2)
    )
    return to_tensors(random_cells(lengths, TOKENS, N_GENES, levels=levels))


def _dense_targets(prepared: Any) -> torch.Tensor:
    cell = torch.repeat_interleave(torch.tensor(prepared.entries))
    dense = torch.zeros(len(prepared.entries), N_GENES + 2)
    return dense.index_put((cell, prepared.genes_hidden), prepared.weights)


def _losses(model: Any, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding loss, and cross-entropy of the adversary without reversal."""
    vectors = model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
    decoded = model.decoder(vectors)
    entropy = torch.zeros(())
    batch = prepared.levels[prepared.target_cells, 1] - 1
    if hasattr(model, "batch_terms"):
        decoded = decoded + (model.batch_terms.weight - model.batch_terms.weight.mean(0))[batch]
    if hasattr(model, "batch_adversary"):
        guess = model.batch_adversary
        entropy = F.cross_entropy(guess.out(F.gelu(guess.inner(vectors))), batch, reduction="sum")
    logits = decoded @ model.profile_genes.weight.T + model.profile_bias
    return -(_dense_targets(prepared) * logits.log_softmax(1)).sum(), entropy


@EVERY_FAMILY
@pytest.mark.parametrize("decoder_hidden", [None, 24])
@pytest.mark.parametrize("batch_column", [None, "batch"])
def test_loss_is_the_cross_entropy_of_the_hidden_profile(
    family: str, decoder_hidden: int | None, batch_column: str | None
) -> None:
    model = decoding_model(family, decoder_hidden=decoder_hidden, batch_column=batch_column)
    prepared = prepare(model, cells_of())
    sums = _dense_targets(prepared).sum(1)
    torch.testing.assert_close(sums, torch.ones(int(prepared.n_targets)))
    loss, (expected, _) = model(prepared), _losses(model, prepared)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    check_gradients(model, loss, expected)


def test_weights_are_log_counts_or_counts() -> None:
    batch = cells_of((30,))
    for weights, of in (("counts", torch.Tensor.double), ("log1p", torch.log1p)):
        model = decoding_model("profile", weights=weights)
        view = model.view(batch, **KEYS)
        expected = of(view.profile_count)
        torch.testing.assert_close(
            model.prepare(view, **KEYS).weights, (expected / expected.sum()).float()
        )


@EVERY_FAMILY
@pytest.mark.parametrize(
    ("options", "answers"),
    [
        ({"objective": "cell_decoding", "view": "drop"}, "weights"),
        ({"objective": "query_decoding", "decoder_hidden": 12}, "query_values"),
    ],
)
def test_hidden_expression_does_not_reach_the_cell_vector(
    family: str, options: dict[str, Any], answers: str
) -> None:
    model = decoding_model(family, **options)
    batch = cells_of()
    shown = model.view(batch, **KEYS)
    in_batch, in_view = (
        part.genes + 1000 * torch.repeat_interleave(part.cu_seqlens.diff())
        for part in (batch, shown)
    )
    seen = torch.isin(in_batch, in_view)
    assert batch.counts is not None
    louder = replace(
        batch, counts=torch.where(seen, batch.counts, 50 * batch.counts), values=batch.values + 1
    )
    one, other = (prepare(model, given) for given in (batch, louder))
    assert torch.equal(
        *(model.cell_vectors(model.states(prepared), prepared) for prepared in (one, other))
    )
    assert not torch.equal(getattr(one, answers), getattr(other, answers))


def test_an_unknown_batch_has_no_term() -> None:
    model = decoding_model("profile", batch_column="batch")
    plain = decoding_model("profile")
    batch = cells_of()
    unknown = replace(batch, levels=torch.zeros_like(batch.levels))  # type: ignore[arg-type]
    torch.testing.assert_close(model(prepare(model, unknown)), plain(prepare(plain, batch)))
    known = prepare(model, batch)
    assert not torch.allclose(
        model.objective.observe(model, known)[1], plain.objective.observe(plain, known)[1]
    )
    options = FAMILIES["profile"] | {"objective": "cell_decoding", "batch_column": "batch"}
    assert not initialized(spec(N_GENES, TOKENS, LEVELS, **options)).batch_terms.weight.any(), (
        "they start at 0"
    )


@EVERY_FAMILY
def test_the_adversary_reverses_only_the_encoder_gradient(family: str) -> None:
    adversary = {"batch_column": "batch", "batch_adversary": 0.5, "batch_adversary_scale": 3.0}
    model = decoding_model(family, **adversary)
    prepared = prepare(model, cells_of())
    decoding, entropy = _losses(model, prepared)
    loss = model(prepared)
    torch.testing.assert_close(loss, decoding + 0.5 * entropy, rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    of_decoding, of_entropy = (
        torch.autograd.grad(
            part,
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for part in (decoding, entropy)
    )
    loss.backward()
    for (name, parameter), one, other in zip(parameters.items(), of_decoding, of_entropy):
        factor = 0.5 if name.startswith("batch_adversary") else -1.5
        torch.testing.assert_close(
            parameter.grad, one + factor * other, rtol=1e-4, atol=1e-5, msg=name
        )
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(prepared), decoding, rtol=1e-5, atol=1e-5)


def test_an_adversary_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_adversary requires batch_column"):
        decoding_model("profile", batch_adversary=1.0)


def test_the_batch_share_is_an_analysis_of_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 200
    width = 6
    levels = torch.randint(1, 4, (n, 2), generator=generator)
    z = (
        torch.randn(n, width, generator=generator)
        + torch.tensor([0.0, 0.7, -1])[levels[:, 1] - 1, None]
    )
    model: Any = SimpleNamespace(
        vector_width=width, kept_vectors=None, objective=SimpleNamespace(leaves=dict)
    )
    mesh: Any = SimpleNamespace(
        device="cpu", pp=SimpleNamespace(size=lambda: 1), sum=lambda tensor: tensor
    )
    monitor = Monitor(model, LEVELS, "batch")
    for cells in torch.arange(n).split(70):
        ones = torch.ones(len(cells))
        batch = Batch(
            ones.long(), ones, torch.arange(len(cells) + 1).int(), cells, levels=levels[cells]
        )
        with monitor.watching([batch]):
            # and cells of padding
            model.kept_vectors.append(torch.cat([z[cells], torch.full((3, width), 1e6)]))
    within, total = (
        sum((own - own.mean(0)).square().sum() for own in groups)
        for groups in ([z[levels[:, 1] == level].double() for level in (1, 2, 3)], [z.double()])
    )
    line = monitor.line(mesh)
    assert line["batch_r2"] == pytest.approx(float(1 - within / total))
    assert 0.1 < line["batch_r2"] < 0.9
    assert "batch_r2" not in Monitor(model).line(mesh)


def test_the_profile_encoder_is_a_plain_perceptron() -> None:
    model = decoding_model("profile")
    batch = cells_of()
    dense = torch.zeros(len(batch.lengths), N_GENES + 2)
    dense[torch.repeat_interleave(torch.tensor(batch.lengths)), batch.genes] = batch.values
    x = dense @ model.gene_embedding.weight
    x = x + model.blocks[0].down(F.gelu(model.blocks[0].up(model.blocks[0].norm(x))))
    torch.testing.assert_close(model.embed(batch), model.norm(x), rtol=1e-4, atol=1e-5)


def test_a_model_is_compared_with_the_mean_profile() -> None:
    objective = decoding_model("profile").objective
    # 1/2, 1/200 and 99/200
    train = GeneStatistics(np.array([99, 0, 49]), np.array([1.0, 1.0, 2.0]), 1.0, 100)
    genes = np.array([0, 2, 0])
    weights = np.array([0.5, 0.5, 1.0])
    per_cell = np.array([0.5, 0.5, 1.0])
    figures, [verdict] = objective.judge(
        genes, np.log([0.6, 0.3, 0.6]), weights, per_cell, train=train
    )
    own, base = (
        -(0.5 * np.log(a) + 0.5 * np.log(b) + np.log(a)) / 2
        for a, b in ((0.6, 0.3), (0.5, 99 / 200))
    )
    assert figures["cross_entropy"] == pytest.approx(own)
    assert figures["cross_entropy_mean_profile"] == pytest.approx(base)
    assert figures["saved_frac"] == pytest.approx(1 - own / base)
    assert verdict.outcome == ("behind" if own > base else "ahead")


def test_the_loss_of_a_model_covers_only_hidden_counts() -> None:
    model = decoding_model("profile", likelihood="nb")
    batch = cells_of()
    prepared = prepare(model, batch)
    view = model.view(batch, **KEYS)
    assert torch.equal(prepared.weights, view.profile_count.float())
    vectors = model.decoder(
        model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
    )
    numbers = [vectors, model.profile_genes.weight, model.profile_bias]
    hidden = prepared.entries, prepared.starts, view.profile_gene, view.profile_count.float()
    expected = profile_loss(*numbers, *hidden, model.profile_dispersion)
    assert torch.equal(model(prepared), expected)
    assert "profile_dispersion" in model.gene_rows & set(model.plan.finish)


def test_means_are_scored_like_counts() -> None:
    train = GeneStatistics(np.ones(60, np.int64), np.ones(60), 1.0, 10)
    figures = []
    for options in ({"weights": "counts"}, {"likelihood": "nb"}):
        model = decoding_model("profile", **options)
        observed = model.objective.observe(model, prepare(model, cells_of()))
        figures.append(
            model.objective.judge(*(x.detach().numpy() for x in observed), train=train)[0]
        )
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


def test_denoise_equals_cell_decoding_of_thinned_counts() -> None:
    batch = cells_of()
    preset = decoding_model("encoder", objective="denoise", decoder_hidden=None)
    same = decoding_model(
        "encoder", view="thin", target="all", max_hidden_frac=0.8, decoder_hidden=None
    )
    prepared, expected = (prepare(model, batch) for model in (preset, same))
    assert torch.equal(preset(prepared), same(expected))
    assert torch.equal(prepared.genes_hidden, batch.genes), "the whole cell is predicted"
    assert sum(prepared.lengths) < len(batch.genes), "and a part of it shown"
    with pytest.raises(ValueError, match="objective denoise needs values made from counts"):
        spec(9, objective="denoise").objective.check_tokens(
            Tokens.model_validate({"tokenizer": "rank"})
        )


def query_spec(family: str, **options: Any) -> Any:
    shape = FAMILIES.get(family) or FAMILIES["encoder"] | {"family": "autoencoder", "latent": 6}
    decoder = {"objective": "query_decoding", "decoder_hidden": 12, "decoder_layers": 1}
    return spec(N_GENES, TOKENS, **shape | decoder | options)


def _view(batch: Batch, step: int = 4, **options: Any) -> QueryView:
    view = build(query_spec("profile", **options)).view(batch, seed=3, step=step)
    assert isinstance(view, QueryView)
    return view


def _values_by_gene(batch: Any) -> dict[tuple[int, int], float]:
    """Value of each gene of each cell, by cell and token id."""
    cell = torch.repeat_interleave(torch.tensor(batch.lengths)).tolist()
    return dict(zip(zip(cell, batch.genes.tolist()), batch.values.tolist()))


def test_queried_genes_have_the_values_of_the_whole_cell() -> None:
    batch = cells_of((20, 31, 1, 14, 2, N_GENES))
    view = _view(batch, max_asked=8, undetected_ratio=2)
    given = _values_by_gene(view)
    values = _values_by_gene(batch)
    asked = list(zip(view.query_cell.tolist(), view.query_genes.tolist()))
    assert not given.keys() & set(asked)
    assert view.query_values.tolist() == [values.get(query, 0.0) for query in asked]
    assert {gene for _, gene in asked} <= set(range(2, N_GENES + 2))
    for cell, length in enumerate(batch.lengths):
        detected = [query for query in asked if query[0] == cell and query in values]
        hidden = length - view.lengths[cell]
        assert len(detected) == len(set(detected)) == min(hidden, 8)
        undetected = sum(query[0] == cell for query in asked) - len(detected)
        assert undetected == (0 if length == N_GENES else 2 * len(detected))


def test_undetected_genes_are_drawn_evenly() -> None:
    batch = cells_of((20,))
    drawn = torch.cat(
        [_view(batch, step=step, undetected_ratio=50).query_genes for step in range(40)]
    )
    absent = torch.ones(N_GENES + 2, dtype=torch.bool)
    absent[:2] = absent[batch.genes] = False
    counts = torch.bincount(drawn, minlength=N_GENES + 2)[absent].double()
    expected = counts.mean()
    assert len(counts) == N_GENES - 20
    # chi-squared of 39 degrees of freedom: mean 39, standard deviation 9
    assert ((counts - expected).square() / expected).sum() < 39 + 4 * 9


def test_weights_count_the_hidden_genes_of_the_vocabulary() -> None:
    view = _view(
        cells_of((30,) * 400),
        max_asked=5,
        undetected_ratio=0.5,
        min_hidden_frac=0.4,
        max_hidden_frac=0.4,
    )
    detected = view.query_values > 0
    sums = [float(view.query_weights[at].double().sum()) for at in (detected, ~detected)]
    # each hidden one, though 5 of a cell are asked
    assert sums[0] == pytest.approx(400 * 30 - sum(view.lengths))
    assert sums[1] == pytest.approx(400 * 0.4 * (N_GENES - 30))


@pytest.mark.parametrize("family", [*FAMILIES, "autoencoder"])
def test_the_loss_is_the_squared_error_of_hidden_genes(
    family: str,
) -> None:
    model = initialized(query_spec(family, undetected_ratio=0.5))
    view = model.view(cells_of((20, 31, 1, 14, 2, N_GENES)), **KEYS)
    prepared = model.prepare(view, **KEYS)
    errors = (
        (model.objective.predict(model, model.states(prepared), prepared) - view.query_values)
        .square()
        .double()
    )
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
    plain, wide = (measure(query_spec("autoencoder", decoder_layers=n)) for n in (1, 2))
    assert wide.parameters - plain.parameters == 8 * 12**2 + 7 * 12
    few, many = (
        size.workspace_of(1 << 14) + size.finish.activations_per_token * (1 << 14)
        for size in (measure(query_spec("autoencoder", max_asked=n)) for n in (2, 10))
    )
    assert few < 0.7 * many


def test_a_model_is_compared_with_the_mean_including_zeros() -> None:
    objective = initialized(query_spec("profile")).objective
    train = GeneStatistics(np.array([59, 0]), np.array([2.0, 1.0]), 2.0, 118)  # means 1 and 0
    genes = np.array([0, 0, 1])
    values = np.array([3.0, 0.0, 0.0])
    weights = np.array([2.0, 1.0, 1.0])
    figures, [verdict] = objective.judge(
        genes, values, np.array([2.0, 0.5, 0.5]), weights, train=train
    )
    own = (2 * 1.0 + 0.25 + 0.25) / 4
    base = (2 * 4.0 + 1.0 + 0.0) / 4
    assert (figures["mse"], figures["mse_gene_mean"]) == pytest.approx((own, base))
    assert (figures["r2_over_gene_mean"], figures["detected_frac"]) == pytest.approx(
        (1 - own / base, 0.5)
    )
    assert (verdict.outcome, verdict.difference) == ("ahead", pytest.approx(1 - own / base))
    assert (
        objective.judge(genes, means := np.array([1.0, 1.0, 0.0]), means, weights, train=train)[1]
        == []
    )


def test_tokens_without_numbers_are_refused() -> None:
    tree = {"corpora": {"a": {}}, "runs": {"x": {"corpus": "a"}}, "train": {"steps": 1}}
    chosen = {"objective": {"name": "query_decoding"}, "tokens": {"tokenizer": "binned"}}
    with refused(
        "config.yaml: runs.x: objective query_decoding needs numbers, got binned; choose continuous"
    ):
        check_config(tree | chosen, "config.yaml")


@pytest.mark.parametrize(
    ("key", "place"),
    [("decoder_layers", "objective.decoder_layers"), ("decoder_dim", "objective.decoder_hidden")],
)
def test_the_decoder_of_an_autoencoder_is_named_where_it_stands(key: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'; set {place}"):
        FamilyConfig.model_validate({"family": "autoencoder", key: 4})
