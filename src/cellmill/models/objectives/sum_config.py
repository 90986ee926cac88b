"""Options of the objective `sum`: several objectives at once, each with a weight. Torch-free."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema, create_model, model_validator

from cellmill import registry
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.plugin import Plugin, by_name
from cellmill.config.tokens import Tokens

SUM = "sum"


def _choice(name: str) -> type[Plugin]:
    """Options class of the part `name`: those of the objective and `weight`."""
    if name == SUM:
        raise ValueError("sum: a sum cannot be part of a sum; list its parts in its place")
    return _weighted(registry.load("objective", name, ObjectiveConfig))


@cache
def _weighted(objective: type[ObjectiveConfig]) -> type[ObjectiveConfig]:
    if "weight" in objective.model_fields:
        raise ValueError(
            f"objective {objective.__name__} has an option `weight` of its own and cannot be part of a sum"
        )
    weight: Any = (float, Field(1.0, gt=0, description="Weight of the objective's mean loss in the sum."))
    return create_model(f"Weighted{objective.__name__}", __base__=objective, weight=weight)


def _parts(value: Any) -> Any:
    """Options of each part: by the objective's name, or by any other whose options then have `name`."""
    named = value if isinstance(value, dict) else {}
    others = {key: _name_of(options, key) for key, options in named.items() if _name_of(options, key) != key}
    if wrong := [key for key in others if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", str(key))]:
        raise ValueError(f"{wrong[0]}: the name of a part is of letters, digits and _; choose another")
    same = {key: options for key, options in named.items() if key not in others} if named else value
    parts = by_name(ObjectiveConfig, same, _choice)
    parts |= {key: by_name(ObjectiveConfig, {name: named[key]}, _choice)[name] for key, name in others.items()}
    if not parts:
        raise ValueError("expected at least one objective with its options, such as cell_decoding: {}, got none")
    return {key: parts[key] for key in named} if others else parts


def _name_of(options: Any, key: Any) -> Any:
    if isinstance(options, ObjectiveConfig):
        return options.name
    return options.get("name", key) if isinstance(options, dict) else key


class SumConfig(ObjectiveConfig):
    """Several objectives at once: the weighted sum of their mean losses, from one forward pass."""

    implementation: ClassVar[str] = "cellmill.models.objectives.sum:Sum"

    name: Literal["sum"] = Field("sum", description="Several objectives at once.")
    parts: Annotated[
        dict[str, SerializeAsAny[ObjectiveConfig]],
        BeforeValidator(_parts),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": ["object", "null"]}}),
    ] = Field(
        description="Objectives, each with its options and `weight`, the factor of its mean loss (1.0). A part may "
        "have any name, with the objective in `name`, so that several parts can predict different columns. At most "
        "one part may define a view (cell_decoding, denoise, query_decoding), which all parts then see, and at most "
        "one may hide tokens (masked_value, masked_gene, next_gene). Weights are above 0.",
    )

    @model_validator(mode="after")
    def _one_view_and_one_mask(self) -> Self:
        for does, having in (
            ("draw a view", [part.name for part in self.each() if part.draws_view]),
            ("hide tokens", [part.name for part in self.each() if part.hides_tokens]),
        ):
            if len(having) > 1:
                raise ValueError(
                    f"parts: {' and '.join(having)} both {does}, and the model is given one batch; keep one"
                )
        return self

    @property
    def needs_counts(self) -> bool:  # type: ignore[override]
        """True if a part needs the counts of tokens."""
        return any(part.needs_counts for part in self.each())

    def each(self) -> list[ObjectiveConfig]:
        """Return the parts."""
        return list(self.parts.values())

    def obs_columns(self) -> dict[str, str]:
        """Columns of every part."""
        return {column: option for part in self.each() for column, option in part.obs_columns().items()}

    def number_columns(self) -> dict[str, str]:
        """Columns of every part."""
        return {column: option for part in self.each() for column, option in part.number_columns().items()}

    def standardised(self, moments: Mapping[str, tuple[float, float]]) -> Self:
        """Return the options with every part standardised."""
        return self.model_copy(
            update={"parts": {name: part.standardised(moments) for name, part in self.parts.items()}}
        )

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """Labels that any part reads."""
        return tuple(dict.fromkeys(column for part in self.each() for column in part.supervised_by))

    def counted_columns(self) -> tuple[str, ...]:
        """Columns of every part."""
        return tuple(dict.fromkeys(column for part in self.each() for column in part.counted_columns()))

    def fitted(self, cells: Mapping[str, Mapping[str, int]]) -> Self:
        """Return the options with every part fitted."""
        return self.model_copy(update={"parts": {name: part.fitted(cells) for name, part in self.parts.items()}})

    def gene_columns(self) -> tuple[str, ...]:
        """Columns of every part."""
        return tuple(dict.fromkeys(column for part in self.each() for column in part.gene_columns()))

    def with_genes(self, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> Self:
        """Return the options with the genes of every part."""
        return self.model_copy(update={"parts": {name: part.with_genes(tokens) for name, part in self.parts.items()}})

    def warnings(self, option: str = "objective") -> list[str]:
        """Return the warnings of every part."""
        return [line for name, part in self.parts.items() for line in part.warnings(f"{option}.parts.{name}")]

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokens that a part cannot use."""
        for part in self.each():
            part.check_tokens(tokens)
