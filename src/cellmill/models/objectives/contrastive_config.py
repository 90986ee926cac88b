"""Options of the objective `supervised_contrastive`. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.objective import ObjectiveConfig


class SupervisedContrastiveConfig(ObjectiveConfig):
    """Vectors of cells of one label near to each other, and far from those of other labels."""

    implementation: ClassVar[str] = "cellmill.models.objectives.supervised_contrastive:SupervisedContrastive"
    hides_tokens: ClassVar[bool] = False

    name: Literal["supervised_contrastive"] = Field(
        "supervised_contrastive",
        description="Tell cells of one label from all others of the global batch, by their vectors (Khosla et al. "
        "2020). The run is supervised, and named so in cards and tables.",
    )
    label_column: str = Field(
        description="obs column of the label. Cells of unknown label take no part; test cells are in no shard that a "
        "training reads."
    )
    temperature: float = Field(
        0.1, gt=0, description="Divisor of the cosines of vectors; the smaller, the more the nearest cells weigh."
    )

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """The label."""
        return (self.label_column,)

    def obs_columns(self) -> dict[str, str]:
        """The label."""
        return {self.label_column: "objective.label_column"}
