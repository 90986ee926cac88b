"""Options of the built-in objectives. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import Tokens


class MaskedObjectiveConfig(ObjectiveConfig):
    """Options that both masked objectives share."""

    mask_frac: float = Field(0.15, gt=0, lt=1, description="Fraction of a cell's tokens that is masked, at least one.")
    cell_loss_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of a second loss: predict the masked tokens from the cell embedding and the visible half "
        "of each token (scGPT's GEPC). 0 turns it off.",
    )


class MaskedValueConfig(MaskedObjectiveConfig):
    """Predict the values of masked tokens; their genes stay visible."""

    implementation: ClassVar[str] = "cellmill.models.objectives.masked_value:MaskedValue"

    name: Literal["masked_value"] = Field("masked_value", description="Predict the values of masked tokens.")

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokenizers whose values are places, not counts: there is no value to hide."""
        if tokens.value_kind not in ("class", "scalar"):
            raise ValueError(
                f"objective masked_value needs values, which tokens.tokenizer {tokens.tokenizer} does not have; "
                "choose binned or continuous, or objective masked_gene"
            )


class MaskedGeneConfig(MaskedObjectiveConfig):
    """Predict which genes the masked tokens are; their values stay visible."""

    implementation: ClassVar[str] = "cellmill.models.objectives.masked_gene:MaskedGene"

    name: Literal["masked_gene"] = Field("masked_gene", description="Predict which genes the masked tokens are.")


class CellDecodingConfig(ObjectiveConfig):
    """Predict the hidden part of a cell's expression, over the whole vocabulary, from the cell's vector."""

    implementation: ClassVar[str] = "cellmill.models.objectives.cell_decoding:CellDecoding"
    needs_counts: ClassVar[bool] = True

    name: Literal["cell_decoding"] = Field(
        "cell_decoding", description="Predict the hidden part of a cell's expression from the cell's vector."
    )
    view: Literal["drop", "thin"] = Field(
        "thin",
        description="Part of a cell that the model is given. thin: of each count a binomial draw; the rest of the "
        "counts is hidden. drop: a random share of its genes; the others are hidden.",
    )
    min_hidden_frac: float = Field(0.2, ge=0, lt=1, description="Smallest hidden share of a cell's genes or counts.")
    max_hidden_frac: float = Field(
        0.8, gt=0, lt=1, description="Largest; each cell and step draws its share evenly between both."
    )
    target: Literal["hidden", "all"] = Field("hidden", description="Predict the hidden part, or the whole cell.")
    weights: Literal["log1p", "counts"] = Field(
        "log1p",
        description="Weight of a gene in its cell's cross-entropy: log(1 + count), or the count (multinomial "
        "likelihood); the weights of a cell sum to 1.",
    )
    decoder_hidden: int | None = Field(
        256, ge=1, description="Width of the decoder's hidden layer; null is a linear decoder."
    )
    batch_column: str | None = Field(
        None,
        description="obs column, or `dataset`, of the cell's batch, for which the decoder has a term, so that the "
        "cell's vector need not hold it; null has none.",
    )
    batch_adversary: float | None = Field(
        None,
        gt=0,
        description="Weight of the loss of a classifier of the batch, through a reversed gradient, so that the cell's "
        "vector does not hold it; requires batch_column. null has none.",
    )
    batch_adversary_scale: float = Field(
        0.02,
        gt=0,
        description="Factor of the reversed gradient, beyond the weight of the classifier's loss. Where their product "
        "is large, the embedding collapses.",
    )

    @model_validator(mode="after")
    def _fractions_in_order(self) -> Self:
        if self.min_hidden_frac > self.max_hidden_frac:
            raise ValueError(
                f"min_hidden_frac: expected at most max_hidden_frac {self.max_hidden_frac:g}, got "
                f"{self.min_hidden_frac:g}"
            )
        return self

    @model_validator(mode="after")
    def _adversary_has_a_batch(self) -> Self:
        if self.batch_adversary is not None and self.batch_column is None:
            raise ValueError("batch_adversary requires batch_column; set it, or batch_adversary to null")
        return self

    def obs_columns(self) -> dict[str, str]:
        """The batch."""
        return {} if self.batch_column is None else {self.batch_column: "objective.batch_column"}

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse to thin tokens whose values are places: the order of the shown genes is that of the whole counts."""
        if self.view == "thin" and tokens.value_kind == "place":
            raise ValueError(
                f"objective.view thin needs values made from counts, which tokens.tokenizer {tokens.tokenizer} does "
                "not have; choose binned or continuous, or view drop"
            )
