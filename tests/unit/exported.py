"""A corpus and an exported model with random weights, made through the same code as real ones."""

from pathlib import Path
from typing import Any

import torch

from cellmill.config.options import PreprocessOptions, ShardOptions, VocabularyOptions
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_model
from cellmill.stages import data
from tests.models import spec

SMALL = {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2}


def make_corpus(folder: Path, raw: Path, **split: Any) -> dict[str, Path]:
    """Paths of `cells`, `vocabulary` and `manifest` of a corpus of one raw dataset."""
    cells = folder / "cells" / raw.name
    genes = folder / "vocabulary.tsv"
    manifest = folder / "shards" / "manifest.json"
    keep_all = PreprocessOptions.model_validate(
        {"preprocess": {"min_genes": 0, "max_mito_frac": 1}}
    )
    data.preprocess(
        options=keep_all,
        input=raw,
        counts="X",
        dataset=raw.stem,
        out=cells,
        report=cells.with_suffix(".json"),
    )
    data.vocabulary(
        options=VocabularyOptions.model_validate({"vocabulary": {}}), cells=[cells], out=genes
    )
    options = ShardOptions.model_validate({"shard": {"test_frac": 0.4} | split})
    data.shard(options=options, cells=[cells], vocabulary=genes, out=manifest)
    return {"cells": cells, "vocabulary": genes, "manifest": manifest}


def export_model(
    folder: Path,
    genes: Path,
    tokens: dict[str, Any] | None = None,
    seed: int = 0,
    levels: dict[str, tuple[str, ...]] | None = None,
    **model: Any,
) -> Path:
    """The folder of a small model over the vocabulary in `genes`, with the weights that `seed`
    gives.
    """
    known = Vocabulary.read(genes)
    options = {name: value for name, value in (SMALL | model).items() if value is not None}
    given = spec(
        known.n_genes, Tokens.model_validate({"max_tokens": 64} | (tokens or {})), levels, **options
    )
    network = build(given)
    kept = network.state_dict().keys()  # parameters and persistent buffers
    tensors = {
        name: tensor for name, tensor in initial_tensors(network, seed, None, known) if name in kept
    }
    return save_model(folder, given, known, tensors)


def save_model(
    folder: Path, given: ModelSpec, genes: Vocabulary, tensors: dict[str, torch.Tensor]
) -> Path:
    """The folder of a model with these tensors."""
    about = {"fingerprint": "none", "levels": given.levels, "step": 0}
    write_model(folder, given.sections(), genes, tensors, about, lambda config: "")
    return folder
