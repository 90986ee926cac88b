"""Build the whole model on the meta device from a torch-free specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from cellmill.config.family import FamilyConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.options import TrainOptions
from cellmill.config.tokens import Tokens
from cellmill.models.family import Model
from cellmill.models.initial import initial_values


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides which parameters a model has."""

    model: FamilyConfig
    objective: ObjectiveConfig
    tokens: Tokens
    n_genes: int

    @classmethod
    def of(cls, options: TrainOptions, n_genes: int) -> Self:
        """Return the specification of a run's model over `n_genes` genes."""
        return cls(options.model, options.objective, options.tokens, n_genes)


def build(spec: ModelSpec) -> Model:
    """Return the whole model on the meta device, with the functions that fill its parameters and buffers."""
    with torch.device("meta"):
        objective = spec.objective.load()(spec.objective, spec.tokens)
        model: Model = spec.model.load()(spec.model, spec.n_genes, spec.tokens, objective)
    model.fills = initial_values(model)
    return model
