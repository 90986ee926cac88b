"""Build the whole model on the meta device from a torch-free specification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.errors import ConfigError
from cellmill.models.family import Model
from cellmill.models.initial import initial_values
from cellmill.parallel.materialize import WithoutCompiler, plain_name


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides which parameters a model has."""

    model: FamilyConfig
    objective: ObjectiveConfig
    tokens: Tokens
    n_genes: int
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Levels of the obs columns that the run reads, in the order of its batches."""

    @classmethod
    def of(
        cls, options: TrainOptions, n_genes: int, levels: Mapping[str, Sequence[str]] | None = None
    ) -> Self:
        return cls(options.model, options.objective, options.tokens, n_genes, levels or {})

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the options of model, objective and tokens as JSON stores them."""
        return {
            name: getattr(self, name).model_dump(mode="json")
            for name in ("model", "objective", "tokens")
        }


def build(spec: ModelSpec, transform: Callable[[Model], None] | None = None) -> Model:
    """Return the whole model on the meta device, changed by `transform`.

    Raise ConfigError for impossible sizes.
    """
    try:
        with torch.device("meta"), WithoutCompiler():
            objective = spec.objective.load()(spec.objective, spec.tokens)
            objective.levels = spec.levels
            model: Model = spec.model.load()(spec.model, spec.n_genes, spec.tokens, objective)
            if model.heads is None:
                plan = model.plan
                model.heads = tuple(name for name in plan.finish if name not in plan.begin)
            if transform is not None:
                transform(model)
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise ConfigError(
            "model: its widths give a tensor of more than 2^63 bytes; lower them"
        ) from None
    model.fills = {plain_name(name): fill for name, fill in initial_values(model).items()}
    return model
