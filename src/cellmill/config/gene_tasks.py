"""Options of tasks that judge what a model knows of genes. Torch-free."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.evaluate import TaskConfig
from cellmill.config.section import EachOnce


class ImputationConfig(TaskConfig):
    """Expression of genes that are hidden from the model, from the others; skipped without enough cells."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.imputation:Imputation"

    name: Literal["imputation"] = Field("imputation", description="Name of the task.")
    hidden_frac: float = Field(
        0.2, gt=0, le=0.9, description="Share of the genes that is hidden, by a seeded draw, in all cells alike."
    )
    genes: Annotated[list[str], EachOnce] | None = Field(
        None,
        min_length=1,
        description="Genes to hide instead of a share, by Ensembl id or symbol; null draws them.",
    )
    max_genes: int = Field(500, ge=1, description="Most genes that are drawn.")
    min_cells: int = Field(10, ge=2, description="Genes that fewer of the scored cells express are not hidden.")
    neighbors: int = Field(15, ge=1, description="k of the average over nearest cells.")
    seeds: int = Field(
        3, ge=1, description="Repetitions of the cross-validation; one where donors or batches are its folds."
    )
    most_folds: int = Field(
        10, ge=2, description="Donors, or batches, are tested one after another, or of more, so many groups of them."
    )


class GeneEmbeddingConfig(TaskConfig):
    """Membership of gene sets, and transcription factors, from vectors of genes; skipped for a model without any."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.gene_embedding:GeneEmbedding"
    files: ClassVar[tuple[str, ...]] = ("gene_sets", "transcription_factors")

    name: Literal["gene_embedding"] = Field("gene_embedding", description="Name of the task.")
    gene_sets: str | None = Field(
        None, description="GMT file of gene sets: on each line a name, a description and the genes, tab-separated."
    )
    transcription_factors: str | None = Field(
        None, description="File of transcription factors, one a line, by Ensembl id or symbol."
    )
    min_genes: int = Field(10, ge=2, description="Sets with fewer known genes are left out, by name.")
    max_others: int = Field(
        2000, ge=50, description="Genes of no set, at most: a seeded draw of those that training cells express."
    )
    seeds: int = Field(
        3, ge=1, description="Repetitions of the cross-validation and of the draw, `evaluate.folds` each."
    )

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if self.gene_sets is None and self.transcription_factors is None:
            raise ValueError(
                "task gene_embedding: expected gene_sets or transcription_factors, got neither; name a file"
            )
        return self


class GrnConfig(TaskConfig):
    """Similarity of genes against known regulations; an error where too few of them are among the model's genes."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.grn:Grn"
    files: ClassVar[tuple[str, ...]] = ("edges",)

    name: Literal["grn"] = Field("grn", description="Name of the task.")
    edges: str = Field(
        description="File of edges: on each line a transcription factor and a target, tab-separated, by Ensembl id or "
        "symbol; more columns are not read."
    )
    min_edges: int = Field(20, ge=1, description="Fewest edges between known genes; with fewer the task fails.")
    min_targets: int = Field(
        3, ge=1, description="Transcription factors with fewer known targets are left out, by name."
    )
    absolute: bool = Field(
        False, description="Rank pairs by the size of a similarity, so that a negative one counts as much."
    )
