"""Options of families whose gene embedding takes up given vectors of genes. Torch-free."""

from typing import Self

from pydantic import Field, model_validator

from cellmill.config.section import Section


class GeneVectorsConfig(Section):
    """Pretrained gene vectors from a file, such as those of a protein or text model."""

    gene_vectors: str | None = Field(
        None,
        description="File with a vector per gene, by Ensembl id or symbol: .npy with shape (genes, dim) and the names, "
        "one per line, in the file of the same name with .genes.txt in place of .npy; or .safetensors with a "
        "tensor per name. The vector is projected by a learned matrix and added to the gene's learned "
        "embedding; a gene without a vector has only the learned embedding.",
    )
    gene_vector_dim: int | None = Field(
        None,
        ge=1,
        description="Dimension of the vectors; null means no vectors. Without a file the vectors are those of "
        "init_from.",
    )
    train_gene_vectors: bool = Field(
        False, description="Also train the vectors; otherwise only their projection is trained."
    )

    @model_validator(mode="after")
    def _vectors_have_a_length(self) -> Self:
        if self.gene_vector_dim is None and (self.gene_vectors is not None or self.train_gene_vectors):
            raise ValueError("gene_vectors requires gene_vector_dim, the numbers of each vector; set it")
        return self
