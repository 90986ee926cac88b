"""Labels that a run, or the run that it starts from, was trained with are in its record and in the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.stages.export import model_card
from cellmill.stages.train import supervised_by
from tests.models import config_json

CONTRAST: dict[str, Any] = {"name": "supervised_contrastive", "label_column": "cell_type"}


@pytest.mark.parametrize(
    ("objective", "earlier", "expected"),
    [
        ({"name": "cell_decoding"}, None, []),
        (CONTRAST, None, ["cell_type"]),
        ({"name": "cell_decoding"}, ["tissue"], ["tissue"]),
        (CONTRAST, ["tissue"], ["cell_type", "tissue"]),
    ],
)
def test_the_labels_of_a_run_are_those_of_its_objective_and_of_its_first_weights(
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
        "tokens": {"tokenizer": "continuous", "max_tokens": 4},
        "n_genes": 3,
        "vocabulary_digest": "a",
        "fingerprint": "b",
        "init_from": None,
        "step": 1,
        "val_loss": 1.0,
        "supervised_by": labels,
    }
    return model_card(config | more, 5)


def test_the_card_says_by_which_column_cells_were_weighted() -> None:
    plain = card("profile", CONTRAST, [])
    weighted = card("profile", CONTRAST, [], weighted_by="cell_type")
    assert "| training data | fingerprint `b` |" in plain
    assert "`b`; cells of rare values of obs column cell_type were read more often |" in weighted


def test_the_card_says_which_labels_were_used() -> None:
    supervised, plain = (card("profile", CONTRAST, labels) for labels in (["cell_type"], []))
    assert "tags: [single-cell, transcriptomics, profile, supervised]" in supervised
    assert "| supervised | by labels of obs column cell_type |" in supervised
    assert "It is a supervised embedding of cell_type: it saw these labels in training." in supervised
    assert "| supervised | no: trained without labels |" in plain
    assert "profile, supervised]" not in plain


def test_the_card_of_a_sum_has_the_options_of_its_parts() -> None:
    parts = {"cell_decoding": {"name": "cell_decoding", "weight": 1.0, "view": "thin"}}
    parts["masked_gene"] = {"name": "masked_gene", "weight": 0.3, "mask_frac": 0.15}
    written = card("encoder", {"name": "sum", "parts": parts}, [])
    assert "# An `encoder` single-cell model\n" in written
    listed = "sum of cell_decoding: weight 1.0, view thin; masked_gene: weight 0.3, mask_frac 0.15"
    assert f"| objective | {listed} |\n" in written
