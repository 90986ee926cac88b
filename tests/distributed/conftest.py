"""The pool of processes, one process alone, and a tiny corpus of simulated cells that all of them train on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from cellmill.cli import main
from tests.distributed.pool import Pool
from tests.models import split


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, as two nodes of two."""
    made = Pool(world=4, local_world=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a group of one: the reference of every layout. Ends with the module: others make their own."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1"}
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with vocabulary.tsv and shards/manifest.json of 240 simulated cells."""
    folder = tmp_path_factory.mktemp("corpus")
    config = folder / "config.yaml"
    table = folder / "datasets.tsv"
    table.write_text("dataset\tpath\nsim\traw.h5ad\n")
    config.write_text(CONFIG.replace("TABLE", str(table)))
    raw, cells = folder / "raw.h5ad", folder / "cells" / "sim.h5ad"
    report, vocabulary, manifest = folder / "sim.json", folder / "vocabulary.tsv", folder / "shards" / "manifest.json"
    shared = f"--config {config} --corpus sim"
    for command in (
        f"simulate --out {raw} --cells 240 --genes 120 --types 4 --batches 2 --seed 1",
        f"preprocess {shared} --input {raw} --dataset sim --out {cells} --report {report}",
        f"vocabulary {shared} --cells {cells} --out {vocabulary}",
        f"shard {shared} --cells {cells} --vocabulary {vocabulary} --out {manifest}",
    ):
        assert main(command.split()) == 0
    return str(folder)


def options(parallel: dict[str, Any] | None = None, **overrides: dict[str, Any]) -> dict[str, Any]:
    """Options of a small run; `parallel` and other sections override keys."""
    tree: dict[str, Any] = {
        "tokens": {"tokenizer": "continuous", "max_tokens": 64},
        "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
        "model": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1},
        "parallel": parallel or {},
        "train": {
            "steps": 6,
            "global_batch": 16,
            "token_budget": 4096,
            "lr": 1e-3,
            "warmup_steps": 2,
            "clip_norm": 0.5,
            "log_every_steps": 1,
            "val_every_steps": 100,
            "checkpoint_every_steps": 100,
        },
    }
    for section, values in overrides.items():
        tree[section] = tree.get(section, {}) | values
    return tree | split(tree["model"])


CONFIG = """
corpora: {sim: {table: TABLE}}
preprocess: {min_genes: 5, min_cells: 1}
shard: {cells_per_shard: 100, val_frac: 0.15, test_frac: 0.15}
train: {steps: 1}
runs: {sim: {corpus: sim}}
"""
