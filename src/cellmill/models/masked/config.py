"""Options of the `masked` family: a bidirectional transformer encoder over packed genes. Torch-free."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import FamilyConfig
from cellmill.config.run import Tokens


class MaskedConfig(FamilyConfig):
    """Architecture and objective of the masked encoder."""

    family: Literal["masked"] = Field(
        "masked", description="A pre-norm transformer encoder trained to fill in what is hidden."
    )
    objective: Literal["masked_gene", "masked_value"] = Field(
        "masked_value", description="What is hidden and predicted at masked tokens: which gene it is, or its value."
    )
    mask_frac: float = Field(0.15, gt=0, lt=1, description="Fraction of a cell's tokens that is masked, at least one.")
    hidden: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(4, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden must be a multiple of it.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of heads = {self.heads}")
        return self

    def check_tokens(self, tokens: Tokens) -> None:
        """masked_value hides a token's value, which rank tokens do not have: their place in the cell is no count."""
        if self.objective == "masked_value" and tokens.tokenizer == "rank":
            raise ValueError(
                "model.objective masked_value needs values, which tokens.tokenizer rank does not have; "
                "choose binned or continuous, or masked_gene"
            )
