"""Gene names as Ensembl ids, the key of every table in cellmill.

Symbols change: a few percent of the names in an older dataset are previous symbols or aliases by now, so those are
looked up too (GENCODE, HGNC and MGI; genes/README.md). Case matters: `Actb` is a mouse gene and `ACTB` a human one,
and a dataset of the other organism must not pass. A name shared by several genes maps to none.
"""

import gzip
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.counts_reader import CountsReader
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError

_PREFIXES = {"human": "ENSG", "mouse": "ENSMUSG"}
ORGANISMS = tuple(_PREFIXES)
ID_COLUMNS = ("ensembl_id", "ensembl_ids", "ensembl_gene_id", "gene_ids", "gene_id", "feature_id", "ensembl")
"""var columns searched for Ensembl ids, in this order, when the name itself is not one."""
SYMBOL_COLUMNS = ("symbol", "gene_symbol", "feature_name", "gene_name", "gene_symbols")
"""var columns searched for symbols of ids that the table lacks."""

_IDS = {organism: re.compile(rf"({prefix}\d{{11}})(?:\.\d+)?(?:_PAR_Y)?") for organism, prefix in _PREFIXES.items()}
_OPEN_FRAME = re.compile(r"C[\dXY]+orf\d+")
_EXAMPLES = 10


@dataclass(frozen=True)
class Coverage:
    """Number of var rows by how their Ensembl id was found, and examples of those without one."""

    organism: str | None
    n_genes: int
    id: int = 0
    symbol: int = 0
    previous: int = 0
    alias: int = 0
    ambiguous: int = 0
    unmapped: int = 0
    examples: tuple[str, ...] = ()

    @property
    def frac(self) -> float:
        """Fraction of the genes with an Ensembl id."""
        return (self.id + self.symbol + self.previous + self.alias) / self.n_genes if self.n_genes else 0.0

    def as_json(self) -> dict[str, Any]:
        """All fields and `frac`, for a report."""
        return asdict(self) | {"examples": list(self.examples), "frac": self.frac}


class MappedGenes(NamedTuple):
    """Gene names of a dataset, one entry per var row."""

    gene_ids: list[str]  # Ensembl id; empty if the name is unknown or ambiguous
    symbols: list[str]  # current symbol, or the id if the gene has none
    is_mito: np.ndarray  # mitochondrial genes; bool
    coverage: Coverage


class GeneColumns(NamedTuple):
    """Columns of a file as rows of a vocabulary."""

    target: np.ndarray  # row of the vocabulary for each column, -1 for none; int32
    measured: np.ndarray  # columns of gene expression, not of antibodies or guides; bool
    ordered: bool = False  # rows are sequences, and all columns are residues


class _Table(NamedTuple):
    symbols: dict[str, str]  # symbol of an id
    ids: dict[str, dict[str, str]]  # kind of name -> name -> id; empty for an ambiguous name


def map_genes(var_names: Sequence[str], var: pd.DataFrame, organism: str | None) -> MappedGenes:
    """Ensembl ids and symbols of the genes of a dataset.

    A gene is looked up by its name if that is an id (a version such as `.12` is cut), by an id in a column of `var`
    (`ID_COLUMNS`), then by its name as a current symbol, a previous symbol, an alias. Several genes may get the same
    id. If `organism` is None, names are used as ids.
    """
    names = [str(name) for name in var_names]
    own = _column(var, SYMBOL_COLUMNS)
    if organism is None:
        symbols = [symbol or name for name, symbol in zip(names, own or names)]
        return MappedGenes(names, symbols, _is_mito(symbols), Coverage(None, len(names), id=len(names)))
    table, pattern = _table(organism), _IDS[organism]
    columns = [values for column in ID_COLUMNS if (values := _column(var, (column,))) is not None]
    gene_ids, symbols, unknown = [], [], []
    tally = dict.fromkeys(("id", *table.ids, "ambiguous", "unmapped"), 0)
    for row, name in enumerate(names):
        gene, kind = _look_up(name, (values[row] for values in columns), table, pattern)
        tally[kind] += 1
        unknown += [] if gene else [name]
        gene_ids.append(gene)
        symbols.append(table.symbols.get(gene) or (own[row] if own else "") or gene or name)
    coverage = Coverage(organism, len(names), **tally, examples=tuple(unknown[:_EXAMPLES]))
    return MappedGenes(gene_ids, symbols, _is_mito(symbols), coverage)


def match_columns(reader: CountsReader, vocabulary: Vocabulary) -> GeneColumns:
    """Match columns of `reader` to genes of `vocabulary`, by name or through a table of symbols.

    Takes the reading that matches most genes. Raises DataError when none matches any.
    """
    measured = is_expression(reader.var)
    if reader.ordered:
        return GeneColumns(_match_residues(reader, vocabulary), measured, ordered=True)
    organisms = [o for o in ORGANISMS if any(gene.startswith(_PREFIXES[o]) for gene in vocabulary.gene_ids)]
    best, most = np.full(reader.n_vars, -1, np.int32), 0
    for organism in (None, *organisms):
        ids = map_genes(reader.var_names, reader.var, organism).gene_ids
        target = np.where(measured, vocabulary.rows_of(ids), -1).astype(np.int32)
        if (matched := len(np.unique(target[target >= 0]))) > most:
            best, most = target, matched
        if (best[measured] >= 0).all():
            break  # no table can match more
    if most == 0:
        raise DataError(
            f"{reader.path}: no genes in common with the model: its first is {reader.var_names[0]!r}, the model's "
            f"{vocabulary.gene_ids[0]!r} ({vocabulary.symbols[0]}); name genes by Ensembl id or current symbol"
        )
    return GeneColumns(best, measured)


def _match_residues(reader: CountsReader, vocabulary: Vocabulary) -> np.ndarray:
    rows = vocabulary.rows_of(reader.var_names)
    if (rows < 0).any():
        missing = reader.var_names[int((rows < 0).argmax())]
        raise DataError(
            f"{reader.path}: it has sequences, and the model knows no residue {missing!r}: its first gene is "
            f"{vocabulary.gene_ids[0]!r}; use a model of sequences"
        )
    return rows


def is_expression(var: pd.DataFrame) -> np.ndarray:
    """Genes of a dataset; False for antibodies and guides of 10x files, whose names (CD3) would pass for genes."""
    if "feature_types" not in var:
        return np.ones(len(var), dtype=bool)
    return var["feature_types"].astype(str).to_numpy() == "Gene Expression"


def gene_symbols(organism: str) -> dict[str, str]:
    """Symbol of every Ensembl id of an organism, by ascending id; the id itself for a gene without a symbol."""
    return _table(organism).symbols


def _look_up(name: str, columns: Iterable[str], table: _Table, pattern: re.Pattern[str]) -> tuple[str, str]:
    for text in (name, *columns):
        if match := pattern.fullmatch(text):
            return match[1], "id"
    for kind, ids in table.ids.items():
        if name in ids:
            return ids[name], kind if ids[name] else "ambiguous"
    return "", "unmapped"


def _column(var: pd.DataFrame, names: Sequence[str]) -> list[str] | None:
    for name in names:
        if name in var.columns:
            return ["" if pd.isna(value) else str(value) for value in var[name]]
    return None


def _is_mito(symbols: list[str]) -> np.ndarray:
    return np.array([symbol.startswith(("MT-", "mt-")) for symbol in symbols], dtype=bool)


@cache
def _table(organism: str) -> _Table:
    symbols: dict[str, str] = {}
    ids: dict[str, dict[str, str]] = {"symbol": {}, "previous": {}, "alias": {}}
    with gzip.open(Path(__file__).parent / "genes" / f"{organism}.tsv.gz", "rt", encoding="utf-8") as file:
        next(file)
        for line in file:
            gene, symbol, previous, aliases = line.rstrip("\n").split("\t")
            symbols[gene] = symbol
            # C1orf159 is often spelled C1ORF159
            capitals = "|".join(n.upper() for n in (symbol, *previous.split("|")) if _OPEN_FRAME.fullmatch(n))
            for kind, names in (("symbol", symbol), ("previous", previous), ("alias", aliases), ("alias", capitals)):
                for name in names.split("|") if names else ():
                    ids[kind][name] = gene if ids[kind].get(name, gene) == gene else ""
    return _Table(symbols, ids)
