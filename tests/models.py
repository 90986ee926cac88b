"""Specifications of small models, from one flat mapping of the family's and the objective's options."""

from __future__ import annotations

from typing import Any

from cellmill.config.family import FamilyConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import Tokens
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model

NAMES = (
    "mask_frac cell_loss_weight renormalize parts "
    "view min_hidden_frac max_hidden_frac target likelihood weights decoder_hidden"
)
OF_OBJECTIVE = {"objective": "name"} | {name: name for name in NAMES.split()}


def split(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections `model` and `objective`."""
    model = {key: value for key, value in options.items() if key not in OF_OBJECTIVE}
    return {"model": model, "objective": {OF_OBJECTIVE[key]: options[key] for key in options.keys() - model.keys()}}


def spec(n_genes: int, tokens: Tokens | None = None, **options: Any) -> ModelSpec:
    """The specification of a model over `n_genes` genes."""
    sections = split(options)
    objective = ObjectiveConfig.model_validate(sections["objective"])
    tokens = Tokens.model_validate({}) if tokens is None else tokens
    return ModelSpec(FamilyConfig.model_validate(sections["model"]), objective, tokens, n_genes)


def model_on_cpu(n_genes: int, tokens: Tokens | None = None, **options: Any) -> Model:
    """The model with memory but without values."""
    return build(spec(n_genes, tokens, **options)).to_empty(device="cpu")
