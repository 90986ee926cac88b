"""Options of the objective `supervised_contrastive`. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.objective import ObjectiveConfig


class SupervisedContrastiveConfig(ObjectiveConfig):
    """Supervised contrastive embeddings: cells of one label close together, and far from other labels."""

    implementation: ClassVar[str] = "cellmill.models.objectives.supervised_contrastive:SupervisedContrastive"
    hides_tokens: ClassVar[bool] = False

    name: Literal["supervised_contrastive"] = Field(
        "supervised_contrastive",
        description="Supervised contrastive loss: separate cells of one label from all others of the global batch, by "
        "their embeddings (Khosla et al. 2020). Model cards and tables mark the run as supervised.",
    )
    label_column: str = Field(
        description="obs column of the label. Cells without a known label are ignored; test cells are in no shard "
        "that a training reads."
    )
    temperature: float = Field(
        0.1,
        gt=0,
        description="Temperature, which divides cosine similarities; lower values give the nearest cells more weight.",
    )

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """The label."""
        return (self.label_column,)

    def obs_columns(self) -> dict[str, str]:
        """The label."""
        return {self.label_column: "objective.label_column"}
