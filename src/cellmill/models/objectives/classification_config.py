"""Options of the objective `classification`. Torch-free."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator

from cellmill.config.objective import ObjectiveConfig

BALANCED = "balanced"


class ClassificationConfig(ObjectiveConfig):
    """Cell labels predicted from the cell embedding."""

    implementation: ClassVar[str] = "cellmill.models.objectives.classification:Classification"
    hides_tokens: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = (
        *("profile", "encoder", "autoencoder", "autoregressive", "bert", "scgpt", "hf"),
    )

    name: Literal["classification"] = Field(
        "classification",
        description="Predict the label of a cell from its embedding; `cellmill predict` then labels other cells. Model "
        "cards and tables mark the run as supervised.",
    )
    label_column: str = Field(
        description="obs column of the label. Cells without a label are ignored; test cells are in no shard that a "
        "training reads."
    )
    class_weights: Literal["balanced"] | dict[str, float] | None = Field(
        None,
        description="Weight of a cell's loss by its label, 1 for labels that are not listed. balanced: N / (K n) for a "
        "label with n of the N labelled training cells, with K labels; train writes the numbers into the run.",
    )
    head_hidden: int | None = Field(
        None, ge=1, description="Width of a hidden layer between embedding and labels; null is a linear classifier."
    )
    head_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout before the last layer of the head, the same in every layout."
    )

    adversarial_scale: float | None = Field(
        None,
        gt=0,
        description="As a part of a sum: the gradient to the cell embedding is reversed and multiplied by this, so "
        "that the head learns the label and the model hides it, for example a batch or donor (0.02 is mild; at 0.2 "
        "embeddings collapsed). Such a label is not predicted. null trains head and model together.",
    )

    @field_validator("class_weights")
    @classmethod
    def _positive(cls, value: object) -> object:
        given = value if isinstance(value, dict) else {}
        if wrong := [label for label, weight in given.items() if not 0 <= weight < math.inf]:
            raise ValueError(f"{wrong[0]}: expected a weight of 0 or more, got {given[wrong[0]]}")
        return value

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """The label, unless the model hides it."""
        return () if self.adversarial_scale else (self.label_column,)

    def obs_columns(self) -> dict[str, str]:
        """The label."""
        return {self.label_column: "objective.label_column"}

    def named_levels(self) -> dict[str, tuple[str, list[str]]]:
        """Labels of given weights."""
        given = self.class_weights if isinstance(self.class_weights, dict) else {}
        return {self.label_column: ("objective.class_weights", list(given))}

    def counted_columns(self) -> tuple[str, ...]:
        """The label, for balanced weights."""
        return (self.label_column,) if self.class_weights == BALANCED else ()

    def fitted(self, cells: Mapping[str, Mapping[str, int]]) -> Self:
        """Return the options with the numbers that `balanced` stands for."""
        if self.class_weights != BALANCED:
            return self
        counts = {label: n for label, n in cells[self.label_column].items() if n}
        total = sum(counts.values())
        weights = {label: total / (len(counts) * n) for label, n in counts.items()}
        return self.model_copy(update={"class_weights": weights})
