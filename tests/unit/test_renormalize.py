"""Masked values: what visible values tell about hidden ones, with and without `renormalize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.load import load_config
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch, tokenized
from cellmill.models.batch import padded, to_tensors
from cellmill.models.objectives.masked import MaskedValue
from tests.models import random_cells, spec

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (20, 31, 1, 14, 2)


def _prepared(renormalize: bool, louder: bool = False, tokenizer: str = "continuous") -> tuple[Any, Batch]:
    """A masked batch; with `louder`, one whose masked genes have ten times the counts."""
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    objective = MaskedValue(spec(60, tokens, objective="masked_value", renormalize=renormalize).objective, tokens)
    cells = random_cells(LENGTHS, tokens, 60, first=0)
    genes, counts, starts = cells.genes - 2, cells.counts, cells.cu_seqlens.astype(np.int64)

    def prepare(counts: np.ndarray) -> tuple[Any, Batch]:
        batch = tokenized(tokens.load()(tokens), genes, counts, starts, np.arange(len(LENGTHS)), 64)
        tensors = padded(to_tensors(batch), 80)
        return objective.prepare(tensors, seed=3, step=4), tensors

    masked, batch = prepare(counts)
    if not louder:
        return masked, batch
    counts[masked.targets.numpy()] *= 10
    return prepare(counts)


def _per_10k(values: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """(cells,): the sum of each cell's counts per 10,000."""
    return torch.zeros(len(LENGTHS) + 1).index_add(0, cell, values.expm1())[: len(LENGTHS)]


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_library_size_tells_the_hidden_total_unless_values_are_made_again(renormalize: bool) -> None:
    masked, batch = _prepared(renormalize)
    hidden = _per_10k(batch.values.masked_fill(~masked.value_hidden, 0), masked.cell)
    told = 1e4 - _per_10k(masked.values, masked.cell)
    something_visible = torch.tensor([length > 1 for length in LENGTHS])
    if not renormalize:
        torch.testing.assert_close(told, hidden, rtol=1e-4, atol=0.1)
        return
    torch.testing.assert_close(told[something_visible], torch.zeros(4), rtol=0, atol=0.1)
    assert hidden[something_visible].min() > 100
    assert torch.equal(masked.answers, batch.values[masked.targets]), "the answers are the whole cell's values"


@pytest.mark.parametrize("tokenizer", ["continuous", "binned"])
def test_hidden_counts_change_nothing_that_the_model_is_given(tokenizer: str) -> None:
    (one, _), (other, _) = (_prepared(True, louder, tokenizer) for louder in (False, True))
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.center, other.center)
    leaking = [_prepared(False, louder, tokenizer)[0] for louder in (False, True)]
    assert not torch.equal(leaking[0].values, leaking[1].values)


def test_all_shipped_configurations_hide_the_library_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped = [ROOT / "config" / "config.yaml", *(ROOT / "config" / "examples").glob("*.yaml")]
    named = [path for path in shipped if "masked_value" in path.read_text(encoding="utf-8")]
    runs = [run for path in named for run in load_config(path).runs.values()]
    parts = [part for run in runs for part in run.objective.each() if part.name == "masked_value"]
    assert len(parts) >= 4
    assert all(part.needs_counts for part in parts)
