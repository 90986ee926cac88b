"""A model folder of published weights: the files that `consolidate` writes, with their source instead of a training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file, write_json, write_text
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_tensors
from cellmill.models.published.tensors import read_mapping
from cellmill.parallel.materialize import named_tensors

IMPORTED = "imported"
"""In place of the fingerprint of training data."""
FILES = ("config.json", "model.safetensors", "vocabulary.tsv", "README.md")


def write_model(
    out: Path, spec: ModelSpec, genes: Vocabulary, tensors: Mapping[str, torch.Tensor], source: dict[str, Any]
) -> list[str]:
    """Write the model folder `out`; config.json, with `source`, is written last.

    Parameters of the model that `tensors` lacks get their initial values of seed 0; returns their names. Raises
    DataError for a tensor of another shape or without a finite value, ConfigError for an `out` that no import wrote.
    """
    _refuse_other_files(out)
    model = build(spec)
    for name, empty in named_tensors(model):  # before any is made: a damaged configuration may ask for any size
        if name in tensors and tensors[name].shape != empty.shape:
            raise DataError(
                f"{source['weights']}: expected a tensor of shape {tuple(empty.shape)} for {name}, got "
                f"{tuple(tensors[name].shape)}; its configuration is another model's"
            )
    written, untrained = {}, []
    for name, initial in initial_tensors(model, 0, None, genes):
        if name not in tensors:
            untrained.append(name)
        written[name] = tensors.get(name, initial).float().contiguous()
        if not written[name].isfinite().all():
            raise DataError(f"{source['weights']}: {name} has values that are not finite; copy the file again")
    (out / "config.json").unlink(missing_ok=True)
    write_tensors(out / "model.safetensors", written)
    genes.write(out / "vocabulary.tsv")
    config = {
        "format": WEIGHTS_FORMAT,
        "family": spec.model.family,
        "model": spec.model.model_dump(mode="json"),
        "objective": spec.objective.model_dump(mode="json"),
        "tokens": spec.tokens.model_dump(mode="json"),
        "n_genes": genes.n_genes,
        "vocabulary_digest": genes.digest,
        "fingerprint": IMPORTED,
        "init_from": str(source["weights"]),
        "step": 0,
        "val_loss": None,
        "seed": 0,
        "source": source | {"untrained": untrained},
        "weights_sha256": sha256_file(out / "model.safetensors"),
    }
    write_text(out / "README.md", imported_card(config, sum(tensor.numel() for tensor in written.values())))
    write_json(out / "config.json", config)
    return untrained


def _refuse_other_files(out: Path) -> None:
    """Raise ConfigError for a folder with files of others, such as those that are read, or the model of a run."""
    if not out.is_dir():
        return
    config = out / "config.json"
    if config.exists() and read_mapping(config).get("fingerprint") == IMPORTED:
        return
    # an import that was killed has left the others, and temporary files, which begin with a dot
    if others := sorted(p.name for p in out.iterdir() if p.name not in FILES[1:] and not p.name.startswith(".")):
        raise ConfigError(
            f"--out {out}: expected a new folder, or that of an earlier import, got one with {others[0]}; set another"
        )


def imported_card(config: dict[str, Any], parameters: int) -> str:
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
| parameters | {parameters:,} |
| vocabulary | {config["n_genes"]:,} genes, digest `{config["vocabulary_digest"][:16]}` |
| tokens | {config["tokens"]["tokenizer"]}, at most {config["tokens"]["max_tokens"]} genes a cell |
{rows}
Parameters that the source does not have, at their initial values: {untrained}.

    cellmill embed --model . --input cells.h5ad --out embedded.h5ad

writes the cells' embeddings to `obsm["X_cellmill"]`. Genes are Ensembl ids; raw counts go in.

## Limits
The weights, their licence and their training data are the source's; cellmill has not judged them. Evaluate them on
your cells beside the baselines before use. Not for clinical use.
"""
