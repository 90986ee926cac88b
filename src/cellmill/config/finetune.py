"""Options of a fine-tuning method: the contract, and the built-in `full`."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.plugin import Plugin


class MethodConfig(Plugin):
    """Base of every fine-tuning method's options; the method itself is a `cellmill.finetune.method.Method`."""

    kind: ClassVar[str] = "method"
    key: ClassVar[str] = "method"
    default: ClassVar[str | None] = "full"

    method: str


class FullConfig(MethodConfig):
    """Train every parameter of the unchanged model."""

    implementation: ClassVar[str] = "cellmill.finetune.method:Method"

    method: Literal["full"] = Field("full", description="Name of the method.")
