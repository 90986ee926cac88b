"""Options of the `autoregressive` family: a causal transformer over genes in rank order. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.transformer import TransformerConfig


class AutoregressiveConfig(TransformerConfig):
    """Architecture of the causal transformer: transformer blocks and a choice of pooling."""

    implementation: ClassVar[str] = "cellmill.models.autoregressive.causal_transformer:AutoregressiveModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("none", "class", "scalar", "place")
    objectives: ClassVar[tuple[str, ...]] = ("next_gene",)

    family: Literal["autoregressive"] = Field(
        "autoregressive",
        description="A pre-norm transformer whose tokens, in rank order, attend to earlier tokens of their cell. For "
        "generating cells; nothing shows that its embeddings are better.",
    )
    layers: int = Field(4, ge=0, description="Transformer blocks; with 0 a gene depends only on the gene before it.")
    pooling: Literal["mean", "last"] = Field(
        "mean", description="Cell embedding: mean of its tokens' states, or the state of its last token."
    )
