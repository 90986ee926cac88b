"""Options of the `scgpt` family. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.post_norm import PostNormConfig


class ScgptConfig(PostNormConfig):
    """Architecture of scGPT."""

    implementation: ClassVar[str] = "cellmill.models.scgpt.scgpt_model:ScgptModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("class",)

    family: Literal["scgpt"] = Field(
        "scgpt",
        description="scGPT: a normed gene embedding plus a normed MLP of the bin index, then post-norm blocks; the "
        "cell embedding is normalised to length 1. The command import converts scGPT's weights to one.",
    )
    cls_value: float = Field(0.0, description="Value of the token <cls>; scGPT's pad_value.")
