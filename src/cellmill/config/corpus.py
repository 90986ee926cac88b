"""Sections of the stages of a corpus: preprocess, vocabulary, shard."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cellmill.config.section import Section


class Preprocess(Section):
    """Counts, quality control and gene names of one dataset."""

    organism: Literal["human", "mouse"] | None = Field(
        "human", description="Gene table that maps symbols to Ensembl ids; null takes var_names as ids without mapping."
    )
    min_genes: int = Field(200, ge=0, description="Minimum detected genes of a cell.")
    min_counts: int = Field(1, ge=1, description="Minimum counts of a cell.")
    max_mito_frac: float = Field(
        0.2, ge=0, le=1, description="Maximum fraction of mitochondrial counts of a cell; 1 keeps all cells."
    )
    min_cells: int = Field(3, ge=0, description="Minimum number of kept cells in which a gene is detected.")
    min_coverage_frac: float = Field(
        0.5, ge=0, le=1, description="Minimum fraction of a dataset's genes that map to an Ensembl id."
    )
    keep_obs: list[str] | None = Field(None, description="obs columns to keep; null keeps all.")
    row_block: int = Field(4096, ge=1, description="Cells read into memory at a time.")


class VocabularyConfig(Section):
    """Genes of the vocabulary."""

    min_cells: int = Field(1, ge=1, description="Minimum number of cells of the corpus in which a gene is detected.")
    max_genes: int | None = Field(
        None, ge=1, description="Maximum number of genes, those in most cells; null keeps all."
    )


class Shard(Section):
    """Train, val and test shards."""

    cells_per_shard: int = Field(16_384, ge=64, description="Cells in one shard file.")
    split_by: str | None = Field(
        None,
        description="obs column (such as donor), or `dataset`, each of whose values is in one split; null splits by a "
        "hash of a cell's counts, so that identical cells stay together.",
    )
    val_frac: float = Field(0.1, ge=0, lt=1, description="Fraction of cells (or of split_by's values) for validation.")
    test_frac: float = Field(0.1, ge=0, lt=1, description="Fraction held out for evaluation.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the split and of the order of cells on disk.")

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        if self.val_frac + self.test_frac >= 1:
            raise ValueError(f"val_frac + test_frac = {self.val_frac + self.test_frac:g} leaves no cells to train on")
        return self
