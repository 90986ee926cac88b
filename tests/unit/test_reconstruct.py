"""Filling in what is hidden: figures against numpy, references from training cells alone, masks that never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

from cellmill.config.tokens import Tokens
from cellmill.data.counts_reader import open_counts
from cellmill.data.manifest import Manifest
from cellmill.data.vocabulary import Vocabulary
from cellmill.evaluate import embed
from cellmill.evaluate.reconstruct import TrainTokens, judge_genes, judge_values, read_train_tokens, reconstruct
from cellmill.models.export import load_model
from cellmill.models.family import Model
from cellmill.models.objectives.masking import MaskedBatch
from tests.unit.exported import export_model, make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> dict[str, Path]:
    return make_corpus(tmp_path_factory.mktemp("corpus"), simulated)


class _Answers(Model):
    """Predicts what `rule` makes of the hidden tokens' rows and answers."""

    def __init__(self, model: Model, rule: Any) -> None:
        super().__init__()
        self.model, self.rule = model, rule

    def prepare(self, *arguments: Any, **options: Any) -> MaskedBatch:
        return self.model.prepare(*arguments, **options)

    def predict(self, prepared: MaskedBatch) -> torch.Tensor:
        return self.rule(prepared.genes[prepared.targets] - 2, prepared.answers)


def _judged(
    corpus: dict[str, Path], model: Model, tokens: Tokens, objective: str, budget: int = 5000
) -> dict[str, Any]:
    train = read_train_tokens(Manifest.read(corpus["manifest"]), tokens)
    with open_counts(corpus["cells"]) as reader:
        chosen = np.arange(reader.n_obs) % 2 == 0
        return reconstruct(
            model,
            reader,
            Vocabulary.read(corpus["vocabulary"]),
            tokens,
            train,
            chosen=chosen,
            objective=objective,
            seed=3,
            token_budget=budget,
        )


def _load(folder: Path, corpus: dict[str, Path], tokenizer: str, objective: str) -> tuple[Model, Tokens]:
    exported = export_model(folder, corpus["vocabulary"], {"tokenizer": tokenizer}, objective=objective)
    model, _, config = load_model(exported)
    return model, Tokens.model_validate(config["tokens"])


def test_means_and_frequencies_are_those_of_the_training_shards_alone(corpus: dict[str, Path]) -> None:
    manifest = Manifest.read(corpus["manifest"])
    tokens = Tokens(tokenizer="continuous", max_tokens=4096)
    found = read_train_tokens(manifest, tokens)
    matrices = [ad.read_h5ad(manifest.shard_path(shard)).X for shard in manifest.splits["train"].shards]
    counts = np.concatenate([matrix.toarray() for matrix in matrices]).astype(np.float64)
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    detected = (counts > 0).sum(axis=0)
    assert found.n_cells == len(counts)
    assert (found.n == detected).all()
    assert found.global_mean == pytest.approx(values.sum() / detected.sum(), rel=1e-5)
    seen = detected > 0
    assert found.mean[seen] == pytest.approx(values.sum(axis=0)[seen] / detected[seen], rel=1e-5)
    assert found.mean[~seen] == pytest.approx(np.full((~seen).sum(), found.global_mean))


def test_values_are_judged_as_numpy_would() -> None:
    random = np.random.default_rng(0)
    genes, targets, predicted = random.integers(0, 5, 400), random.normal(size=400), random.normal(size=400)
    train = TrainTokens(np.full(5, 9), random.normal(size=5), 0.3, 9)
    found = judge_values(genes, targets, predicted, train)
    sse = ((targets - predicted) ** 2).sum()
    assert found["r2_over_gene_mean"] == pytest.approx(1 - sse / ((targets - train.mean[genes]) ** 2).sum())
    assert found["r2_over_global_mean"] == pytest.approx(1 - sse / ((targets - 0.3) ** 2).sum())
    centred = np.corrcoef(targets - train.mean[genes], predicted - train.mean[genes])[0, 1]
    assert found["pearson_gene_centred"] == pytest.approx(centred)


def test_hidden_genes_are_judged_beside_their_frequency() -> None:
    train = TrainTokens(np.array([6, 1, 0]), np.zeros(3), 0.0, 7)
    found = judge_genes(np.array([0, 0, 1, 2]), np.array([1, 0, 0, 0], bool), np.array([0.1, 2, 3, 3.0]), train)
    frequency = np.log(np.array([7, 7, 2, 1]) / 10)
    assert found["accuracy"] == 0.25
    assert found["accuracy_frequency"] == 0.5
    assert found["cross_entropy_frequency"] == pytest.approx(-frequency.mean())
    assert found["verdict"] == [
        "Hidden genes are predicted no better than by their frequency in training cells: cross-entropy 2.025 "
        "against 1.156 nats, accuracy 0.250 against 0.500."
    ]


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [
        (0.1, "better than by the gene's mean over training cells: R² over the gene mean is 0.990."),
        (2.0, "worse than by the gene's mean over training cells: R² over the gene mean is -3.000."),
    ],
)
def test_the_verdict_compares_with_the_gene_mean(noise: float, verdict: str) -> None:
    targets = np.array([1.0, -1.0])
    train = TrainTokens(np.array([2]), np.array([0.0]), 0.0, 2)
    found = judge_values(np.array([0, 0]), targets, targets + noise, train)
    assert found["verdict"] == [f"Hidden values are predicted {verdict}"]


def test_perfect_answers_score_one_and_gene_means_score_zero(tmp_path: Path, corpus: dict[str, Path]) -> None:
    model, tokens = _load(tmp_path / "model", corpus, "continuous", "masked_value")
    mean = torch.from_numpy(read_train_tokens(Manifest.read(corpus["manifest"]), tokens).mean).float()
    perfect = _judged(corpus, _Answers(model, lambda rows, answers: answers), tokens, "masked_value")
    assert perfect["r2_over_gene_mean"] == pytest.approx(1)
    assert perfect["pearson_gene_centred"] == pytest.approx(1)
    by_mean = _judged(corpus, _Answers(model, lambda rows, answers: mean[rows]), tokens, "masked_value")
    assert by_mean["r2_over_gene_mean"] == pytest.approx(0, abs=1e-5)
    assert "no better than by the gene's mean" in by_mean["verdict"][0]
    assert by_mean["n_cells"] == 300
    assert by_mean["n_targets"] == perfect["n_targets"]


@pytest.mark.parametrize(
    ("tokenizer", "objective"), [("continuous", "masked_value"), ("binned", "masked_value"), ("rank", "masked_gene")]
)
def test_masks_are_the_same_at_each_run_and_for_each_packing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: dict[str, Path], tokenizer: str, objective: str
) -> None:
    model, tokens = _load(tmp_path / "model", corpus, tokenizer, objective)
    reference = _judged(corpus, model, tokens, objective)
    monkeypatch.setattr(embed, "ROW_BLOCK", 50)
    again = _judged(corpus, model, tokens, objective, budget=300)
    for key, value in reference.items():
        if key != "verdict":
            assert again[key] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), key
    assert reference["objective"] == objective
