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


class HiddenShareConfig(ObjectiveConfig):
    """Options of objectives that hide a random share of each cell."""

    min_hidden_frac: float = Field(0.2, ge=0, lt=1, description="Smallest hidden share of a cell's genes or counts.")
    max_hidden_frac: float = Field(
        0.8, gt=0, lt=1, description="Largest; each cell and step draws its share evenly between both."
    )

    @model_validator(mode="after")
    def _fractions_in_order(self) -> Self:
        if self.min_hidden_frac > self.max_hidden_frac:
            raise ValueError(
                f"min_hidden_frac: expected at most max_hidden_frac {self.max_hidden_frac:g}, got "
                f"{self.min_hidden_frac:g}"
            )
        return self


class CellDecodingConfig(HiddenShareConfig):
    """Predict the hidden part of a cell's expression, over the whole vocabulary, from the cell's vector."""

    implementation: ClassVar[str] = "cellmill.models.objectives.cell_decoding:CellDecoding"
    needs_counts: ClassVar[bool] = True
    draws_view: ClassVar[bool] = True
    hides_tokens: ClassVar[bool] = False

    name: Literal["cell_decoding"] = Field(
        "cell_decoding", description="Predict the hidden part of a cell's expression from the cell's vector."
    )
    view: Literal["drop_thin", "thin", "drop"] = Field(
        "drop_thin",
        description="Part of a cell that the model is given. drop: its genes but for a random share. thin: of each "
        "count a binomial draw. drop_thin: of the genes that are left the draws, with a share of its own for both. "
        "The rest is hidden.",
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
    view_loss: Literal["vicreg"] | None = Field(
        None,
        description="A second loss, on the vectors of a cell's shown and hidden part over the global batch, in "
        "training only; it encodes both parts, twice. vicreg: equal vectors of both parts, directions of equal spread "
        "and without correlation (Bardes et al. 2022).",
    )
    invariance_weight: float = Field(
        1.0, ge=0, description="Weight of vicreg's mean square difference; the cross-entropy of a cell has weight 1."
    )
    variance_weight: float = Field(
        1.0, ge=0, description="Weight of vicreg's variance term, 0 where all standard deviations are at least 1."
    )
    covariance_weight: float = Field(0.04, ge=0, description="Weight of vicreg's covariance term.")
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
        1.0, gt=0, description="Factor of the reversed gradient, beyond the weight of the classifier's loss."
    )

    @model_validator(mode="after")
    def _adversary_has_a_batch(self) -> Self:
        if self.batch_adversary is not None and self.batch_column is None:
            raise ValueError("batch_adversary requires batch_column; set it, or batch_adversary to null")
        return self

    def obs_columns(self) -> dict[str, str]:
        """The batch."""
        return {} if self.batch_column is None else {self.batch_column: "objective.batch_column"}

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse sequences, which have no counts, and to thin places: their order is that of the whole counts."""
        if tokens.sequences:
            raise ValueError(
                f"objective {self.name} needs counts, which sequences do not have; set objective.name to masked_gene"
            )
        if self.view != "drop" and tokens.value_kind == "place":
            raise ValueError(
                f"objective.view {self.view} needs values made from counts, which tokens.tokenizer {tokens.tokenizer} "
                "does not have; choose binned or continuous, or view drop"
            )


class QueryDecodingConfig(HiddenShareConfig):
    """Predict the value of each asked gene, zeros included, from the cell's vector; only the gene is told."""

    implementation: ClassVar[str] = "cellmill.models.objectives.query_decoding:QueryDecoding"
    needs_counts: ClassVar[bool] = True

    name: Literal["query_decoding"] = Field(
        "query_decoding",
        description="Predict the values of hidden genes one by one, zeros included; a decoder is told the gene.",
    )
    max_asked: int = Field(
        256,
        ge=1,
        description="Most hidden detected genes of a cell that are asked in a step. They bound the decoder's memory.",
    )
    undetected_ratio: float = Field(
        1.0, gt=0, description="Hidden undetected genes that are asked for each detected one."
    )
    decoder_hidden: int = Field(128, ge=1, description="Width of the decoder.")
    decoder_layers: int = Field(2, ge=0, description="Feed-forward layers of the decoder.")

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokens without numbers: the number of the whole cell is what is predicted."""
        if tokens.value_kind != "scalar":
            raise ValueError(
                f"objective query_decoding needs values that are numbers, which tokens.tokenizer {tokens.tokenizer} "
                "does not have; choose continuous, or objective cell_decoding"
            )


class NextGeneConfig(ObjectiveConfig):
    """Predict each next gene of a cell in rank order, its value, and the end of the cell."""

    implementation: ClassVar[str] = "cellmill.models.objectives.next_gene:NextGene"

    name: Literal["next_gene"] = Field(
        "next_gene", description="Predict each next gene of a cell in rank order, its value, and the cell's end."
    )
    value_loss_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the loss of values: cross-entropy of bins, squared error of continuous ones. 0 turns it "
        "off; tokenizers without values have none.",
    )
