"""Gene names mapped to Ensembl ids, the key of every table in cellmill, and to rows of a vocabulary.

Previous symbols and aliases are looked up too (GENCODE, HGNC and MGI; data/genes/README.md). Case
matters: `Actb` is a mouse gene and `ACTB` a human one, and a dataset of the other organism must not
pass. A name shared by several genes maps to none.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.data.genes.columns import INDEX, GeneNames, choose_names
from cellmill.data.genes.lookup import look_up
from cellmill.data.genes.tables import ORGANISMS, PREFIXES, gene_table, orthologs
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.errors import ConfigError, DataError, did_you_mean

SYMBOL_COLUMNS = ("symbol", "gene_symbol", "feature_name", "gene_name", "gene_symbols")
"""var columns searched for symbols of ids that the table lacks."""

# share of counts on genes without an Ensembl id above which a file is warned about
MAX_LOST = 0.02
LOST_NAMES = 5  # genes that such a warning names
SEPARATOR = "+"
"""Between the genes of one perturbation."""

FITS_WELL = 0.5
"""Share of a file's names that are genes of an organism, above which the file is taken for one of
that organism.
"""
_EXAMPLES = 10
# MT-ND1 and mt-Nd1, of the rat Mt-nd1, of flies mt:ND1; R writes MT.ND1
_MITOCHONDRIAL = re.compile(r"mt[-:.]", re.IGNORECASE)
_OTHER_FEATURES = re.compile(
    r"antibody|antigen|crispr|guide|multiplex|hashtag|peak|chromatin|custom|sample.?tag|vdj|cmo"
    r"|^(?:protein|proteins|adt|hto|cite.*|grna|sgrna|atac.*)$"
)
"""Types of features that are not genes, in lower case."""
_IF_ANY = ("column", "by_column", "prefixes", "made_unique", "respelled")  # fields of Coverage


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
    column: str | None = None  # column of `var` that names most genes; None for the index
    # share of genes with an id, by column, if several columns name any
    by_column: dict[str, float] = field(default_factory=dict)
    # prefix that was left out -> number of names
    prefixes: dict[str, int] = field(default_factory=dict)
    # name with a suffix -> the name that it repeats
    made_unique: dict[str, str] = field(default_factory=dict)
    # name of several parts, with `.` for `-` or a date -> the symbol or id that it was read as
    respelled: dict[str, str] = field(default_factory=dict)
    reference: str | None = None  # organism onto whose genes those with an id were mapped
    orthologs: int = 0  # number of them with a one-to-one ortholog

    @property
    def n_with_id(self) -> int:
        """Number of genes with an Ensembl id of their own organism."""
        return self.id + self.symbol + self.previous + self.alias

    @property
    def frac(self) -> float:
        """Fraction of the genes with an Ensembl id."""
        return self.n_with_id / self.n_genes if self.n_genes else 0.0

    def as_json(self) -> dict[str, Any]:
        """Fields and `frac` for a report, without those that say nothing about these genes."""
        fields = asdict(self) | {"examples": list(self.examples), "frac": self.frac}
        for name in ("made_unique", "respelled"):
            if fields[name]:
                fields[f"n_{name}"] = len(fields[name])
                fields[name] = dict(islice(fields[name].items(), _EXAMPLES))
        for name in _IF_ANY:
            if not fields[name]:
                del fields[name]
        if self.reference is None:
            del fields["reference"], fields["orthologs"]
        else:
            fields["ortholog_frac"] = self.orthologs / max(1, self.n_with_id)
        return fields


class MappedGenes(NamedTuple):
    """Gene names of a dataset, one entry per var row."""

    gene_ids: list[str]  # Ensembl id; empty if the name is unknown or ambiguous
    symbols: list[str]  # current symbol, or the id if the gene has none
    is_mito: np.ndarray  # mitochondrial genes; bool
    coverage: Coverage
    names: list[str]  # names in the file, from the column of `var` that names each gene
    conflict: str | None = None  # sentence on a column of `var` that names other genes


class GeneColumns(NamedTuple):
    """Columns of a file as rows of a vocabulary."""

    target: np.ndarray  # row of the vocabulary for each column, -1 for none; int32
    measured: np.ndarray  # columns of gene expression, not of antibodies or guides; bool
    ordered: bool = False  # rows are sequences, and all columns are residues
    # measured columns whose name is not a gene's, bool; None if there are none
    unnamed: np.ndarray | None = None
    notes: tuple[str, ...] = ()  # lines on how the names were read
    mismatch: str | None = None  # line on genes of another organism than the model's

    @property
    def known_genes(self) -> np.ndarray:
        """(M,) int64: rows of the vocabulary that have a column, ascending."""
        return np.unique(self.target[self.target >= 0]).astype(np.int64)


def map_genes(var_names: Sequence[str], var: pd.DataFrame, organism: str | None) -> MappedGenes:
    """Ensembl ids and symbols of the genes of a dataset; several genes may get the same id.

    The column of `var` that names most genes is taken (`columns.choose_names`), `var_names` being
    its index, and each name is looked up as in `lookup`. Without `organism`, names are ids.
    """
    names = list(map(str, var_names))
    columns = [name for name in SYMBOL_COLUMNS if name in var]
    in_var = text_values(var[columns[0]]).tolist() if columns else []
    if organism is None:
        symbols = [symbol or name for name, symbol in zip(names, in_var or names)]
        coverage = Coverage(None, len(names), id=len(names))
        return MappedGenes(names, symbols, _mitochondrial(symbols), coverage, names)
    chosen = choose_names(names, var, organism)
    gene_ids = chosen.gene_ids
    known = gene_table(organism).symbols
    symbols = []
    for name, gene, symbol in zip(chosen.texts, gene_ids, in_var or gene_ids):
        symbols.append(known.get(gene) or symbol or gene or name)
    mito = _mitochondrial(symbols)
    coverage = _coverage(chosen, organism)
    return MappedGenes(gene_ids, symbols, mito, coverage, chosen.texts, chosen.conflict)


def map_names(names: Sequence[str], organism: str) -> MappedGenes:
    """Ensembl ids and symbols of names that a user or a model lists, each looked up as it is."""
    matches = [look_up(name, organism) for name in names]
    gene_ids = [match.gene for match in matches]
    symbols = gene_table(organism).symbols
    shown = [symbols.get(gene) or gene or name for name, gene in zip(names, gene_ids)]
    tally: dict[str, Any] = Counter(match.kind for match in matches)
    coverage = Coverage(organism, len(names), examples=_unknown(names, gene_ids), **tally)
    return MappedGenes(gene_ids, shown, _mitochondrial(shown), coverage, list(names))


def _unknown(names: Sequence[str], gene_ids: Sequence[str]) -> tuple[str, ...]:
    """The first names without a gene."""
    unknown = (name for name, gene in zip(names, gene_ids) if not gene)
    return tuple(islice(unknown, _EXAMPLES))


def _coverage(chosen: GeneNames, organism: str) -> Coverage:
    is_index = chosen.column == INDEX
    n_naming = sum(share > 0 for share in chosen.coverage.values())
    tally: dict[str, Any] = Counter(chosen.kinds)
    return Coverage(
        organism,
        len(chosen.gene_ids),
        examples=_unknown(chosen.texts, chosen.gene_ids),
        column=None if is_index else chosen.column,
        by_column=chosen.coverage if n_naming > 1 or not is_index else {},
        prefixes=dict(chosen.prefixes),
        made_unique=chosen.made_unique,
        respelled=chosen.respelled,
        **tally,
    )


def map_orthologs(mapped: MappedGenes, reference: str, table: Path | None = None) -> MappedGenes:
    """Replace genes of one organism by the ids and symbols of their orthologs in `reference`.

    Genes without an ortholog lose their id. `table` is a user's file of orthologs, instead of the
    packaged one. Genes of `reference` itself stay as they are.
    """
    organism = mapped.coverage.organism
    if organism is None or organism == reference:
        return mapped
    known = orthologs(organism, reference, table)
    symbols = gene_table(reference).symbols
    gene_ids = [known.get(gene, "") for gene in mapped.gene_ids]
    names = [symbols.get(gene, gene) or old for gene, old in zip(gene_ids, mapped.symbols)]
    coverage = replace(mapped.coverage, reference=reference, orthologs=sum(map(bool, gene_ids)))
    return MappedGenes(gene_ids, names, mapped.is_mito, coverage, mapped.names, mapped.conflict)


def match_columns(reader: CountsReader, vocabulary: Vocabulary) -> GeneColumns:
    """Match columns of `reader` to genes of `vocabulary`: by name, a table of symbols, or orthologs.

    Takes the reading that matches most genes, then most columns. Raises DataError when no reading
    matches any gene.
    """
    if reader.ordered:
        rows = vocabulary.rows_of(reader.var_names)
        if (rows < 0).any():
            missing = reader.var_names[int((rows < 0).argmax())]
            has = wanted = "sequences"
            if reader.ranked:
                has = "genes in rank order"
                wanted = "the same token dictionary"
            raise DataError(
                f"{reader.path}: it has {has}, and the model does not know {missing!r}: its first gene is "
                f"{vocabulary.gene_ids[0]!r}; use a model of {wanted}"
            )
        return GeneColumns(rows, is_expression(reader.var), ordered=True)
    if vocabulary.digest not in reader.matches:  # several parts of an evaluation match
        reader.matches[vocabulary.digest] = _match_genes(reader, vocabulary)
    columns: GeneColumns = reader.matches[vocabulary.digest]
    return columns


def _match_genes(reader: CountsReader, vocabulary: Vocabulary) -> GeneColumns:
    measured = is_expression(reader.var)
    rows = np.flatnonzero(measured)
    names = [reader.var_names[row] for row in rows]
    best = None
    best_matched = (0, 0)  # genes and columns that match
    mismatch = conflict = None
    for reading in _readings(names, reader.var.iloc[rows], vocabulary):
        target = np.full(reader.n_vars, -1, np.int32)
        target[rows] = vocabulary.rows_of(reading.gene_ids)
        known = target[target >= 0]
        matched = (len(np.unique(known)), len(known))
        if matched > best_matched:
            conflict = reading.conflict
            unnamed = np.zeros(reader.n_vars, bool)
            unnamed[rows] = [not gene for gene in reading.gene_ids]
            sums = describe_sums(_shared_genes(reading.gene_ids, names))
            best = GeneColumns(
                target,
                measured,
                unnamed=unnamed if unnamed.any() else None,
                notes=(*reading.notes, *sums),
                mismatch=reading.mismatch,
            )
            best_matched = matched
        mismatch = reading.mismatch or mismatch
        if len(known) == len(rows):
            break  # no table can match more
    if conflict is not None:
        raise DataError(f"{reader.path}: {conflict}")
    if best is not None:
        return best
    fault = f"{reader.path}: no genes in common with the model"
    if mismatch is not None:
        raise DataError(f"{fault}: {mismatch}, and none is left")
    first = next(iter(reader.var_names), None)
    raise DataError(
        f"{fault}: its first is {first!r}, the model's {vocabulary.gene_ids[0]!r} ({vocabulary.symbols[0]}); name "
        "genes by Ensembl id or current symbol"
    )


class _Reading(NamedTuple):
    """Names of a file as genes, in one of several ways."""

    gene_ids: list[str]
    notes: tuple[str, ...] = ()
    mismatch: str | None = None  # as in GeneColumns
    conflict: str | None = None  # as in MappedGenes


def _readings(names: list[str], var: pd.DataFrame, vocabulary: Vocabulary) -> Iterator[_Reading]:
    """Read names as genes of an organism of the vocabulary, as ids, or as genes of another organism.

    The genes of another organism are replaced by their orthologs.
    """
    if (vocabulary.rows_of(names) >= 0).all():  # as in preprocessed cells: no table is read
        yield _Reading(names)
        return
    known = organisms_of(vocabulary)
    best_frac = 0.0
    for organism in known:
        mapped = map_genes(names, var, organism)
        best_frac = max(best_frac, mapped.coverage.frac)
        changes = tuple(describe_changes(mapped.coverage))
        yield _Reading(mapped.gene_ids, changes, conflict=mapped.conflict)
    yield _Reading(names)
    if len(known) != 1 or best_frac > FITS_WELL:
        return
    for organism in {*ORGANISMS} - {*known}:
        mapped = map_genes(names, var, organism)
        mismatch = None
        if mapped.coverage.frac > max(best_frac, FITS_WELL):
            mismatch = f"its genes are of {organism}, the model's of {known[0]}: they are matched by orthologs"
        gene_ids = map_orthologs(mapped, known[0]).gene_ids
        changes = tuple(describe_changes(mapped.coverage))
        yield _Reading(gene_ids, changes, mismatch, mapped.conflict)


def _shared_genes(gene_ids: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Names of the rows of `var` by gene, for genes of several rows."""
    by_gene: dict[str, list[str]] = {}
    for gene, name in zip(gene_ids, names):
        by_gene.setdefault(gene, []).append(name)
    return {gene: carriers for gene, carriers in by_gene.items() if gene and len(carriers) > 1}


def organisms_of(vocabulary: Vocabulary) -> list[str]:
    """Organisms whose Ensembl ids a vocabulary has."""
    organisms = []
    for organism, prefix in PREFIXES.items():
        if any(gene.startswith(prefix) for gene in vocabulary.gene_ids):
            organisms.append(organism)
    return organisms


def describe_changes(coverage: Coverage) -> list[str]:
    """Lines on the column that names the genes, if it is not the index, and on changed names."""
    lines = []
    if coverage.column is not None:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in coverage.by_column.items())
        lines.append(
            f"genes are named by var[{coverage.column!r}] (share of names that are genes: {shares})"
        )
    for prefix, count in coverage.prefixes.items():
        lines.append(f"prefix {prefix!r} is left out of {count:,} names")
    if coverage.respelled:
        name, part = next(iter(coverage.respelled.items()))
        lines.append(
            f"{len(coverage.respelled):,} names are read in part, with '-' for '.', or as the symbol that a "
            f"spreadsheet made a date of, as {name!r} as {part!r}"
        )
    if coverage.made_unique:
        name, stem = next(iter(coverage.made_unique.items()))
        lines.append(
            f"{len(coverage.made_unique):,} names repeat another name with a suffix that made them unique, as {name!r} "
            f"repeats {stem!r}: their counts are added to its gene"
        )
    return lines


def describe_sums(summed: Mapping[str, Sequence[str]]) -> list[str]:
    """Line on genes that several rows of `var` name; `summed` are these names by gene."""
    if not summed:
        return []
    n_rows = sum(map(len, summed.values()))
    gene, names = next(iter(summed.items()))
    example = f"{', '.join(names[:LOST_NAMES])} of {gene}"
    return [f"{n_rows:,} names are of {len(summed):,} genes: their counts are summed, as {example}"]


def lost_counts(frac: float, names: Sequence[str]) -> str | None:
    """Warn that names without an Ensembl id have the share `frac` of the counts; None if it is small."""
    if frac <= MAX_LOST:
        return None
    shown = ", ".join(repr(name) for name in names[:LOST_NAMES])
    return (
        f"warning: {frac:.1%} of its counts are on genes whose names are not known, most of them on {shown}; name "
        "genes by Ensembl id or current symbol"
    )


def is_expression(var: pd.DataFrame) -> np.ndarray:
    """Return a mask of the genes: False for antibodies and guides of 10x files.

    Their names (CD3) would pass for genes. Types count in any case, and a row without a type is a gene.
    Some tools write biotypes or `Gene` there: if no type is `Gene Expression`, every row is a gene,
    except for the types of other features that 10x has.
    """
    if "feature_types" not in var:
        return np.ones(len(var), dtype=bool)
    kinds = pd.Series(text_values(var["feature_types"]), dtype=object).str.strip().str.lower()
    if (kinds == "gene expression").any():
        return kinds.isin(["gene expression", "", "nan", "none"]).to_numpy()
    return ~kinds.str.contains(_OTHER_FEATURES).to_numpy(bool)


def _mitochondrial(symbols: list[str]) -> np.ndarray:
    return np.array([bool(_MITOCHONDRIAL.match(symbol)) for symbol in symbols], dtype=bool)


def rows_of_names(names: Iterable[str], vocabulary: Vocabulary) -> dict[str, int]:
    """Row of each name's gene; -1 for a gene that is not in the vocabulary.

    A name is looked up as an id, as a symbol of the vocabulary, then in the packaged tables of its
    organisms.
    """
    by_symbol = {symbol: row for row, symbol in enumerate(vocabulary.symbols)}
    rows = {}
    for name, synonyms in names_of_genes(names, vocabulary).items():
        first, *others = vocabulary.rows_of(synonyms).tolist()
        candidates = [row for row in (first, by_symbol.get(name, -1), *others) if row >= 0]
        rows[name] = candidates[0] if candidates else -1
    return rows


def rows_of_known_genes(
    names: Iterable[str], vocabulary: Vocabulary, option: str
) -> dict[str, int]:
    """Find the row of each name's gene.

    Raises ConfigError, which names `option`, for a gene that is not in the vocabulary.
    """
    rows = rows_of_names(names, vocabulary)
    for name, row in rows.items():
        if row < 0:
            known = [*vocabulary.symbols, *vocabulary.gene_ids]
            raise ConfigError(
                f"{option}: {name!r} is not a gene of the model; {did_you_mean(name, known)}"
            )
    return rows


def names_of_genes(names: Iterable[str], vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """List the names under which a file may have the gene of each name.

    These are the name, its Ensembl id and its current symbol. Ids and symbols come from the packaged
    tables of the vocabulary's organisms.
    """
    synonyms: dict[str, tuple[str, ...]] = {name: (name,) for name in sorted({*names})}
    for organism in organisms_of(vocabulary):
        symbols = gene_table(organism).symbols
        for name in synonyms:
            gene = look_up(name, organism).gene
            if gene:
                synonyms[name] += (gene, symbols.get(gene, gene))
    return synonyms


def perturbed_genes(names: Sequence[str], vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Find the rows of each perturbation's genes by `rows_of_names`; empty if none is known."""
    genes = [[part.strip() for part in name.split(SEPARATOR)] for name in names]
    return dict(zip(names, known_rows(genes, vocabulary)))


def known_rows(genes: Sequence[Sequence[str]], vocabulary: Vocabulary) -> list[list[int]]:
    """Rows of the vocabulary of the known genes of each perturbation, by `rows_of_names`."""
    row_of_gene = rows_of_names(chain.from_iterable(genes), vocabulary)
    return [[row_of_gene[name] for name in names if row_of_gene[name] >= 0] for names in genes]
