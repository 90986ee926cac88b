"""Batch terms, adversary, covariates and perturbations in the layouts: losses, gradient norms and the batch's share are
those of one process; and an export that reads obs columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from cellmill.data.counts_reader import open_counts
from cellmill.evaluate.embed import embed_cells, load_for_inference
from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.models import split

OBJECTIVE = {
    "objective": "cell_decoding",
    "batch_column": "batch",
    "batch_adversary": 0.5,
    "batch_adversary_scale": 2.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4},
    "profile": {"family": "profile", "hidden": 32, "layers": 1, "decoder_hidden": None},
    "response": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "objective": "perturbation_response"}
    | {"perturbation_column": "donor", "control": "donor_0", "perturbed_genes": {"donor_1": [5, 90], "donor_2": [40]}},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("encoder", {"sharding_strategy": "HYBRID_SHARD"}),
    ("encoder", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("encoder", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("profile", {"strategy": "ddp"}),
    ("profile", {"sharding_strategy": "FULL_SHARD", "tp": 2}),
    ("response", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
    ("response", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
]
STEPS = 4
COVARIATES = {"encoder": {"covariates": ["donor", "batch"], "covariate_unknown_frac": 0.3}}


def _options(model: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": 256, "val_every_steps": 2}  # several micro-batches a step
    return options(layout, tokens=COVARIATES.get(model, {}), train=train) | split(OBJECTIVE | MODELS[model])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the references."""
    return {name: str(tmp_path_factory.mktemp("one")) for name in MODELS}


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, folders: dict[str, str]) -> dict[str, Any]:
    """Curves of one process."""
    return {name: cases.curve_and_share(corpus, _options(name), folders[name], STEPS) for name in MODELS}


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_curves_and_the_batch_s_share_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, Any], tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    given = {"corpus": corpus, "options": _options(model, layout), "folder": str(tmp_path), "steps": STEPS}
    found = pool.run("curve_and_share", **given)
    curve, shares = references[model]
    np.testing.assert_allclose(np.array(found[0][0]), np.array(curve), atol=5e-6, rtol=5e-6)
    np.testing.assert_allclose(np.array(found[0][1]), np.array(shares), rtol=1e-4)
    assert len(shares) == 2
    assert all(0 < share < 1 for share in shares)
    assert all(of_rank[0] == found[0][0] for of_rank in found), "ranks disagree about a number that is global"


def test_an_exported_model_reads_the_columns_of_a_file(
    corpus: str, references: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    exported = cases.exported(corpus, Path(folders["encoder"]), tmp_path)
    assert {"batch_terms.weight", "batch_adversary.out.bias", "covariates.tables.1.weight"} <= exported.keys()
    model, vocabulary, tokens, config = load_for_inference(tmp_path)
    obs = ad.read_h5ad(Path(corpus) / "cells" / "sim.h5ad").obs
    assert config["levels"] == {name: sorted(obs[name].unique()) for name in ("batch", "donor")}
    with open_counts(Path(corpus) / "cells" / "sim.h5ad") as reader:
        vectors = embed_cells(reader, model, vocabulary, tokens, 4096).vectors
        reader.obs["donor"] = "a stranger"
        unknown = embed_cells(reader, model, vocabulary, tokens, 4096).vectors
        del reader.obs["donor"]
        absent = embed_cells(reader, model, vocabulary, tokens, 4096).vectors
    assert np.abs(vectors - unknown).max() > 1e-4
    np.testing.assert_array_equal(unknown, absent)
