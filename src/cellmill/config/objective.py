"""The torch-free half of an objective: its options, and the tokens and families that it suits."""

from typing import ClassVar

from pydantic import Field

from cellmill.config.plugin import Plugin
from cellmill.config.tokens import Tokens


class ObjectiveConfig(Plugin):
    """What a model is trained to predict, and how its loss is made."""

    kind: ClassVar[str] = "objective"
    default: ClassVar[str | None] = "cell_decoding"
    families: ClassVar[tuple[str, ...]] = ()
    """Families that it serves, beside those that name it in `FamilyConfig.objectives`."""

    needs_counts: ClassVar[bool] = False  # if True, batches have the counts of their tokens

    name: str = Field(description="Name of the objective.")

    def obs_columns(self) -> dict[str, str]:
        """obs columns whose levels batches carry for it, and the option that names each."""
        return {}

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise ValueError when the objective cannot be computed from such tokens."""
