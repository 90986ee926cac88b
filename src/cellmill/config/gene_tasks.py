"""Options of tasks that evaluate gene embeddings and imputation. Torch-free."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.evaluate import TaskConfig
from cellmill.config.section import EachOnce


class ImputationConfig(TaskConfig):
    """Imputation of hidden genes from the others; skipped without enough cells."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.imputation:Imputation"

    name: Literal["imputation"] = Field("imputation", description="Name of the task.")
    hidden_frac: float = Field(
        0.2, gt=0, le=0.9, description="Fraction of the genes to hide: a seeded draw, the same for all cells."
    )
    genes: Annotated[list[str], EachOnce] | None = Field(
        None,
        min_length=1,
        description="Genes to hide instead of a random fraction, by Ensembl id or symbol; null draws them.",
    )
    max_genes: int = Field(500, ge=1, description="Maximum number of hidden genes.")
    min_cells: int = Field(10, ge=2, description="Genes expressed by fewer of the evaluated cells are not hidden.")
    neighbors: int = Field(15, ge=1, description="k of the kNN average.")
    seeds: int = Field(
        3, ge=1, description="Repetitions of the cross-validation; one if the folds are donors or batches."
    )
    most_folds: int = Field(
        10,
        ge=2,
        description="Maximum number of groups: donors or batches are tested one at a time, or, if there "
        "are more, in this many groups.",
    )


class GeneEmbeddingConfig(TaskConfig):
    """Prediction of gene sets and transcription factors from gene embeddings; skipped for a model without any."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.gene_embedding:GeneEmbedding"
    files: ClassVar[tuple[str, ...]] = ("gene_sets", "transcription_factors")

    name: Literal["gene_embedding"] = Field("gene_embedding", description="Name of the task.")
    gene_sets: str | None = Field(
        None, description="GMT file of gene sets: per line a name, a description and the genes, tab-separated."
    )
    transcription_factors: str | None = Field(
        None, description="File of transcription factors, one per line, by Ensembl id or symbol."
    )
    min_genes: int = Field(10, ge=2, description="Gene sets with fewer known genes are skipped, by name.")
    max_others: int = Field(
        2000,
        ge=50,
        description="Maximum number of genes outside all sets: a seeded draw of those that training cells express.",
    )
    seeds: int = Field(
        3, ge=1, description="Repetitions of the cross-validation and of the draw, with `evaluate.folds` folds each."
    )

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if self.gene_sets is None and self.transcription_factors is None:
            raise ValueError(
                "task gene_embedding: expected gene_sets or transcription_factors, got neither; name a file"
            )
        return self


class GrnConfig(TaskConfig):
    """Gene similarity against known regulatory edges; an error if too few of them are among the model's genes."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.grn:Grn"
    files: ClassVar[tuple[str, ...]] = ("edges",)

    name: Literal["grn"] = Field("grn", description="Name of the task.")
    edges: str = Field(
        description="File of edges: per line a transcription factor and a target, tab-separated, by Ensembl id or "
        "symbol; further columns are ignored."
    )
    min_edges: int = Field(
        20, ge=1, description="Minimum number of edges between known genes; with fewer the task fails."
    )
    min_targets: int = Field(
        3, ge=1, description="Transcription factors with fewer known targets are skipped, by name."
    )
    absolute: bool = Field(
        False, description="Rank pairs by absolute similarity, so that negative similarities count equally."
    )
