"""Published single-cell models as model folders that name their source.

No code that a file names is run. docs/finetune.md lists the files, and how tokens, genes and heads
are converted, for Geneformer (Theodoris et al. 2023, family `bert`) and scGPT (Cui et al. 2024,
family `scgpt`). Geneformer orders genes by their count divided by the cell's total and by the gene's
median. The rank tokenizer gives the same order with these medians in the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cellmill.config.load import Tree, check_options
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.config.published import (
    DICTIONARIES,
    PublishedFolder,
    geneformer_sections,
    published_file,
    read_mapping,
    require,
    scgpt_sections,
)
from cellmill.data.genes.names import map_names
from cellmill.data.genes.tables import gene_table
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_model
from cellmill.models.pickled_numbers import read_numbers
from cellmill.parallel.materialize import named_tensors

# bounds of medians that can be stored
MIN_MEDIAN = float(np.finfo(np.float32).tiny)
MAX_MEDIAN = float(np.finfo(np.float32).max)
Names = Mapping[str, tuple[str, ...]]
"""Names that a published file may have for each module of ours."""
BERT_LAYER: Names = {
    "out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
SCGPT_LAYER: Names = {
    "out": ("self_attn.out_proj", "self_attn._impl.out_proj"),
    "attention_norm": ("norm1",),
    "up": ("linear1",),
    "down": ("linear2",),
    "ffn_norm": ("norm2",),
}
SCGPT_QKV = ("self_attn.in_proj_", "self_attn.Wqkv.", "self_attn._impl.Wqkv.")
IMPORTED = "imported"  # instead of the fingerprint of training data
PARTIAL_FILES = ("model.safetensors", "vocabulary.tsv", "README.md")  # written before config.json


def import_geneformer(
    folder: Path, out: Path, pooling: Literal["mean", "cls"] | None = None, embed_layer: int = -1
) -> str:
    """Write the model folder `out`, and return the line to print.

    `pooling` None is Geneformer's default: the state of <cls> if the dictionary has it (V2),
    otherwise the mean (V1).
    """
    config_path, path, *_ = PublishedFolder("geneformer", folder).files()
    sections = geneformer_sections(folder)
    tokens, genes = read_dictionaries(folder)
    if pooling == "cls" and sections["model"]["ends"] == "none":
        raise ConfigError(f"--pooling cls: {folder} has no token <cls>; use mean")
    sections["model"]["embed_layer"] = embed_layer
    if pooling is not None:
        sections["model"]["pooling"] = pooling
    weights = _Weights(path)
    spec = _make_spec(config_path, sections, {"name": "masked_gene", "cell_loss_weight": 0}, genes)
    rows = [int(tokens[name]) for name in [*SPECIAL, *genes.gene_ids]]
    tensors = _convert_geneformer(weights, spec.model, rows, tokens)
    source = {"model": "Geneformer", "weights": str(path), "weights_digest": sha256_file(path)}
    n_left_out = sum(not name.startswith("<") for name in tokens) - genes.n_genes
    untrained = _write(out, spec, genes, tensors, source | {"genes_left_out": n_left_out})
    return (
        f"{out}: {genes.n_genes:,} genes ({n_left_out:,} without a median left out), at most "
        f"{spec.tokens.max_tokens:,} a cell, embedding: {spec.model.pooling} of layer {embed_layer}; parameters "  # type: ignore[attr-defined]
        f"without a source: {len(untrained)}"
    )


def import_scgpt(folder: Path, out: Path, organism: str = "human", max_tokens: int = 1200) -> str:
    """Write the model folder `out`, and return the line to print.

    `max_tokens` counts <cls>, like scGPT's max_length.
    """
    if max_tokens < 2:
        raise ConfigError(f"--max-tokens: expected at least 2, <cls> and a gene, got {max_tokens}")
    config_path, path, vocab_path = PublishedFolder("scgpt", folder).files()
    sections = scgpt_sections(folder)
    weights = _Weights(path)
    batch_norms = [name for name in weights.tensors if name.startswith(("dsbn.", "bn."))]
    if batch_norms:
        raise DataError(
            f"{path}: {batch_norms[0]}: batch norms of fine-tuned scGPT are not supported; use the pretrained"
        )
    tokens = read_mapping(vocab_path)
    _check_tokens(vocab_path, tokens, ("<pad>", "<cls>"))
    genes, rows, line = _map_symbols(vocab_path, tokens, organism)
    sections["tokens"]["max_tokens"] = max_tokens - 1
    spec = _make_spec(config_path, sections, {"name": "cell_decoding"}, genes)
    source = {
        "model": "scGPT",
        "weights": str(path),
        "weights_digest": sha256_file(path),
        "genes": line,
    }
    tensors = _convert_scgpt(weights, spec.model, rows, tokens)
    untrained = _write(out, spec, genes, tensors, source)
    return (
        f"{out}: {line}; at most {max_tokens - 1:,} genes a cell, the highest first where scGPT draws at random; "
        f"parameters without a source: {len(untrained)}"
    )


def _make_spec(path: Path, sections: Tree, objective: Tree, genes: Vocabulary) -> ModelSpec:
    model = check_options(FamilyConfig, sections["model"], str(path))
    tokens = Tokens.model_validate(sections["tokens"])
    return ModelSpec(model, ObjectiveConfig.model_validate(objective), tokens, genes.n_genes)


def read_dictionaries(folder: Path) -> tuple[Tree, Vocabulary]:
    """Return Geneformer's tokens by name, and the genes with token and median, or raise DataError."""
    tokens, medians = (read_numbers(published_file(folder, pattern)) for pattern in DICTIONARIES)
    _check_tokens(folder / "token_dictionary", tokens, SPECIAL)
    genes = sorted(name for name in tokens if name in medians and not name.startswith("<"))
    wrong = [name for name in genes if not MIN_MEDIAN <= medians[name] <= MAX_MEDIAN]
    if wrong:
        raise DataError(
            f"{folder}: gene_median_dictionary: {wrong[0]}: expected a median above 0, got {medians[wrong[0]]!r}"
        )
    if not genes:
        raise DataError(
            f"{folder}: token_dictionary and gene_median_dictionary have no gene in common"
        )
    symbols = gene_table("human").symbols
    return tokens, _make_vocabulary(genes, symbols, [medians[gene] for gene in genes])


def _map_symbols(
    path: Path, tokens: dict[str, int], organism: str
) -> tuple[Vocabulary, list[int], str]:
    """Return the genes of scGPT's symbols with an Ensembl id, their tokens, and a line on the rest."""
    names = [name for name in tokens if not name.startswith("<")]
    mapped = map_names(names, organism)
    chosen: dict[str, str] = {}
    for name, gene, symbol in zip(names, mapped.gene_ids, mapped.symbols):
        # a current symbol before an earlier one or an alias
        if gene and (gene not in chosen or name == symbol):
            chosen[gene] = name
    if not chosen:
        raise DataError(f"{path}: no gene symbol of {organism}; its first is {names[:1]}")
    ids = sorted(chosen)
    seen = mapped.coverage
    line = (
        f"{len(ids):,} of {len(names):,} gene symbols have an Ensembl id of their own ({seen.unmapped:,} unknown, "
        f"{seen.ambiguous:,} ambiguous)"
    )
    # medians of 1: cells are cut by count only
    genes = _make_vocabulary(ids, dict(zip(mapped.gene_ids, mapped.symbols)), [1.0] * len(ids))
    return genes, [tokens[chosen[gene]] for gene in ids], line


def _make_vocabulary(
    ids: list[str], symbols: Mapping[str, str], medians: Sequence[float]
) -> Vocabulary:
    names = [symbols.get(gene, gene) for gene in ids]
    return Vocabulary(ids, names, np.zeros(len(ids), np.int64), np.array(medians, np.float32))


def _check_tokens(path: Path, tokens: Mapping[str, Any], special: Sequence[str]) -> None:
    for name in special:
        require(path, tokens, name)
    for name, token in tokens.items():
        if type(token) is not int or not 0 <= token < 2**31:
            raise DataError(
                f"{path}: {name}: expected a token, a whole number from 0, got {token!r}"
            )


class _Weights:
    """Tensors of a file by their published names; torch's files are read with `weights_only`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            loaded = (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(path, "cpu", weights_only=True)
            )
        except Exception as error:  # damaged bytes raise almost anything
            line = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{path}: cannot be read safely: {line}") from None
        is_valid = isinstance(loaded, Mapping) and all(
            isinstance(value, Tensor) for value in loaded.values()
        )
        if not is_valid:
            raise DataError(f"{path}: expected tensors by name, got something else")
        self.tensors: Mapping[str, Tensor] = loaded

    def take(self, *names: str) -> Tensor:
        """Return the tensor of the first of these names that the file has, or raise DataError."""
        stored = [name for name in names if name in self.tensors]
        tensor: Tensor = require(self.path, self.tensors, stored[0] if stored else names[0])
        return tensor

    def table(self, name: str, tokens: Sequence[int], source: str) -> Tensor:
        """Return a table with a row for each of `tokens`. Raise DataError if it has fewer."""
        rows = self.take(name)
        largest = max(tokens)
        if largest >= len(rows):
            raise DataError(
                f"{self.path}: has {len(rows):,} tokens, {source} goes to {largest:,}; it is another model's"
            )
        return rows

    def pair(self, ours: str, *theirs: str) -> dict[str, Tensor]:
        """Return weight and bias of a module, by our names."""
        pair = {}
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in theirs]
            pair[f"{ours}.{kind}"] = self.take(*names)
        return pair

    def blocks(
        self,
        model: Any,
        layers: str,
        modules: Names,
        qkv: Callable[[str, str], Sequence[Tensor]],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the blocks by our names.

        `qkv(layer, kind)` returns query, key and value, (H, …) each; rows of ours are query, key
        and value of each head. Raise DataError unless the heads divide H.
        """
        for index in range(model.layers):
            layer = f"{layers}.{index}."
            block = f"blocks.{index}."
            for kind in ("weight", "bias"):
                parts = qkv(layer, kind)
                for part in parts:
                    if len(part) % model.heads:
                        raise DataError(
                            f"{self.path}: expected queries, keys and values of {model.heads} equal heads, got "
                            f"{len(part)} rows; its configuration is another model's"
                        )
                by_head = [x.unflatten(0, (model.heads, -1)) for x in parts]
                yield f"{block}qkv.{kind}", torch.stack(by_head, dim=1).flatten(0, 2)
            for ours, theirs in modules.items():
                names = [layer + name for name in theirs]
                yield from self.pair(block + ours, *names).items()


def _convert_geneformer(
    weights: _Weights, model: Any, rows: list[int], tokens: Tree
) -> dict[str, Tensor]:
    """Return tensors by our names; `rows` are tokens of our vocabulary's rows."""
    take = weights.take
    start = "bert." if any(name.startswith("bert.") for name in weights.tensors) else ""
    embeddings = f"{start}embeddings"
    end_names = ("<cls>", "<eos>")[: model.n_ends]
    ends = [int(require(weights.path, tokens, name)) for name in end_names]
    all_rows = [*rows, *ends]
    words = weights.table(f"{embeddings}.word_embeddings.weight", all_rows, "the dictionary")
    types = take(f"{embeddings}.token_type_embeddings.weight")
    ours = {
        "gene_embedding.weight": words[rows],
        "place_embedding.weight": take(f"{embeddings}.position_embeddings.weight") + types[0],
        **weights.pair("embedding_norm", f"{embeddings}.LayerNorm"),
    }
    if ends:
        ours["end_embedding.weight"] = words[ends]

    def qkv(layer: str, kind: str) -> list[Tensor]:
        return [take(f"{layer}attention.self.{part}.{kind}") for part in ("query", "key", "value")]

    ours |= weights.blocks(model, f"{start}encoder.layer", BERT_LAYER, qkv)
    if "cls.predictions.bias" in weights.tensors:
        ours |= weights.pair("head.0", "cls.predictions.transform.dense")
        ours |= weights.pair("head.2", "cls.predictions.transform.LayerNorm")
        ours["gene_bias"] = take("cls.predictions.bias")[rows]
    return ours


def _convert_scgpt(
    weights: _Weights, model: Any, rows: list[int], tokens: dict[str, int]
) -> dict[str, Tensor]:
    """Return tensors by our names; `rows` are tokens of our vocabulary's genes."""
    table = weights.table("encoder.embedding.weight", [*tokens.values()], "vocab.json")
    pad = table[tokens["<pad>"]]
    cls = table[tokens["<cls>"]]

    def qkv(layer: str, kind: str) -> Sequence[Tensor]:
        names = [f"{layer}{name}{kind}" for name in SCGPT_QKV]
        return weights.take(*names).chunk(3)

    return {
        # scGPT hides values, never genes: its vocabulary has no <mask>, whose row is that of <pad>
        "gene_embedding.weight": torch.cat([torch.stack([pad, pad]), table[rows]]),
        "end_embedding.weight": cls[None],
        **weights.pair("gene_norm", "encoder.enc_norm"),
        **weights.pair("value_in.0", "value_encoder.linear1"),
        **weights.pair("value_in.2", "value_encoder.linear2"),
        **weights.pair("value_out_norm", "value_encoder.norm"),
        **dict(weights.blocks(model, "transformer_encoder.layers", SCGPT_LAYER, qkv)),
    }


def _write(
    out: Path,
    spec: ModelSpec,
    genes: Vocabulary,
    tensors: Mapping[str, Tensor],
    source: Tree,
) -> list[str]:
    """Write the model folder `out`, and return the names of parameters that `tensors` lacks.

    They get their initial values of seed 0. config.json, with `source`, is written last. Raise
    DataError for a tensor of another shape or with a value that is not finite, ConfigError for an
    `out` that no import wrote.
    """
    _check_out(out)
    model = build(spec)
    # before any is made: a damaged configuration may ask for any size
    for name, empty in named_tensors(model):
        if name in tensors and tensors[name].shape != empty.shape:
            raise DataError(
                f"{source['weights']}: expected a tensor of shape {tuple(empty.shape)} for {name}, got "
                f"{tuple(tensors[name].shape)}; its configuration is another model's"
            )
    written = {}
    for name, initial in initial_tensors(model, 0, None, genes):
        written[name] = tensors.get(name, initial).float().contiguous()
        if not written[name].isfinite().all():
            raise DataError(
                f"{source['weights']}: {name} has values that are not finite; copy the file again"
            )
    untrained = [name for name in written if name not in tensors]
    about = {
        "fingerprint": IMPORTED,
        "init_from": source["weights"],
        "step": 0,
        "val_loss": None,
        "seed": 0,
        "source": source | {"untrained": untrained},
    }
    n_parameters = sum(tensor.numel() for tensor in written.values())
    write_model(
        out, spec.sections(), genes, written, about, lambda config: _card(config, n_parameters)
    )
    return untrained


def _check_out(out: Path) -> None:
    """Raise ConfigError if `out` has files that no import wrote."""
    config_path = out / "config.json"
    if config_path.exists() and read_mapping(config_path).get("fingerprint") == IMPORTED:
        return
    # an import that was killed has left PARTIAL_FILES, and temporary files, which begin with a dot
    others = [
        p.name for p in out.glob("*") if p.name not in PARTIAL_FILES and not p.name.startswith(".")
    ]
    if others:
        raise ConfigError(
            f"--out {out}: expected a new folder, or that of an earlier import, got one with {min(others)}; set another"
        )


def _card(config: Tree, n_parameters: int) -> str:
    """Return the README of an imported model: its source, what was left out, and its limits."""
    source = config["source"]
    rows = "".join(f"| {key} | {value} |\n" for key, value in source.items() if key != "untrained")
    untrained = ", ".join(f"`{name}`" for name in source["untrained"]) or "none"
    return f"""---
library_name: cellmill
tags: [single-cell, transcriptomics, {config["family"]}]
---
# {source["model"]}, imported

| | |
|---|---|
| parameters | {n_parameters:,} |
| vocabulary | {config["n_genes"]:,} genes, digest `{config["vocabulary_digest"][:16]}` |
| tokens | {config["tokens"]["tokenizer"]}, at most {config["tokens"]["max_tokens"]} genes a cell |
{rows}| training cells | unknown: the source has no digests of them |

Parameters that the source does not have, at their initial values: {untrained}.

    cellmill embed --model . --input cells.h5ad --out embedded.h5ad

writes the cells' embeddings to `obsm["X_cellmill"]`. Genes are Ensembl ids; raw counts go in.

## Limits
The weights, their licence and their training data are the source's; cellmill has not judged them. Evaluate them on
your cells beside the baselines before use. Not for clinical use.
"""
