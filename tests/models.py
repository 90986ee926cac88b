"""Specifications of small models, from one flat mapping of the family's and the objective's options."""

from __future__ import annotations

import json
from typing import Any

from cellmill.config.parts.family import WEIGHTS_FORMAT, FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model

OPTIONS = {name for options in ObjectiveConfig.built_in().values() for name in options.model_fields if name != "name"}
OF_OBJECTIVE = {"objective": "name"} | {name: name for name in OPTIONS}


def split(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections `model` and `objective`, masked_value if none is named."""
    options = {"objective": "masked_value"} | options
    model = {key: value for key, value in options.items() if key not in OF_OBJECTIVE}
    return {"model": model, "objective": {OF_OBJECTIVE[key]: options[key] for key in options.keys() - model.keys()}}


def config_json(**more: Any) -> str:
    """The least that the config.json of an exported model has, and `more`."""
    texts = dict.fromkeys(("family", "vocabulary_digest", "weights_sha256"), "")
    return json.dumps({"format": WEIGHTS_FORMAT, **texts, "model": {}, "tokens": {}, "objective": {}} | more)


def spec(
    n_genes: int, tokens: Tokens | None = None, levels: dict[str, tuple[str, ...]] | None = None, **options: Any
) -> ModelSpec:
    """The specification of a model over `n_genes` genes."""
    sections = split(options)
    objective = ObjectiveConfig.model_validate(sections["objective"])
    tokens = Tokens.model_validate({}) if tokens is None else tokens
    return ModelSpec(FamilyConfig.model_validate(sections["model"]), objective, tokens, n_genes, levels or {})


def model_on_cpu(n_genes: int, tokens: Tokens | None = None, **options: Any) -> Model:
    """The model with memory but without values."""
    return build(spec(n_genes, tokens, **options)).to_empty(device="cpu")
