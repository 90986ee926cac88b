"""Options of the objective `regression`. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field

from cellmill.config.objective import ObjectiveConfig


class RegressionConfig(ObjectiveConfig):
    """A number per cell, predicted from the cell embedding."""

    implementation: ClassVar[str] = "cellmill.models.objectives.regression:Regression"
    hides_tokens: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = (
        *("profile", "encoder", "autoencoder", "autoregressive", "bert", "scgpt", "hf"),
    )

    name: Literal["regression"] = Field(
        "regression",
        description="Predict a number per cell from its embedding; `cellmill predict` then predicts it for other "
        "cells. Model cards and tables mark the run as supervised.",
    )
    target_column: str = Field(
        description="obs column of the target; cells without a value are ignored. It is standardised: the model learns "
        "(target - target_mean) / target_std, and predictions are in the column's own unit."
    )
    loss: Literal["mse", "huber", "pearson"] = Field(
        "mse",
        description="mse: squared error; huber: Huber loss, linear above huber_delta (Huber 1964); pearson: 1 minus "
        "Pearson's correlation over the cells of a global batch, in training and in validation. With pearson, "
        "scale and offset of the predictions are arbitrary, as they do not change the loss.",
    )
    huber_delta: float = Field(
        1.0,
        gt=0,
        description="Threshold of the Huber loss, in standard deviations of the target; read with loss huber.",
    )
    target_mean: float | None = Field(
        None,
        description="Mean of the target; null computes it from the training cells, and train writes it into the run.",
    )
    target_std: float | None = Field(None, gt=0, description="Standard deviation of the target; null likewise.")
    number_hidden: int | None = Field(
        None, ge=1, description="Width of a hidden layer between embedding and target; null is a linear model."
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
