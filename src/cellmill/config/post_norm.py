"""Options that families of post-norm blocks share: `bert` and `scgpt`. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import FamilyConfig


class PostNormConfig(FamilyConfig):
    """Architecture of post-norm blocks, and the cell's vector."""

    objectives: ClassVar[tuple[str, ...]] = ("cell_decoding", "masked_value", "masked_gene")
    weight_keys: ClassVar[tuple[str, ...]] = (
        *("family", "hidden", "layers", "heads", "ffn_width", "activation", "norm_eps", "ends"),
    )

    hidden: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(6, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden must be a multiple of it.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")
    activation: Literal["gelu", "relu"] = Field("relu", description="Activation inside the feed-forward layers.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the layer norms.")
    ends: Literal["none", "cls", "cls_eos"] = Field(
        "none", description="Tokens added to each cell: none; <cls> before it; and <eos> after it."
    )
    pooling: Literal["mean", "cls"] = Field(
        "mean", description="Vector of a cell: mean over its genes, without <cls> and <eos>, or the state of <cls>."
    )
    embed_layer: int = Field(
        0, le=0, description="Block whose output is pooled when cells are embedded: 0 is the last, -1 the one before."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of heads = {self.heads}")
        if self.pooling == "cls" and self.ends == "none":
            raise ValueError("pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean")
        if -self.embed_layer > self.layers:
            raise ValueError(f"embed_layer: expected at least {-self.layers} with layers = {self.layers}")
        return self

    @property
    def ffn_width(self) -> int:
        """Width inside the feed-forward layers."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def n_ends(self) -> int:
        """Tokens added to each cell."""
        return {"none": 0, "cls": 1, "cls_eos": 2}[self.ends]

    def tp_sizes(self) -> dict[str, int]:
        """Attention is cut by whole heads, feed-forward by its width; the vocabulary can be cut anywhere."""
        return {"model.heads": self.heads, "model.ffn_hidden": self.ffn_width}

    def pp_sizes(self) -> dict[str, int]:
        """A pipeline can be cut between any two blocks."""
        return {"model.layers": self.layers}
