"""Given gene vectors in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.data.vocabulary import Vocabulary
from tests.distributed.conftest import options
from tests.distributed.curves import assert_curve_in_every_rank, curves_of_one_process
from tests.distributed.pool import Pool
from tests.models import split

MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1},
    "profile": {"family": "profile", "hidden": 32, "layers": 1, "objective": "cell_decoding"},
}
TRAINED = {"train_gene_vectors": True}
SPLIT = {"mask_frac": 0.3, "random_frac": 0.2, "keep_frac": 0.2}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("encoder", SPLIT, {"sharding_strategy": "HYBRID_SHARD"}),
    ("encoder", SPLIT | TRAINED, {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("encoder", SPLIT, {"pp": 2, "tp": 2}),
    ("profile", {}, {"strategy": "ddp"}),
    ("profile", TRAINED, {"tp": 4}),
]
DIM, STEPS = 6, 3


def _options(model: str, more: dict[str, Any], file: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    given = MODELS[model] | more | {"gene_vectors": file, "gene_vector_dim": DIM}
    chosen: dict[str, Any] = {} if model == "profile" else {"tokens": {"truncation": "random", "zero_frac": 0.2}}
    return options(layout, train={"token_budget": 256}, **chosen) | split(given)


@pytest.fixture(scope="module")
def vectors(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with vectors of two thirds of the corpus's genes."""
    genes = Vocabulary.read(Path(corpus) / "vocabulary.tsv").gene_ids
    path = tmp_path_factory.mktemp("vectors") / "vectors.npy"
    np.save(path, np.random.default_rng(0).normal(1, 3, (len(genes) * 2 // 3, DIM)))
    path.with_suffix(".genes.txt").write_text("".join(f"{gene}\n" for gene in genes[: len(genes) * 2 // 3]))
    return str(path)


@pytest.fixture(scope="module")
def references(
    alone: None, corpus: str, vectors: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """Curves of one process."""
    given = {str((model, more)): _options(model, more, vectors) for model, more, _ in CASES}
    return curves_of_one_process(corpus, given, tmp_path_factory, STEPS)


@pytest.mark.parametrize(("model", "more", "layout"), CASES, ids=str)
def test_curves_are_those_of_one_process(
    pool: Pool,
    corpus: str,
    vectors: str,
    references: dict[str, np.ndarray],
    tmp_path: Path,
    model: str,
    more: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    chosen = _options(model, more, vectors, layout)
    given = {"corpus": corpus, "options": chosen, "folder": str(tmp_path), "steps": STEPS}
    assert_curve_in_every_rank(pool, given, references[str((model, more))])


def test_frozen_and_trained_vectors_give_other_curves(references: dict[str, np.ndarray]) -> None:
    frozen, trained = (references[str(("encoder", more))] for more in (SPLIT, SPLIT | TRAINED))
    assert frozen[0, 0] == trained[0, 0]
    assert abs(frozen[2, 0] - trained[2, 0]) > 1e-5
