"""A corpus: the table of its datasets, and the sections of the stages that make it: preprocess, vocabulary, shard."""

import csv
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from cellmill.config.section import Section, error_line, explain
from cellmill.errors import ConfigError, did_you_mean

FASTA = (".fasta", ".fa", ".faa")  # also with .gz
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # name of a corpus, run or dataset, which is part of a path


def is_fasta(path: Path) -> bool:
    """True if a dataset is a FASTA file, by its name."""
    return path.name.lower().removesuffix(".gz").endswith(FASTA)


class Preprocess(Section):
    """Quality control and gene names of one dataset; of a FASTA file min_counts, keep_obs and row_block are read."""

    organism: Literal["human", "mouse"] | None = Field(
        "human", description="Gene table that maps symbols to Ensembl ids; null uses var_names as ids."
    )
    min_genes: int = Field(200, ge=0, description="Drop cells with fewer detected genes.")
    min_counts: int = Field(
        1,
        ge=1,
        description="Drop cells with fewer counts (sequences with fewer residues); those with none are always dropped.",
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


class Dataset(Section):
    """One row of the table; an empty field is null."""

    dataset: str = Field(pattern=f"^{NAME}$", description="Name, used in file names.")
    path: str = Field(
        pattern=r"^[^{}<>\r\n]+$",  # Snakemake reads braces and angles in an input as wildcards
        description="The .h5ad file, or a FASTA file of proteins (.fasta, .fa, .faa, also .gz), absolute or relative "
        "to Snakemake's working directory; without braces and < >.",
    )
    counts: str = Field("X", description="Matrix with raw counts: X, raw, or the name of a layer.")
    label: str | None = Field(None, description="obs column that the probes predict; empty for no probes.")
    source: str | None = Field(None, description="Source of the data, for the report.")
    licence: str | None = Field(None, description="Licence of the data, for the report.")


def read_datasets(table: Path) -> dict[str, Dataset]:
    """Rows of a tab-separated table by name, in order. Raises ConfigError naming the line.

    Read with the csv module: importing pandas takes a second.
    """
    try:
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter="\t")
            header, rows = reader.fieldnames or [], [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{table}: {error.strerror}; expected the table of datasets") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{table}: not UTF-8 text; save it as tab-separated UTF-8") from None
    known = list(Dataset.model_fields)
    if unknown := [name for name in header if name not in known]:
        raise ConfigError(f"{table}: unknown column {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    datasets: dict[str, Dataset] = {}
    for line, row in rows:
        if None in row:
            raise ConfigError(f"{table}, line {line}: more fields than columns in the header")
        try:
            dataset = Dataset(**{key: value for key, value in row.items() if value})
        except ValidationError as error:
            raise ConfigError(f"{table}, line {line}: {error_line(*explain(error, Dataset))}") from None
        if dataset.dataset in datasets:
            raise ConfigError(f"{table}, line {line}: dataset {dataset.dataset!r} is a duplicate; rename it")
        datasets[dataset.dataset] = dataset
    if not datasets:
        raise ConfigError(f"{table}: no datasets; add a row per .h5ad file")
    return datasets
