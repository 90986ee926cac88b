"""Options of the `profile` family. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.family import FamilyConfig
from cellmill.config.gene_vectors import GeneVectorsConfig


class ProfileConfig(GeneVectorsConfig, FamilyConfig):
    """Architecture of the profile encoder."""

    implementation: ClassVar[str] = "cellmill.models.profile.perceptron:ProfileModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("scalar",)
    objectives: ClassVar[tuple[str, ...]] = ("cell_decoding", "denoise", "query_decoding", "supervised_contrastive")
    weight_keys: ClassVar[tuple[str, ...]] = ("family", "hidden", "layers", "ffn_width")
    sequence_parallel: ClassVar[bool] = False

    family: Literal["profile"] = Field(
        "profile",
        description="An MLP on the expression profile, without attention: fast, and the small model that a transformer "
        "has to beat.",
    )
    hidden: int = Field(256, ge=8, description="Width of the residual stream and of the embedding.")
    layers: int = Field(2, ge=0, description="Feed-forward blocks.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")

    @property
    def ffn_width(self) -> int:
        """Width inside the feed-forward layers."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def tp_sizes(self) -> dict[str, int]:
        """Feed-forward layers are cut by their width; the vocabulary can be cut anywhere."""
        return {"model.ffn_hidden": self.ffn_width}
