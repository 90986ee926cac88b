"""Imported scGPT: its vectors are those of torch's TransformerEncoder, and its genes are those of the symbols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.genes.tables import gene_symbols
from cellmill.data.stream.batch import Batch
from cellmill.errors import DataError
from cellmill.evaluate.embed import load_for_inference
from cellmill.models.published.scgpt import import_scgpt
from tests.unit.published import scgpt_folder

IDS = {symbol: gene for gene, symbol in gene_symbols("human").items()}
NAMES = ["GAPDH", "CD3D", "MS4A1", "NKG7", "LYZ", "CD8A", "GNLY", "PPBP", "FCGR3A", "ACTB", "no-such-gene"]
SYMBOLS = NAMES[:-1]


def _restated(folder: Path, names: list[str], bins: list[int]) -> torch.Tensor:
    """One cell's vector, by the paper and by torch's own layers."""
    weights = torch.load(folder / "best_model.pt", weights_only=True)
    weights = {name.replace(".Wqkv.", ".in_proj_"): tensor for name, tensor in weights.items()}
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)  # post-norm, ReLU
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    start = "transformer_encoder."
    encoder.load_state_dict({n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)})

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"value_encoder.{name}.weight"], weights[f"value_encoder.{name}.bias"])

    tokens = json.loads((folder / "vocab.json").read_text())
    genes = weights["encoder.embedding.weight"][[tokens[name] for name in ["<cls>", *names]]]
    values = torch.tensor([[-2.0], *([float(value)] for value in bins)])  # pad_value for <cls>
    embedded = norm(linear(linear(values, "linear1").relu(), "linear2"), "value_encoder.norm")
    with torch.no_grad():
        states = encoder((norm(genes, "encoder.enc_norm") + embedded)[None])[0]
    return states[0] / states[0].norm()


@pytest.mark.parametrize("attention", ["Wqkv", "in_proj"])
def test_the_vector_is_that_of_torchs_encoder(attention: str, tmp_path: Path) -> None:
    folder = scgpt_folder(tmp_path / "published", NAMES, attention)
    import_scgpt(folder, tmp_path / "model")
    network, vocabulary, tokens, _ = load_for_inference(tmp_path / "model")
    rng = np.random.RandomState(0)
    cells = [[SYMBOLS[i] for i in rng.permutation(10)[:n]] for n in (4, 10, 1)]
    bins = [rng.randint(1, 51, len(cell)).tolist() for cell in cells]
    lengths = [len(cell) for cell in cells]
    rows = vocabulary.rows_of([IDS[name] for cell in cells for name in cell])
    batch = Batch(
        genes=torch.from_numpy(rows).long() + len(SPECIAL),
        values=torch.tensor([value for cell in bins for value in cell]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cells=torch.arange(3),
    )
    with torch.inference_mode():
        found = network.embed(batch)
    expected = torch.stack([_restated(folder, *cell) for cell in zip(cells, bins)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (tokens.bins, tokens.max_tokens) == (50, 1199)  # type: ignore[attr-defined]


def test_values_are_scgpts_bins() -> None:
    """n_bins - 1 quantiles of the cell's nonzero counts, digitized at their right edges (scGPT's side='one')."""
    counts = np.random.RandomState(0).geometric(0.05, 400)
    options: Any = Tokens.model_validate({"tokenizer": "binned", "bins": 50, "max_tokens": 1199})
    _, values, _ = options.load()(options).tokenize(np.arange(400), counts, np.array([0, 400]))
    np.testing.assert_array_equal(values, np.digitize(counts, np.quantile(counts, np.linspace(0, 1, 51 - 1))))


def test_symbols_become_ensembl_ids_and_the_others_are_counted(tmp_path: Path) -> None:
    names = [*NAMES, "CD20", "GAPDH.2"]  # an alias of MS4A1, whose own name comes first
    folder = scgpt_folder(tmp_path / "published", names)
    line = import_scgpt(folder, tmp_path / "model")
    assert "10 of 13 gene symbols have an Ensembl id of their own (2 unknown, 0 ambiguous)" in line
    _, vocabulary, _, _ = load_for_inference(tmp_path / "model")
    assert vocabulary.gene_ids == sorted(IDS[name] for name in SYMBOLS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_emb_style": "category"}, "expected post-norm blocks over continuous values, but input_emb_style is"),
        ({"pre_norm": True}, "but pre_norm is set"),
        ({"d_hid": 32}, r"expected a tensor of shape \(32, 16\) for blocks.0.up.weight, got \(24, 16\)"),
        ({"n_bins": "51"}, "n_bins: expected a whole number from 3, got '51'"),
        ({"n_bins": 2}, "n_bins: expected a whole number from 3, got 2"),
        ({"nlayers": 3}, "transformer_encoder.layers.2.self_attn.in_proj_weight is missing"),
    ],
    ids=str,
)
def test_folders_of_other_models_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = scgpt_folder(tmp_path / "published", NAMES)
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(args | change))
    with pytest.raises(DataError, match=problem):
        import_scgpt(folder, tmp_path / "model")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """torch raises a KeyError, an OSError without a name, and other errors for damaged files."""
    folder = scgpt_folder(tmp_path / "published", NAMES)
    whole = (folder / "best_model.pt").read_bytes()
    for size in range(0, len(whole), 1000):
        (folder / "best_model.pt").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"best_model\.pt: cannot be read safely: \S"):
            import_scgpt(folder, tmp_path / "model")
