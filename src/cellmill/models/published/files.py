"""Reading the files of published models safely, and writing them as model folders that name their source.

Pickled dictionaries are read without running code that the file names, which a plain unpickle would import and call.
Only numpy's scalars are allowed, and functions of this module stand in for numpy's own.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.config.published import read_mapping, require
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import require_file, sha256_file, write_json, write_text
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_tensors
from cellmill.parallel.materialize import named_tensors


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the CPU tensors of a file; torch's are read with `weights_only`."""
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise almost anything
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}: cannot be read safely: {line}") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise DataError(f"{path}: expected tensors by name, got something else")
    return dict(loaded)


def check_tokens(path: Path, tokens: Mapping[str, Any]) -> None:
    """Raise DataError naming `path` for a token that cannot be a row of a table."""
    for name, token in tokens.items():
        if type(token) is not int or not 0 <= token < 2**31:
            raise DataError(f"{path}: {name}: expected a token, a whole number from 0, got {token!r}")


class Published:
    """Tensors of the file `path` by their published names. Raises DataError for one that is missing."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.path, self.tensors = path, tensors

    def take(self, *names: str) -> torch.Tensor:
        """The tensor of the first of these names that is there."""
        tensor: torch.Tensor = require(self.path, self.tensors, next((n for n in names if n in self.tensors), names[0]))
        return tensor

    def pair(self, theirs: str, ours: str) -> dict[str, torch.Tensor]:
        return {f"{ours}.{kind}": self.take(f"{theirs}.{kind}") for kind in ("weight", "bias")}


def published_vocabulary(ids: list[str], symbols: Mapping[str, str], medians: Sequence[float]) -> Vocabulary:
    names = [symbols.get(gene, gene) for gene in ids]
    return Vocabulary(ids, names, np.zeros(len(ids), np.int64), np.array(medians, np.float32))


def joined_heads(path: Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """(H, ...) each -> (3 H, ...): query, key and value of each head. Raises DataError unless `heads` divides H."""
    if wrong := [len(x) for x in (q, k, v) if len(x) % heads]:
        raise DataError(
            f"{path}: expected queries, keys and values of {heads} equal heads, got {wrong[0]} rows; its configuration "
            "is another model's"
        )
    return torch.stack([x.unflatten(0, (heads, -1)) for x in (q, k, v)], dim=1).flatten(0, 2)


class _Dtype:
    """Stand-in for numpy.dtype: its letter and size, such as f8, and its byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _scalar(dtype: Any, raw: Any) -> int | float:
    if not isinstance(dtype, _Dtype) or dtype.code not in ("f8", "f4", "f2", "i8", "i4", "i2", "u8", "u4", "u2"):
        raise pickle.UnpicklingError("a numpy scalar that is not a number")
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    number: int | float = np.frombuffer(raw, dtype.order + dtype.code, count=1)[0].item()
    return number


def _latin1(text: Any, encoding: Any) -> bytes:  # bytes, which protocols below 3 write as text
    if encoding != "latin1":
        raise pickle.UnpicklingError("text in another encoding than latin1")
    return str(text).encode("latin1")


ALLOWED = {
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _latin1,
}
"""Globals that a file may name, and what stands in for each."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return ALLOWED[module, name]


def read_numbers(path: Path) -> dict[str, int | float]:
    """Return the dictionary in a pickle, of texts to numbers. Raises DataError for anything else in it."""
    require_file(path)
    try:
        with path.open("rb") as file:
            value = _Unpickler(file).load()
    except Exception as error:  # damaged bytes raise almost anything; nothing of the file has run
        problem = str(error) or type(error).__name__
        raise DataError(
            f"{path}: expected a pickled dictionary of texts and numbers, got one that cannot be read safely: {problem}"
        ) from None
    plain = isinstance(value, dict) and all(type(k) is str and type(v) in (int, float) for k, v in value.items())
    if not plain:
        raise DataError(f"{path}: expected a pickled dictionary of texts and numbers, got other values")
    return dict(value)


IMPORTED = "imported"  # in place of the fingerprint of training data
FILES = ("config.json", "model.safetensors", "vocabulary.tsv", "README.md")


def write_model(
    out: Path, spec: ModelSpec, genes: Vocabulary, tensors: Mapping[str, torch.Tensor], source: dict[str, Any]
) -> list[str]:
    """Write the model folder `out`; config.json, with `source`, is written last.

    Parameters of the model that `tensors` lacks get their initial values of seed 0; returns their names. Raises
    DataError for a tensor of another shape or without a finite value, ConfigError for an `out` that no import wrote.
    """
    config_path = out / "config.json"
    if out.is_dir() and not (config_path.exists() and read_mapping(config_path).get("fingerprint") == IMPORTED):
        # an import that was killed has left the others, and temporary files, which begin with a dot
        others = sorted(p.name for p in out.iterdir() if p.name not in FILES[1:] and not p.name.startswith("."))
        if others:
            expected = "expected a new folder, or that of an earlier import"
            raise ConfigError(f"--out {out}: {expected}, got one with {others[0]}; set another")
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
    config_path.unlink(missing_ok=True)
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
    write_json(config_path, config)
    return untrained


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
