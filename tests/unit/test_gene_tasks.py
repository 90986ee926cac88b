"""Tasks gene_embedding, grn and imputation: scores against references; nothing of hidden genes is
read.
"""

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
from sklearn.decomposition import PCA
from sklearn.linear_model import RidgeCV
from sklearn.metrics import average_precision_score, roc_auc_score

from cellmill import open_cells
from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import GeneEmbeddingConfig, GrnConfig, ImputationConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.features.expression import cross_correlations
from cellmill.evaluate.features.gene_vectors import expression_statistics
from cellmill.evaluate.hidden_genes.decoder import (
    decode_expression,
    expression_from_count_shares,
    expression_from_log_shares,
)
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.methods import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import Context, Skipped, run_task
from cellmill.evaluate.tasks.gene_embedding import GeneEmbedding
from cellmill.evaluate.tasks.gene_task import compute_auroc, compute_auroc_terms
from cellmill.evaluate.tasks.grn import (
    Grn,
    build_network,
    compute_average_precision,
    select_usable_edges,
)
from cellmill.evaluate.tasks.imputation import task as imputation_task
from cellmill.evaluate.tasks.imputation.fold_scores import score_expression
from cellmill.evaluate.tasks.imputation.regressions import VisibleFeatures, predict_by_regressions
from cellmill.evaluate.tasks.imputation.task import Imputation
from cellmill.evaluate.tasks.imputation.training_cell_regressions import TrainingCellRegressions
from cellmill.runs.results import Row, ScoredMethod, TaskResult
from tests.unit.evaluated import make_context, named

SET = range(30)  # rows of the vocabulary with vectors of their own
FACTORS = range(2)
TARGETS = range(2, 42)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Context:
    """A model whose input vectors know one gene set, and two factors with twenty targets each."""
    context = make_context(tmp_path_factory.mktemp("planted"), corpus)
    random = np.random.default_rng(0)
    vectors = random.normal(size=(context.model.vocabulary.n_genes, 16)).astype(np.float32)
    vectors[SET, 0] += 4
    for factor in FACTORS:
        vectors[[factor, *TARGETS[factor::2]], 5 + factor] += 6
    with torch.no_grad():
        context.model.network.gene_embedding.weight[len(SPECIAL) :] = torch.from_numpy(vectors)  # type: ignore[union-attr,index]
    return context


def _tsv(path: Path, lines: list[list[str]]) -> Path:
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


def test_scores_of_rankings_equal_scikit_learn() -> None:
    random = np.random.default_rng(1)
    member = random.random(300) < 0.2
    scores = np.round(random.normal(size=300) + member, 1)  # with ties
    assert compute_auroc(member, scores) == pytest.approx(roc_auc_score(member, scores))
    assert compute_average_precision(member, scores) == pytest.approx(
        average_precision_score(member, scores)
    )
    terms = compute_auroc_terms(member, scores)
    assert terms.mean() == pytest.approx(roc_auc_score(member, scores))
    own = scores[member]
    other = scores[~member]
    wins = (own[:, None] > other) + 0.5 * (own[:, None] == other)
    delong = wins.mean(1).var() / len(own) + wins.mean(0).var() / len(other)
    assert terms.var() / len(terms) == pytest.approx(delong)


def test_sparse_statistics_equal_those_of_dense_arrays(planted: Context) -> None:
    profiles = planted.model.training_profiles()
    dense = profiles.toarray().astype(np.float64)
    expected = np.stack([dense.mean(0), dense.std(0), (dense > 0).mean(0)], axis=1)
    np.testing.assert_allclose(expression_statistics(profiles), expected, atol=1e-6)
    both = np.corrcoef(dense[:, :7].T)
    np.testing.assert_allclose(
        cross_correlations(dense[:, :3], dense[:, 3:7]), both[:3, 3:], atol=1e-9
    )


def test_only_a_planted_gene_set_is_found(
    planted: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbols = planted.model.vocabulary.symbols
    ids = planted.model.vocabulary.gene_ids
    chance = np.random.default_rng(3).permutation(np.arange(60, 300))[:40]
    lines = [
        [
            "planted",
            "by symbol and id",
            *(symbols[row] for row in SET[:15]),
            *(ids[row] for row in SET[15:]),
        ],
        ["chance", "", *(symbols[row] for row in chance), "NO-SUCH-GENE"],
        ["small", "", *symbols[:3]],
    ]
    gmt = _tsv(tmp_path / "sets.gmt", lines)
    factors = _tsv(tmp_path / "factors.txt", [[symbols[row]] for row in SET])
    config = GeneEmbeddingConfig(
        name="gene_embedding",
        gene_sets=str(gmt),
        transcription_factors=str(factors),
        seeds=2,
        max_others=100,
    )
    result = GeneEmbedding(config).run(planted)
    rows = {row.method.name: row for row in result.rows}
    assert {
        "embedding of genes",
        "untrained embedding of genes",
        "PCA50 of genes",
        "random vectors",
    } <= set(rows)
    own = rows["embedding of genes"]
    random = rows["random vectors"]
    assert min(own.scores["AUROC of planted"].repetitions) > 0.95
    assert own.scores["AUROC, transcription factors"].mean > 0.95
    assert abs(np.mean(own.scores["AUROC of chance"].repetitions) - 0.5) < 0.2
    assert abs(random.scores["AUROC, gene sets"].mean - 0.5) < 0.15
    both = np.mean(
        [own.scores["AUROC of planted"].repetitions, own.scores["AUROC of chance"].repetitions]
    )
    assert own.scores["AUROC, gene sets"].mean == pytest.approx(both)
    assert result.verdicts[1].outcome == "ahead"
    assert result.figures["left_out"] == "small"
    assert result.figures["named_genes"] == result.figures["known_genes"] + 1
    printed = capsys.readouterr().out
    assert "2 of 3 sets are used: training cells express at least 10 of their genes" in printed
    assert "left out: small" in printed
    json.dumps(result.to_json(), allow_nan=False)
    assert GeneEmbedding(config).run(planted).to_json() == result.to_json()
    whole = _tsv(tmp_path / "whole", [["whole", "", *ids]])
    mouse = _tsv(tmp_path / "mouse", [["set", "", "Actb"]])
    broken = _tsv(tmp_path / "bad", [["set", ""]])
    for error, message, changed in (
        (
            Skipped,
            "no set has at least 50 usable genes",
            {"transcription_factors": None, "min_genes": 50},
        ),
        (
            Skipped,
            "usable genes, with at least 10 other genes outside it",
            {"transcription_factors": None, "gene_sets": str(whole)},
        ),
        (
            DataError,
            "mouse: none of its 1 genes is one of the model's, such as 'Actb'",
            {"gene_sets": str(mouse)},
        ),
        (
            DataError,
            "bad, line 1: expected a name, a description and genes",
            {"gene_sets": str(broken)},
        ),
    ):
        with pytest.raises(error, match=message):
            GeneEmbedding(config.model_copy(update=changed)).run(planted)
    with pytest.raises(
        ValueError, match="expected gene_sets or transcription_factors, got neither"
    ):
        Evaluate.model_validate({"tasks": {"gene_embedding": {}}})


def test_planted_edges_are_ranked_first(planted: Context, tmp_path: Path) -> None:
    symbols = planted.model.vocabulary.symbols
    lines = [
        [symbols[factor], symbols[target], "1"]
        for factor in FACTORS
        for target in TARGETS[factor::2]
    ]
    lines += [
        [symbols[50], symbols[TARGETS[0]]],
        [symbols[0], symbols[0]],
        ["absent", symbols[3]],
        lines[0],
    ]
    edges = _tsv(tmp_path / "edges.tsv", lines)
    config = GrnConfig(name="grn", edges=str(edges), min_targets=2)
    result = Grn(config).run(planted)
    rows = {row.method.name: row for row in result.rows}
    assert rows["embedding of genes"].scores["AUROC"].mean > 0.9
    assert rows["embedding of genes"].numbers["AUPRC, all pairs"] > 0.8
    assert rows["random"].scores["AUROC"].mean == pytest.approx(0.5, abs=0.05)
    assert rows["random"].scores["AUPRC"].mean == pytest.approx(0.5, abs=0.1)
    assert {"co-expression, Pearson", "co-expression, Spearman", "PCA50 of genes"} <= set(rows)
    # two factors are two units: the difference is large, and undecided
    assert result.verdicts[0].difference > 0.3
    assert (result.verdicts[0].outcome, result.verdicts[0].n) == ("undecided", 2)
    found = {
        key: result.figures[key]
        for key in ("edges", "known_edges", "factors", "targets", "left_out")
    }
    assert found == {
        "edges": 43,
        "known_edges": 41,
        "factors": 2,
        "targets": 40,
        "left_out": symbols[50],
    }
    json.dumps(result.to_json(), allow_nan=False)
    task = Grn(config)
    first = task.run(planted)
    assert task.run(replace(planted, dataset="another")) == first  # its cells play no part
    alone = _tsv(tmp_path / "alone.tsv", lines[:20])  # of one factor: every target is its own
    for message, changed in (
        (
            "41 of 43 edges can be used .* at least 100 are needed: .*, not absent, or",
            {"min_edges": 100},
        ),
        ("0 factors have 2 targets or more", {"edges": str(alone)}),
    ):
        with pytest.raises(DataError, match=message):
            Grn(config.model_copy(update=changed)).run(planted)
    # by size, the opposite vectors are as good
    table: torch.Tensor = planted.model.network.gene_embedding.weight  # type: ignore[union-attr,assignment]
    rows_of_factors = slice(len(SPECIAL), len(SPECIAL) + len(FACTORS))
    with torch.no_grad():
        table[rows_of_factors] *= -1
        signed, absolute = (
            Grn(config.model_copy(update={"absolute": of})).run(planted) for of in (False, True)
        )
        table[rows_of_factors] *= -1
    assert signed.rows[0].scores["AUROC"].mean < 0.1
    assert absolute.rows[0].scores["AUROC"].mean > 0.6


def test_edges_are_matched_by_alias() -> None:
    ids = ["ENSG00000115415", "ENSG00000173166", "ENSG00000111640"]
    symbols = ["STAT1", "RAPH1", "GAPDH"]
    vocabulary = Vocabulary(ids, symbols, np.ones(3, np.int64), np.ones(3, np.float32))
    edges = [
        ("ISGF-3", "RAPH1"),
        ("STAT1", "ENSG00000173166"),
        ("STAT1", "GAPDH"),
        ("STAT1", "nothing"),
    ]
    pairs = select_usable_edges(edges, vocabulary, np.array([True, True, False]))
    assert pairs.tolist() == [[0, 1]]
    factors, _, _, left_out = build_network(np.array([[0, 1], [1, 0], [2, 1]]), 1)
    assert factors.tolist() == [2]  # the others have no other candidate than their target
    assert left_out.tolist() == [0, 1]


PROFILE = {"family": "profile", "hidden": 16, "layers": 1, "heads": None}
MODELS: dict[str, dict[str, Any]] = {
    "cell_decoding": PROFILE | {"objective": "cell_decoding"},
    "query_decoding": PROFILE | {"objective": "query_decoding", "decoder_hidden": 8},
    "masked_value": {"objective": "masked_value", "layers": 0, "tokens": {"zero_frac": 0.2}},
}
CONFIG = ImputationConfig(name="imputation", seeds=2, max_genes=80)


@pytest.fixture(scope="module", params=MODELS)
def context(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    corpus: dict[str, Path],
) -> Context:
    model = dict(MODELS[request.param])
    tokens = {"tokenizer": "continuous"} | model.pop("tokens", {})
    return make_context(tmp_path_factory.mktemp(request.param), corpus, tokens=tokens, **model)


def _hidden(context: Context, counts: sp.csr_matrix | None = None) -> PartlyHiddenCells:
    genes = context.measured_genes[5:150:2]  # more than are asked at once
    cells = np.arange(20)
    if counts is None:
        counts = read_rows(context.reader, cells)
    return PartlyHiddenCells.from_context(context, cells, counts, genes)


def test_the_model_sees_nothing_of_hidden_genes(context: Context) -> None:
    hidden = _hidden(context)
    columns = np.isin(
        match_columns(context.reader, context.model.vocabulary).target, hidden.hidden_genes
    )
    other = hidden.counts.copy()
    other.data = np.where(columns[other.indices], 7 * other.data + 3, other.data)
    assert (other != hidden.counts).nnz
    changed = _hidden(context, other)
    for batch in hidden.tokenize():
        assert not np.isin(batch.token_ids, hidden.hidden_genes + len(SPECIAL)).any()
    vectors = hidden.embed(context.model.network)
    np.testing.assert_array_equal(changed.embed(context.model.network), vectors)
    one_hidden = replace(hidden, hidden_genes=hidden.hidden_genes[:1])
    assert (vectors != one_hidden.embed(context.model.network)).any()
    own = decode_expression(hidden, vectors)
    of_changed = decode_expression(changed, vectors)
    assert own is not None
    assert of_changed is not None
    np.testing.assert_array_equal(own, of_changed)
    assert own.shape == hidden.hidden_expression.shape == (20, 73)
    assert (own >= 0).all()
    assert own.std(0).min() > 0
    total = np.asarray(hidden.counts.sum(1)).ravel()
    place = np.flatnonzero(
        match_columns(context.reader, context.model.vocabulary).target == hidden.hidden_genes[2]
    )
    expected = np.log1p(hidden.counts[:, place].toarray().ravel() * 1e4 / total)
    np.testing.assert_allclose(hidden.hidden_expression[:, 2], expected, rtol=1e-5)


def test_masked_values_are_predicted_for_the_requested_gene(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    options = {"objective": "masked_value", "layers": 0, "pooling": "cls"}
    context = make_context(tmp_path, corpus, tokens={"tokenizer": "continuous"}, **options)
    hidden = _hidden(context)
    network = context.model.network
    own = decode_expression(hidden, np.zeros((20, 16), np.float32))
    assert own is not None
    centers = np.array(
        [
            b.values[s:e].mean()
            for b in hidden.tokenize()
            for s, e in zip(b.cu_seqlens, b.cu_seqlens[1:])
        ]
    )
    with torch.no_grad():  # without layers a token's state depends on its gene alone
        state = (
            network.gene_embedding.weight[len(SPECIAL) + hidden.hidden_genes] + network.hidden_value
        )  # type: ignore[union-attr,index,operator]
        of_genes = network.value_out(network.head(network.norm(state))).squeeze(1).numpy()  # type: ignore[operator]
    np.testing.assert_allclose(own, np.maximum(of_genes + centers[:, None], 0), atol=1e-5)


def test_a_true_profile_gives_the_expected_logarithm() -> None:
    random = np.random.default_rng(0)
    profile = random.gamma(0.5, 1, 300) + 1e-3
    means = 4000 * profile / profile.sum()
    counts = random.poisson(means, (4000, 300))
    shares = profile[:40] / profile.sum()
    visible = sp.csr_matrix(np.where(np.arange(300) < 40, 0, counts))
    seen = np.log1p(counts * 1e4 / counts.sum(1, keepdims=True))[:, :40]
    predicted = expression_from_count_shares(np.tile(shares, (4000, 1)), visible)
    np.testing.assert_allclose(predicted.mean(0), seen.mean(0), atol=0.03)


def test_shares_of_logarithms_are_scaled_by_visible_genes() -> None:
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(50), 6)[:, :20]
    counts = random.poisson(random.gamma(1, 4, (6, 30)))
    rest = 1 - shares.sum(1, keepdims=True)
    logs = np.log1p(counts * 1e4 * rest / counts.sum(1, keepdims=True))
    expected = shares * logs.sum(1, keepdims=True) / rest
    for depth in (1, 5):
        visible = sp.csr_matrix(depth * np.hstack([np.zeros((6, 20), int), counts]))
        predicted = expression_from_log_shares(shares, visible)
        np.testing.assert_allclose(predicted, expected, rtol=1e-5)


def test_scores_equal_scipy() -> None:
    random = np.random.default_rng(0)
    seen = np.round(random.gamma(1, 1, (12, 7)), 1)
    predicted = seen + random.normal(size=seen.shape)
    predicted[:, 3], seen[4] = 0.1, 0.7
    scores = score_expression(predicted, seen)
    for name, reference in (("Pearson", pearsonr), ("Spearman", spearmanr)):
        by_gene = [
            np.nan if gene == 3 else reference(predicted[:, gene], seen[:, gene])[0]
            for gene in range(7)
        ]
        by_cell = [
            np.nan if cell == 4 else reference(predicted[cell], seen[cell])[0] for cell in range(12)
        ]
        np.testing.assert_allclose(scores[f"{name} by gene"], by_gene)
        np.testing.assert_allclose(scores[f"{name} by cell"], by_cell)
    np.testing.assert_allclose(scores["MSE"], ((predicted - seen) ** 2).mean(1))


def test_regressions_equal_scikit_learn_in_both_scalings() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(30, 4)) * [1, 1, 100, 0.01]
    expression = features @ random.normal(size=(4, 6))
    fitted = features[:20]
    tested = features[20:]
    method = ScoredMethod("f")
    profiles = sp.csr_matrix(random.random((30, 5)))
    found = named(
        predict_by_regressions(
            expression[:20],
            VisibleFeatures(profiles[:20], {method: fitted}),
            VisibleFeatures(profiles[20:], {method: tested}),
            3,
        )
    )
    alphas = np.logspace(-2, 4, 13)
    means = fitted.mean(0)
    deviations = fitted.std(0)
    for ending, scale in (
        ("", lambda values: (values - means) / deviations),
        (", unscaled", lambda values: values),
    ):
        ridge = RidgeCV(alphas).fit(scale(fitted), expression[:20]).predict(scale(tested))
        np.testing.assert_allclose(found[f"f + ridge{ending}"], ridge)
        for cell, own in enumerate(scale(tested)):
            nearest = np.argsort(((scale(fitted) - own) ** 2).sum(1))[:3]
            np.testing.assert_allclose(found[f"f + kNN{ending}"][cell], expression[nearest].mean(0))


def tables(result: TaskResult) -> dict[str, Row]:
    """Rows by name."""
    return {row.method.name: row for row in result.rows}


def test_a_decoder_that_copies_the_baseline_is_level(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder's place is taken by the slow, obvious baseline: ridge on PCA50 of the training
    shards' cells.
    """
    manifest = context.model.manifest
    genes = context.model.vocabulary.n_genes
    shards = [open_cells(manifest.shard_path(shard)).X for shard in manifest.splits["train"].shards]
    counts = np.asarray(sp.vstack(shards).todense(), np.float64)

    def copied(hidden: PartlyHiddenCells, vectors: np.ndarray) -> np.ndarray:
        shown = np.setdiff1d(np.arange(genes), hidden.hidden_genes)
        measured = np.isin(np.arange(genes), context.measured_genes)
        own = np.where(measured, counts, 0)

        def profiles(of: np.ndarray) -> np.ndarray:
            return np.log1p(1e4 * of / np.maximum(of.sum(1, keepdims=True), 1))

        seen = profiles(own)[:, hidden.hidden_genes]
        dense = np.asarray(hidden.visible_counts.todense(), np.float64)
        components = PCA(50, svd_solver="full").fit(profiles(own[:, shown]))
        ridge = RidgeCV(np.logspace(-2, 4, 13)).fit(
            components.transform(profiles(own[:, shown])), seen
        )
        return np.asarray(ridge.predict(components.transform(profiles(dense[:, shown]))))

    monkeypatch.setattr(imputation_task, "decode_expression", copied)
    result = Imputation(CONFIG).run(context)
    rows = tables(result)
    for metric in ("Pearson by gene", "Spearman by gene", "Pearson by cell", "MSE"):
        copy, baseline = (
            rows[name].scores[metric].mean
            for name in ("embedding + decoder", "PCA50 of visible genes + ridge, unscaled")
        )
        assert copy == pytest.approx(baseline, abs=2e-3)
    by_gene = next(
        verdict for verdict in result.verdicts if verdict.metric == "Pearson of a gene over cells"
    )
    assert by_gene.outcome != "ahead"


def test_predictions_read_no_hidden_gene_of_scored_cells(context: Context) -> None:
    hidden = _hidden(context)
    columns = np.isin(context.gene_columns.target, hidden.hidden_genes)
    other = hidden.counts.copy()
    other.data = np.where(columns[other.indices], 7 * other.data + 3, other.data)
    changed = _hidden(context, other)
    vectors = {
        EMBEDDING: hidden.embed(context.model.network),
        UNTRAINED: np.ones((20, 16), np.float32),
    }
    trained = TrainingCellRegressions.read(context, hidden.hidden_genes)
    assert trained is not None
    assert trained.training_cells.counts.shape[0] == context.model.manifest.splits["train"].n_obs
    found = trained.predict(VisibleFeatures(hidden.visible_profiles, vectors), 3)
    again = trained.predict(VisibleFeatures(changed.visible_profiles, vectors), 3)
    assert "PCA50 of visible genes + ridge" in named(found)
    for name, values in found.items():
        np.testing.assert_array_equal(values, again[name])


def test_cells_of_the_dataset_are_fitted_separately(context: Context) -> None:
    trained = TrainingCellRegressions.read(
        replace(context, dataset="elsewhere"), _hidden(context).hidden_genes
    )
    assert trained is not None
    assert [*trained.groups_by_note()] == [""]  # a dataset that the model was not trained on
    some = replace(trained, is_from_dataset=np.arange(len(trained.is_from_dataset)) % 3 == 0)
    groups = some.groups_by_note()
    assert [*groups] == ["", ", training cells of the dataset"]
    assert (groups[", training cells of the dataset"] % 3 == 0).all()
    hidden = _hidden(context)
    ones = np.ones((20, 16), np.float32)
    vectors = {EMBEDDING: ones, UNTRAINED: ones}
    means = trained.training_cells.hidden_expression[some.is_from_dataset].mean(0)
    found = named(some.predict(VisibleFeatures(hidden.visible_profiles, vectors), 3))
    predicted = found["gene means, training cells of the dataset"]
    np.testing.assert_allclose(predicted, np.tile(means, (20, 1)))


def test_every_method_is_scored_in_folds_of_cells_or_batches(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Imputation(CONFIG)
    result = task.run(context)
    rows = {row.method.name: row for row in result.rows}
    kinds = ["embedding", "untrained", "PCA50 of visible genes"]
    methods = ("ridge", "kNN", "ridge, unscaled", "kNN, unscaled")
    fitted = [f"{kind} + {method}" for kind in kinds for method in methods]
    folded = [f"{kind}, folds of scored cells + {method}" for kind in kinds for method in methods]
    means = ["gene means", "gene means, folds of scored cells"]
    # means have no Pearson by gene
    assert list(rows) == ["embedding + decoder", *fitted, *folded, *means]
    assert {name for name, row in rows.items() if row.method.kind == "variant"} == {
        *folded,
        means[1],
    }
    assert all("folds of scored cells" not in verdict.against for verdict in result.verdicts)
    means_row = rows["gene means"]
    ridge = rows["PCA50 of visible genes + ridge"]
    assert means_row.value("Pearson by gene") is None
    assert ridge.scores["Pearson by gene"].mean > 0.1  # simulated types
    assert ridge.scores["MSE"].mean < means_row.scores["MSE"].mean
    assert len(means_row.scores["MSE"].repetitions) == 2
    assert {verdict.metric for verdict in result.verdicts}.isdisjoint({"mean squared error"})
    assert result.figures["hidden_genes"] == 80
    assert (result.figures["folds_of"], result.figures["folds"]) == ("cells", context.options.folds)
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
    assert whole.lower_is_better == ["MSE"]
    assert len(whole.rows[0].scores["MSE"].repetitions) == 3
    assert "not hidden, unknown or too rare: NOTHING" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"imputation\.genes: none of 1 named genes is known"):
        Imputation(CONFIG.model_copy(update={"genes": ["NOTHING"]})).run(context)
    frequent = CONFIG.model_copy(update={"genes": [*symbols], "min_cells": 1})
    with pytest.raises(
        DataError, match=r"imputation\.genes: all \d+ measured genes of \S+ would be"
    ):
        Imputation(frequent).run(context)
    few = replace(context, scored=np.arange(context.reader.n_obs) < 9)
    reason = run_task(Imputation(CONFIG), few).skipped
    n_folds = context.options.folds
    assert reason == f"9 scored cells are too few for {n_folds} folds of 4; lower evaluate.folds"
    assert Evaluate.model_validate({"tasks": {"imputation": {}}}).tasks["imputation"].paths() == {}
