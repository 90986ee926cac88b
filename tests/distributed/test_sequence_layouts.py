"""Sequences in the layouts: losses and gradient norms are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.cli import main
from tests.distributed import cases
from tests.distributed.conftest import CONFIG, options
from tests.distributed.pool import Pool

STEPS = 3
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


def test_the_encoder_of_sequences_is_that_of_one_process(
    pool: Pool, alone: None, proteins: str, tmp_path: Path
) -> None:
    layout: dict[str, Any] = {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}
    train = {"token_budget": 512}
    one, spread = (options(parallel, train=train) | SECTIONS for parallel in ({}, layout))
    expected = np.array(cases.curve(proteins, one, str(tmp_path / "one"), STEPS))
    curves = pool.run("curve", corpus=proteins, options=spread, folder=str(tmp_path / "many"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), expected, atol=5e-6, rtol=5e-6)
