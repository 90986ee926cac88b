"""The column of `var` that names a file's genes.

It is the index or the column of text that names most genes. Other columns that agree with it fill its
gaps: a file may have ids of some genes and symbols of all. Ensembl ids come before symbols, since
two genes may share a symbol.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_columns
from cellmill.data.genes.lookup import MISSING_NAMES, UNMAPPED, Matches, match_names
from cellmill.data.genes.tables import PREFIXES

INDEX = "the index"
_ID = re.compile(r"(?:^|[^A-Za-z0-9])(ENS[A-Z]*G)\d{11}")  # of a gene of any species
# share of equal genes in the rows that two columns name, for the second to fill gaps of the first
_MIN_AGREEMENT = 0.8
_MIN_OWN = 0.1  # share of the organism's own ids among those of a file with genes of two species
_MIN_ROWS = 10  # rows that both columns name; fewer show nothing
_MAJORITY = 0.5  # a larger share of the texts of a column, or of the rows, is a majority


@dataclass(frozen=True)
class NameColumn:
    """Texts of one column of `var`, or of its index, as names of genes."""

    name: str  # name of the column, or INDEX
    texts: list[str]
    matches: Matches

    @property
    def shown(self) -> str:
        """The column as messages call it."""
        return INDEX if self.name == INDEX else f"var[{self.name!r}]"

    @property
    def n_filled(self) -> int:
        return sum(text not in MISSING_NAMES for text in self.texts)

    @property
    def n_ids(self) -> int:
        return self.matches.kinds.count("id")

    @property
    def has_ids(self) -> bool:
        """True if most of the texts are Ensembl ids."""
        return self.n_ids > _MAJORITY * self.n_filled

    @property
    def names_genes(self) -> bool:
        """True if most of the texts are names of genes."""
        return self.matches.n_matched > _MAJORITY * self.n_filled

    def agreement(self, other: "NameColumn") -> float:
        """Return the share of equal genes among the rows where both columns have a gene.

        It is 1 if there are few such rows.
        """
        pairs = [pair for pair in zip(self.matches.gene_ids, other.matches.gene_ids) if all(pair)]
        if len(pairs) < _MIN_ROWS:
            return 1.0
        return sum(first == second for first, second in pairs) / len(pairs)


@dataclass
class GeneNames:
    """Genes of the rows of `var`, and where their names come from."""

    column: str  # the column that names most genes
    # Ensembl id of each row; empty if unknown or ambiguous
    gene_ids: list[str] = field(default_factory=list)
    # id, symbol, previous, alias, ambiguous or unmapped
    kinds: list[str] = field(default_factory=list)
    # the name of each row in the column that names it
    texts: list[str] = field(default_factory=list)
    # prefix that was removed -> number of names
    prefixes: Counter[str] = field(default_factory=Counter)
    # entries of `Matches` for the names that were used
    made_unique: dict[str, str] = field(default_factory=dict)
    respelled: dict[str, str] = field(default_factory=dict)
    # share of rows with a gene, by column that was looked at
    coverage: dict[str, float] = field(default_factory=dict)
    conflict: str | None = None  # sentence on a column that names as many genes, but others

    def add(self, column: NameColumn, row: int) -> None:
        """Append a row, with the name that a column has for it."""
        matches = column.matches
        text = column.texts[row]
        self.gene_ids.append(matches.gene_ids[row])
        self.kinds.append(matches.kinds[row])
        self.texts.append(text)
        if matches.gene_ids[row] and text in matches.prefixes:
            self.prefixes[matches.prefixes[text]] += 1
        if text in matches.made_unique:
            self.made_unique[text] = matches.made_unique[text]
        if text in matches.respelled:
            self.respelled[text] = matches.respelled[text]


def choose_names(names: Sequence[str], var: pd.DataFrame, organism: str) -> GeneNames:
    """Genes of a file by the column of `var` that names most of them; `names` are the index.

    Of columns with equally many genes the one with more Ensembl ids is taken, then the index, then
    the first.
    """
    columns = _read_columns(names, var, organism)
    _drop_other_species(columns, organism)
    best = max(columns, key=lambda column: (column.matches.n_genes, column.n_ids))
    trusted = [column for column in columns if column is best or _may_fill(column, best)]
    trusted.sort(key=lambda column: (not column.has_ids, column is not best))
    genes = GeneNames(best.name)
    for row, column in enumerate(_first_known(trusted)):
        genes.add(column, row)
    for column in columns:
        genes.coverage[column.name] = column.matches.n_matched / max(len(names), 1)
    for column in columns:
        if _contradicts(column, best):
            both = [f"{one.shown} ({genes.coverage[one.name]:.1%})" for one in (best, column)]
            genes.conflict = (
                f"{' and '.join(both)} name as many genes, but most rows differ; set the dataset's gene_column "
                "(--gene-column) to the column that names them, or to index"
            )
    return genes


def _read_columns(names: Sequence[str], var: pd.DataFrame, organism: str) -> list[NameColumn]:
    """The index, and if it is not of Ensembl ids, every column of text."""
    index = NameColumn(INDEX, list(names), match_names(names, organism))
    if index.n_ids == len(names):
        return [index]
    columns = [index]
    for name, texts in text_columns(var).items():
        columns.append(NameColumn(name, texts, match_names(texts, organism)))
    return columns


def _drop_other_species(columns: list[NameColumn], organism: str) -> None:
    """Leave rows without a gene that have the id of another species, whatever their symbol is.

    Only columns count of whose ids a tenth are of `organism`. Otherwise all rows may be of a species
    that is read by its symbols, with a transgene or a few rows of another annotation, or the column
    may name orthologs.
    """
    for column in columns:
        ids = [*map(_ID.search, column.texts)]
        if column.n_ids < _MIN_OWN * (len(ids) - ids.count(None)):
            continue
        for row, found in enumerate(ids):
            is_other = found is not None and found[1] != PREFIXES[organism]
            if is_other and all(one.matches.kinds[row] != "id" for one in columns):
                for one in columns:
                    one.matches.gene_ids[row], one.matches.kinds[row] = UNMAPPED


def _may_fill(column: NameColumn, best: NameColumn) -> bool:
    is_likely = column.name == INDEX or column.names_genes
    return is_likely and column.agreement(best) >= _MIN_AGREEMENT


def _contradicts(column: NameColumn, best: NameColumn) -> bool:
    """True if a column names nearly as many genes as the best one, and others."""
    as_many = column.matches.n_genes > 0.9 * best.matches.n_genes
    return as_many and column.names_genes and column.agreement(best) < _MAJORITY


def _first_known(columns: list[NameColumn]) -> list[NameColumn]:
    """For each row the first column that has a gene there, or else the first of all."""
    has_gene = np.array([column.matches.gene_ids for column in columns], object) != ""
    return [columns[position] for position in has_gene.argmax(axis=0)]
