"""Runs of earlier commits, kept in tests/fixtures: their checkpoints go on, an exported model embeds as it did.

`run_of_0.1.0`, of an encoder, was stopped at step 3 of 6. Its options have keys that have moved since.
`profile_run_of_92da339`, of the family and objective that are the default now, was sent SIGTERM and stopped at step 14
of 24; its folder is as it was left. In both, expected_metrics.jsonl is that of the same run without the stop, on two
processes.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from cellmill.cli import main
from cellmill.runs.progress import read_lines

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STOPPED_AT = {"run_of_0.1.0": 3, "profile_run_of_92da339": 14}


@pytest.fixture(params=["run_of_0.1.0", pytest.param("profile_run_of_92da339", marks=pytest.mark.full)])
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, which is the working directory."""
    with tarfile.open(FIXTURES / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / request.param, filter="data")
    monkeypatch.chdir(tmp_path / request.param)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / request.param


@pytest.mark.full
def test_a_run_of_an_earlier_commit_goes_on_from_its_checkpoint_with_the_same_curve(
    earlier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--options", (earlier / "options.json").read_text(), "--manifest", "shards/manifest.json"]
    assert main([*words, "--vocabulary", "vocabulary.tsv", "--out", "train", "--nproc-per-node", "2"]) == 0
    said, step = capfd.readouterr().out, STOPPED_AT[earlier.name]
    assert f"going on from step {step}\n" in said, said
    assert not list(earlier.glob("train/superseded-*"))
    for key in ("loss", "grad_norm", "val_loss"):
        found, expected = (curve(earlier / name, key) for name in ("train/metrics.jsonl", "expected_metrics.jsonl"))
        assert len(found) > 1
        assert found == pytest.approx(expected, rel=1e-5), key


def curve(path: Path, key: str) -> dict[int, float]:
    """Value of `key` by step; a step that stands twice is an error."""
    pairs = [(line["step"], line[key]) for line in read_lines(path) if key in line]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("earlier", ["run_of_0.1.0"], indirect=True)
def test_a_checkpoint_and_a_model_of_the_version_before_give_the_same_embeddings(earlier: Path) -> None:
    words = ["embed", "--options", json.dumps({"embed": {}}), "--input", "cells/sim.h5ad"]
    assert main([*words, "--model", "model", "--out", "embedded.h5ad"]) == 0
    found = ad.read_h5ad(earlier / "embedded.h5ad").obsm["X_cellmill"]
    np.testing.assert_allclose(found, np.load(earlier / "expected_embedding.npy"), atol=2e-6)
    options = json.dumps({"consolidate": {"checkpoint": "last"}})
    words = ["consolidate", "--options", options, "--train", "train", "--vocabulary", "vocabulary.tsv"]
    assert main([*words, "--out", "exported"]) == 0
    assert json.loads((earlier / "exported" / "config.json").read_text())["objective"]["name"] == "masked_value"
