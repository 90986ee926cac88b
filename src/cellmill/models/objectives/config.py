"""Options of the built-in objectives. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

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
