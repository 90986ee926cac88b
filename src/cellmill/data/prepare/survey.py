"""What a file of counts holds, and so what its row in the table of datasets should say.

Counts, names of genes, texts that mean no label and sparse rows are judged by the rules of the
stages that read them. Only the choice of obs columns and of thresholds is made here; thresholds
from the first `MAX_BLOCKS` blocks.
"""

import fnmatch
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path

import numpy as np
import pandas as pd

from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import NO_COLUMNS
from cellmill.data.arrays import as_text, select_columns
from cellmill.data.genes.names import Coverage, is_expression
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.formats import declared_names, open_counts, open_dataset
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.measure import measure_block
from cellmill.data.prepare.naming import find_organism, name_genes
from cellmill.data.prepare.perturbations import (
    PerturbationColumn,
    TargetNames,
    find_perturbations,
)
from cellmill.data.prepare.preprocess import describe_sparse
from cellmill.errors import DataError

MAX_BLOCKS = 5  # blocks of 4,096 cells
COLUMNS = {
    "label": (
        "celltype celltypes cellontologyclass annotation annotations cellannotation celllabel "
        "bulklabels label labels celltype* *celltype annotation* *annotation cellsubtype class "
        "subclass leiden louvain seuratclusters clusters cluster"
    ).split(),
    "batch": (
        "batch batchid sample sampleid samplename library libraryid channel lane origident plate "
        "run dataset"
    ).split(),
    "donor": (
        "donor donorid patient patientid individual individualid subject subjectid participant "
        "participantid mouse mouseid animal animalid"
    ).split(),
}
"""Names of obs columns by field of the table, the likeliest first, in lower case and without
punctuation; * stands for any text.
"""
_MAX_VALUES = 200  # values of a column that groups cells
# cells with a smaller fraction of the median number of detected genes are dropped. With a median of
# 1,000 genes, as in whole transcriptomes, this is the usual 200
_MIN_GENES_FRAC = 0.2
# thresholds that are tried in turn, until at most this fraction of the cells is dropped
_MITO_FRACS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_MAX_DROPPED_FRAC = 0.25


@dataclass(frozen=True)
class Thresholds:
    """Quality control of a file, and what it was chosen from."""

    min_genes: int
    max_mito_frac: float
    median_genes: int
    dropped_frac: float
    n_cells: int  # that were looked at
    sparse: str | None  # advice on rows that hold too few counts for cells


@dataclass(frozen=True)
class Survey:
    """Contents of one file."""

    counts: str
    counts_rule: str
    n_obs: int
    coverage: Coverage
    columns: dict[str, str]  # obs columns by field of the table
    n_values: dict[str, int]  # number of values of all obs columns with few of them
    perturbations: PerturbationColumn | None
    thresholds: Thresholds

    def describe(self) -> str:
        """One line: what was found, and what was chosen."""
        coverage = self.coverage
        parts = [
            f"{self.n_obs:,} cells",
            f"{coverage.n_with_id:,} of {coverage.n_genes:,} names are {coverage.organism} genes",
            f"counts in {self.counts}",
        ]
        if self.counts_rule != "refuse":
            parts.append(f"with fractions, which are drawn ({self.counts_rule})")
        for field, column in self.columns.items():
            parts.append(f"{field} {column} ({self.n_values[column]:,} values)")
        parts += [f"no {field}" for field in COLUMNS if field not in self.columns]
        if self.perturbations is not None:
            controls = ", ".join(self.perturbations.controls)
            parts.append(f"perturbation {self.perturbations.column} (control {controls})")
        if "label" not in self.columns and self.n_values:
            parts.append(f"columns with few values: {', '.join(self.n_values)}")
        if self.thresholds.sparse is not None:
            parts.append(f"warning: {self.thresholds.sparse}")
        return "; ".join(parts)


def survey_file(path: Path | str) -> Survey:
    """Look at the input at a path or URL, which is fetched.

    Raise DataError or ConfigError if it cannot be read, holds no counts, or names no known genes.
    """
    local = local_input(path)
    with declared_names(local) as names:
        declared = names.counts if names is not None else []
    first = declared[0] if declared and "X" not in declared else "X"
    with ExitStack() as stack:
        reader = stack.enter_context(_open_likeliest(local, first))
        if reader.ordered:
            kind = "genes in rank order" if reader.ranked else "sequences"
            raise DataError(f"{path}: has {kind}, not counts; start from config/examples")
        counts = reader.find_counts()
        if counts != first:
            reader = stack.enter_context(open_counts(local, counts))
        reader.counts_rule = "stochastic"
        is_gene = is_expression(reader.var)
        coverage = find_organism([*compress(reader.var_names, is_gene)], reader.var[is_gene])
        thresholds = _choose_thresholds(reader, coverage)
        rule = reader.counts_rule if reader.n_rounded else "refuse"
        n_values = dict(_count_values(reader.obs))
        targets = TargetNames.read(reader, coverage.organism)
        reader.warn_of_values()
        return Survey(
            counts=counts,
            counts_rule=rule,
            n_obs=reader.n_obs,
            coverage=coverage,
            columns=choose_columns(n_values),
            n_values=n_values,
            perturbations=find_perturbations(reader.obs, targets),
            thresholds=thresholds,
        )


def _open_likeliest(path: Path, first: str) -> CountsReader:
    """Open the matrix `first`, or else the layer `counts`.

    X of a modality may be null, or have scaled values of fewer genes.
    """
    try:
        return open_dataset(path, first)
    except DataError as error:
        try:
            return open_dataset(path, "counts")
        except DataError:
            raise error from None


def choose_columns(names: Collection[str]) -> dict[str, str]:
    """The likeliest obs column of each field of COLUMNS, among the `names`; none for some."""
    by_plain: dict[str, str] = {}
    for name in names:
        by_plain.setdefault(re.sub(r"[^a-z0-9]", "", name.casefold()), name)
    columns = {}
    for field, likely in COLUMNS.items():
        for pattern in likely:
            matches = fnmatch.filter(by_plain, pattern)
            if matches:
                columns[field] = by_plain[matches[0]]
                break
    return columns


def _count_values(obs: pd.DataFrame) -> Iterator[tuple[str, int]]:
    """Yield the obs columns that group cells, each with its number of values.

    They have 2 to 200 values, fewer than half of the cells. Columns with fractions are left out, and
    texts that mean no label are not counted.
    """
    for name, column in obs.items():
        column_name = str(name)
        is_writable = column_name.isprintable() and "|" not in column_name
        if column.dtype.kind in "bfcmM" or not is_writable:
            continue
        values = map(as_text, pd.factorize(column)[1])
        n_values = sum(not NO_COLUMNS.means_no_label(value) for value in values)
        if 2 <= n_values <= min(_MAX_VALUES, len(obs) // 2):
            yield column_name, n_values


def _choose_thresholds(reader: CountsReader, coverage: Coverage) -> Thresholds:
    """Thresholds that drop few cells, and always less than half, except of rows that are no cells."""
    options = Preprocess.model_validate({"organism": coverage.organism})
    genes = name_genes(reader, options)
    parts = []
    for raw in islice(reader.rows(), MAX_BLOCKS):
        block = select_columns(raw, genes.target, len(genes.gene_ids))
        parts.append(measure_block(block, genes.is_mito))
    n_genes, n_counts, mito_frac = np.hstack(parts)
    sparse = describe_sparse(n_counts)
    median = int(np.median(n_genes))
    min_genes = options.min_genes
    if sparse is None:
        min_genes = min(min_genes, int(_MIN_GENES_FRAC * median))
    mito_fracs = _MITO_FRACS if sparse is None else (options.max_mito_frac,)
    for max_mito_frac in mito_fracs:
        is_dropped = (n_genes < min_genes) | (n_counts == 0) | (mito_frac > max_mito_frac)
        if is_dropped.mean() <= _MAX_DROPPED_FRAC:
            break
    return Thresholds(
        min_genes, max_mito_frac, median, float(is_dropped.mean()), len(n_genes), sparse
    )
