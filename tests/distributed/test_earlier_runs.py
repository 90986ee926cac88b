"""A run of version 0.1.0, kept in tests/fixtures: its checkpoint goes on, its exported model embeds as it did.

Its options have keys that have moved since, its metrics.jsonl the losses of the whole run, its model's embeddings those
of the same cells. It was stopped at step 3 of 6.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from cellmill.cli import main
from cellmill.runs.metrics import read_lines

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "run_of_0.1.0.tar.xz"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_run_of_the_version_before_goes_on_from_its_checkpoint_with_the_same_curve(
    earlier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--options", (earlier / "options.json").read_text(), "--manifest", "shards/manifest.json"]
    assert main([*words, "--vocabulary", "vocabulary.tsv", "--out", "train", "--nproc-per-node", "2"]) == 0
    said = capfd.readouterr().out
    assert "going on from step 3" in said or "resuming from step 3" in said, said
    assert not list(earlier.glob("train/superseded-*"))
    expected = [line for line in read_lines(earlier / "expected_metrics.jsonl") if "loss" in line]
    found = [line for line in read_lines(earlier / "train" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-5)


def test_a_checkpoint_and_a_model_of_the_version_before_give_the_same_embeddings(earlier: Path) -> None:
    words = ["embed", "--options", json.dumps({"embed": {}}), "--input", "cells/sim.h5ad"]
    assert main([*words, "--model", "model", "--out", "embedded.h5ad"]) == 0
    found = ad.read_h5ad(earlier / "embedded.h5ad").obsm["X_cellmill"]
    np.testing.assert_allclose(found, np.load(earlier / "expected_embedding.npy"), atol=2e-6)
    options = json.dumps({"consolidate": {"checkpoint": "last"}})
    words = ["consolidate", "--options", options, "--train", "train", "--vocabulary", "vocabulary.tsv"]
    assert main([*words, "--out", "exported"]) == 0
    assert json.loads((earlier / "exported" / "config.json").read_text())["objective"]["name"] == "masked_value"
