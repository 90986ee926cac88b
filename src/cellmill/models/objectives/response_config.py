"""Options of the objective `perturbation_response`. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.tokens import Tokens
from cellmill.models.objectives.decoding_config import DecodingConfig, refuse_sequences


class PerturbationResponseConfig(DecodingConfig):
    """Predict the hidden part of a cell's expression from its embedding and its perturbation."""

    implementation: ClassVar[str] = "cellmill.models.objectives.perturbation_response:PerturbationResponse"
    view: ClassVar[Literal["thin"]] = "thin"
    target: ClassVar[Literal["hidden"]] = "hidden"
    families: ClassVar[tuple[str, ...]] = ("profile", "encoder", "autoencoder", "scgpt")

    name: Literal["perturbation_response"] = Field(
        "perturbation_response",
        description="Predict the hidden part of a cell's expression from its embedding and its perturbation, so "
        "that the model can predict a control's expression under a perturbation. Task perturbation evaluates it.",
    )
    likelihood: Literal["softmax"] = Field("softmax", description="Cross-entropy between predicted and true profile.")
    weights: Literal["counts"] = Field(
        "counts",
        description="Weight of a gene in its cell's cross-entropy: its count, because expression changes are "
        "measured in counts.",
    )
    perturbation_column: str = Field(
        "perturbation", description="obs column of the perturbation; cells without a value are not targets."
    )
    control: str = Field(description="Value that marks unperturbed cells.")
    perturbed_genes: dict[str, list[int]] | None = Field(
        None,
        description="Token ids of the genes of each perturbation; null finds the genes that perturbations are named "
        "after (several joined by +), and train writes them into the run.",
    )

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.batch_column == self.perturbation_column:
            raise ValueError(f"batch_column and perturbation_column are both {self.batch_column}; name another batch")
        return self

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """The perturbation."""
        return (self.perturbation_column,)

    def obs_columns(self) -> dict[str, str]:
        """The perturbation and the batch."""
        return {self.perturbation_column: "objective.perturbation_column"} | super().obs_columns()

    def named_levels(self) -> dict[str, tuple[str, list[str]]]:
        """The control."""
        return {self.perturbation_column: ("objective.control", [self.control])}

    def gene_columns(self) -> tuple[str, ...]:
        """The perturbation, unless its genes are given."""
        return () if self.perturbed_genes is not None else (self.perturbation_column,)

    def with_genes(self, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> Self:
        """Return the options with the genes of each perturbation that has any."""
        if self.perturbed_genes is not None:
            return self
        found = {
            level: list(of) for level, of in tokens[self.perturbation_column].items() if of and level != self.control
        }
        return self.model_copy(update={"perturbed_genes": found})

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse sequences, and tokens whose values are places, which cannot be made from thinned counts."""
        refuse_sequences(self.name, tokens)
        if tokens.value_kind == "place":
            raise ValueError(
                f"objective {self.name} needs values made from counts, which tokens.tokenizer {tokens.tokenizer} does "
                "not have; choose binned or continuous"
            )
