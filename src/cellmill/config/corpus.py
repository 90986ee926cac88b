"""A corpus: the table of its datasets, and the sections of the stages that make it: preprocess,
vocabulary, shard.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from cellmill.config.section import Section, leaving_out

SPLITS = ("train", "val", "test")

SPLIT_OPTIONS = ("split_by", "train_values", "val_frac", "test_frac", "seed")
"""Options of section shard that say which cells are held out."""
FASTA = (".fasta", ".fa", ".faa")  # also with .gz
NOT_WILDCARD = r"^[^{}<>\r\n]+$"
"""Pattern of a path that Snakemake takes as it is: it reads braces and angles in an input as
wildcards.
"""
ROLES = ("batch", "donor", "condition", "perturbation", "dose")
"""Columns of the table that name an obs column, which preprocessed cells have under the name of the
role.
"""
# obs column of preprocessed cells: True for those with the dataset's `control`
IS_CONTROL = "is_control"
DATASET = "dataset"  # obs column that shards add: the name of a cell's dataset
MISSING = "<missing>"  # level of cells without a value
ORGANISM = "organism"  # obs column of preprocessed cells with `organism_column`
# obs columns of cells or shards that no `label_name` may take
RESERVED = (*ROLES, IS_CONTROL, ORGANISM, DATASET)


def is_fasta(path: Path) -> bool:
    """True if a dataset is a FASTA file, by its name."""
    return path.name.lower().removesuffix(".gz").endswith(FASTA)


class Preprocess(Section):
    """Quality control and gene names of a dataset. For FASTA files, only min_counts, keep_obs
    and row_block are read.
    """

    organism: Literal["human", "mouse"] | None = "human"
    """Gene table that maps symbols to Ensembl ids; null uses var_names as ids."""
    reference_organism: Literal["human", "mouse"] | None = None
    """Map genes of the other organism to the genes of this one by one-to-one orthologs, so that a
    corpus can contain both. Genes without an ortholog are dropped and counted. null keeps each
    dataset's own genes.
    """
    orthologs: str | None = None
    """Tab-separated file of orthologs to use instead of the packaged table: a header with the names
    of both organisms, then Ensembl ids; only pairs whose genes occur once are used. Requires
    reference_organism.
    """
    organism_column: bool = False
    """Add obs column `organism`, human or mouse, to the cells. Datasets of both can then form one
    corpus without reference_organism, each with its own genes, and tokens.covariates: [organism]
    tells the model the organism.
    """
    min_genes: int = Field(200, ge=0)
    """Drop cells with fewer detected genes."""
    min_counts: int = Field(1, ge=1)
    """Drop cells with fewer counts (sequences with fewer residues); cells without counts are always
    dropped.
    """
    max_mito_frac: float = Field(0.2, ge=0, le=1)
    """Largest mitochondrial fraction of a cell; 1 keeps all."""
    min_cells: int = Field(0, ge=0)
    """Drop genes detected in fewer of the dataset's kept cells. If it is above 0, the tokens of a
    cell depend on the other cells of its file. `vocabulary.min_cells` counts over the corpus.
    """
    min_coverage_frac: float = Field(0.5, ge=0, le=1)
    """Minimum fraction of genes with an Ensembl id."""
    gene_length: Literal["keep", "normalise", "refuse"] = "keep"
    """What to do with cells of full-length protocols (Smart-seq and others, found by any obs column
    that names them), whose counts grow with gene length. keep: leave them as they are, with a
    warning. normalise: divide their counts by gene length, keep the sum of each cell, and draw
    whole numbers. refuse: refuse the dataset.
    """
    keep_obs: list[str] | None = None
    """obs columns to keep; null keeps all."""
    row_block: int = Field(4096, ge=1)
    """Cells in memory at a time."""

    _as_before = leaving_out("gene_length")

    def problems(self) -> Iterator[str]:
        if self.gene_length == "normalise" and self.organism is None:
            yield "gene_length normalise requires organism, whose genes have lengths; set it, or gene_length to keep"
        if self.orthologs is not None and self.reference_organism is None:
            yield "orthologs is read with reference_organism alone; set that, or leave orthologs out"


class VocabularyConfig(Section):
    """Selection of the genes that become tokens."""

    min_cells: int = Field(1, ge=1)
    """Drop genes detected in fewer cells of the corpus."""
    max_genes: int | None = Field(None, ge=1)
    """Maximum number of genes, chosen by `select`; null: all."""
    select: Literal["detected", "seurat", "seurat_v3"] = "detected"
    """Which genes max_genes keeps: those detected in most cells, or the most variable ones, by this
    flavor of scanpy's highly_variable_genes. seurat_v3 requires scikit-misc (`cellmill[hvg]`). With
    seurat, seurat_v3 or shard.split_by, the vocabulary is made from training cells only: cells of
    val and test do not affect its genes, medians and quantiles.
    """
    quantiles: bool = False
    """Store the per-mille quantiles of the corpus's values, within 0.5 %, for tokens.binning
    quantile_corpus.
    """
    variability: bool = False
    """Store the order of the genes by variability (as `select`, else seurat), for tokens.truncation
    variable.
    """
    genes: str | None = None
    """File with one Ensembl id or current symbol per line; other genes are dropped. null keeps all.
    """
    medians: str | None = Field(None, pattern=NOT_WILDCARD)
    """Model whose medians replace the corpus's for all genes that the model has: geneformer:FOLDER
    or scgpt:FOLDER, as in init_from, or a vocabulary.tsv. Tokens then have the order of that model.
    null keeps the corpus's medians.
    """
    protein_coding: bool = False
    """Drop genes that GENCODE does not list as protein coding."""

    def reads_split(self, shard: "Shard") -> bool:
        """True if only training cells are read: genes chosen by variability, or a split that holds
        out whole groups.

        Otherwise cells are split by chance, and those held out are as the others.
        """
        return self.select != "detected" or shard.split_by is not None

    def problems(self) -> Iterator[str]:
        if self.select != "detected" and self.max_genes is None:
            yield f"select {self.select} requires max_genes, the number of genes; set it, usually to 2000"


class Shard(Section):
    """Split into train, val and test, and size of the shards."""

    cells_per_shard: int = Field(16_384, ge=64)
    """Cells per shard file."""
    order: Literal["rank", "genes"] = "rank"
    """Order of the genes of a cell on disk. rank, by count over the gene's corpus median, serves every kind of tokens.
    genes takes half of the bytes and is as fast for models that read whole cells (`max_tokens` above the genes of a
    cell). Tokens by rank, cells that are cut, and all cells for families that read the order of tokens (autoregressive,
    bert, hf) are then ranked while they are read, at less than half of the speed.
    """
    split_by: str | None = None
    """obs column, such as donor, or `dataset`. All cells with the same value go to the same split.
    null splits cells at random and puts cells with equal counts into the same split.
    """
    train_values: list[str] = Field([])
    """Values of split_by that are only for training, such as the control; the fractions apply to
    the other values.
    """
    val_frac: float = Field(0.1, ge=0, lt=1)
    """Fraction of cells, or of the values of split_by, for validation."""
    test_frac: float = Field(0.1, ge=0, lt=1)
    """Fraction held out for evaluation."""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of the split and of the order on disk."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What to do with duplicates: cells with the same counts of the same genes as an earlier cell
    of the corpus. keep counts and reports them, drop removes them. With few counts, different cells
    may be equal by chance.
    """
    jobs: int = Field(1, ge=1, le=1000)
    """Number of jobs, each of which writes a part of the shards. The shards do not depend on it."""

    def problems(self) -> Iterator[str]:
        if self.train_values and self.split_by is None:
            yield "train_values requires split_by, the obs column of these values; set it, or leave them out"
        # beside train_values the others may all be held out
        held_out = self.val_frac + self.test_frac
        if held_out > 1 or (held_out == 1 and not self.train_values):
            yield f"val_frac + test_frac = {held_out:g} leaves no cells for training"
