"""Masked prediction: figures against numpy, references from training cells alone, masks that never
change.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill import open_cells
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tasks import ReconstructConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.inference import embed
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks import reconstruct
from cellmill.evaluate.training_shards import read_gene_statistics
from cellmill.models.build import build
from cellmill.models.export import initial_tensors
from cellmill.models.objective import GeneStatistics
from cellmill.runs.results import TaskResult
from tests.models import objective_of, spec
from tests.unit.evaluated import make_context
from tests.unit.exported import save_model


def _objective(name: str, **tokens: Any) -> Any:
    return objective_of(Tokens.model_validate(tokens), name)


def _answering(model: EvaluatedModel, rule: Any) -> EvaluatedModel:
    """A model that predicts what `rule` makes of the targets' vocabulary rows and answers."""
    network = copy.copy(model.network)
    network.objective = copy.copy(network.objective)
    network.objective.predict_from_head = lambda _, states, prepared: rule(
        prepared.token_ids[prepared.target_tokens] - 2, prepared.targets
    )
    return replace(model, network=network)


def _model(folder: Path, corpus: dict[str, Path], tokenizer: str, objective: str) -> EvaluatedModel:
    return make_context(folder, corpus, tokens={"tokenizer": tokenizer}, objective=objective).model


def _judged(context: Context, model: EvaluatedModel, **options: Any) -> TaskResult:
    return reconstruct.Reconstruct(ReconstructConfig(**options)).run(replace(context, model=model))


def test_means_come_only_from_training_shards(
    corpus: dict[str, Path],
) -> None:
    manifest = Manifest.read(corpus["manifest"])
    # it predicts whole cells, so profiles are made of these
    statistics = read_gene_statistics(manifest, _objective("denoise", max_tokens=4096), seed=0)
    matrices = [
        open_cells(manifest.shard_path(shard)).X for shard in manifest.splits["train"].shards
    ]
    counts = np.concatenate([matrix.toarray() for matrix in matrices]).astype(np.float64)
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    detected = (counts > 0).sum(axis=0)
    assert statistics.n_cells == len(counts)
    assert (statistics.n_tokens == detected).all()
    assert statistics.global_mean == pytest.approx(values.sum() / detected.sum(), rel=1e-5)
    seen = detected > 0
    assert statistics.mean[seen] == pytest.approx(
        values.sum(axis=0)[seen] / detected[seen], rel=1e-5
    )
    assert statistics.mean[~seen] == pytest.approx(np.full((~seen).sum(), statistics.global_mean))
    profiles = (statistics.count_profile, statistics.log_count_profile)
    for profile, expression in zip(profiles, (counts, np.log1p(counts))):
        fractions = (expression / expression.sum(axis=1, keepdims=True)).sum(axis=0)
        expected = (fractions + 1 / len(fractions)) / (len(counts) + 1)
        assert profile == pytest.approx(expected)


def test_values_are_scored_as_numpy_would() -> None:
    random = np.random.default_rng(0)
    genes = random.integers(0, 5, 400)
    targets = random.normal(size=400)
    predicted = random.normal(size=400)
    statistics = GeneStatistics(np.full(5, 9), random.normal(size=5), 0.3, 9)
    figures, _ = _objective("masked_value").judge(genes, targets, predicted, statistics=statistics)
    sse = ((targets - predicted) ** 2).sum()
    means = statistics.mean[genes]
    assert figures["r2_over_gene_mean"] == pytest.approx(1 - sse / ((targets - means) ** 2).sum())
    assert figures["r2_over_global_mean"] == pytest.approx(1 - sse / ((targets - 0.3) ** 2).sum())
    centred = np.corrcoef(targets - means, predicted - means)[0, 1]
    assert figures["pearson_gene_centred"] == pytest.approx(centred)


def test_masked_genes_are_compared_with_their_frequency() -> None:
    statistics = GeneStatistics(np.array([6, 1, 0]), np.zeros(3), 0.0, 7)
    correct = np.array([1, 0, 0, 0], bool)
    cross_entropy = np.array([0.1, 2, 3, 3.0])
    figures, verdicts = _objective("masked_gene").judge(
        np.array([0, 0, 1, 2]), correct, cross_entropy, statistics=statistics
    )
    frequency = np.log(np.array([7, 7, 2, 1]) / 10)
    assert figures["accuracy"] == 0.25
    assert figures["accuracy_frequency"] == 0.5
    assert figures["cross_entropy_frequency"] == pytest.approx(-frequency.mean())
    assert [verdict.sentence for verdict in verdicts] == [
        "prediction of masked genes is behind gene frequency in training cells by 0.869 nats cross-entropy "
        "(no interval)."
    ]


def test_masked_residues_are_named_so() -> None:
    statistics = GeneStatistics(np.array([6, 1]), np.zeros(2), 0.0, 7)
    zero = np.zeros(1, int)
    residues = _objective("masked_gene", tokenizer="sequence")
    _, [verdict] = residues.judge(zero, zero > 0, zero, statistics=statistics)
    assert verdict.compared == "prediction of masked residues"
    assert verdict.against == "residue frequency in training sequences"


def test_perfect_answers_score_one(
    tmp_path: Path, corpus: dict[str, Path], context: Context
) -> None:
    model = _model(tmp_path, corpus, "continuous", "masked_value")
    mean = torch.from_numpy(model.gene_statistics.mean).float()
    perfect = _judged(context, _answering(model, lambda rows, answers: answers))
    assert perfect.figures["r2_over_gene_mean"] == pytest.approx(1)
    assert perfect.figures["pearson_gene_centred"] == pytest.approx(1)
    assert [verdict.sentence for verdict in perfect.verdicts] == [
        "prediction of masked values is ahead of the gene's training mean by 1.000 R² (no interval)."
    ]
    by_mean = _judged(context, _answering(model, lambda rows, answers: mean[rows]))
    assert by_mean.figures["r2_over_gene_mean"] == pytest.approx(0, abs=1e-5)
    assert [verdict.outcome for verdict in by_mean.verdicts] == ["level"]
    assert by_mean.figures["n_cells"] == 300
    assert by_mean.figures["n_targets"] == perfect.figures["n_targets"]


@pytest.mark.parametrize(
    ("tokenizer", "objective"),
    [
        ("continuous", "masked_value"),
        pytest.param("binned", "masked_value", marks=pytest.mark.full),
        pytest.param("rank", "masked_gene", marks=pytest.mark.full),
    ],
)
def test_masks_are_the_same_in_every_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    corpus: dict[str, Path],
    context: Context,
    tokenizer: str,
    objective: str,
) -> None:
    model = _model(tmp_path, corpus, tokenizer, objective)
    reference = _judged(context, model).figures
    monkeypatch.setattr(embed, "ROW_BLOCK", 50)
    monkeypatch.setattr(reconstruct, "TOKEN_BUDGET", 300)
    assert _judged(context, model).figures == pytest.approx(reference, abs=1e-5)


def test_judging_may_change_only_untrained_options(
    tmp_path: Path, corpus: dict[str, Path], context: Context
) -> None:
    model = _model(tmp_path / "value", corpus, "continuous", "masked_value")
    as_trained = _judged(context, model).figures
    assert _judged(context, model, objective={"mask_frac": 0.15}).figures == as_trained
    more = _judged(context, model, objective={"mask_frac": 0.45}).figures
    assert more["n_targets"] == pytest.approx(3 * as_trained["n_targets"], rel=0.1)
    message = r"^evaluate\.tasks\.reconstruct\.objective: unknown key 'mask_fraq'; did you mean 'mask_frac'\?$"
    with pytest.raises(ConfigError, match=message):
        _judged(context, model, objective={"mask_fraq": 0.1})
    decoding = _model(tmp_path / "decoding", corpus, "continuous", "cell_decoding")
    with pytest.raises(
        ConfigError, match="unknown key 'mask_frac'; there are: name, min_hidden_frac, "
    ):
        _judged(context, decoding, objective={"mask_frac": 0.1})
    with pytest.raises(ConfigError, match=r"{'decoder_hidden': 7}, which changes decoder\.0\.bias"):
        _judged(context, decoding, objective={"decoder_hidden": 7})


def test_an_option_at_its_value_changes_no_score_of_hf(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    """Its token ids are in a buffer that the state of the model does not have."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    architecture = {"model_type": "bert", "intermediate_size": 16} | sizes
    genes = Vocabulary.read(corpus["vocabulary"])
    given = replace(
        spec(
            genes.n_genes,
            Tokens.model_validate({"tokenizer": "rank", "max_tokens": 64}),
            family="encoder",
            objective="masked_gene",
        ),
        model=FamilyConfig.model_validate(
            {"family": "hf", "weights": "random", "architecture": architecture}
        ),
    )
    network = build(given)
    kept = network.state_dict().keys()
    tensors = {
        name: tensor for name, tensor in initial_tensors(network, 0, None, genes) if name in kept
    }
    folder = save_model(tmp_path / "hf", given, genes, tensors)
    network, vocabulary, tokens, config = embed.load_for_inference(folder)
    context = make_context(tmp_path, corpus)
    model = replace(
        context.model, network=network, config=config, vocabulary=vocabulary, tokens=tokens
    )
    plain = _judged(context, model)
    assert plain.figures["n_targets"]
    assert _judged(context, model, objective={"mask_frac": 0.15}) == plain
