"""Options of families whose gene embedding takes up given vectors of genes. Torch-free."""

from typing import Self

from pydantic import Field, model_validator

from cellmill.config.section import Section


class GeneVectorsConfig(Section):
    """Vectors of genes from a file, such as those of a protein or text model."""

    gene_vectors: str | None = Field(
        None,
        description="File with a vector per gene, by Ensembl id or symbol: .npy, (genes, numbers), with the names one "
        "a line in the file of the same name with .genes.txt in place of .npy; or .safetensors, a tensor per name. A "
        "gene's embedding is its learned one plus a learned projection of its vector; one without a vector has the "
        "learned one alone.",
    )
    gene_vector_dim: int | None = Field(
        None,
        ge=1,
        description="Numbers of each vector; null has no vectors. Without a file they are those of init_from.",
    )
    train_gene_vectors: bool = Field(
        False, description="Train the vectors too; otherwise only their projection is trained."
    )

    @model_validator(mode="after")
    def _vectors_have_a_length(self) -> Self:
        if self.gene_vector_dim is None and (self.gene_vectors is not None or self.train_gene_vectors):
            raise ValueError("gene_vectors requires gene_vector_dim, the numbers of each vector; set it")
        return self
