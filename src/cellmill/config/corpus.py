"""Sections of the stages that make a corpus: preprocess, vocabulary, shard."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cellmill.config.section import Section


class Preprocess(Section):
    """Quality control and gene names of one dataset."""

    organism: Literal["human", "mouse"] | None = Field(
        "human", description="Gene table that maps symbols to Ensembl ids; null uses var_names as ids."
    )
    min_genes: int = Field(200, ge=0, description="Drop cells with fewer detected genes.")
    min_counts: int = Field(
        1, ge=1, description="Drop cells with fewer counts; cells without counts are always dropped."
    )
    max_mito_frac: float = Field(
        0.2, ge=0, le=1, description="Drop cells with a larger fraction of mitochondrial counts; 1 keeps all."
    )
    min_cells: int = Field(3, ge=0, description="Drop genes detected in fewer of the kept cells.")
    min_coverage_frac: float = Field(
        0.5, ge=0, le=1, description="Smallest accepted fraction of a dataset's genes that map to an Ensembl id."
    )
    keep_obs: list[str] | None = Field(None, description="obs columns to keep; null keeps all.")
    row_block: int = Field(4096, ge=1, description="Cells in memory at a time.")


class VocabularyConfig(Section):
    """Selection of the genes that become tokens."""

    min_cells: int = Field(1, ge=1, description="Leave out genes detected in fewer cells of the corpus.")
    max_genes: int | None = Field(
        None, ge=1, description="Most genes to keep, those detected in most cells; null keeps all."
    )


class Shard(Section):
    """Split into train, val and test, and size of the shards."""

    cells_per_shard: int = Field(16_384, ge=64, description="Cells per shard file.")
    split_by: str | None = Field(
        None,
        description="obs column, such as donor, or `dataset`, to split by: cells of one value stay together; null "
        "splits by a hash of a cell's counts, so identical cells stay together.",
    )
    val_frac: float = Field(0.1, ge=0, lt=1, description="Fraction of cells, or of split_by's values, for validation.")
    test_frac: float = Field(0.1, ge=0, lt=1, description="Fraction held out for evaluation.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the split and of the order on disk.")

    @model_validator(mode="after")
    def _train_split_is_not_empty(self) -> Self:
        if self.val_frac + self.test_frac >= 1:
            raise ValueError(f"val_frac + test_frac = {self.val_frac + self.test_frac:g} leaves no cells for training")
        return self
