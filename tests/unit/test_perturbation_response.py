"""Objective perturbation_response against its definition, and what it says of perturbations it was
not trained on.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.evaluate.features.expression import expected_log_expression
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.perturbation.profiles import Profiles, read_profiles
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.models.batch import to_tensors
from cellmill.stages.training_inputs import fit_options
from tests.models import genes_of, initialized, prepare, random_cells, spec, train_options

N_GENES = 30
LEVELS = {"assay": ("a", "b"), "guide": ("A", "A+B", "control", "unnamed", "<missing>")}
GENES = {"A": [5], "A+B": [5, 9]}
OPTIONS = {
    "objective": "perturbation_response",
    "perturbation_column": "guide",
    "control": "control",
}
TOKENS = Tokens.model_validate({"max_tokens": 64})


def _model(levels: Any = LEVELS, **options: Any) -> Any:
    given = (
        {"family": "profile", "hidden": 16, "layers": 1, "perturbed_genes": GENES}
        | OPTIONS
        | options
    )
    model = initialized(spec(N_GENES, TOKENS, levels, **given))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("response_genes.weight", "response_genes.bias", "response_terms.weight"):
            model.get_parameter(name).normal_(0, 0.3, generator=generator)
    return model


def _cells() -> Batch:
    """Seven cells; of the fifth the perturbation is missing, of the sixth the corpus does not have
    it.
    """
    levels = np.array([[1, 1], [2, 2], [1, 3], [2, 4], [1, 5], [2, 0], [1, 2]], np.int32)
    return to_tensors(random_cells([12] * 7, TOKENS, N_GENES, first=0, levels=levels))


@pytest.mark.parametrize("length", [None, 200])
def test_the_decoder_receives_the_vector_of_the_response(length: int | None) -> None:
    model = _model()
    prepared = prepare(model, _cells(), length)
    # cells of unknown perturbation are no targets
    assert prepared.target_cells.tolist() == [0, 1, 2, 3, 6]
    table = model.profile_genes.weight
    project = model.response_genes
    of_genes = {0: table[5], 1: (table[5] + table[9]) / 2, 3: torch.zeros_like(table[5])}
    of_genes[6] = of_genes[1]
    vectors = model.cell_vectors(model.states(prepared), prepared)
    expected = torch.zeros(())
    entries = iter(torch.arange(len(prepared.entry_targets)).split(prepared.n_entries))
    for cell, rows in zip(prepared.target_cells.tolist(), entries):
        vector = vectors[cell]
        if cell in of_genes:  # the other one is a control
            vector = (
                vector
                + project(of_genes[cell])
                + model.response_terms.weight[prepared.levels[cell, 1] - 1]
            )
        logits = model.decoder(vector) @ table.T + model.profile_bias
        expected = (
            expected
            - (
                logits.log_softmax(0)[prepared.entry_token_ids[rows]] * prepared.entry_targets[rows]
            ).sum()
        )
    torch.testing.assert_close(model(prepared), expected, atol=1e-4, rtol=1e-5)


def test_the_view_loss_has_the_cells_that_are_predicted() -> None:
    prepared = prepare(_model(view_loss="vicreg"), _cells(), 200)
    predicted = [0, 1, 2, 3, 6]  # cells of a known perturbation
    assert prepared.target_cells.tolist() == predicted
    assert prepared.pairs.tolist() == [predicted, [7 + cell for cell in predicted]]


def test_another_control_or_gene_gives_another_loss() -> None:
    losses = []
    for changed in ({}, {"control": "A"}, {"perturbed_genes": {"A": [7]}}):
        model = _model(**changed)
        losses.append(model(prepare(model, _cells())).item())
    assert len({round(loss, 4) for loss in losses}) == 3


def test_an_untrained_perturbation_has_the_response_to_its_genes() -> None:
    model = _model()
    vectors = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    before = model.objective.predict_log_profile(model, vectors, None, [])
    assert before.shape == (3, N_GENES)
    torch.testing.assert_close(before.exp().sum(1), torch.ones(3))
    unheard = model.objective.predict_log_profile(model, vectors, "Z", [7])
    moved = vectors + model.response_genes(model.profile_genes.weight[7])
    torch.testing.assert_close(unheard, model.objective.predict_log_profile(model, moved, None, []))
    named = model.objective.predict_log_profile(model, vectors, "A", [5])
    moved = (
        vectors
        + model.response_genes(model.profile_genes.weight[5])
        + model.response_terms.weight[0]
    )
    torch.testing.assert_close(named, model.objective.predict_log_profile(model, moved, None, []))


def test_expected_logarithms_equal_poisson_counts() -> None:
    shares = np.array([[0.001, 0.2, 0.799], [0.0, 0.5, 0.5]])
    depth = np.array([150, 12])
    counts = np.arange(600)
    for row, n in zip(range(2), depth):
        exact = [
            (poisson.pmf(counts, n * p) * np.log1p(counts * 1e4 / n)).sum() for p in shares[row]
        ]
        np.testing.assert_allclose(expected_log_expression(shares, depth)[row], exact, atol=0.02)
    np.testing.assert_allclose(expected_log_expression(shares, depth)[1], exact, atol=1e-9)


def test_a_training_finds_the_genes_that_levels_are_named_after(tmp_path: Path) -> None:
    vocabulary = genes_of(N_GENES)
    path = tmp_path / "vocabulary.tsv"
    vocabulary.write(path)
    gene = vocabulary.symbols[3]
    given = {"perturbation_column": "guide", "control": "control"}
    shards: Any = SimpleNamespace(
        levels=lambda columns: {"guide": [gene, "control", "nothing", "<missing>"]}
    )
    found = fit_options(
        train_options(objective={"name": "perturbation_response"} | given), path, shards
    )
    assert found.objective.perturbed_genes == {gene: [3 + len(SPECIAL)]}
    assert fit_options(found, path, shards) == found


def test_a_predicted_change_is_the_mean_over_its_controls(context: Context) -> None:
    sizes = {"family": "profile", "hidden": 16, "layers": 1}
    model = initialized(
        spec(context.model.vocabulary.n_genes, context.model.tokens, LEVELS, **sizes | OPTIONS)
    )
    with torch.no_grad():
        model.get_parameter("response_genes.bias").fill_(0.5)
    cells = np.arange(context.reader.n_obs)
    vectors = np.random.default_rng(0).normal(size=(len(cells), 16)).astype(np.float32)
    names = np.where(cells % 2, "control", "A")
    batches = np.where(cells // 2 % 2, "x", "y")
    obs = context.reader.obs.assign(perturbation=names, batch=batches)
    roles = {
        "perturbation": obs["perturbation"],
        "batch": obs["batch"],
        "is_control": obs["perturbation"] == "control",
    }
    changed = replace(
        context, roles=roles, vectors=vectors, model=replace(context.model, network=model.eval())
    )
    profiles: Profiles = read_profiles(
        changed.reader, changed.gene_columns, roles, ("batch",), changed.options.seed
    )
    strata = np.array([[1.0, 0.0], [0.25, 0.75]])
    head = ResponseHead.find(model, changed.options.precision)
    assert head is not None
    found = head.predict_changes(vectors, profiles, strata, ["A", "A"], [[2], [2]])
    of_strata = []
    for stratum in (0, 1):
        cells = np.flatnonzero((profiles.half == 0) & (profiles.stratum == stratum))[:128]
        with torch.no_grad():
            given = torch.from_numpy(vectors[cells])
            moved = given + model.response_genes(model.profile_genes.weight[4])
            logs = [
                model.objective.predict_log_profile(model, v, None, [])[:, profiles.genes]
                for v in (given, moved)
            ]
        before, after = (
            expected_log_expression(log.double().softmax(1).numpy(), profiles.depth[cells]).mean(0)
            for log in logs
        )
        of_strata.append(after - before)
    np.testing.assert_allclose(found, strata @ np.array(of_strata), atol=1e-6)
    assert np.abs(found).max() > 1e-3
    unknown = vectors.copy()
    unknown[(profiles.half == 0) & (profiles.stratum == 1)] = np.nan
    again = head.predict_changes(unknown, profiles, strata, ["A", "A"], [[2], [2]])
    np.testing.assert_array_equal(again[0], found[0])
    assert np.isnan(again[1]).all(), "no control of a stratum has an embedding"
    assert ResponseHead.find(context.model.network, "32-true") is None
