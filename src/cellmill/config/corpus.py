"""A corpus: the table of its datasets, and the sections of the stages that make it: preprocess, vocabulary, shard."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from cellmill.config.datasets import check_name, check_url, is_url, parse_filter, read_rows
from cellmill.config.section import Section, error_line, explain
from cellmill.errors import ConfigError

SPLITS = ("train", "val", "test")

FASTA = (".fasta", ".fa", ".faa")  # also with .gz
ROLES = ("batch", "donor", "condition", "perturbation", "dose")
"""Columns of the table that name an obs column, which preprocessed cells have under the name of the role."""
IS_CONTROL = "is_control"
"""obs column of preprocessed cells: True for those with the dataset's `control`."""


ORGANISM = "organism"
"""obs column of preprocessed cells with `organism_column`."""


RESERVED = (*ROLES, IS_CONTROL, ORGANISM, "dataset")
"""obs columns of cells or shards that no `label_name` may take."""


def is_fasta(path: Path) -> bool:
    """True if a dataset is a FASTA file, by its name."""
    return path.name.lower().removesuffix(".gz").endswith(FASTA)


class Preprocess(Section):
    """Quality control and gene names of a dataset; of FASTA, min_counts, keep_obs, row_block, compression are read."""

    organism: Literal["human", "mouse"] | None = Field(
        "human", description="Gene table that maps symbols to Ensembl ids; null uses var_names as ids."
    )
    reference_organism: Literal["human", "mouse"] | None = Field(
        None,
        description="Organism whose genes the other organism's genes are mapped to, by one-to-one orthologs, so that a "
        "corpus can contain both; genes without an ortholog are dropped and counted. null keeps each "
        "dataset's own genes.",
    )
    orthologs: str | None = Field(
        None,
        description="Tab-separated file of orthologs to use instead of the packaged table: a header with the names of "
        "both organisms, then Ensembl ids; only pairs whose genes occur once are used. Requires "
        "reference_organism.",
    )
    organism_column: bool = Field(
        False,
        description="Add obs column `organism` to the cells: human or mouse, from their dataset. Datasets of both can "
        "then form one corpus without reference_organism, each with its own genes, and tokens.covariates: "
        "[organism] tells the model the organism.",
    )
    min_genes: int = Field(200, ge=0, description="Drop cells with fewer detected genes.")
    min_counts: int = Field(
        1,
        ge=1,
        description="Drop cells with fewer counts (sequences with fewer residues); cells without counts are always "
        "dropped.",
    )
    max_mito_frac: float = Field(
        0.2, ge=0, le=1, description="Drop cells with a larger fraction of mitochondrial counts; 1 keeps all."
    )
    min_cells: int = Field(
        0,
        ge=0,
        description="Drop genes detected in fewer of the dataset's kept cells; above 0, the tokens of a cell depend on "
        "the other cells of its file. `vocabulary.min_cells` counts over the corpus.",
    )
    min_coverage_frac: float = Field(
        0.5, ge=0, le=1, description="Minimum fraction of a dataset's genes that map to an Ensembl id."
    )
    keep_obs: list[str] | None = Field(None, description="obs columns to keep; null keeps all.")
    row_block: int = Field(4096, ge=1, description="Cells in memory at a time.")
    compression: Literal["gzip"] | None = Field(
        "gzip",
        description="Compression of the preprocessed cells; any AnnData reader opens them. null takes about four times "
        "the disk and less CPU time (benchmarks/README.md); the shards are the same.",
    )

    @model_validator(mode="after")
    def _orthologs_are_read(self) -> Self:
        if self.orthologs is not None and self.reference_organism is None:
            raise ValueError("orthologs is read with reference_organism alone; set that, or leave orthologs out")
        return self


class VocabularyConfig(Section):
    """Selection of the genes that become tokens."""

    min_cells: int = Field(1, ge=1, description="Drop genes detected in fewer cells of the corpus.")
    max_genes: int | None = Field(
        None, ge=1, description="Maximum number of genes, chosen by `select`; null keeps all."
    )
    select: Literal["detected", "seurat", "seurat_v3"] = Field(
        "detected",
        description="Which genes max_genes keeps: those detected in most cells, or the most variable over all cells of "
        "the corpus, by this flavor of scanpy's highly_variable_genes. seurat_v3 requires scikit-misc "
        "(`cellmill[hvg]`).",
    )
    quantiles: bool = Field(
        False,
        description="Store the quantiles of all values of the corpus, per mille, for runs with tokens.binning "
        "quantile_corpus. They are within 0.5 % of the exact counts per 10,000.",
    )
    variability: bool = Field(
        False,
        description="Store the order of the genes by their variability over the corpus, for runs with "
        "tokens.truncation variable: by flavor seurat_v3 if that is `select`, else by seurat.",
    )
    genes: str | None = Field(
        None,
        description="File with one Ensembl id or current symbol per line; other genes are dropped. null keeps all.",
    )
    protein_coding: bool = Field(False, description="Drop genes that GENCODE does not list as protein coding.")

    @model_validator(mode="after")
    def _variable_genes_have_a_number(self) -> Self:
        if self.select != "detected" and self.max_genes is None:
            raise ValueError(f"select {self.select} requires max_genes, the number of genes; set it, usually to 2000")
        return self


class Shard(Section):
    """Split into train, val and test, and size of the shards."""

    cells_per_shard: int = Field(16_384, ge=64, description="Cells per shard file.")
    split_by: str | None = Field(
        None,
        description="obs column, such as donor, or `dataset`, to split by: cells of one value stay together; null "
        "splits by a hash of a cell's counts, so identical cells stay together.",
    )
    train_values: list[str] = Field(
        [],
        description="Values of split_by whose cells all go to training, such as the control if whole perturbations are "
        "held out; the fractions apply to the other values.",
    )
    val_frac: float = Field(0.1, ge=0, lt=1, description="Fraction of cells, or of split_by's values, for validation.")
    test_frac: float = Field(0.1, ge=0, lt=1, description="Fraction held out for evaluation.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the split and of the order on disk.")
    duplicates: Literal["keep", "drop"] = Field(
        "keep",
        description="Duplicate cells, which have the same counts of the same genes as an earlier cell of the "
        "corpus: keep counts and reports them, drop removes them. With few counts, different cells may be equal by "
        "chance.",
    )
    jobs: int = Field(
        1,
        ge=1,
        le=1000,
        description="Number of jobs that write the shards, each a part of them; the shards do not depend on it.",
    )

    @model_validator(mode="after")
    def _values_are_of_a_column(self) -> Self:
        if self.train_values and self.split_by is None:
            raise ValueError(
                "train_values requires split_by, the obs column of these values; set it, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _train_split_is_not_empty(self) -> Self:
        if self.val_frac + self.test_frac >= 1:
            raise ValueError(f"val_frac + test_frac = {self.val_frac + self.test_frac:g} leaves no cells for training")
        return self


class ObsColumns(Section):
    """Columns of the table that are about obs: each obs column is looked for before anything is computed."""

    filter: str | None = Field(
        None,
        description="Filter for cells to keep, as for `pandas.DataFrame.query`: comparisons of obs columns (`` `in "
        "backticks` `` if the name has spaces) with strings, numbers and lists, joined by and, or, not.",
    )
    label: str | None = Field(
        None,
        description="obs column that the probes predict, or several, separated by |; empty for no probes. Kept "
        "whatever preprocess.keep_obs says.",
    )
    label_name: str | None = Field(
        None,
        description="Name of the label in preprocessed cells, so that datasets whose columns have other names share "
        "one; of several labels one for each, separated by |. Empty for the name of the column.",
    )
    label_map: str | None = Field(
        None,
        pattern=r"^[^{}<>\r\n]+$",  # Snakemake reads braces and angles in an input as wildcards
        description="Tab-separated file with the columns `from` and `to`, which renames values of the label in "
        "preprocessed cells, and with that in shards, training and evaluation; of several labels one for each, "
        "separated by |, where an empty one renames nothing. Cells of a `from` whose `to` is empty have no label; "
        "labels that the file leaves out stay as they are, and are reported. A `from` that no cell has is refused. "
        "`filter` reads the values before they are renamed.",
    )
    batch: str | None = Field(None, description="obs column of the batch; preprocessed cells have it as `batch`.")
    donor: str | None = Field(None, description="obs column of the donor; preprocessed cells have it as `donor`.")
    condition: str | None = Field(
        None, description="obs column of the condition, such as a disease; preprocessed cells have it as `condition`."
    )
    perturbation: str | None = Field(
        None, description="obs column of the perturbation; preprocessed cells have it as `perturbation`."
    )
    control: str | None = Field(
        None,
        description="Value of the perturbation column (of the condition column if the dataset has no perturbations) "
        "that marks untreated cells: `is_control` of preprocessed cells.",
    )
    dose: str | None = Field(
        None, description="obs column of the dose, a number; preprocessed cells have it as `dose`."
    )

    @field_validator("filter")
    @classmethod
    def _filter_is_a_condition(cls, value: str | None) -> str | None:
        if value is not None:
            parse_filter(value)
        return value

    @model_validator(mode="after")
    def _each_label_has_a_name(self) -> Self:
        labels, names = self.labels, self.label_names
        for key in ("label_name", "label_map"):
            given = getattr(self, key)
            if given is not None and (n := len(given.split("|"))) != len(labels):
                raise ValueError(f"{key}: expected one for each label, {len(labels)}, got {n}; separate them by |")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"label_name: two labels are called {twice[0]!r}; rename one")
        for label, name in zip(labels, names):
            if name != label and (not name or name in RESERVED):
                raise ValueError(
                    f"label_name: expected a name of its own for label {label!r}, got {name!r}; choose another"
                )
        return self

    @model_validator(mode="after")
    def _control_is_of_something(self) -> Self:
        if self.control is not None and self.controlled is None:
            raise ValueError("control is a value of the perturbation or the condition; name one of these columns too")
        return self

    @property
    def labels(self) -> list[str]:
        """obs columns of the labels."""
        return [name for name in map(str.strip, (self.label or "").split("|")) if name]

    @property
    def label_names(self) -> list[str]:
        """Names of the labels in preprocessed cells, in the order of `labels`."""
        return self.labels if self.label_name is None else [name.strip() for name in self.label_name.split("|")]

    @property
    def label_maps(self) -> dict[str, str]:
        """Path of the label map by name of the label in preprocessed cells, of the labels that have one."""
        paths = map(str.strip, (self.label_map or "").split("|"))
        return {name: path for name, path in zip(self.label_names, paths) if path}

    @property
    def roles(self) -> dict[str, str]:
        """obs column of the file by role."""
        return {role: column for role in ROLES if (column := getattr(self, role)) is not None}

    @property
    def controlled(self) -> str | None:
        """The role whose value `control` is."""
        return next((role for role in ("perturbation", "condition") if role in self.roles), None)

    @property
    def asked_for(self) -> dict[str, str]:
        """Every obs column of the file that is named, and the columns of the table that name it."""
        read = [(name, "label") for name in self.labels] + [(column, role) for role, column in self.roles.items()]
        if self.filter is not None:
            read += [(name, "filter") for name in parse_filter(self.filter).columns]
        return {name: ", ".join(owner for other, owner in read if other == name) for name, _ in read}


NO_COLUMNS = ObsColumns.model_validate({})
"""Of a dataset without filter, labels and roles."""


class Dataset(ObsColumns):
    """One row of the table; an empty field is null."""

    dataset: str = Field(description="Name, used in file names.")
    path: str = Field(
        pattern=r"^[^{}<>\r\n]+$",  # Snakemake reads braces and angles in an input as wildcards
        description="Input: .h5ad, .zarr, 10x .h5, .loom, a folder with matrix.mtx, a SOMA experiment, or a FASTA "
        "file of proteins (.fasta, .fa, .faa, also .gz); a path, absolute or relative to Snakemake's working "
        "directory, or a URL; without braces and < >.",
    )
    counts: str = Field(
        "X",
        description="Matrix with raw counts: X, raw, the name of a layer (`layers/X` if it is X), or a genome of a 10x "
        "file.",
    )
    round_counts: bool = Field(
        False, description="Round fractional counts, such as those of RSEM and SoupX, to the nearest whole number."
    )
    organism: Literal["human", "mouse", "none"] | None = Field(
        None, description="preprocess.organism of this dataset; none uses var_names as ids."
    )
    min_genes: int | None = Field(None, ge=0, description="preprocess.min_genes of this dataset.")
    min_counts: int | None = Field(None, ge=1, description="preprocess.min_counts of this dataset.")
    max_mito_frac: float | None = Field(None, ge=0, le=1, description="preprocess.max_mito_frac of this dataset.")
    source: str | None = Field(None, description="Source of the data, for the report.")
    licence: str | None = Field(None, description="Licence of the data, for the report.")

    @field_validator("dataset")
    @classmethod
    def _name_is_usable(cls, value: str) -> str:
        return check_name(value)

    @field_validator("path")
    @classmethod
    def _has_no_credentials(cls, path: str) -> str:
        if is_url(path):
            check_url(path)
        return path

    def preprocess(self, section: Preprocess) -> Preprocess:
        """The corpus's options with those of the dataset."""
        names = ("organism", "min_genes", "min_counts", "max_mito_frac")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return section.model_copy(update={name: None if value == "none" else value for name, value in own.items()})


def read_datasets(table: Path) -> dict[str, Dataset]:
    """Rows of a tab-separated table by name, in order. Raises ConfigError naming the line."""
    datasets: dict[str, Dataset] = {}
    for line, row in read_rows(table, list(Dataset.model_fields)):
        try:
            dataset = Dataset.model_validate(row)
        except ValidationError as error:
            raise ConfigError(f"{table}, line {line}: {error_line(*explain(error, Dataset))}") from None
        if dataset.dataset in datasets:
            raise ConfigError(f"{table}, line {line}: dataset {dataset.dataset!r} is a duplicate; rename it")
        datasets[dataset.dataset] = dataset
    if not datasets:
        raise ConfigError(f"{table}: no datasets; add a row per .h5ad file")
    return datasets
