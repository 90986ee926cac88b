"""Options of the objective `regression`. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field

from cellmill.config.objective import ObjectiveConfig


class RegressionConfig(ObjectiveConfig):
    """A number of each cell, predicted from its vector."""

    implementation: ClassVar[str] = "cellmill.models.objectives.regression:Regression"
    hides_tokens: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = (
        *("profile", "encoder", "autoencoder", "autoregressive", "bert", "scgpt", "hf"),
    )

    name: Literal["regression"] = Field(
        "regression",
        description="Predict a number of the cell from its vector; `cellmill predict` then predicts that of other "
        "cells. The run is supervised, and named so in cards and tables.",
    )
    target_column: str = Field(
        description="obs column of the number; cells without one take no part. It is standardised: the model learns "
        "(number - target_mean) / target_std, and predictions are in the column's own unit."
    )
    loss: Literal["mse", "huber", "pearson"] = Field(
        "mse",
        description="Squared error; Huber's loss, which grows linearly above huber_delta (Huber 1964); or pearson: 1 "
        "minus Pearson's correlation over the cells of a global batch, in training and in validation. With pearson "
        "predictions follow the number up to scale and offset alone, as these do not change the loss.",
    )
    huber_delta: float = Field(1.0, gt=0, description="In standard deviations of the number; read with loss huber.")
    target_mean: float | None = Field(
        None, description="null takes the mean of the training cells; train writes it into the run."
    )
    target_std: float | None = Field(
        None, gt=0, description="null takes the standard deviation of the training cells, likewise."
    )
    number_hidden: int | None = Field(
        None, ge=1, description="Width of a hidden layer between vector and number; null has none: a linear model."
    )
    number_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout before the last layer of the head, the same in every layout."
    )

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """The number."""
        return (self.target_column,)

    def number_columns(self) -> dict[str, str]:
        """The number."""
        return {self.target_column: "objective.target_column"}

    def standardised(self, moments: Mapping[str, tuple[float, float]]) -> Self:
        """Return the options with the mean and the standard deviation that are not given."""
        mean, std = moments[self.target_column]
        given = {"target_mean": self.target_mean, "target_std": self.target_std}
        found = {"target_mean": mean, "target_std": std}
        return self.model_copy(update={key: found[key] for key, value in given.items() if value is None})
