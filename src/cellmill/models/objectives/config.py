"""Options of the built-in objectives. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import Tokens


class MaskedObjectiveConfig(ObjectiveConfig):
    """Options that both masked objectives share."""

    reads_zeros: ClassVar[bool] = True

    mask_frac: float = Field(0.15, gt=0, lt=1, description="Fraction of a cell's tokens that is masked, at least one.")
    random_frac: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of the masked tokens that show random content in training instead of a mask: a random "
        "gene of the vocabulary, or the value of a random visible gene of the cell. BERT has 0.1; 0 masks all.",
    )
    keep_frac: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of the masked tokens that show their own content in training (BERT 0.1).",
    )
    cell_loss_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of a second loss: predict the masked tokens from the cell embedding and the visible half "
        "of each token (scGPT's GEPC). 0 turns it off.",
    )

    @model_validator(mode="after")
    def _some_are_hidden(self) -> Self:
        if self.random_frac + self.keep_frac >= 1:
            raise ValueError(
                f"random_frac + keep_frac = {self.random_frac + self.keep_frac:g} hides none of the masked tokens; "
                "lower one of them"
            )
        return self

    @property
    def reads_cells(self) -> bool:  # type: ignore[override]
        """True if the second loss is on."""
        return self.cell_loss_weight > 0


class MaskedValueConfig(MaskedObjectiveConfig):
    """Predict the values of masked tokens; their genes stay visible."""

    implementation: ClassVar[str] = "cellmill.models.objectives.masked_value:MaskedValue"

    name: Literal["masked_value"] = Field("masked_value", description="Predict the values of masked tokens.")
    renormalize: bool = Field(
        False,
        description="Compute values of visible tokens only from visible counts; set it to yes in new runs. "
        "Otherwise they leak the answer: a cell's values sum to 10,000 counts, so the visible ones reveal the sum of "
        "the hidden ones, and bins shift with hidden counts. The values to predict are always those of the whole "
        "cell. The default is off so that earlier runs stay reproducible.",
    )

    @property
    def needs_counts(self) -> bool:  # type: ignore[override]
        """True if values are renormalised."""
        return self.renormalize

    def warnings(self, option: str = "objective") -> list[str]:
        """Say what leaks without `renormalize`."""
        if self.renormalize:
            return []
        return [
            f"{option}.renormalize is no: values of visible tokens are made with a cell's whole library size, so they "
            "leak the sum of the hidden counts; set it to yes in a new run"
        ]

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokenizers whose values are places, not counts: there is no value to hide."""
        if tokens.value_kind not in ("class", "scalar"):
            choose = "objective masked_gene" if tokens.sequences else "binned or continuous, or objective masked_gene"
            raise ValueError(
                f"objective masked_value needs values, which tokens.tokenizer {tokens.tokenizer} does not have; "
                f"choose {choose}"
            )


class MaskedGeneConfig(MaskedObjectiveConfig):
    """Predict which genes the masked tokens are; their values stay visible."""

    implementation: ClassVar[str] = "cellmill.models.objectives.masked_gene:MaskedGene"

    name: Literal["masked_gene"] = Field("masked_gene", description="Predict which genes the masked tokens are.")


class HiddenShareConfig(ObjectiveConfig):
    """Options of objectives that hide a random fraction of each cell."""

    min_hidden_frac: float = Field(0.2, ge=0, lt=1, description="Minimum hidden fraction of a cell's genes or counts.")
    max_hidden_frac: float = Field(
        0.8, gt=0, lt=1, description="Maximum; the fraction is drawn uniformly between both for each cell and step."
    )

    @model_validator(mode="after")
    def _fractions_in_order(self) -> Self:
        if self.min_hidden_frac > self.max_hidden_frac:
            raise ValueError(
                f"min_hidden_frac: expected at most max_hidden_frac {self.max_hidden_frac:g}, got "
                f"{self.min_hidden_frac:g}"
            )
        return self


class QueryDecodingConfig(HiddenShareConfig):
    """Predict the value of each queried gene, zeros included, from the cell embedding and the gene."""

    implementation: ClassVar[str] = "cellmill.models.objectives.query_decoding:QueryDecoding"
    needs_counts: ClassVar[bool] = True
    draws_view: ClassVar[bool] = True
    hides_tokens: ClassVar[bool] = False

    name: Literal["query_decoding"] = Field(
        "query_decoding",
        description="Predict the values of hidden genes one by one, zeros included; the decoder receives the gene.",
    )
    max_asked: int = Field(
        256,
        ge=1,
        description="Maximum number of hidden detected genes per cell to predict in a step. It bounds the decoder's "
        "memory.",
    )
    undetected_ratio: float = Field(
        1.0, gt=0, description="Number of hidden undetected genes to predict per detected one."
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
        description="Weight of the value loss: cross-entropy of bins, squared error of continuous values. 0 turns "
        "it off; tokenizers without values have none.",
    )
