"""Toy family and optimizer of tests/plugin, found by entry point, in every layout: parity, resume, export."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from safetensors.numpy import load_file

from cellmill.runs.progress import read_lines

pytestmark = pytest.mark.full
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "HYBRID_SHARD": (4, {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}),
    "tp": (2, {"tp": 2}),
    "sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp": (2, {"pp": 2}),
}
STEPS, SAVED = 6, 3
OPTIONS: dict[str, Any] = {
    "tokens": {"tokenizer": "toy_genes", "max_tokens": 48},
    "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
    "model": {"family": "toy", "hidden": 16, "layers": 2, "heads": 2},
    "objective": {"name": "toy_next_gene"},
    "train": {
        "steps": STEPS,
        "optimizer": {"name": "toy_momentum", "decay": 0.8},
        "lr": 0.1,
        "global_batch": 16,
        "token_budget": 4096,
        "warmup_steps": 2,
        "log_every_steps": 1,
        "val_every_steps": 100,
        "checkpoint_every_steps": SAVED,
    },
}


def cellmill(environment: dict[str, str], *words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cellmill.cli", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


class Toy:
    """Trainings of the toy family on one corpus."""

    def __init__(self, corpus: str, environment: dict[str, str], folder: Path) -> None:
        self.corpus, self.environment, self.folder = Path(corpus), environment, folder

    def train(self, name: str, processes: int, parallel: dict[str, Any]) -> np.ndarray:
        """Loss and gradient norm of each step, `(steps, 2)`."""
        options = json.dumps(OPTIONS | {"parallel": parallel})
        words = ["train", "--options", options, "--manifest", self.corpus / "shards" / "manifest.json"]
        words += ["--vocabulary", self.corpus / "vocabulary.tsv", "--out", self.folder / name]
        cellmill(self.environment, *words, "--nproc-per-node", str(processes))
        lines = read_lines(self.folder / name / "metrics.jsonl")
        return np.array([[line["loss"], line["grad_norm"]] for line in lines if "loss" in line])

    def export(self, name: str) -> Path:
        out = self.folder / f"{name}-model"
        words = ["consolidate", "--options", '{"consolidate": {"checkpoint": "last"}}', "--train", self.folder / name]
        cellmill(self.environment, *words, "--vocabulary", self.corpus / "vocabulary.tsv", "--out", out)
        return out

    def embed(self, model: Path) -> np.ndarray:
        out = model / "embedded.h5ad"
        words = ["embed", "--options", '{"embed": {}}', "--model", model, "--input", self.corpus / "cells" / "sim.h5ad"]
        cellmill(self.environment, *words, "--out", out)
        found: np.ndarray = ad.read_h5ad(out).obsm["X_cellmill"]
        return found


@pytest.fixture(scope="module")
def toy(corpus: str, plugins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(corpus, plugins, tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def alone(toy: Toy) -> np.ndarray:
    """The curve of one process."""
    return toy.train("alone", 1, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plugin_family_trains_the_model_of_one_process(toy: Toy, alone: np.ndarray, layout: str) -> None:
    curve = toy.train(layout, *LAYOUTS[layout])
    assert len(curve) == STEPS
    np.testing.assert_allclose(curve, alone, rtol=5e-6)


def test_a_plugin_family_resumes_in_another_layout_exports_and_embeds(toy: Toy, alone: np.ndarray) -> None:
    toy.train("resumed", *LAYOUTS["HYBRID_SHARD"])
    run = toy.folder / "resumed"
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    (run / "status.json").unlink()
    curve = toy.train("resumed", *LAYOUTS["pp"])
    np.testing.assert_allclose(curve, alone, rtol=5e-6)

    models = [toy.export("alone"), toy.export("resumed")]
    tensors = [load_file(model / "model.safetensors") for model in models]
    assert tensors[0].keys() == tensors[1].keys()
    places, pairs = np.arange(48)[:, None], np.arange(4)[None]
    for tensor in tensors:  # the rotary table is a buffer
        np.testing.assert_allclose(tensor["angles"], places * 10_000.0 ** (-pairs / 4), rtol=1e-6)
    vectors = [toy.embed(model) for model in models]
    assert np.isfinite(vectors[0]).all()
    np.testing.assert_allclose(vectors[0], vectors[1], atol=5e-6)
