"""Sequences in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.cli import main
from tests.distributed import cases
from tests.distributed.conftest import CONFIG, options
from tests.distributed.pool import Pool

STEPS = 3
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 130,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}
SECTIONS = {
    "tokens": {"tokenizer": "sequence", "max_tokens": 64},
    "objective": {"name": "masked_gene"},
}


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with vocabulary.tsv and shards/manifest.json of 120 simulated proteins."""
    folder = tmp_path_factory.mktemp("proteins")
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.fasta\n")
    (folder / "config.yaml").write_text(CONFIG.replace("TABLE", str(folder / "datasets.tsv")))
    shared, cells = f"--config {folder}/config.yaml --corpus sim", folder / "cells" / "sim.h5ad"
    for command in (
        f"simulate --out {folder}/raw.fasta --cells 120 --types 3 --seed 1",
        f"preprocess {shared} --input {folder}/raw.fasta --dataset sim --out {cells} --report {folder}/sim.json",
        f"vocabulary {shared} --cells {cells} --out {folder}/vocabulary.tsv",
        f"shard {shared} --cells {cells} --vocabulary {folder}/vocabulary.tsv --out {folder}/shards/manifest.json",
    ):
        assert main(command.split()) == 0
    return str(folder)


HF = {
    "model": {"family": "hf", "weights": "random", "architecture": {"model_type": "esm"} | SHAPE},
    "objective": {"name": "masked_gene", "cell_loss_weight": 0},
}
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'cellmill[hf]'"
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}),
        pytest.param(HF, {"strategy": "ddp"}, marks=needs_transformers),
        pytest.param(
            HF, {"sharding_strategy": "HYBRID_SHARD", "activation_checkpointing": "full"}, marks=needs_transformers
        ),
    ],
    ids=["encoder, tp", "hf, ddp", "hf, hybrid shard"],
)
def test_models_of_sequences_are_those_of_one_process(
    pool: Pool, alone: None, proteins: str, tmp_path: Path, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    train = {"token_budget": 512}
    one, spread = (options(parallel, train=train) | SECTIONS | model for parallel in ({}, layout))
    expected = np.array(cases.curve(proteins, one, str(tmp_path / "one"), STEPS))
    curves = pool.run("curve", corpus=proteins, options=spread, folder=str(tmp_path / "many"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), expected, atol=5e-6, rtol=5e-6)
