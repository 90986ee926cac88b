"""Folders of the published layouts of Geneformer and scGPT, with small random weights."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
ENDS = ("<cls>", "<eos>")


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Numbers of numpy's legacy generator, whose stream never changes."""
    rng = np.random.RandomState(7)
    return {
        name: torch.from_numpy(0.3 * rng.standard_normal(shapes[name])).float()
        for name in sorted(shapes)
    }


def bert_config(version: str, n_tokens: int, positions: int) -> dict[str, Any]:
    more = {
        "hidden_act": "relu" if version == "V1" else "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
    }
    return (
        SIZES
        | more
        | {"model_type": "bert", "vocab_size": n_tokens, "max_position_embeddings": positions}
    )


def geneformer_tokens(genes: list[str], version: str) -> dict[str, int]:
    """Special tokens first, then the genes in an order of their own."""
    shuffled = [genes[i] for i in np.random.RandomState(1).permutation(len(genes))]
    return {
        name: token
        for token, name in enumerate(["<pad>", "<mask>", *ENDS[: 2 * (version == "V2")], *shuffled])
    }


def geneformer_medians(genes: list[str]) -> dict[str, np.float64]:
    return dict(zip(genes, np.random.RandomState(2).lognormal(0, 1, len(genes))))


def geneformer_folder(
    folder: Path, genes: list[str], version: str = "V1", positions: int = 32
) -> Path:
    """A BertForMaskedLM; V1 has its weights in pytorch_model.bin, V2 in model.safetensors."""
    folder.mkdir(parents=True)
    tokens = geneformer_tokens(genes, version)
    config = bert_config(version, len(tokens), positions)
    tensors = random_tensors(_bert_shapes(config))
    (folder / "config.json").write_text(json.dumps(config))
    if version == "V1":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "token_dictionary_gc.pkl").write_bytes(pickle.dumps(tokens))
    (folder / "gene_median_dictionary_gc.pkl").write_bytes(
        pickle.dumps(geneformer_medians(genes), protocol=2)
    )
    return folder


def _bert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h = config["hidden_size"]
    inner = config["intermediate_size"]
    tables = {
        "word": config["vocab_size"],
        "position": config["max_position_embeddings"],
        "token_type": 2,
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{k}_embeddings.weight": (n, h) for k, n in tables.items()
    }
    shapes |= _pair("embeddings.LayerNorm", h)
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _pair(f"{layer}attention.{name}", h, h)
        shapes |= _pair(f"{layer}attention.output.LayerNorm", h) | _pair(
            f"{layer}output.LayerNorm", h
        )
        shapes |= _pair(f"{layer}intermediate.dense", inner, h) | _pair(
            f"{layer}output.dense", h, inner
        )
    head = _pair("cls.predictions.transform.dense", h, h) | _pair(
        "cls.predictions.transform.LayerNorm", h
    )
    head["cls.predictions.bias"] = (config["vocab_size"],)
    return {f"bert.{name}": shape for name, shape in shapes.items()} | head


def _pair(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def scgpt_folder(folder: Path, symbols: list[str], attention: str = "Wqkv") -> Path:
    """Pretrained scGPT; `attention` is the name of its first matrix: Wqkv of flash-attn or in_proj
    of torch.
    """
    folder.mkdir(parents=True)
    tokens = {name: token for token, name in enumerate([*symbols, "<pad>", "<cls>", "<eoc>"])}
    args = {
        "embsize": 16,
        "nheads": 2,
        "d_hid": 24,
        "nlayers": 2,
        "n_bins": 51,
        "pad_value": -2,
        "dropout": 0.2,
    }
    shapes: dict[str, tuple[int, ...]] = {"encoder.embedding.weight": (len(tokens), 16)}
    shapes |= _pair("encoder.enc_norm", 16) | _pair("value_encoder.norm", 16)
    shapes |= _pair("value_encoder.linear1", 16, 1) | _pair("value_encoder.linear2", 16, 16)
    shapes["decoder.fc.0.weight"] = (16, 16)  # without a counterpart
    for i in range(2):
        layer = f"transformer_encoder.layers.{i}."
        dot = "." if attention == "Wqkv" else "_"
        shapes |= {
            f"{layer}self_attn.{attention}{dot}weight": (48, 16),
            f"{layer}self_attn.{attention}{dot}bias": (48,),
        }
        shapes |= (
            _pair(f"{layer}self_attn.out_proj", 16, 16)
            | _pair(f"{layer}norm1", 16)
            | _pair(f"{layer}norm2", 16)
        )
        shapes |= _pair(f"{layer}linear1", 24, 16) | _pair(f"{layer}linear2", 16, 24)
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "vocab.json").write_text(json.dumps(tokens))
    torch.save(random_tensors(shapes), folder / "best_model.pt")
    return folder
