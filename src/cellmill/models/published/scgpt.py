"""scGPT (Cui et al. 2024) as a model folder of the family `scgpt`.

    args.json        sizes of the model
    vocab.json       gene symbol -> token, with <pad> and <cls>
    best_model.pt    state dict of torch, with attention named as flash-attn or as torch names it

Symbols are mapped to Ensembl ids; those that are unknown, ambiguous or a second name of a gene are left out. Values are
quantile bins of the cell's nonzero counts, 1 to n_bins - 1, with ties at the right edge where scGPT draws one at
random. A cell longer than the model takes keeps the genes of highest counts where scGPT draws a random sample. scGPT's
own decoders have no counterpart, so an objective's heads start untrained.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from cellmill.config.load import check_options
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.published import PublishedFolder, read_mapping, require, scgpt_sections
from cellmill.data.genes.names import map_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file
from cellmill.models.build import ModelSpec
from cellmill.models.published import files

LAYER = {"norm1": "attention_norm", "linear1": "up", "linear2": "down", "norm2": "ffn_norm"}
"""Modules of a layer of scGPT, and ours."""
QKV = ("self_attn.in_proj_{}", "self_attn.Wqkv.{}", "self_attn._impl.Wqkv.{}")
OUT = ("self_attn.out_proj.{}", "self_attn._impl.out_proj.{}")


def import_scgpt(folder: Path, out: Path, organism: str = "human", max_tokens: int = 1200) -> str:
    """Write the model folder `out`; returns the line to print. `max_tokens` counts <cls>, as scGPT's max_length."""
    if max_tokens < 2:
        raise ConfigError(f"--max-tokens: expected at least 2, <cls> and a gene, got {max_tokens}")
    config_path, path, vocab_path = PublishedFolder("scgpt", folder).files()
    sections, theirs = scgpt_sections(folder), files.read_weights(path)
    if more := [name for name in theirs if name.startswith(("dsbn.", "bn."))]:
        raise DataError(f"{path}: {more[0]}: batch norms of fine-tuned scGPT are not supported; use the pretrained")
    tokens = read_mapping(vocab_path)
    for name in ("<pad>", "<cls>"):
        require(vocab_path, tokens, name)
    files.check_tokens(vocab_path, tokens)
    genes, rows, line = _vocabulary(vocab_path, tokens, organism)
    model = check_options(FamilyConfig, sections["model"], str(config_path))
    spec = ModelSpec(
        model,
        ObjectiveConfig.model_validate({"name": "cell_decoding"}),
        Tokens.model_validate(sections["tokens"] | {"max_tokens": max_tokens - 1}),
        genes.n_genes,
    )
    tensors = _renamed(path, theirs, model, rows, tokens)
    source = {"model": "scGPT", "weights": str(path), "weights_digest": sha256_file(path), "genes": line}
    untrained = files.write_model(out, spec, genes, tensors, source)
    return (
        f"{out}: {line}; at most {max_tokens - 1:,} genes a cell, the highest first where scGPT draws at random; "
        f"parameters without a source: {len(untrained)}"
    )


def _vocabulary(path: Path, tokens: dict[str, int], organism: str) -> tuple[Vocabulary, torch.Tensor, str]:
    """The genes with an Ensembl id, their tokens, and a line about the rest."""
    names = [name for name in tokens if not name.startswith("<")]
    mapped = map_genes(names, pd.DataFrame(index=names), organism)
    chosen: dict[str, str] = {}
    for name, gene, symbol in zip(names, mapped.gene_ids, mapped.symbols):
        if gene and (gene not in chosen or name == symbol):  # a current symbol before an earlier one or an alias
            chosen[gene] = name
    if not chosen:
        raise DataError(f"{path}: no gene symbol of {organism}; its first is {names[:1]}")
    ids = sorted(chosen)
    symbols = dict(zip(mapped.gene_ids, mapped.symbols))
    genes = files.published_vocabulary(ids, symbols, [1.0] * len(ids))  # cells are cut by count alone
    seen = mapped.coverage
    line = (
        f"{len(ids):,} of {len(names):,} gene symbols have an Ensembl id of their own ({seen.unmapped:,} unknown, "
        f"{seen.ambiguous:,} ambiguous)"
    )
    return genes, torch.tensor([tokens[chosen[gene]] for gene in ids]), line


def _renamed(
    path: Path, theirs: dict[str, torch.Tensor], model: Any, rows: torch.Tensor, tokens: dict[str, int]
) -> dict[str, torch.Tensor]:
    found = files.Published(path, theirs)
    take, pair = found.take, found.pair
    table = take("encoder.embedding.weight")
    if (largest := max(tokens.values())) >= len(table):
        raise DataError(f"{path}: has {len(table):,} tokens, vocab.json goes to {largest:,}; it is another model's")
    pad, cls = table[tokens["<pad>"]], table[tokens["<cls>"]]
    ours = {
        # scGPT hides values, never genes: its vocabulary has no <mask>, whose row is that of <pad>
        "gene_embedding.weight": torch.cat([torch.stack([pad, pad]), table[rows]]),
        "end_embedding.weight": cls[None],
        **pair("encoder.enc_norm", "gene_norm"),
        **pair("value_encoder.linear1", "value_in.0"),
        **pair("value_encoder.linear2", "value_in.2"),
        **pair("value_encoder.norm", "value_out_norm"),
    }
    for index in range(model.layers):
        layer, block = f"transformer_encoder.layers.{index}.", f"blocks.{index}."
        for kind in ("weight", "bias"):
            q, k, v = take(*(layer + name.format(kind) for name in QKV)).chunk(3)
            ours[f"{block}qkv.{kind}"] = files.joined_heads(path, q, k, v, model.heads)
            ours[f"{block}out.{kind}"] = take(*(layer + name.format(kind) for name in OUT))
        for name, own in LAYER.items():
            ours |= pair(layer + name, block + own)
    return ours
