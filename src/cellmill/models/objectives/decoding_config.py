"""Options of the objectives that decode a cell's expression from its vector. Torch-free."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.tokens import Tokens
from cellmill.models.objectives.config import HiddenShareConfig


class DecodingConfig(HiddenShareConfig):
    """Options of objectives that predict expression, over the whole vocabulary, from the cell embedding."""

    implementation: ClassVar[str] = "cellmill.models.objectives.cell_decoding:CellDecoding"
    needs_counts: ClassVar[bool] = True
    draws_view: ClassVar[bool] = True
    hides_tokens: ClassVar[bool] = False

    likelihood: Literal["softmax", "nb"] = Field(
        "softmax",
        description="softmax: cross-entropy between predicted and true profile. nb: negative binomial of the count of "
        "every gene, zeros included; the mean is the softmax times the sum of the cell's counts to predict, "
        "the dispersion is learned per gene. Genes cut off by tokens.max_tokens count as zeros.",
    )
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
        description="A second loss, in training only, on the embeddings of a cell's shown and hidden part over the "
        "global batch; it encodes both parts, in two forward passes. vicreg: variance-invariance-covariance "
        "regularisation (Bardes et al. 2022).",
    )
    # the paper's 25 : 25 : 1; with ten times as much, probes of the demo's cells lost 0.04 of accuracy
    invariance_weight: float = Field(
        0.1,
        ge=0,
        description="Weight of vicreg's invariance term, the mean squared difference; the cross-entropy of a cell has "
        "weight 1.",
    )
    variance_weight: float = Field(
        0.1, ge=0, description="Weight of vicreg's variance term, which is 0 if all standard deviations are at least 1."
    )
    covariance_weight: float = Field(0.004, ge=0, description="Weight of vicreg's covariance term.")
    batch_column: str | None = Field(
        None,
        description="obs column, or `dataset`, of the cell's batch. The decoder gets a term per batch, so that the "
        "cell embedding need not encode the batch; null has none.",
    )
    batch_adversary: float | None = Field(
        None,
        gt=0,
        description="Weight of the loss of a batch classifier with reversed gradient, which removes the batch from the "
        "cell embedding; requires batch_column. null has none.",
    )
    batch_adversary_scale: float = Field(
        0.02,
        gt=0,
        description="Factor of the reversed gradient, in addition to the weight of the classifier's loss. If their "
        "product is large, the embedding collapses.",
    )

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        vicreg = ("invariance_weight", "variance_weight", "covariance_weight")
        unread = {"weights": "likelihood softmax, got nb"} if self.likelihood == "nb" else {}
        unread |= dict.fromkeys(vicreg, "view_loss vicreg, got null") if self.view_loss is None else {}
        unread |= {"batch_adversary_scale": "batch_adversary, got null"} if self.batch_adversary is None else {}
        for name, required in unread.items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} requires {required}; leave {name} out")
        return self

    @model_validator(mode="after")
    def _adversary_has_a_batch(self) -> Self:
        if self.batch_adversary is not None and self.batch_column is None:
            raise ValueError("batch_adversary requires batch_column; set it, or batch_adversary to null")
        return self

    def obs_columns(self) -> dict[str, str]:
        """The batch."""
        return {} if self.batch_column is None else {self.batch_column: "objective.batch_column"}


class CellDecodingConfig(DecodingConfig):
    """Predict the hidden part of a cell's expression, over the whole vocabulary, from the cell embedding."""

    name: Literal["cell_decoding"] = Field(
        "cell_decoding", description="Predict the hidden part of a cell's expression from the cell embedding."
    )
    view: Literal["drop_thin", "thin", "drop"] = Field(
        "drop_thin",
        description="Part of a cell that the model sees. drop: all genes except a random fraction. thin: a binomial "
        "draw of each count. drop_thin: binomial draws of the remaining genes, with a separate fraction for each. The "
        "rest is hidden.",
    )
    target: Literal["hidden", "all"] = Field("hidden", description="Predict the hidden part, or the whole cell.")

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse sequences, which have no counts, and to thin places: their order is that of the whole counts."""
        refuse_sequences(self.name, tokens)
        if self.view != "drop" and tokens.value_kind == "place":
            raise ValueError(
                f"objective.view {self.view} needs values made from counts, which tokens.tokenizer {tokens.tokenizer} "
                "does not have; choose binned or continuous, or view drop"
            )


class DenoiseConfig(DecodingConfig):
    """Predict a whole cell from binomial draws of its counts: cell_decoding with view thin and target all."""

    view: ClassVar[Literal["thin"]] = "thin"
    target: ClassVar[Literal["all"]] = "all"

    name: Literal["denoise"] = Field("denoise", description="Predict a whole cell from its thinned counts.")

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokens whose values are places, which cannot be made from thinned counts."""
        refuse_sequences(self.name, tokens)
        if tokens.value_kind == "place":
            raise ValueError(
                f"objective denoise needs values made from counts, which tokens.tokenizer {tokens.tokenizer} does not "
                "have; choose binned or continuous"
            )


def refuse_sequences(name: str, tokens: Tokens) -> None:
    """Raise ValueError for tokens of sequences."""
    if tokens.sequences:
        raise ValueError(
            f"objective {name} needs counts, which sequences do not have; set objective.name to masked_gene"
        )
