"""The torch-free half of a model family: its options, and how layouts may cut the model."""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from cellmill.config import sizes
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.plugin import Plugin
from cellmill.config.tokens import Tokens

WEIGHTS_FORMAT = 2
"""What the numbers in a parameter mean; increased when parameters keep name and shape but change meaning.

1: rows of `qkv` are all queries, then all keys, then all values. 2: those of each head are together.
"""


class FamilyConfig(Plugin):
    """Base of every family's options."""

    kind: ClassVar[str] = "family"
    key: ClassVar[str] = "family"
    default: ClassVar[str | None] = "encoder"
    renamed: ClassVar[dict[str, str]] = {"masked": "encoder"}
    moved: ClassVar[dict[str, str]] = {
        "objective": "objective.name",
        "mask_frac": "objective.mask_frac",
        "cell_loss_weight": "objective.cell_loss_weight",
    }

    family: str
    weight_keys: ClassVar[tuple[str, ...]] = ()  # options that must match those of the model of `init_from`
    value_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of token values (`Tokens.value_kind`) that the family can embed
    sequence_parallel: ClassVar[bool] = True  # whether the rows that pass from block to block are tokens
    compiles: ClassVar[bool] = True  # whether its blocks have methods that `parallel.compile` can compile
    covariates: ClassVar[bool] = False  # whether cells may have tokens of obs columns before their genes
    objectives: ClassVar[tuple[str, ...]] = ()
    """Objectives that the family serves, in addition to those whose `families` lists this family."""

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """As `Plugin.override`; a run's own `size` replaces the numbers at the top that it stands for."""
        return super().override(sizes.replaced(defaults, own), own)

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Raise ValueError when the family cannot train on the objective, or read such tokens, with its options."""

    def tp_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallel must divide, by the option's name; empty if not supported."""
        return {}

    def pp_sizes(self) -> dict[str, int]:
        """Number of blocks that a pipeline divides into stages, by the option's name; empty if not supported."""
        return {}


class SizedFamilyConfig(FamilyConfig):
    """Base of families that have `hidden`, `layers`, `heads` and `ffn_hidden`, which a name of a size may set.

    A size is replaced by its numbers before they are validated: a run by name is the run with these numbers.
    """

    size: sizes.SizeName | None = Field(
        None,
        exclude=True,
        description="Named size (docs/objectives.md): sets hidden, layers and heads if they are not given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, value: Any) -> Any:
        return sizes.expanded(value) if isinstance(value, dict) else value
