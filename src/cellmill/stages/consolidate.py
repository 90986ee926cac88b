"""consolidate: export a sharded checkpoint as a self-contained model: weights, configuration, vocabulary, model card.

One process on a CPU, with the whole model in memory. What a fine-tuning method added is merged, so an export is always
a plain model. `config.json` is written last: its existence means that the rest is complete.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from cellmill.config import check_options
from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.finetune import MethodConfig
from cellmill.config.load import upgrade_options
from cellmill.config.options import ConsolidateOptions
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.files import sha256_file, write_json, write_text
from cellmill.finetune.method import load_method
from cellmill.models.build import build
from cellmill.models.export import spec_of, write_tensors
from cellmill.models.family import Model
from cellmill.parallel.materialize import named_tensors
from cellmill.runs.folder import Checkpoint, TrainFolder
from cellmill.train.checkpoint import CheckpointReader

PREFIX = "model."


def run(*, options: ConsolidateOptions, train: Path, vocabulary: Path, out: Path) -> None:
    """Export the best or last checkpoint of the training folder `train` to the folder `out`."""
    checkpoint = _choose(TrainFolder(train), options.consolidate.checkpoint)
    state = checkpoint.state()
    if (version := state["identity"].get("weights_format", 1)) != WEIGHTS_FORMAT:
        raise DataError(
            f"{checkpoint.path}: expected weights of format {WEIGHTS_FORMAT}, got {version}; train it again"
        )
    genes = Vocabulary.read(vocabulary)
    if genes.digest != state["vocabulary_digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {genes.digest[:12]}, the checkpoint was trained with "
            f"{state['vocabulary_digest'][:12]}; use the vocabulary it was trained with"
        )
    spec = spec_of(state["options"] | {"levels": state.get("levels", {})}, genes.n_genes)
    method = load_method(check_options(MethodConfig, state["options"].get("finetune", {}), f"{checkpoint.path}"))
    model = build(spec, method.transform).to_empty(device="cpu")
    _load(checkpoint, model)
    method.merge(model)
    tensors = model.state_dict()
    if differing := sorted(tensors.keys() ^ build(spec).state_dict().keys()):
        raise DataError(f"finetune.method {method.config.method}: merge leaves another model: {differing[0]}")
    (out / "config.json").unlink(missing_ok=True)
    write_tensors(out / "model.safetensors", tensors)
    genes.write(out / "vocabulary.tsv")
    config = _config(state, genes) | {"weights_sha256": sha256_file(out / "model.safetensors")}
    write_text(out / "README.md", model_card(config, sum(p.numel() for p in model.parameters())))
    write_json(out / "config.json", config)
    print(f"{out}: step {config['step']}, {len(tensors)} tensors", flush=True)


def _choose(folder: TrainFolder, which: str) -> Checkpoint:
    newest, damaged = folder.newest_whole()
    for line in damaged:
        print(f"warning: {line}; exporting the previous one", file=sys.stderr, flush=True)
    return folder.best() if which == "best" or newest is None else newest  # `best` refuses a folder without any


def _load(checkpoint: Checkpoint, model: Model) -> None:
    """Load parameters and persistent buffers into `model`, on the CPU."""
    tensors = {PREFIX + name: tensor.detach() for name, tensor in named_tensors(model, persistent=True)}
    reader = CheckpointReader(checkpoint.path)
    saved = {name for name in reader.read_metadata().state_dict_metadata if name.startswith(PREFIX)}
    if differing := sorted(saved ^ tensors.keys()):
        raise DataError(
            f"{checkpoint.path}: expected the tensors of its options' model, which differ in {differing[0]} "
            f"({len(differing)} in all); train it again"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is intended
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def _config(state: dict[str, Any], genes: Vocabulary) -> dict[str, Any]:
    options, progress = upgrade_options(state["options"]), state["progress"]
    return {
        "format": WEIGHTS_FORMAT,
        "family": options["model"]["family"],
        "model": options["model"],
        "objective": options["objective"],
        "tokens": options["tokens"],
        "n_genes": genes.n_genes,
        "vocabulary_digest": genes.digest,
        "fingerprint": state["fingerprint"],
        "init_from": state.get("init_from"),
        "supervised_by": state.get("supervised_by", []),
        "step": progress["step"],
        "val_loss": progress["val_loss"],
        "seed": options["train"]["seed"],
        **({"levels": state["levels"]} if "levels" in state else {}),
    }


def _is_short(value: Any) -> bool:
    """True for an option that is set and fits into a row of the card."""
    return value is not None and not isinstance(value, dict)


def _listed(options: dict[str, Any], name: str) -> str:
    """Options of a part of the model for a row of the card, without its `name`."""
    return ", ".join(f"{key} {options[key]}" for key in options if key != name and _is_short(options[key]))


def _objective(options: dict[str, Any]) -> str:
    """Name and options of an objective, or of the parts of a sum, for a row of the card."""
    if "parts" in options:
        parts = [_objective({"name": name} | part) for name, part in options["parts"].items()]
        return f"{options['name']} of {'; '.join(parts)}"
    listed = _listed(options, "name")
    return f"{options['name']}: {listed}" if listed else str(options["name"])


def model_card(config: dict[str, Any], parameters: int) -> str:
    """Return the README of an export: the model, its training, and its limits."""
    model = config["model"]
    goes_in = "Genes are Ensembl ids; raw counts go in."
    if config["tokens"]["tokenizer"] == "sequence":
        goes_in = "Tokens are residues; a FASTA file of proteins goes in."
    loss = "not validated" if config["val_loss"] is None else f"{config['val_loss']:.4f}"
    shape, family = _listed(model, "family"), config["family"]
    tags, labels = ["single-cell", "transcriptomics", config["family"]], config["supervised_by"]
    supervised = f"by labels of obs column {', '.join(labels)}" if labels else "no: trained without labels"
    judged = f" It is a supervised embedding of {', '.join(labels)}: it saw these labels in training." if labels else ""
    return f"""---
library_name: cellmill
tags: [{", ".join([*tags, "supervised"] if labels else tags)}]
---
# {"An" if family[0] in "aehiou" else "A"} `{family}` single-cell model

| | |
|---|---|
| parameters | {parameters:,} |
| architecture | {shape} |
| objective | {_objective(config["objective"])} |
| supervised | {supervised} |
| tokens | {config["tokens"]["tokenizer"]}, at most {config["tokens"]["max_tokens"]} a cell |
| vocabulary | {config["n_genes"]:,} genes, digest `{config["vocabulary_digest"][:16]}` |
| training data | fingerprint `{config["fingerprint"][:16]}` |
| first weights | {config["init_from"] or "fresh"} |
| step | {config["step"]:,} |
| validation loss | {loss} |

Made by cellmill. {goes_in}

    cellmill embed --model . --input cells.h5ad --out embedded.h5ad

writes the cells' embeddings to `obsm["X_cellmill"]`.

## Limits
The embedding was judged on the datasets that the run's `evaluate/metrics.json` names, beside baselines that it may
lose to; read it before use.{judged} Nothing is known of other tissues, assays or species. Not for clinical use.
"""
