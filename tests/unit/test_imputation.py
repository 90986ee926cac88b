"""Task imputation: nothing of the hidden genes is read, predictions and scores against references."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from scipy.stats import pearsonr, spearmanr

from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import ImputationConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.names import match_columns
from cellmill.errors import DataError
from cellmill.evaluate.features import read_rows
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.imputation import (
    HiddenGenes,
    Imputation,
    expression_of_shares,
    expression_scores,
    fitted,
    own_expression,
)
from tests.unit.evaluated import make_context

PROFILE = {"family": "profile", "hidden": 16, "layers": 1, "heads": None}
MODELS: dict[str, dict[str, Any]] = {
    "cell_decoding": PROFILE | {"objective": "cell_decoding"},
    "query_decoding": PROFILE | {"objective": "query_decoding", "decoder_hidden": 8},
    "masked_value": {"objective": "masked_value", "layers": 0, "tokens": {"zero_frac": 0.2}},
}
CONFIG = ImputationConfig(name="imputation", seeds=2, max_genes=80)


@pytest.fixture(scope="module", params=MODELS)
def context(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Context:
    model = dict(MODELS[request.param])
    tokens = {"tokenizer": "continuous"} | model.pop("tokens", {})
    return make_context(tmp_path_factory.mktemp(request.param), simulated, tokens=tokens, **model)


def _hidden(context: Context, counts: sp.csr_matrix | None = None) -> HiddenGenes:
    genes = context.measured_genes[5:150:2]  # more than are asked at once
    return HiddenGenes(context, read_rows(context.reader, np.arange(20)) if counts is None else counts, genes)


def test_the_model_sees_nothing_of_hidden_genes(context: Context) -> None:
    hidden = _hidden(context)
    columns = np.isin(match_columns(context.reader, context.model.vocabulary).target, hidden.genes)
    other = hidden.counts.copy()
    other.data = np.where(columns[other.indices], 7 * other.data + 3, other.data)
    assert (other != hidden.counts).nnz
    changed = _hidden(context, other)
    for batch in hidden.tokens():
        assert not np.isin(batch.genes, hidden.genes + len(SPECIAL)).any()
    vectors = hidden.embedded(context.model.network)
    np.testing.assert_array_equal(changed.embedded(context.model.network), vectors)
    assert (vectors != HiddenGenes(context, hidden.counts, hidden.genes[:1]).embedded(context.model.network)).any()
    own, of_changed = own_expression(hidden, vectors), own_expression(changed, vectors)
    assert own is not None
    assert of_changed is not None
    np.testing.assert_array_equal(own, of_changed)
    assert own.shape == hidden.expression().shape == (20, 73)
    assert (own >= 0).all()
    assert own.std(0).min() > 0
    total = np.asarray(hidden.counts.sum(1)).ravel()
    place = np.flatnonzero(match_columns(context.reader, context.model.vocabulary).target == hidden.genes[2])
    expected = np.log1p(hidden.counts[:, place].toarray().ravel() * 1e4 / total)
    np.testing.assert_allclose(hidden.expression()[:, 2], expected, rtol=1e-5)


def test_masked_values_are_those_of_the_asked_gene_and_cell(tmp_path: Path, simulated: Path) -> None:
    options = {"objective": "masked_value", "layers": 0, "pooling": "cls"}
    context = make_context(tmp_path, simulated, tokens={"tokenizer": "continuous"}, **options)
    hidden, network = _hidden(context), context.model.network
    own = own_expression(hidden, np.zeros((20, 16), np.float32))
    assert own is not None
    centers = np.array([b.values[s:e].mean() for b in hidden.tokens() for s, e in zip(b.cu_seqlens, b.cu_seqlens[1:])])
    with torch.no_grad():  # without layers a token's state depends on its gene alone
        state = network.gene_embedding.weight[len(SPECIAL) + hidden.genes] + network.hidden_value  # type: ignore[union-attr,index,operator]
        of_genes = network.value_out(network.head(network.norm(state))).squeeze(1).numpy()  # type: ignore[operator]
    np.testing.assert_allclose(own, np.maximum(of_genes + centers[:, None], 0), atol=1e-5)


@pytest.mark.parametrize("is_log", [False, True])
def test_a_true_profile_gives_the_expected_logarithm(is_log: bool) -> None:
    random = np.random.default_rng(0)
    profile = random.gamma(0.5, 1, 300) + 1e-3
    means = 4000 * profile / profile.sum()
    counts = random.poisson(means, (4000, 300))
    shares = np.log1p(counts).mean(0) if is_log else counts.mean(0)
    shares = shares[:40] / shares.sum()
    visible = sp.csr_matrix(np.where(np.arange(300) < 40, 0, counts))
    seen = np.log1p(counts * 1e4 / counts.sum(1, keepdims=True))[:, :40]
    predicted = expression_of_shares(np.tile(shares, (4000, 1)), visible, is_log)
    np.testing.assert_allclose(predicted.mean(0), seen.mean(0), atol=0.03)


def test_scores_are_those_of_scipy_and_undefined_for_a_constant() -> None:
    random = np.random.default_rng(0)
    seen = np.round(random.gamma(1, 1, (12, 7)), 1)
    predicted = seen + random.normal(size=seen.shape)
    predicted[:, 3], seen[4] = 0.1, 0.7
    scores = expression_scores(predicted, seen)
    for name, reference in (("Pearson", pearsonr), ("Spearman", spearmanr)):
        by_gene = [np.nan if gene == 3 else reference(predicted[:, gene], seen[:, gene])[0] for gene in range(7)]
        by_cell = [np.nan if cell == 4 else reference(predicted[cell], seen[cell])[0] for cell in range(12)]
        np.testing.assert_allclose(scores[f"{name} by gene"], by_gene)
        np.testing.assert_allclose(scores[f"{name} by cell"], by_cell)
    np.testing.assert_allclose(scores["MSE"], ((predicted - seen) ** 2).mean(1))


def test_what_is_fitted_reads_no_expression_of_tested_cells() -> None:
    random = np.random.default_rng(0)
    features, train, test = {"f": random.normal(size=(30, 4))}, np.arange(20), np.arange(20, 30)
    seen = features["f"] @ random.normal(size=(4, 6))
    found = fitted(features, seen, train, test, 3)
    other = fitted(features, np.where(np.arange(30)[:, None] < 20, seen, 9), train, test, 3)
    for name, values in found.items():
        np.testing.assert_array_equal(values, other[name])
    np.testing.assert_allclose(found["f + ridge"], seen[test], atol=0.02)
    np.testing.assert_array_equal(found["gene means"], np.tile(seen[:20].mean(0), (10, 1)))


def test_the_task_scores_every_method_in_folds_of_cells_or_of_whole_batches(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Imputation(CONFIG)
    result = task.run(context)
    rows = {row["name"]: row for row in result.rows}
    kinds = ["embedding", "untrained", "PCA50 of visible genes"]
    ridges = [f"{kind} + {method}" for kind in kinds for method in ("ridge", "kNN")]
    assert list(rows) == ["embedding + decoder", *ridges, "gene means"]
    assert rows["gene means"]["Pearson by gene_mean"] is None
    assert rows["PCA50 of visible genes + ridge"]["Pearson by gene_mean"] > 0.1  # simulated types
    assert rows["PCA50 of visible genes + ridge"]["MSE_mean"] < rows["gene means"]["MSE_mean"]
    assert len(rows["gene means"]["MSE_repetitions"]) == 2
    assert {verdict.metric for verdict in result.verdicts}.isdisjoint({"mean squared error"})
    assert result.figures["hidden_genes"] == 80
    assert "80 of" in capsys.readouterr().out
    json.dumps(result.to_json(), allow_nan=False)
    assert task.run(context).to_json() == result.to_json()
    symbols = context.model.vocabulary.symbols
    expressed = np.argsort(-context.model.vocabulary.n_cells)[:6]
    named = CONFIG.model_copy(update={"genes": [*(symbols[row] for row in expressed), "NOTHING"]})
    batch = pd.Series(np.arange(context.reader.n_obs) % 3)
    whole = Imputation(named).run(replace(context, roles={"batch": batch}))
    assert whole.figures["hidden_genes"] == 6
    assert (whole.figures["folds_of"], whole.figures["folds"]) == ("batch", 3)
    assert len(whole.rows[0]["MSE_repetitions"]) == 3
    assert "not hidden, unknown or too rare: NOTHING" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"imputation\.genes: 0 of 1 are genes of the model"):
        Imputation(CONFIG.model_copy(update={"genes": ["NOTHING"]})).run(context)
    few = replace(context, scored=np.arange(context.reader.n_obs) < 9)
    assert Imputation(CONFIG).run(few).skipped == "9 scored cells make no two folds of 4 or more"
    assert Evaluate.model_validate({"tasks": {"imputation": {}}}).tasks["imputation"].paths() == {}
