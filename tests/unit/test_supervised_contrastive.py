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
from cellmill.models.objectives.contrastive import contrast
from cellmill.stages.export import model_card
from cellmill.stages.train import supervised_by
from cellmill.train.worker import batch_column
from tests.checks import check_gradients, loss_by_shares
from tests.models import ONE_LAYER, config_json, initialized, prepare, random_cells, spec

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
    return to_tensors(random_cells(lengths, TOKENS, N_GENES, rng=rng, first=first, levels=levels))


def _reference(z: torch.Tensor, labels: list[int], temperature: float) -> Any:
    """Equation 2 of the paper as it is written, summed over the cells i that have another of their
    label.
    """
    z, loss = F.normalize(z, dim=1), torch.zeros((), dtype=z.dtype)
    for i in range(len(labels)):
        others = [a for a in range(len(labels)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        below = sum((z[i] @ z[a] / temperature).exp() for a in others)
        for p in positives:
            loss = loss - ((z[i] @ z[p] / temperature).exp() / below).log() / len(positives)
    return loss


def _table(z: torch.Tensor, labels: list[int]) -> torch.Tensor:
    return torch.cat([torch.tensor(labels, dtype=z.dtype)[:, None], F.normalize(z, dim=1)], dim=1)


@pytest.mark.parametrize("anchors", [1, 4, 1024])
def test_the_loss_equals_the_formula_of_the_paper(
    anchors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.models.objectives.contrastive.ANCHORS", anchors)
    z = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = [1, 2, 2, 1, 1, 3, 2, 4, 4]
    expected = _reference(z, labels, 0.3)
    assert contrast(_table(z, labels), 0.3).item() == pytest.approx(expected.item())
    slots = torch.zeros(16, 6, dtype=torch.float64).index_copy(
        0, torch.arange(15, 6, -1), _table(z, labels)
    )
    assert contrast(slots, 0.3).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("labels", [[], [1], [1, 2], [0, 0]])
def test_without_two_cells_of_a_label_the_loss_is_zero(labels: list[int]) -> None:
    table = _table(torch.randn(len(labels), 4), labels).requires_grad_()
    loss = contrast(table, 0.1)
    loss.backward()
    assert loss.item() == 0
    assert table.grad is not None
    assert not table.grad.any()


@EVERY_FAMILY
def test_gradients_of_micro_batches_equal_the_whole_batch(family: str) -> None:
    model = _model(family, temperature=0.3)
    given = ((1, 2, 0, 1), (2, 2, 3), (1,), (0, 0))
    batches = [_cells(labels, 10 * at) for at, labels in enumerate(given)]
    batches.append(to_tensors(empty_batch(np.dtype(np.float32), levels=np.empty((0, 2), np.int32))))
    prepared = [prepare(model, batch, 200) for batch in batches]
    loss = loss_by_shares(model, prepared)
    z = torch.cat(
        [model.cell_vectors(model.states(part), part)[part.target_cells] for part in prepared]
    )
    expected = _reference(z, [label for labels in given for label in labels if label], 0.3)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert sum(int(part.n_targets) for part in prepared) == len(z) == 7
    found = check_gradients(model, loss, expected, rtol=1e-3, atol=1e-5)
    assert any(gradient is not None and gradient.abs().max() > 0.1 for gradient in found.values())


def test_the_temperature_comes_from_the_options() -> None:
    batch = _cells((1, 2, 3, 1, 2))
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"label_column": "batch"}]
    losses = [
        (model := _model("profile", **change))(prepare(model, batch)).item() for change in changes
    ]
    assert len({round(loss, 3) for loss in losses}) == 3
    model = _model("profile")
    z = model.cell_vectors(model.states(prepared := prepare(model, batch)), prepared)
    assert losses[2] == pytest.approx(_reference(z, [1] * len(z), 0.1).item(), rel=1e-5)


def test_metrics_are_compared_with_collapsed_vectors() -> None:
    objective = _model("profile").objective
    z = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = [1, 1, 2, 2, 2, 3]
    train = GeneStatistics(np.ones(1, np.int64), np.ones(1), 1.0, 1)
    figures, (verdict,) = objective.judge(np.array(labels), z.numpy(), train=train)
    assert figures["supervised_contrastive"] == pytest.approx(
        float(_reference(z, labels, 0.1)) / 6, rel=1e-5
    )
    assert figures["supervised_contrastive_alike"] == pytest.approx(5 / 6 * math.log(5))
    own = figures["supervised_contrastive"] - figures["supervised_contrastive_alike"]
    assert verdict.difference == pytest.approx(own)
    assert objective.judge(np.array([1]), z[:1].numpy(), train=train) == ({"n_targets": 1}, [])


def test_a_sum_is_supervised_by_the_labels_of_its_parts() -> None:
    parts = {
        "supervised_contrastive": {"label_column": "a_type"},
        "cell_decoding": {"batch_column": "batch"},
    }
    objective = ObjectiveConfig.model_validate({"name": "sum", "parts": parts})
    assert objective.supervised_by == ("a_type",)
    assert (
        ObjectiveConfig.model_validate(
            {"name": "cell_decoding", "batch_column": "batch"}
        ).supervised_by
        == ()
    )
    manifest: Any = SimpleNamespace(obs_levels={})
    for given, expected in ((objective, "batch"), (objective.each()[0], None)):
        options: Any = TrainOptions.model_construct(objective=given)
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
    assert supervised_by(ObjectiveConfig.model_validate(objective), init_from) == expected


def card(family: str, objective: dict[str, Any], labels: list[str], **more: Any) -> str:
    config: dict[str, Any] = {
        "family": family,
        "model": {"hidden": 8},
        "objective": objective,
        "n_genes": 3,
    }
    config |= {
        "tokens": {"tokenizer": "continuous", "max_tokens": 4},
        "vocabulary_digest": "a",
        "fingerprint": "b",
    }
    config |= {"init_from": None, "step": 1, "val_loss": 1.0, "supervised_by": labels}
    return model_card(config | more, 5)


def test_the_card_names_the_labels_used() -> None:
    supervised, plain = (card("profile", LABELLED, labels) for labels in (["cell_type"], []))
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


def test_the_card_of_a_sum_has_the_options_of_its_parts() -> None:
    parts = {"cell_decoding": {"name": "cell_decoding", "weight": 1.0, "view": "thin"}}
    parts["masked_gene"] = {"name": "masked_gene", "weight": 0.3, "mask_frac": 0.15}
    written = card("encoder", {"name": "sum", "parts": parts}, [])
    assert "# An `encoder` single-cell model\n" in written
    listed = "sum of cell_decoding: weight 1.0, view thin; masked_gene: weight 0.3, mask_frac 0.15"
    assert f"| objective | {listed} |\n" in written
