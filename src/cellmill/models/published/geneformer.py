"""Geneformer (Theodoris et al. 2023), V1 and V2, as a model folder of the family `bert`.

    config.json                       BertConfig of transformers
    model.safetensors                 or pytorch_model.bin: BertForMaskedLM, or BertModel alone
    token_dictionary*.pkl             Ensembl id -> token, with <pad>, <mask>, and in V2 <cls> and <eos>
    gene_median_dictionary*.pkl       Ensembl id -> median of the nonzero counts per 10,000 over its corpus

A gene's rank value is its count over the cell's total, times 10,000, over its median: the order of our rank tokens with
these medians in the vocabulary, as the total scales all genes of a cell alike. Ties, which Geneformer leaves to an
unstable sort, are ordered by Ensembl id. Genes without a token or a median are left out.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cellmill.config.load import check_options
from cellmill.config.parts.family import FamilyConfig, PostNormConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.published import DICTIONARIES, PublishedFolder, geneformer_sections, published_file, require
from cellmill.data.genes.tables import gene_table
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file
from cellmill.models.build import ModelSpec
from cellmill.models.published import files

HEAD = "cls.predictions."
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # medians that we can store
LAYER = {
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "ffn_norm",
}
"""Modules of a layer of BERT, and ours."""


def import_geneformer(
    folder: Path, out: Path, pooling: Literal["mean", "cls"] | None = None, embed_layer: int = -1
) -> str:
    """Write the model folder `out`; returns the line to print.

    `pooling` None is Geneformer's default: the state of <cls> where the dictionary has it (V2), else the mean (V1).
    """
    config_path, path, *_ = PublishedFolder("geneformer", folder).files()
    sections = geneformer_sections(folder)
    tokens, genes = read_dictionaries(folder)
    if pooling == "cls" and sections["model"]["ends"] == "none":
        raise ConfigError(f"--pooling cls: {folder} has no token <cls>; use mean")
    changed = {"embed_layer": embed_layer} | ({} if pooling is None else {"pooling": pooling})
    model = check_options(FamilyConfig, sections["model"] | changed, str(config_path))
    theirs = files.read_weights(path)
    spec = ModelSpec(
        model,
        ObjectiveConfig.model_validate({"name": "masked_gene", "cell_loss_weight": 0}),
        Tokens.model_validate(sections["tokens"]),
        genes.n_genes,
    )
    names = [*SPECIAL, *genes.gene_ids]
    rows = torch.tensor([int(tokens[name]) for name in names])
    ends = [int(require(folder, tokens, name)) for name in ("<cls>", "<eos>")[: model.n_ends]]
    tensors = _renamed(path, theirs, model, rows, ends)
    source = {"model": "Geneformer", "weights": str(path), "weights_digest": sha256_file(path)}
    n_left_out = sum(not name.startswith("<") for name in tokens) - genes.n_genes
    untrained = files.write_model(out, spec, genes, tensors, source | {"genes_left_out": n_left_out})
    return (
        f"{out}: {genes.n_genes:,} genes ({n_left_out:,} without a median left out), at most "
        f"{spec.tokens.max_tokens:,} a cell, embedding: {model.pooling} of layer {embed_layer}; parameters without a "
        f"source: {len(untrained)}"
    )


def read_dictionaries(folder: Path) -> tuple[dict[str, Any], Vocabulary]:
    """Tokens by name, and the genes that have a token and a median. Raises DataError."""
    tokens: dict[str, Any]
    tokens, medians = (files.read_numbers(published_file(folder, pattern)) for pattern in DICTIONARIES)
    if missing := [name for name in SPECIAL if name not in tokens]:
        raise DataError(f"{folder}: token_dictionary: the token {missing[0]} is missing")
    files.check_tokens(folder / "token_dictionary", tokens)
    genes = sorted(name for name in tokens if name in medians and not name.startswith("<"))
    if wrong := [name for name in genes if not SMALLEST <= medians[name] <= LARGEST]:
        raise DataError(
            f"{folder}: gene_median_dictionary: {wrong[0]}: expected a median above 0, got {medians[wrong[0]]!r}"
        )
    if not genes:
        raise DataError(f"{folder}: token_dictionary and gene_median_dictionary have no gene in common")
    symbols = gene_table("human").symbols
    return tokens, files.published_vocabulary(genes, symbols, [medians[gene] for gene in genes])


def _renamed(
    path: Path, theirs: dict[str, torch.Tensor], model: PostNormConfig, rows: torch.Tensor, ends: list[int]
) -> dict[str, torch.Tensor]:
    """Tensors by our names; `rows` and `ends` are tokens of our vocabulary's rows, and of <cls> and <eos>."""
    start = "bert." if any(name.startswith("bert.") for name in theirs) else ""
    found = files.Published(path, theirs)
    take, pair = found.take, found.pair
    embeddings = f"{start}embeddings."
    words = take(f"{embeddings}word_embeddings.weight")
    if (largest := max([int(rows.max()), *ends])) >= len(words) or min([int(rows.min()), *ends]) < 0:
        raise DataError(f"{path}: has {len(words):,} tokens, the dictionary goes to {largest:,}; it is another model's")
    types = take(f"{embeddings}token_type_embeddings.weight")
    ours = {
        "gene_embedding.weight": words[rows],
        "place_embedding.weight": take(f"{embeddings}position_embeddings.weight") + types[0],
        **pair(f"{embeddings}LayerNorm", "embedding_norm"),
    }
    if ends:
        ours["end_embedding.weight"] = words[ends]
    for index in range(model.layers):
        layer, block = f"{start}encoder.layer.{index}.", f"blocks.{index}."
        for kind in ("weight", "bias"):
            parts = [take(f"{layer}attention.self.{part}.{kind}") for part in ("query", "key", "value")]
            ours[f"{block}qkv.{kind}"] = files.joined_heads(path, parts[0], parts[1], parts[2], model.heads)
        for name, own in LAYER.items():
            ours |= pair(layer + name, block + own)
    if f"{HEAD}bias" in theirs:
        ours |= pair(f"{HEAD}transform.dense", "head.0") | pair(f"{HEAD}transform.LayerNorm", "head.2")
        ours["gene_bias"] = take(f"{HEAD}bias")[rows]
    return ours
