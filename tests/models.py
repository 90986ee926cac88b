"""Specifications of small models, from one flat mapping of options, and cells for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import tokenize_to_batch
from cellmill.models.batch import pad_batch
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors
from cellmill.models.family import Model
from cellmill.parallel.materialize import materialize

OF_OBJECTIVE = {"objective": "name"}
"""Keys of the section `objective` by their keys in a flat mapping."""
for options in ObjectiveConfig.built_in().values():
    for key in options.model_fields:
        if key != "name":
            OF_OBJECTIVE[key] = key


def split(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections `model` and `objective`, masked_value if none is named."""
    model = {}
    objective = {"name": "masked_value"}
    for key, value in options.items():
        if key in OF_OBJECTIVE:
            objective[OF_OBJECTIVE[key]] = value
        else:
            model[key] = value
    return {"model": model, "objective": objective}


def config_json(**more: Any) -> str:
    """The least that the config.json of an exported model has, and `more`."""
    texts = dict.fromkeys(("family", "vocabulary_digest", "weights_sha256"), "")
    return json.dumps(
        {"format": WEIGHTS_FORMAT, **texts, "model": {}, "tokens": {}, "objective": {}} | more
    )


def objective_of(tokens: Tokens, name: str = "masked_value", **options: Any) -> Any:
    """An objective without a model."""
    config = ObjectiveConfig.model_validate({"name": name} | options)
    return config.load()(config, tokens)


def spec(
    n_genes: int,
    tokens: Tokens | None = None,
    levels: dict[str, tuple[str, ...]] | None = None,
    **options: Any,
) -> ModelSpec:
    """The specification of a model over `n_genes` genes."""
    sections = split(options)
    objective = ObjectiveConfig.model_validate(sections["objective"])
    tokens = Tokens.model_validate({}) if tokens is None else tokens
    return ModelSpec(
        FamilyConfig.model_validate(sections["model"]), objective, tokens, n_genes, levels or {}
    )


def model_on_cpu(n_genes: int, tokens: Tokens | None = None, **options: Any) -> Model:
    """The model with memory but without values."""
    return build(spec(n_genes, tokens, **options)).to_empty(device="cpu")


KEYS = {"seed": 3, "step": 4}
SHAPE = {"hidden": 16, "layers": 2, "heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "profile": ("continuous", {"family": "profile", "hidden": 16, "layers": 2}),
    "encoder": ("continuous", {"family": "encoder"} | SHAPE),
    "autoencoder": ("continuous", {"family": "autoencoder"} | SHAPE),
    "autoregressive": ("rank", {"family": "autoregressive"} | SHAPE),
    "bert": ("rank", {"family": "bert", "ends": "cls_eos"} | SHAPE),
    "scgpt": ("binned", {"family": "scgpt", "ends": "cls", "pooling": "cls"} | SHAPE),
}
"""A small model of each family whose layers cellmill makes, and a tokenizer that it reads."""
ONE_LAYER: dict[str, dict[str, Any]] = {
    "encoder": {"family": "encoder", "hidden": 16, "layers": 1, "heads": 2, "dropout": 0.2},
    "profile": {"family": "profile", "hidden": 16, "layers": 1, "dropout": 0.2},
}


def genes_of(n_genes: int) -> Vocabulary:
    """A vocabulary of `n_genes` genes."""
    ids = [f"ENSG{i:011d}" for i in range(n_genes)]
    return Vocabulary(ids, ids, np.ones(n_genes, np.int64), np.ones(n_genes, np.float32))


def initialized(given: ModelSpec, init_from: Path | None = None) -> Any:
    """The model with its initial values of seed 0, which depend on the names of parameters alone."""
    model = build(given)
    values = initial_tensors(model, 0, init_from, genes_of(given.n_genes))
    materialize(model, torch.device("cpu"), values)
    return model


def seeded(seed: int) -> torch.Generator:
    """A generator of torch's random numbers."""
    return torch.Generator().manual_seed(seed)


def random_cells(
    lengths: Sequence[int],
    tokens: Tokens,
    n_genes: int,
    *,
    seed: int = 0,
    first: int = 11,
    with_counts: bool = True,
    **per_cell: np.ndarray,
) -> Batch:
    """Cells of these lengths with random genes and counts from 1 to 8; ids count from `first`."""
    random = np.random.default_rng(seed)
    genes = [random.permutation(n_genes)[:n] for n in lengths]
    counts = random.integers(1, 9, sum(lengths)).astype(np.uint8)
    return tokenize_to_batch(
        tokens.load()(tokens),
        SparseCounts(np.cumsum([0, *lengths]), np.concatenate(genes).astype(np.int32), counts),
        np.arange(len(lengths)) + first,
        with_counts,
        **per_cell,
    )


def prepare(model: Any, batch: Batch, length: int | None = None) -> Any:
    """What the model is given of a batch, padded to `length` tokens."""
    view = model.view(batch, **KEYS)
    return model.prepare(view if length is None else pad_batch(view, length), **KEYS)


def train_options(**sections: Any) -> TrainOptions:
    """Options of a training of one step."""
    rest: dict[str, Any] = {name: {} for name in TrainOptions.model_fields} | {
        "train": {"steps": 1}
    }
    return TrainOptions.model_validate(rest | sections)
