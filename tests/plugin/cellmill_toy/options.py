"""Options of all toys. Torch-free: `snakemake -n` imports this module and no other of the package."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.methods import MethodConfig, OptimizerConfig
from cellmill.config.parts.objective import Columns, ObjectiveConfig
from cellmill.config.parts.objectives import EMBEDDING_FAMILIES
from cellmill.config.parts.tasks import TaskConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.parts.trackers import ObserverConfig, TrackerConfig


class ToyFamily(FamilyConfig):
    """A causal transformer with rotary positions."""

    implementation = "cellmill_toy.family:ToyModel"
    objectives = ("toy_next_gene",)
    value_kinds = ("none",)
    weight_keys = ("family", "hidden", "layers", "heads")
    family: Literal["toy"] = "toy"
    hidden: int = Field(16, ge=4, description="Width of the residual stream.")
    layers: int = Field(2, ge=1, description="Transformer blocks.")
    heads: int = Field(
        2, ge=1, description="Attention heads; hidden must be a multiple of twice their number."
    )

    def problems(self) -> Iterator[str]:
        if self.hidden % (2 * self.heads):
            yield f"hidden: {self.hidden} is not a multiple of 2 * heads = {2 * self.heads}"

    def tp_sizes(self) -> dict[str, int]:
        """Whole heads; the feed-forward width is four times as large."""
        return {"model.heads": self.heads}

    def pp_sizes(self) -> dict[str, int]:
        """Between any two blocks."""
        return {"model.layers": self.layers}


class ToyNextGene(ObjectiveConfig):
    """Predict the next gene of the cell."""

    implementation = "cellmill_toy.objective:NextGene"
    name: Literal["toy_next_gene"] = "toy_next_gene"
    skip: int = Field(
        0, ge=0, description="Tokens at the start of a cell after which nothing is predicted."
    )


class ToyNumber(ObjectiveConfig):
    """Predict a number of each cell, by least squares."""

    implementation = "cellmill_toy.number:Number"
    owns_tokens = False
    families = EMBEDDING_FAMILIES
    name: Literal["toy_number"] = "toy_number"
    number_column: str = Field(description="obs column of the number.")

    def columns(self, option: str = "objective") -> Columns:
        """The column, and the option that names it."""
        return Columns(numbers={self.number_column: f"{option}.number_column"})


class ToyGenes(Tokens):
    """Genes in rank order, without values."""

    implementation = "cellmill_toy.tokenizer:GenesOnly"
    value_kind = "none"
    tokenizer: Literal["toy_genes"] = "toy_genes"


class ToyAdapter(MethodConfig):
    """Train low-rank adapters of the attention's linear layers and nothing else."""

    implementation = "cellmill_toy.method:LowRank"
    method: Literal["toy_adapter"] = "toy_adapter"
    rank: int = Field(2, ge=1, description="Rank of the adapters.")


class ToyMomentum(OptimizerConfig):
    """Gradient descent with momentum."""

    implementation = "cellmill_toy.optimizer:Momentum"
    state_names = ("momentum",)
    name: Literal["toy_momentum"] = "toy_momentum"
    decay: float = Field(
        0.9, ge=0, lt=1, description="Decay per step of the moving average of gradients."
    )


class ToyFile(TrackerConfig):
    """Write what a tracker is told to a file."""

    implementation = "cellmill_toy.tracker:File"
    name: Literal["toy_file"] = "toy_file"
    path: str = Field(description="File to append to.")


class ToySteps(ObserverConfig):
    """Write what an observer sees to a file."""

    implementation = "cellmill_toy.observer:Steps"
    name: Literal["toy_steps"] = "toy_steps"
    path: str = Field(description="File to append to.")


class ToyNorm(TaskConfig):
    """Length of the embeddings."""

    implementation = "cellmill_toy.task:Norm"
    name: Literal["toy_norm"] = "toy_norm"
    power: float = Field(2.0, gt=0, description="Order of the norm.")
