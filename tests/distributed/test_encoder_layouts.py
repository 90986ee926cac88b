"""Likelihoods and poolings in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, curves_of_one_process
from tests.distributed.pool import Pool
from tests.models import split

MODELS: dict[str, dict[str, Any]] = {
    "negative binomial": {"objective": "cell_decoding", "likelihood": "nb", "decoder_hidden": 16},
    "cls": {"objective": "cell_decoding", "pooling": "cls"},
    "attention, values made again": {"objective": "masked_value", "pooling": "attention", "renormalize": True},
}
TP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
PIPELINE: dict[str, Any] = {"pp": 2, "sharding_strategy": "FULL_SHARD"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("negative binomial", {"tp": 4}),
    ("negative binomial", PIPELINE),
    ("cls", TP),
    ("cls", PIPELINE),
    ("attention, values made again", TP),
    ("attention, values made again", PIPELINE),
]
STEPS = 3


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    family = {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
    return options(layout, train={"token_budget": 256}) | split(family | MODELS[model])


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process."""
    return curves_of_one_process(corpus, {name: _options(name) for name in MODELS}, tmp_path_factory, STEPS)


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(model, layout), "folder": str(tmp_path), "steps": STEPS}
    assert_curve_in_every_rank(pool, given, references[model])
