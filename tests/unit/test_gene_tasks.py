"""Tasks gene_embedding and grn: scores against references, planted vectors, files that do not fit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import GeneEmbeddingConfig, GrnConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.genes import (
    GeneEmbedding,
    Grn,
    auroc,
    auroc_terms,
    average_precision,
    correlations,
    expression_statistics,
    gene_vectors,
    known_edges,
    network_of,
)
from tests.unit.evaluated import make_context

SET = range(30)  # rows of the vocabulary with vectors of their own
FACTORS, TARGETS = range(2), range(2, 42)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Context:
    """A model whose input vectors know one gene set, and two factors with twenty targets each."""
    context = make_context(tmp_path_factory.mktemp("planted"), simulated)
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


def test_scores_of_rankings_are_those_of_scikit_learn_and_delong() -> None:
    random = np.random.default_rng(1)
    member = random.random(300) < 0.2
    scores = np.round(random.normal(size=300) + member, 1)  # with ties
    assert auroc(member, scores) == pytest.approx(roc_auc_score(member, scores))
    assert average_precision(member, scores) == pytest.approx(average_precision_score(member, scores))
    terms = auroc_terms(member, scores)
    assert terms.mean() == pytest.approx(roc_auc_score(member, scores))
    own, other = scores[member], scores[~member]
    wins = (own[:, None] > other) + 0.5 * (own[:, None] == other)
    delong = wins.mean(1).var() / len(own) + wins.mean(0).var() / len(other)
    assert terms.var() / len(terms) == pytest.approx(delong)


def test_statistics_and_correlations_are_those_of_dense_arrays(planted: Context) -> None:
    profiles = planted.model.training_profiles()
    dense = profiles.toarray().astype(np.float64)
    expected = np.stack([dense.mean(0), dense.std(0), (dense > 0).mean(0)], axis=1)
    np.testing.assert_allclose(expression_statistics(profiles), expected, atol=1e-6)
    both = np.corrcoef(dense[:, :7].T)
    np.testing.assert_allclose(correlations(dense[:, :3], dense[:, 3:7]), both[:3, 3:], atol=1e-9)


def test_a_planted_set_is_found_a_set_of_chance_is_not_and_small_or_unknown_ones_are_named(
    planted: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbols, ids = planted.model.vocabulary.symbols, planted.model.vocabulary.gene_ids
    chance = np.random.default_rng(3).permutation(np.arange(60, 300))[:40]
    lines = [
        ["planted", "by symbol and id", *(symbols[row] for row in SET[:15]), *(ids[row] for row in SET[15:])],
        ["chance", "", *(symbols[row] for row in chance), "NO-SUCH-GENE"],
        ["small", "", *symbols[:3]],
    ]
    gmt = _tsv(tmp_path / "sets.gmt", lines)
    factors = _tsv(tmp_path / "factors.txt", [[symbols[row]] for row in SET])
    config = GeneEmbeddingConfig(
        name="gene_embedding", gene_sets=str(gmt), transcription_factors=str(factors), seeds=2, max_others=100
    )
    result = GeneEmbedding(config).run(planted)
    rows = {row["name"]: row for row in result.rows}
    assert {"embedding of genes", "untrained embedding of genes", "PCA50 of genes", "random vectors"} <= set(rows)
    own, random = rows["embedding of genes"], rows["random vectors"]
    assert min(own["AUROC of planted_repetitions"]) > 0.95
    assert own["AUROC, transcription factors_mean"] > 0.95
    assert abs(np.mean(own["AUROC of chance_repetitions"]) - 0.5) < 0.2
    assert abs(random["AUROC, gene sets_mean"] - 0.5) < 0.15
    both = np.mean([own["AUROC of planted_repetitions"], own["AUROC of chance_repetitions"]])
    assert own["AUROC, gene sets_mean"] == pytest.approx(both)
    assert result.verdicts[1].outcome == "ahead"
    assert result.figures["left_out"] == "small"
    assert result.figures["named_genes"] == result.figures["known_genes"] + 1
    printed = capsys.readouterr().out
    assert "2 of 3 sets have 10 or more" in printed
    assert "left out: small" in printed
    json.dumps(result.to_json(), allow_nan=False)
    assert GeneEmbedding(config).run(planted).to_json() == result.to_json()
    few = GeneEmbedding(config.model_copy(update={"transcription_factors": None, "min_genes": 50})).run(planted)
    assert few.skipped is not None
    mouse = _tsv(tmp_path / "mouse.gmt", [["set", "", "Actb", "Gapdh"]])
    with pytest.raises(DataError, match=r"mouse\.gmt: none of its 2 genes is one of the model's, such as 'Actb'"):
        GeneEmbedding(config.model_copy(update={"gene_sets": str(mouse)})).run(planted)
    broken = _tsv(tmp_path / "broken.gmt", [["set", ""]])
    with pytest.raises(DataError, match=r"broken\.gmt, line 1: expected a name, a description and genes"):
        GeneEmbedding(config.model_copy(update={"gene_sets": str(broken)})).run(planted)
    with pytest.raises(ValueError, match="expected gene_sets or transcription_factors, got neither"):
        Evaluate.model_validate({"tasks": {"gene_embedding": {}}})


def test_planted_edges_are_ranked_first_and_absent_ones_are_an_error(planted: Context, tmp_path: Path) -> None:
    symbols = planted.model.vocabulary.symbols
    lines = [[symbols[factor], symbols[target], "1"] for factor in FACTORS for target in TARGETS[factor::2]]
    lines += [[symbols[50], symbols[TARGETS[0]]], [symbols[0], symbols[0]], ["absent", symbols[3]], lines[0]]
    edges = _tsv(tmp_path / "edges.tsv", lines)
    config = GrnConfig(name="grn", edges=str(edges), min_targets=2)
    result = Grn(config).run(planted)
    rows = {row["name"]: row for row in result.rows}
    assert rows["embedding of genes"]["AUROC_mean"] > 0.9
    assert rows["embedding of genes"]["AUPRC, all pairs"] > 0.8
    assert rows["random"]["AUROC_mean"] == pytest.approx(0.5, abs=0.05)
    assert rows["random"]["AUPRC_mean"] == pytest.approx(0.5, abs=0.1)
    assert {"co-expression, Pearson", "co-expression, Spearman", "PCA50 of genes"} <= set(rows)
    # two factors are two units: the difference is large, and undecided
    assert result.verdicts[0].difference > 0.3
    assert (result.verdicts[0].outcome, result.verdicts[0].n) == ("undecided", 2)
    found = {key: result.figures[key] for key in ("edges", "known_edges", "factors", "targets", "left_out")}
    assert found == {"edges": 43, "known_edges": 41, "factors": 2, "targets": 40, "left_out": symbols[50]}
    json.dumps(result.to_json(), allow_nan=False)
    task = Grn(config)
    first = task.run(planted)
    assert task.run(replace(planted, dataset="another")) is first  # its cells play no part
    with pytest.raises(
        DataError, match=r"2 of 43 edges have a gene .* expected 100 others, got 41: .*, not absent, or"
    ):
        Grn(config.model_copy(update={"min_edges": 100})).run(planted)
    alone = _tsv(tmp_path / "alone.tsv", lines[:20])  # of one factor: every target is its own
    with pytest.raises(DataError, match=r"0 factors have 2 targets or more"):
        Grn(config.model_copy(update={"edges": str(alone)})).run(planted)
    # by size, the opposite vectors are as good
    negative = replace(planted.model)
    turned = gene_vectors(negative)["embedding of genes"].copy()
    turned[list(FACTORS)] *= -1
    with torch.no_grad():
        table = planted.model.network.gene_embedding.weight  # type: ignore[union-attr]
        before = table.clone()  # type: ignore[operator]
        table[len(SPECIAL) :] = torch.from_numpy(turned)  # type: ignore[index,operator]
        signed, absolute = (Grn(config.model_copy(update={"absolute": of})).run(planted) for of in (False, True))
        table.copy_(before)  # type: ignore[operator]
    assert signed.rows[0]["AUROC_mean"] < 0.1
    assert absolute.rows[0]["AUROC_mean"] > 0.6


def test_edges_are_matched_by_alias_and_those_of_unexpressed_genes_are_left_out() -> None:
    ids, symbols = ["ENSG00000115415", "ENSG00000173166", "ENSG00000111640"], ["STAT1", "RAPH1", "GAPDH"]
    vocabulary = Vocabulary(ids, symbols, np.ones(3, np.int64), np.ones(3, np.float32))
    edges = [("ISGF-3", "RAPH1"), ("STAT1", "ENSG00000173166"), ("STAT1", "GAPDH"), ("STAT1", "nothing")]
    pairs = known_edges(edges, vocabulary, np.array([True, True, False]))
    assert pairs.tolist() == [[0, 1]]
    factors, _, _, left_out = network_of(np.array([[0, 1], [1, 0], [2, 1]]), 1)
    assert factors.tolist() == [2]  # the others have no other candidate than their target
    assert left_out.tolist() == [0, 1]
