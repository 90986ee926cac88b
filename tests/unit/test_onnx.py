"""The ONNX file gives the vectors of the model, at other numbers of cells and genes than those of its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import export_model
from small_corpus import genes_named, vocabulary_of

from cellmill.cli import main
from cellmill.data.stream.tokenizers import CellTokenizer
from cellmill.models.batch import to_tensors
from cellmill.models.export import load_model, spec_of

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.full

N_GENES = 40


@pytest.fixture
def genes(tmp_path: Path) -> Path:
    path = tmp_path / "vocabulary.tsv"
    vocabulary_of(genes_named(N_GENES)).write(path)
    return path


@pytest.mark.parametrize(
    ("tokens", "model"),
    [
        ({}, {"family": "profile", "heads": None}),
        ({}, {"pooling": "attention", "gene_vector_dim": 5}),
        ({"tokenizer": "binned"}, {"pooling": "cls"}),
        ({"tokenizer": "rank"}, {}),
        ({"tokenizer": "rank", "max_tokens": 3}, {}),
    ],
    ids=["profile", "encoder, continuous, attention", "encoder, binned, cls", "encoder, rank, mean", "short cells"],
)
def test_onnx_gives_the_models_vectors(tmp_path: Path, genes: Path, tokens: Any, model: Any) -> None:
    folder, out = export_model(tmp_path / "model", genes, tokens, **model), tmp_path / "model.onnx"
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(out)]) == 0
    network, vocabulary, config = load_model(folder)
    most = spec_of(config, N_GENES).tokens.max_tokens
    lengths, draw = [min(n, most) for n in (9, 1, 30, 17)], np.random.default_rng(1)
    rows = np.concatenate([draw.permutation(N_GENES)[:n] for n in lengths]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    made = CellTokenizer(spec_of(config, N_GENES).tokens, N_GENES).batch(
        rows, draw.integers(1, 50, len(rows)), starts, np.arange(4)
    )
    with torch.no_grad():
        expected = network.embed(to_tensors(made)).numpy()
    given = {name: np.zeros((4, max(lengths)), np.int64) for name in ("genes", "values")}
    given["values"] = given["values"].astype(np.float32 if made.values.dtype == np.float32 else np.int64)
    for cell, (start, n) in enumerate(zip(starts.tolist(), lengths)):
        given["genes"][cell, :n] = made.genes[start : start + n]
        given["values"][cell, :n] = made.values[start : start + n]
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (found,) = session.run(["cell_vector"], given)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert about["vocabulary"].split("\n") == vocabulary.gene_ids
    assert json.loads(about["tokens"])["tokenizer"] == config["tokens"]["tokenizer"]


def test_a_family_without_a_padded_form_is_refused(tmp_path: Path, genes: Path, capsys: Any) -> None:
    folder = export_model(tmp_path / "model", genes, family="autoregressive")
    assert main(["export", "--format", "onnx", "--model", str(folder), "--out", str(tmp_path / "m.onnx")]) == 2
    assert (
        "family autoregressive cannot be exported to ONNX; families encoder and profile can" in capsys.readouterr().err
    )
    assert not (tmp_path / "m.onnx").exists()
