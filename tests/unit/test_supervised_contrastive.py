"""supervised_contrastive against the paper, and which labels a run's record and its card name."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.options import TrainOptions
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.models.batch import to_tensors
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.shared.per_cell import LabelObjective
from cellmill.models.objectives.supervised_contrastive import contrastive_loss_sum
from cellmill.stages.export import model_card
from cellmill.stages.train import supervised_by
from cellmill.train.worker import batch_column
from tests.checks import assert_near, check_gradients, loss_by_shares
from tests.models import ONE_LAYER, config_json, initialized, prepare, random_cells, seeded, spec

N_GENES = 60
TOKENS = Tokens.model_validate({"max_tokens": 64})
LEVELS = {"batch": ("x", "y"), "cell_type": ("a", "b", "c")}
EVERY_FAMILY = pytest.mark.parametrize("family", ONE_LAYER)
OBJECTIVE = {"objective": "supervised_contrastive", "label_column": "cell_type"}


def _model(family: str, **options: Any) -> Any:
    given = ONE_LAYER[family] | ({} if "objective" in options else OBJECTIVE) | options
    return initialized(spec(N_GENES, TOKENS, LEVELS, **given)).train()


def _cells(labels: tuple[int, ...], first: int = 0) -> Batch:
    """Cells of these labels, by number of their level, all of the first batch."""
    rng = np.random.default_rng(first)
    lengths = rng.integers(2, 30, len(labels))
    levels = np.array([[1, label] for label in labels], np.int32)
    cells = random_cells(lengths, TOKENS, N_GENES, seed=first, first=first, levels=levels)
    return to_tensors(cells)


def _reference(vectors: torch.Tensor, labels: list[int], temperature: float) -> Any:
    """Equation 2 of the paper, summed over the cells that share their label with another cell."""
    z = F.normalize(vectors, dim=1)
    loss = torch.zeros((), dtype=z.dtype)
    for anchor, label in enumerate(labels):
        n_positives = labels.count(label) - 1
        similarities = {}
        for other in range(len(labels)):
            if other != anchor:
                similarities[other] = torch.exp(z[anchor] @ z[other] / temperature)
        total = sum(similarities.values())
        for other, similarity in similarities.items():
            if labels[other] == label:
                loss = loss - torch.log(similarity / total) / n_positives
    return loss


def _table(vectors: torch.Tensor, labels: list[int]) -> torch.Tensor:
    """Rows of the objective: the label of a cell, then its normalised vector."""
    column = torch.tensor(labels, dtype=vectors.dtype)[:, None]
    return torch.cat([column, F.normalize(vectors, dim=1)], dim=1)


@pytest.mark.parametrize("anchors", [1, 4, 1024])
def test_the_loss_equals_the_formula_of_the_paper(
    anchors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cellmill.models.objectives.supervised_contrastive.ANCHORS_PER_CHUNK", anchors
    )
    vectors = torch.randn(9, 5, generator=seeded(0), dtype=torch.float64)
    labels = [1, 2, 2, 1, 1, 3, 2, 4, 4]
    expected = _reference(vectors, labels, 0.3)
    table = _table(vectors, labels)
    torch.testing.assert_close(contrastive_loss_sum(table, 0.3), expected)
    with_empty_slots = torch.zeros(16, 6, dtype=torch.float64)
    with_empty_slots[torch.arange(15, 6, -1)] = table
    torch.testing.assert_close(contrastive_loss_sum(with_empty_slots, 0.3), expected)


@pytest.mark.parametrize("labels", [[], [1], [1, 2], [0, 0]])
def test_without_two_cells_of_a_label_the_loss_is_zero(labels: list[int]) -> None:
    table = _table(torch.randn(len(labels), 4), labels).requires_grad_()
    loss = contrastive_loss_sum(table, 0.1)
    loss.backward()
    assert loss.item() == 0
    assert table.grad is not None
    assert not table.grad.any()


@EVERY_FAMILY
def test_gradients_of_micro_batches_equal_the_whole_batch(family: str) -> None:
    model = _model(family, temperature=0.3)
    batches = [
        _cells((1, 2, 0, 1), first=0),
        _cells((2, 2, 3), first=10),
        _cells((1,), first=20),
        _cells((0, 0), first=30),
        to_tensors(
            empty_batch(np.dtype(np.float32)).with_cell_fields(
                {"levels": np.empty((0, 2), np.int32)}
            )
        ),
    ]
    labels = [1, 2, 1, 2, 2, 3, 1]  # of the cells that have one
    prepared = [prepare(model, batch, 200) for batch in batches]
    loss = loss_by_shares(model, prepared)
    vectors = []
    n_targets = 0
    for part in prepared:
        vectors_of_part = model.cell_vectors(model.states(part), part)
        vectors.append(vectors_of_part[part.target_cells])
        n_targets += int(part.n_targets)
    assert n_targets == len(labels)
    expected = _reference(torch.cat(vectors), labels, 0.3)
    assert_near(loss, expected)
    gradients = check_gradients(model, loss, expected, rtol=1e-3, atol=1e-5)
    largest = [gradient.abs().max() for gradient in gradients.values() if gradient is not None]
    assert max(largest) > 0.1


def test_the_temperature_comes_from_the_options() -> None:
    labels = (1, 2, 3, 1, 2)
    batch = _cells(labels)

    def loss_with(**options: Any) -> torch.Tensor:
        model = _model("profile", **options)
        loss: torch.Tensor = model(prepare(model, batch))
        return loss

    model = _model("profile")
    prepared = prepare(model, batch)
    vectors = model.cell_vectors(model.states(prepared), prepared)
    assert_near(loss_with(), _reference(vectors, [*labels], 0.1))
    assert_near(loss_with(temperature=0.5), _reference(vectors, [*labels], 0.5))
    assert_near(loss_with(label_column="batch"), _reference(vectors, [1] * 5, 0.1))


def test_metrics_are_compared_with_collapsed_vectors() -> None:
    objective = _model("profile").objective
    z = F.normalize(torch.randn(6, 4, generator=seeded(0)), dim=1)
    labels = [1, 1, 2, 2, 2, 3]
    statistics = GeneStatistics(np.ones(1, np.int64), np.ones(1), 1.0, 1)
    figures, (verdict,) = objective.judge(np.array(labels), z.numpy(), statistics=statistics)
    loss = float(_reference(z, labels, 0.1)) / 6
    collapsed = 5 / 6 * math.log(5)  # five cells share a label, each with five other cells
    assert figures["supervised_contrastive"] == pytest.approx(loss, rel=1e-5)
    assert figures["supervised_contrastive_alike"] == pytest.approx(collapsed)
    assert verdict.difference == pytest.approx(loss - collapsed, rel=1e-5)
    for labels in ([1], [1, 3, 2]):
        unpaired = objective.judge(
            np.array(labels), z[: len(labels)].numpy(), statistics=statistics
        )
        assert unpaired == ({"n_targets": len(labels)}, [])


class _Coupled(LabelObjective):
    """An objective of a plug-in that says only that its loss couples cells."""

    def attach(self, model: Any, vocab_size: int) -> tuple[str, ...]:
        self.coupled_widths = (2,)
        return ()


def test_a_loss_that_couples_cells_is_validated_whole() -> None:
    coupled = _Coupled(_model("profile").objective.config, TOKENS)
    coupled.attach(None, 1)
    assert coupled.validates_coupled_loss
    parts = {"cell_decoding": {"view_loss": "vicreg"}}
    assert not _model("profile", objective="sum", parts=parts).objective.validates_coupled_loss
    parts |= {"supervised_contrastive": {"label_column": "cell_type"}}
    assert _model("profile", objective="sum", parts=parts).objective.validates_coupled_loss


def test_a_sum_is_supervised_by_the_labels_of_its_parts() -> None:
    parts = {
        "supervised_contrastive": {"label_column": "a_type"},
        "cell_decoding": {"batch_column": "batch"},
    }
    objective = ObjectiveConfig.model_validate({"name": "sum", "parts": parts})
    contrastive, decoding = objective.all_parts()
    assert objective.supervised_by == ("a_type",)
    assert decoding.supervised_by == ()
    manifest: Any = SimpleNamespace(obs_levels={})
    for part, expected in ((objective, "batch"), (contrastive, None)):
        options: Any = TrainOptions.model_construct(objective=part)
        assert batch_column(options, manifest) == expected


LABELLED: dict[str, Any] = {"name": "supervised_contrastive", "label_column": "cell_type"}


@pytest.mark.parametrize(
    ("objective", "earlier", "expected"),
    [
        ({"name": "cell_decoding"}, None, []),
        (LABELLED, None, ["cell_type"]),
        ({"name": "cell_decoding"}, ["tissue"], ["tissue"]),
        (LABELLED, ["tissue"], ["cell_type", "tissue"]),
    ],
)
def test_the_labels_of_a_run_include_its_first_weights(
    objective: dict[str, Any], earlier: list[str] | None, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config_json(supervised_by=earlier or []))
    init_from = tmp_path if earlier else None
    config = ObjectiveConfig.model_validate(objective)
    assert supervised_by(config, init_from) == expected


def card(family: str, objective: dict[str, Any], labels: list[str], **more: Any) -> str:
    config: dict[str, Any] = {
        "family": family,
        "model": {"hidden": 8},
        "objective": objective,
        "n_genes": 3,
        "tokens": {"tokenizer": "continuous", "max_tokens": 4},
        "vocabulary_digest": "a",
        "fingerprint": "b",
        "init_from": None,
        "step": 1,
        "val_loss": 1.0,
        "supervised_by": labels,
    }
    return model_card(config | more, 5)


def test_the_card_names_the_labels_used() -> None:
    supervised = card("profile", LABELLED, ["cell_type"])
    plain = card("profile", LABELLED, [])
    assert "tags: [single-cell, transcriptomics, profile, supervised]" in supervised
    assert "| supervised | by labels of obs column cell_type |" in supervised
    assert (
        "It is a supervised embedding of cell_type: it saw these labels in training." in supervised
    )
    assert "| supervised | no: trained without labels |" in plain
    assert "profile, supervised]" not in plain
    assert "| training data | fingerprint `b` |" in plain
    weighted = card("profile", LABELLED, [], weighted_by="cell_type")
    assert "`b`; cells of rare values of obs column cell_type were read more often |" in weighted


def test_the_card_has_the_correlation_of_hidden_genes() -> None:
    ridge = {"decoder_weight": 0.1, "validation_correlation": 0.304}
    begin = "| hidden genes | decoder 10%, ridge regression 90%"
    of_genes = "mean correlation of a hidden gene over validation cells 0.30, with a fifth of the genes hidden"
    assert f"{begin}; {of_genes} |\n" in card("profile", LABELLED, [], ridge=ridge)
    without = card("profile", LABELLED, [], ridge=ridge | {"validation_correlation": None})
    assert f"{begin} |\n" in without


def test_the_card_of_a_sum_has_the_options_of_its_parts() -> None:
    parts = {"cell_decoding": {"name": "cell_decoding", "weight": 1.0, "view": "thin"}}
    parts["masked_gene"] = {"name": "masked_gene", "weight": 0.3, "mask_frac": 0.15}
    written = card("encoder", {"name": "sum", "parts": parts}, [])
    assert "# An `encoder` single-cell model\n" in written
    listed = "sum of cell_decoding: weight 1.0, view thin; masked_gene: weight 0.3, mask_frac 0.15"
    assert f"| objective | {listed} |\n" in written


def test_the_card_names_the_batch_and_the_reason() -> None:
    chosen = {
        "name": "cell_decoding",
        "batch_column": "donor",
        "batch_reason": "donor has 2 values",
    }
    assert "| batch | obs column donor (donor has 2 values) |" in card("profile", chosen, [])
    named = {"name": "sum", "parts": {"cell_decoding": {"batch_column": "assay"}}}
    assert "| batch | obs column assay |" in card("profile", named, [])
    assert "| batch |" not in card("profile", {"name": "cell_decoding", "batch_column": None}, [])
