"""cell_decoding with all that belongs to it, denoise and query_decoding: losses written out, and
what they may see.
"""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
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
from cellmill.models.objective import HIDDEN_GENES_STEP, GeneStatistics
from cellmill.models.objectives.query_decoding import QueryView
from cellmill.models.objectives.shared.hidden_genes import mean_gene_correlation, sum_gene_moments
from cellmill.parallel.likelihoods import profile_loss
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import measure_size
from cellmill.train.validation import Monitor
from tests.checks import assert_near, check_gradients, gradients_by_name, refused
from tests.models import KEYS, initialized, prepare, random_cells, seeded, spec

N_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
LEVELS = {"assay": ("a", "b"), "batch": ("x", "y", "z")}
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2},
    "encoder without blocks": {"family": "encoder", "hidden": 16, "layers": 0, "heads": 2},
    "profile": {"family": "profile", "hidden": 16, "layers": 1},
}
METRIC = "val_hidden_genes"
MESH: Any = SimpleNamespace(
    device="cpu", pp=SimpleNamespace(size=lambda: 1), sum=lambda tensor: tensor
)
"""A mesh of one rank."""
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def decoding_model(family: str, **options: Any) -> Any:
    """A model of cell_decoding whose batch terms, if it has any, are not zero."""
    given = {"objective": "cell_decoding"} | FAMILIES[family] | options
    model = initialized(spec(N_GENES, TOKENS, LEVELS, **given))
    if hasattr(model, "batch_terms"):
        torch.nn.init.normal_(model.batch_terms.weight, generator=seeded(1))
    return model


def cells_of(lengths: tuple[int, ...] = (20, 31, 1, 14, 2, 9)) -> Batch:
    """Cells with levels of assay and batch, none of them unknown."""
    assays = np.resize([1, 2], len(lengths))
    batches = np.resize([3, 1, 2, 2, 1, 3], len(lengths))
    levels = np.stack([assays, batches], axis=1)
    levels = levels.astype(np.int32)
    return to_tensors(random_cells(lengths, TOKENS, N_GENES, levels=levels))


def _dense_targets(prepared: Any) -> torch.Tensor:
    """(cells, genes): weights of hidden genes."""
    dense = torch.zeros(len(prepared.n_entries), N_GENES + 2)
    genes_by_cell = prepared.entry_token_ids.split(prepared.n_entries)
    weights_by_cell = prepared.entry_targets.split(prepared.n_entries)
    for row, genes, weights in zip(dense, genes_by_cell, weights_by_cell):
        row[genes] = weights
    return dense


def _losses(model: Any, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding loss, and cross-entropy of the adversary without reversal."""
    vectors = model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
    decoded = model.decoder(vectors)
    entropy = torch.zeros(())
    batch = prepared.levels[prepared.target_cells, 1] - 1
    if hasattr(model, "batch_terms"):
        terms = model.batch_terms.weight
        centred = terms - terms.mean(0)
        decoded = decoded + centred[batch]
    if hasattr(model, "batch_adversary"):
        adversary = model.batch_adversary
        logits = adversary.out(F.gelu(adversary.inner(vectors)))
        entropy = F.cross_entropy(logits, batch, reduction="sum")
    logits = decoded @ model.profile_genes.weight.T + model.profile_bias
    log_p = logits.log_softmax(1)
    return -(_dense_targets(prepared) * log_p).sum(), entropy


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
    loss = model(prepared)
    expected, _ = _losses(model, prepared)
    assert_near(loss, expected)
    # gradients reach 50, so sums of float32 over other numbers of threads differ by more than 1e-6
    check_gradients(model, loss, expected, atol=2e-5)


def test_weights_are_log_counts_or_counts() -> None:
    batch = cells_of((30,))
    for name, weigh in (("counts", torch.Tensor.double), ("log1p", torch.log1p)):
        model = decoding_model("profile", weights=name)
        view = model.view(batch, **KEYS)
        weights = weigh(view.entry_counts)
        expected = weights / weights.sum()
        prepared = model.prepare(view, **KEYS)
        torch.testing.assert_close(prepared.entry_targets, expected.float())


@pytest.mark.parametrize("weights", [{"weights": "counts"}, {"likelihood": "nb"}])
def test_validation_correlates_hidden_genes_if_asked(
    weights: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.models.objectives.shared.hidden_genes.CELLS_PER_CHUNK", 4)
    model = decoding_model("profile", **weights)
    batches = [cells_of(), cells_of((25, 40, 12))]
    monitor = Monitor(model, best_metric=METRIC)
    keys = KEYS | {"step": HIDDEN_GENES_STEP}
    predicted = []
    measured = []
    with torch.no_grad():
        for batch in batches:
            view = model.view(batch, **keys)
            assert sorted(view.token_ids) == sorted(batch.token_ids[batch.token_ids % 5 != 0])
            prepared = model.prepare(view, **keys)
            with monitor.watching([]), monitor.watching_hidden_genes():
                model(prepared)
            vectors = model.cell_vectors(model.states(prepared), prepared)
            logits = model.decoder(vectors) @ model.profile_genes.weight.T + model.profile_bias
            counts = torch.zeros(len(batch.lengths), N_GENES + 2)
            counts[torch.repeat_interleave(torch.tensor(batch.lengths)), batch.token_ids] = (
                batch.counts.float()
            )
            logs = (1e4 * counts / counts.sum(1, keepdim=True)).log1p()
            shares = logits.softmax(1)
            visible = torch.arange(N_GENES + 2) % 5 != 0
            scale = logs[:, visible].sum(1) / shares[:, visible].sum(1)
            predicted.append(shares[:, ~visible] * scale[:, None])
            measured.append(logs[:, ~visible])
    pairs = zip(torch.cat(predicted).T.numpy(), torch.cat(measured).T.numpy())
    expected = [np.corrcoef(x, y)[0, 1] for x, y in pairs if y.any()]
    assert len(expected) > 9
    assert monitor.line(MESH)[METRIC] == pytest.approx(np.mean(expected), abs=1e-5)
    assert not Monitor(model).parts


@pytest.mark.parametrize("n_cells", [1, 3])
def test_hidden_genes_of_equal_cells_have_no_correlation(n_cells: int) -> None:
    n_entries = 40
    fractions = torch.rand(n_entries, generator=seeded(0))
    sums = sum_gene_moments(
        torch.ones(n_cells, 1),
        table=torch.randn(N_GENES, 1, generator=seeded(1)),
        bias=torch.zeros(N_GENES),
        entry_rows=torch.arange(n_cells).repeat_interleave(n_entries),
        entry_token_ids=torch.arange(n_entries).repeat(n_cells),
        entry_fractions=(fractions / fractions.sum()).repeat(n_cells),
    )
    assert mean_gene_correlation(sums.tolist()) == {"hidden_genes": 0}


@EVERY_FAMILY
@pytest.mark.parametrize(
    ("options", "answers"),
    [
        ({"objective": "cell_decoding", "view": "drop"}, "entry_targets"),
        ({"objective": "query_decoding", "decoder_hidden": 12}, "query_targets"),
    ],
)
def test_hidden_expression_does_not_reach_the_cell_vector(
    family: str, options: dict[str, Any], answers: str
) -> None:
    model = decoding_model(family, **options)
    batch = cells_of()
    shown = model.view(batch, **KEYS)
    # counts of genes that the view hides are multiplied, cell by cell
    assert batch.counts is not None
    louder = batch.counts.clone()
    start = 0
    for genes, shown_genes in zip(
        batch.token_ids.split(batch.lengths), shown.token_ids.split(shown.lengths)
    ):
        end = start + len(genes)
        is_hidden = ~torch.isin(genes, shown_genes)
        louder[start:end][is_hidden] *= 50
        start = end
    prepared = prepare(model, batch)
    changed_batch = replace(batch, counts=louder, values=batch.values + 1)
    changed = prepare(model, changed_batch)
    vectors = model.cell_vectors(model.states(prepared), prepared)
    changed_vectors = model.cell_vectors(model.states(changed), changed)
    assert torch.equal(changed_vectors, vectors)
    assert not torch.equal(getattr(changed, answers), getattr(prepared, answers))


def test_an_unknown_batch_has_no_term() -> None:
    model = decoding_model("profile", batch_column="batch")
    plain = decoding_model("profile")
    batch = cells_of()
    unknown = replace(batch, levels=torch.zeros_like(batch.levels))  # type: ignore[arg-type]
    loss = model(prepare(model, unknown))
    plain_loss = plain(prepare(plain, batch))
    torch.testing.assert_close(loss, plain_loss)
    known = prepare(model, batch)
    observed = model.objective.observe(model, known)
    without_terms = plain.objective.observe(plain, known)
    assert not torch.allclose(observed[1], without_terms[1])


def test_an_unknown_batch_has_the_mean_of_the_known_terms() -> None:
    model = decoding_model("profile", batch_column="batch")
    batch = cells_of()

    def decode(number: int) -> torch.Tensor:
        levels = torch.full_like(batch.levels, number)  # type: ignore[arg-type]
        prepared = prepare(model, replace(batch, levels=levels))
        vectors = model.cell_vectors(model.states(prepared), prepared)[prepared.target_cells]
        return model.objective.decoder_features(model, vectors, prepared)

    known = torch.stack([decode(number) for number in (1, 2, 3)])
    torch.testing.assert_close(decode(0), known.mean(0))
    assert not torch.allclose(known[0], known[1])


def test_cells_without_a_batch_are_in_no_batch() -> None:
    options = {"batch_column": "batch", "batch_adversary": 0.5}
    levels = LEVELS | {"batch": (*LEVELS["batch"], "<missing>")}
    given = {"objective": "cell_decoding"} | FAMILIES["profile"] | options
    model = initialized(spec(N_GENES, TOKENS, levels, **given))
    known = decoding_model("profile", **options)
    n_batches = len(LEVELS["batch"])
    tensors = known.state_dict()
    for name, tensor in model.state_dict().items():
        if name in model.level_rows:  # the row of <missing> must have no effect
            missing = torch.full_like(tensor[:1], 7.0)
            tensors[name] = torch.cat([tensors[name], missing])
    model.load_state_dict(tensors)
    batch = cells_of()
    codes = batch.levels.clone()  # type: ignore[union-attr]
    codes[:2, 1] = 0
    missing_codes = codes.masked_fill(codes == 0, n_batches + 1)
    loss = model(prepare(model, replace(batch, levels=missing_codes)))
    expected = known(prepare(known, replace(batch, levels=codes)))
    torch.testing.assert_close(loss, expected)


def test_terms_of_batches_start_at_zero() -> None:
    options = FAMILIES["profile"] | {"objective": "cell_decoding", "batch_column": "batch"}
    model = initialized(spec(N_GENES, TOKENS, LEVELS, **options))
    assert not model.batch_terms.weight.any()


@EVERY_FAMILY
def test_the_adversary_reverses_only_the_encoder_gradient(family: str) -> None:
    adversary = {"batch_column": "batch", "batch_adversary": 0.5, "batch_adversary_scale": 3.0}
    model = decoding_model(family, **adversary)
    prepared = prepare(model, cells_of())
    decoding, entropy = _losses(model, prepared)
    loss = model(prepared)
    assert_near(loss, decoding + 0.5 * entropy)
    # the encoder gets -0.5 * 3 times the gradient of the entropy, the adversary 0.5 times
    is_adversary = {
        name: name.startswith("batch_adversary") for name, _ in model.named_parameters()
    }
    for_encoder = gradients_by_name(model, decoding - 1.5 * entropy)
    decoding, entropy = _losses(model, prepared)
    for_adversary = gradients_by_name(model, decoding + 0.5 * entropy)
    for name, gradient in gradients_by_name(model, loss).items():
        expected = for_adversary[name] if is_adversary[name] else for_encoder[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        assert_near(model.eval()(prepared), decoding)


def test_an_adversary_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_adversary requires batch_column"):
        decoding_model("profile", batch_adversary=1.0)


def test_the_batch_share_is_an_analysis_of_variance() -> None:
    generator = seeded(0)
    n = 200
    width = 6
    levels = torch.randint(1, 4, (n, 2), generator=generator)
    offset_by_level = torch.tensor([0.0, 0.7, -1])
    offsets = offset_by_level[levels[:, 1] - 1]
    z = torch.randn(n, width, generator=generator) + offsets[:, None]
    model: Any = SimpleNamespace(
        vector_width=width, kept_vectors=None, objective=SimpleNamespace(parts_by_name=dict)
    )
    monitor = Monitor(model, LEVELS, "batch")
    for cells in torch.arange(n).split(70):
        ones = torch.ones(len(cells))
        cu_seqlens = torch.arange(len(cells) + 1).int()
        batch = Batch(ones.long(), ones, cu_seqlens, cells, levels=levels[cells])
        padding = torch.full((3, width), 1e6)
        with monitor.watching([batch]):
            model.kept_vectors.append(torch.cat([z[cells], padding]))
    centred = (z - z.mean(0)).double()
    total = centred.square().sum()
    within = torch.zeros((), dtype=torch.float64)
    for level in (1, 2, 3):
        of_level = z[levels[:, 1] == level].double()
        within += (of_level - of_level.mean(0)).square().sum()
    line = monitor.line(MESH)
    assert line["batch_r2"] == pytest.approx(float(1 - within / total))
    assert 0.1 < line["batch_r2"] < 0.9
    assert "batch_r2" not in Monitor(model).line(MESH)


def test_the_profile_encoder_is_a_plain_perceptron() -> None:
    model = decoding_model("profile")
    batch = cells_of()
    cells = torch.repeat_interleave(torch.tensor(batch.lengths))
    dense = torch.zeros(len(batch.lengths), N_GENES + 2)
    dense[cells, batch.token_ids] = batch.values
    x = dense @ model.gene_embedding.weight
    [block] = model.blocks
    activations = F.gelu(block.up(block.norm(x)))
    expected = model.norm(x + block.down(activations))
    vectors = model.embed(batch)
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


def _statistics(**profiles: np.ndarray) -> GeneStatistics:
    """Statistics of 2 cells and 60 genes: token values that profiles must not be made from."""
    return GeneStatistics(np.arange(60), np.ones(60), 1.0, 2, **profiles)


def test_a_model_is_compared_with_the_mean_profile() -> None:
    objective = decoding_model("profile").objective
    statistics = _statistics(log_count_profile=np.array([0.5, 0.005, 0.495]))
    genes = np.array([0, 2, 0])
    weights = np.array([0.5, 0.5, 1.0])
    per_cell = np.array([0.5, 0.5, 1.0])
    log_p = np.log([0.6, 0.3, 0.6])
    figures, [verdict] = objective.judge(genes, log_p, weights, per_cell, statistics=statistics)
    # two cells, one with half of its weight on the first gene and half on the third, and one
    # with all of it on the first
    own = -(1.5 * np.log(0.6) + 0.5 * np.log(0.3)) / 2
    base = -(1.5 * np.log(0.5) + 0.5 * np.log(99 / 200)) / 2
    assert (figures["n_targets"], figures["n_entries"]) == (2, 3)
    assert figures["cross_entropy"] == pytest.approx(own)
    assert figures["cross_entropy_mean_profile"] == pytest.approx(base)
    assert figures["cross_entropy_reduction_frac"] == pytest.approx(1 - own / base)
    assert verdict.outcome == ("behind" if own > base else "ahead")


def test_both_cross_entropies_are_summed_in_float64() -> None:
    objective = decoding_model("profile").objective
    statistics = _statistics(log_count_profile=np.array([2 / 3, 1 / 3]))
    random = np.random.default_rng(0)
    fractions = random.random(1000, np.float32)
    log_p = -random.random(1000, np.float32)
    genes = np.zeros(1000, np.int64)
    figures, _ = objective.judge(
        genes, log_p, fractions, np.full(1000, 1e-3), statistics=statistics
    )
    expected = -(fractions.astype(np.float64) * log_p.astype(np.float64)).sum()
    assert figures["cross_entropy"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("tokenizer", "options", "compared", "share"),
    [
        ("continuous", {}, "hidden expression", 0.5),
        ("continuous", {"view": "thin", "weights": "counts"}, "hidden expression", 0.25),
        ("continuous", {"likelihood": "nb"}, "hidden expression", 0.25),
        ("rank", {"target": "all"}, "whole cell", 0.5),
    ],
)
def test_the_baseline_is_a_profile_of_the_targets_scale(
    tokenizer: str, options: dict[str, Any], compared: str, share: float
) -> None:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    model = build(
        spec(N_GENES, tokens, LEVELS, objective="cell_decoding", **FAMILIES["encoder"], **options)
    )
    statistics = _statistics(log_count_profile=np.array([0.5]), count_profile=np.array([0.25]))
    one = np.ones(1)
    figures, [verdict] = model.objective.judge(
        np.zeros(1, int), -one, one, one, statistics=statistics
    )
    assert verdict.compared == f"prediction of the {compared}"
    assert verdict.against == "the mean profile of training cells"
    assert figures["cross_entropy_mean_profile"] == pytest.approx(-np.log(share))


def test_the_loss_of_a_model_covers_only_hidden_counts() -> None:
    model = decoding_model("profile", likelihood="nb")
    batch = cells_of()
    prepared = prepare(model, batch)
    view = model.view(batch, **KEYS)
    assert torch.equal(prepared.entry_targets, view.entry_counts.float())
    vectors = model.cell_vectors(model.states(prepared), prepared)
    expected = profile_loss(
        model.decoder(vectors[prepared.target_cells]),
        model.profile_genes.weight,
        model.profile_bias,
        prepared.n_entries,
        prepared.entry_starts,
        view.entry_token_ids,
        view.entry_counts.float(),
        model.profile_dispersion,
    )
    assert torch.equal(model(prepared), expected)
    assert "profile_dispersion" in model.gene_rows & set(model.plan.finish)


def test_means_are_scored_like_counts() -> None:
    statistics = _statistics(count_profile=np.full(60, 1 / 60))
    figures = []
    for options in ({"weights": "counts"}, {"likelihood": "nb"}):
        model = decoding_model("profile", **options)
        tensors = model.objective.observe(model, prepare(model, cells_of()))
        observed = [tensor.detach().numpy() for tensor in tensors]
        figures.append(model.objective.judge(*observed, statistics=statistics)[0])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


def test_denoise_equals_cell_decoding_of_thinned_counts() -> None:
    batch = cells_of()
    preset = decoding_model("encoder", objective="denoise", decoder_hidden=None)
    same = decoding_model(
        "encoder", view="thin", target="all", max_hidden_frac=0.8, decoder_hidden=None
    )
    prepared = prepare(preset, batch)
    assert torch.equal(preset(prepared), same(prepare(same, batch)))
    assert torch.equal(prepared.entry_token_ids, batch.token_ids), "the whole cell is predicted"
    assert sum(prepared.lengths) < len(batch.token_ids), "and a part of it shown"


def test_denoise_needs_counts() -> None:
    objective = spec(9, objective="denoise").objective
    ranks = Tokens.model_validate({"tokenizer": "rank"})
    with pytest.raises(ValueError, match="objective denoise needs values made from counts"):
        objective.check_tokens(ranks)


def query_spec(family: str, **options: Any) -> Any:
    shape = FAMILIES.get(family) or FAMILIES["encoder"] | {"family": "autoencoder", "latent": 6}
    decoder = {"objective": "query_decoding", "decoder_hidden": 12, "decoder_layers": 1}
    return spec(N_GENES, TOKENS, **shape | decoder | options)


def _view(batch: Batch, step: int = 4, **options: Any) -> QueryView:
    model = build(query_spec("profile", **options))
    view = model.view(batch, seed=3, step=step)
    assert isinstance(view, QueryView)
    return view


def _values_by_gene(batch: Any) -> dict[tuple[int, int], float]:
    """Value of each gene of each cell, by cell and token id."""
    values = {}
    genes_by_cell = batch.token_ids.split(batch.lengths)
    values_by_cell = batch.values.split(batch.lengths)
    for cell, genes in enumerate(genes_by_cell):
        for gene, value in zip(genes.tolist(), values_by_cell[cell].tolist()):
            values[cell, gene] = value
    return values


def test_queried_genes_have_the_values_of_the_whole_cell() -> None:
    batch = cells_of((20, 31, 1, 14, 2, N_GENES))
    view = _view(batch, max_asked=8, undetected_ratio=2)
    given = _values_by_gene(view)
    values = _values_by_gene(batch)
    asked = list(zip(view.queries.cells.tolist(), view.queries.token_ids.tolist()))
    assert not given.keys() & set(asked)
    assert view.queries.targets.tolist() == [values.get(query, 0.0) for query in asked]
    assert {gene for _, gene in asked} <= set(range(2, N_GENES + 2))
    for cell, length in enumerate(batch.lengths):
        detected = [query for query in asked if query[0] == cell and query in values]
        hidden = length - view.lengths[cell]
        assert len(detected) == len(set(detected)) == min(hidden, 8)
        undetected = sum(query[0] == cell for query in asked) - len(detected)
        assert undetected == (0 if length == N_GENES else 2 * max(1, len(detected)))


@pytest.mark.parametrize("ratio", ["0.1", "0.3", "0.7", "1.1", "2.3"])
def test_queries_are_rounded_up_from_the_exact_ratio(ratio: str) -> None:
    batch = cells_of(tuple(range(1, N_GENES)))
    view = _view(batch, undetected_ratio=float(ratio), min_hidden_frac=0.9, max_hidden_frac=0.98)
    is_detected = view.queries.targets > 0
    n_detected: Counter[int] = Counter()
    n_undetected: Counter[int] = Counter()
    for cell, counted in zip(view.queries.cells.tolist(), is_detected.tolist()):
        (n_detected if counted else n_undetected)[cell] += 1
    assert max(n_detected.values()) > 50
    expected = {
        cell: math.ceil(max(1, n_detected[cell]) * Fraction(ratio)) for cell in range(N_GENES - 1)
    }
    assert n_undetected == expected


def test_undetected_genes_are_drawn_evenly() -> None:
    batch = cells_of((20,))
    drawn: Counter[int] = Counter()
    for step in range(40):
        view = _view(batch, step=step, undetected_ratio=50)
        drawn.update(view.queries.token_ids.tolist())
    token_ids = set(range(2, N_GENES + 2))
    undetected = token_ids - set(batch.token_ids.tolist())
    counts = np.array([drawn[gene] for gene in undetected])
    assert len(counts) == N_GENES - 20
    expected = counts.mean()
    chi_squared = np.sum((counts - expected) ** 2 / expected)
    assert chi_squared < 39 + 4 * 9, "39 degrees of freedom: mean 39, standard deviation 9"


def test_weights_count_the_hidden_genes_of_the_vocabulary() -> None:
    view = _view(
        cells_of((30,) * 400),
        max_asked=5,
        undetected_ratio=0.5,
        min_hidden_frac=0.4,
        max_hidden_frac=0.4,
    )
    is_detected = view.queries.targets > 0
    weights = view.queries.importance_weights.double()
    n_hidden = 400 * 30 - sum(view.lengths)
    n_undetected = 400 * 0.4 * (N_GENES - 30)
    # all hidden genes count, though only 5 of a cell are queried
    assert float(weights[is_detected].sum()) == pytest.approx(n_hidden)
    assert float(weights[~is_detected].sum()) == pytest.approx(n_undetected)


@pytest.mark.parametrize("family", [*FAMILIES, "autoencoder"])
def test_the_loss_is_the_squared_error_of_hidden_genes(family: str) -> None:
    model = initialized(query_spec(family, undetected_ratio=0.5))
    batch = cells_of((20, 31, 1, 14, 2, N_GENES))
    view = model.view(batch, **KEYS)
    prepared = model.prepare(view, **KEYS)
    answers = model.objective.predict_targets(model, model.states(prepared), prepared)
    errors = (answers - view.queries.targets).square().double()
    expected = 0.0
    for cell in view.queries.cells.unique():
        is_of_cell = view.queries.cells == cell
        weights = view.queries.importance_weights[is_of_cell]
        mean = (weights * errors[is_of_cell]).sum() / weights.sum()
        expected += len(weights) * mean.item()
    assert model(prepared).item() == pytest.approx(expected, rel=1e-5)
    assert int(prepared.n_targets) == len(view.queries.cells) > 50
    assert prepared.query_weights.max() > 1.2


@pytest.mark.full
def test_the_plan_counts_the_decoder() -> None:
    plain = measure_size(query_spec("autoencoder", decoder_layers=1))
    wide = measure_size(query_spec("autoencoder", decoder_layers=2))
    assert wide.parameters - plain.parameters == 8 * 12**2 + 7 * 12

    def memory(max_asked: int) -> float:
        size = measure_size(query_spec("autoencoder", max_asked=max_asked))
        load = Load(1 << 14, pairs=0, cells=1 << 9)
        return size.finish_workspace.estimate(load) + size.finish.activations.total(load)

    assert memory(max_asked=2) < 0.7 * memory(max_asked=10)


def test_a_model_is_compared_with_the_mean_including_zeros() -> None:
    objective = initialized(query_spec("profile")).objective
    n_cells = np.array([59, 0])
    means = np.array([2.0, 1.0])  # of cells with the gene; over all 118 cells 1 and 0
    statistics = GeneStatistics(n_cells, means, 2.0, 118)
    genes = np.array([0, 0, 1])
    values = np.array([3.0, 0.0, 0.0])
    weights = np.array([2.0, 1.0, 1.0])
    answers = np.array([2.0, 0.5, 0.5])
    figures, [verdict] = objective.judge(genes, values, answers, weights, statistics=statistics)
    own = (2 * 1.0 + 0.25 + 0.25) / 4
    base = (2 * 4.0 + 1.0 + 0.0) / 4
    explained = 1 - own / base
    assert figures["mse"] == pytest.approx(own)
    assert figures["mse_gene_mean"] == pytest.approx(base)
    assert figures["r2_over_gene_mean"] == pytest.approx(explained)
    assert figures["detected_frac"] == pytest.approx(0.5)
    assert verdict.outcome == "ahead"
    assert verdict.difference == pytest.approx(explained)
    means = np.array([1.0, 1.0, 0.0])
    _, verdicts = objective.judge(genes, means, means, weights, statistics=statistics)
    assert verdicts == []


def test_tokens_without_numbers_are_refused() -> None:
    tree = {
        "corpora": {"a": {}},
        "runs": {"x": {"corpus": "a"}},
        "train": {"steps": 1},
        "objective": {"name": "query_decoding"},
        "tokens": {"tokenizer": "binned"},
    }
    with refused(
        "config.yaml: runs.x: objective query_decoding needs numbers, got binned; set tokens.tokenizer to continuous"
    ):
        check_config(tree, "config.yaml")


@pytest.mark.parametrize(
    ("key", "place"),
    [("decoder_layers", "objective.decoder_layers"), ("decoder_dim", "objective.decoder_hidden")],
)
def test_the_decoder_of_an_autoencoder_is_named_where_it_stands(key: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'; set {place}"):
        FamilyConfig.model_validate({"family": "autoencoder", key: 4})
