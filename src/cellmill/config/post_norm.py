"""Options that families of post-norm blocks share: `bert` and `scgpt`. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import Tokens
from cellmill.config.transformer import TransformerConfig


class PostNormConfig(TransformerConfig):
    """Architecture of post-norm blocks, and the pooling."""

    objectives: ClassVar[tuple[str, ...]] = ("cell_decoding", "masked_value", "masked_gene", "supervised_contrastive")
    weight_keys: ClassVar[tuple[str, ...]] = (*(*TransformerConfig.weight_keys, "activation", "norm_eps", "ends"),)

    layers: int = Field(6, ge=1, description="Transformer blocks.")
    activation: Literal["gelu", "relu"] = Field("relu", description="Activation inside the feed-forward layers.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the layer norms.")
    ends: Literal["none", "cls", "cls_eos"] = Field(
        "none", description="Special tokens added to each cell: none; <cls> at its start; or also <eos> at its end."
    )
    pooling: Literal["mean", "cls"] = Field(
        "mean", description="Cell embedding: mean over its genes, without <cls> and <eos>, or the state of <cls>."
    )
    embed_layer: int = Field(
        0, le=0, description="Block whose output is pooled when cells are embedded: 0 is the last, -1 the one before."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pooling == "cls" and self.ends == "none":
            raise ValueError("pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean")
        if -self.embed_layer > self.layers:
            raise ValueError(f"embed_layer: expected at least {-self.layers} with layers = {self.layers}")
        return self

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Refuse labels predicted from another block than the one whose output is the cell embedding."""
        if self.embed_layer and any(part.name == "classification" for part in objective.each()):
            raise ValueError(
                f"model.embed_layer {self.embed_layer}: objective classification predicts labels from the last block; "
                "set embed_layer to 0"
            )

    @property
    def n_ends(self) -> int:
        """Tokens added to each cell."""
        return {"none": 0, "cls": 1, "cls_eos": 2}[self.ends]
