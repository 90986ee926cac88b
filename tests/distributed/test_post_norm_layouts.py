"""Families bert and scgpt in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, curves_of_one_process
from tests.distributed.pool import Pool
from tests.models import split

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "bert": SIZES | {"family": "bert", "ends": "cls_eos", "objective": "masked_gene", "cell_loss_weight": 0.5},
    "scgpt": SIZES | {"family": "scgpt", "ends": "cls", "pooling": "cls", "objective": "cell_decoding"},
}
TOKENIZERS = {"bert": "rank", "scgpt": "binned"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"strategy": "ddp"}),
    ("bert", {"sharding_strategy": "HYBRID_SHARD"}),
    ("bert", {"tp": 2, "sequence_parallel": True, "sharding_strategy": "FULL_SHARD"}),
    ("bert", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("scgpt", {"pp": 2, "tp": 2, "sequence_parallel": True}),
]
STEPS = 3


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    tokens = {"tokenizer": TOKENIZERS[model], "max_tokens": 64}
    return options(layout, train={"token_budget": 256}, tokens=tokens) | split(MODELS[model])


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
