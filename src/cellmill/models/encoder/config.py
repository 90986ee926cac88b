"""Options of the `encoder` family: a bidirectional transformer encoder over packed genes. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import FamilyConfig


class EncoderConfig(FamilyConfig):
    """Architecture of the encoder."""

    implementation: ClassVar[str] = "cellmill.models.encoder.model:EncoderModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("class", "scalar", "place")
    objectives: ClassVar[tuple[str, ...]] = ("cell_decoding", "masked_value", "masked_gene")
    covariates: ClassVar[bool] = True
    weight_keys: ClassVar[tuple[str, ...]] = ("family", "hidden", "layers", "heads", "ffn_width")

    family: Literal["encoder"] = Field(
        "encoder", description="A pre-norm transformer encoder whose tokens attend to all tokens of their cell."
    )
    hidden: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(4, ge=0, description="Transformer blocks; 0 leaves the embeddings and a norm.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden must be a multiple of it.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of heads = {self.heads}")
        return self

    @property
    def ffn_width(self) -> int:
        """Width inside the feed-forward layers."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def tp_sizes(self) -> dict[str, int]:
        """Attention is cut by whole heads, feed-forward by its width; the vocabulary can be cut anywhere."""
        return {"model.heads": self.heads, "model.ffn_hidden": self.ffn_width}

    def pp_sizes(self) -> dict[str, int]:
        """A pipeline can be cut between any two blocks."""
        return {"model.layers": self.layers}
