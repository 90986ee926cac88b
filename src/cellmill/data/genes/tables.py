"""Packaged tables: human and mouse genes, their one-to-one orthologs, and the Cell Ontology.

Genes have the names, the biotype and the length of each Ensembl id (data/genes/README.md).
Orthologs are Ensembl's; a pair counts only if both of its genes occur in no other pair, because
pairs of duplicated genes would assign the counts of one gene to several. The Cell Ontology
(data/ontology/README.md) has the is_a edges of its terms.
"""

import gzip
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from itertools import chain
from math import log
from pathlib import Path
from typing import NamedTuple

from cellmill.errors import DataError
from cellmill.files import require_file

PREFIXES = {"human": "ENSG", "mouse": "ENSMUSG"}
"""Beginning of the Ensembl ids of each organism."""
ORGANISMS = tuple(PREFIXES)

# GENCODE writes ENSG00000223972.5_2 in releases mapped back to GRCh37
_ID = r"({}\d{{11}})(?:\.\d+(?:_\d+)?)?(?:_PAR_Y)?"
_OLD_PAR_Y = "ENSGR0"  # how GENCODE before 25 wrote ids of _PAR_Y: with R for a zero
_IDS = {organism: re.compile(_ID.format(prefix)) for organism, prefix in PREFIXES.items()}
_NAMES_WITH_ID = {  # HLA-DRA_ENSG00000204287, as tools write to make symbols unique, or ENSG00000204287.12_HLA-DRA;
    # Seurat writes `-` for `_`
    organism: re.compile(
        rf"\S.*[-_|:/ (]{pattern.pattern}\)?|{pattern.pattern}[-_|:/ (]+[A-Za-z].*"
    )
    for organism, pattern in _IDS.items()
}
_OPEN_FRAME = re.compile(r"C[\dXY]+orf\d+")
RELEASE = "2026-03-26"
_TERM_ID = re.compile(r"CL:\d{7}")


class GeneTable(NamedTuple):
    """Genes of one organism, by ascending Ensembl id."""

    symbols: dict[str, str]  # symbol of an id; the id itself for a gene without one
    # kind of name (symbol, previous, alias) -> name -> id; empty for an ambiguous name
    ids: dict[str, dict[str, str]]
    protein_coding: frozenset[str]  # ids


def gene_id(name: str, organism: str) -> str:
    """Ensembl id without a version such as `.12`; empty if `name` is not an id of the organism."""
    if name.startswith(_OLD_PAR_Y):
        name = name.replace(_OLD_PAR_Y, "ENSG00", 1)
    match = _IDS[organism].fullmatch(name)
    return match[1] if match else ""


def gene_id_within(name: str, organism: str) -> str:
    """Ensembl id before or after a symbol in `name`, as in `HLA-DRA_ENSG00000204287`; else empty."""
    if name.count(PREFIXES[organism]) != 1:
        return ""
    match = _NAMES_WITH_ID[organism].fullmatch(name)
    return match[1] or match[2] if match else ""


def organism_of(gene: str) -> str | None:
    """Organism of an Ensembl id; None for an id of an organism without a packaged table."""
    return next((organism for organism in ORGANISMS if gene_id(gene, organism)), None)


@cache
def gene_table(organism: str) -> GeneTable:
    symbols: dict[str, str] = {}
    ids: dict[str, dict[str, str]] = {"symbol": {}, "previous": {}, "alias": {}}
    coding = []
    for line in _lines_of_genes(organism):
        gene, symbol, previous, aliases, biotype, _ = line.split("\t")
        symbols[gene] = symbol
        if biotype == "protein_coding":
            coding.append(gene)
        names = {"symbol": [symbol], "previous": previous.split("|"), "alias": aliases.split("|")}
        if "orf" in line:  # C1orf159 is often spelled C1ORF159
            for name in (symbol, *names["previous"]):
                if _OPEN_FRAME.fullmatch(name):
                    names["alias"].append(name.upper())
        for kind, names_of_kind in names.items():
            known = ids[kind]
            for name in filter(None, names_of_kind):
                known[name] = gene if known.get(name, gene) == gene else ""
    return GeneTable(symbols, ids, frozenset(coding))


def _lines_of_genes(organism: str) -> list[str]:
    content = gzip.decompress((Path(__file__).parent / f"{organism}.tsv.gz").read_bytes())
    return content.decode().splitlines()[1:]


@cache
def gene_lengths(organism: str) -> dict[str, int]:
    """Bases of the median transcript by gene id, of the genes that GENCODE lists."""
    lengths = {}
    for line in _lines_of_genes(organism):
        gene, *_, length = line.split("\t")
        if length:
            lengths[gene] = int(length)
    return lengths


class CellOntology:
    """Terms and their is_a edges.

    `parents` maps the id of a term to the ids of its direct superclasses, and `names` to its name.
    """

    def __init__(self, parents: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> None:
        self.parents = parents
        self.names = names
        self._known: dict[str, dict[str, int]] = {}

    def __contains__(self, term: str) -> bool:
        return term in self.parents

    def ancestors(self, term: str) -> dict[str, int]:
        """Least number of is_a edges from `term` up to each of its superclasses and, 0, to itself."""
        if term not in self._known:
            steps = {term: 0}
            waiting = [term]
            for below in waiting:  # breadth first
                for above in self.parents[below]:
                    if above not in steps:
                        steps[above] = steps[below] + 1
                        waiting.append(above)
            self._known[term] = steps
        return self._known[term]

    @cached_property
    def _n_below(self) -> Counter[str]:
        """Number of terms that have a term among their superclasses, itself included."""
        return Counter(chain.from_iterable(map(self.ancestors, self.parents)))

    def information(self, term: str) -> float:
        """Compute the information content of a term from the terms below it.

        It is 1 without any, and 0 for the root (Seco, Veale & Hayes 2004, ECAI).
        """
        return 1 - log(self._n_below[term]) / log(len(self.parents))

    def nearness(self, one: str, other: str) -> float:
        """Compare the superclasses of two terms, each with itself: intersection by union.

        It is 1 for the same term. This is the similarity simUI of Gentleman's package GOstats (2005). Every
        cell is a `cell`, so it is above 0.
        """
        a = self.ancestors(one).keys()
        b = self.ancestors(other).keys()
        return len(a & b) / len(a | b)

    def steps(self, one: str, other: str) -> int:
        """Count is_a edges on the shortest way from both terms up to a common superclass.

        This is the distance of Rada et al. (1989).
        """
        a = self.ancestors(one)
        b = self.ancestors(other)
        return min(a[term] + b[term] for term in a.keys() & b.keys())


def is_term_id(text: str) -> bool:
    """True for text of the form CL:0000084, known or not."""
    return _TERM_ID.fullmatch(text) is not None


@cache
def cell_ontology() -> CellOntology:
    _, *lines = read_lines(Path(__file__).parents[1] / "ontology" / "cell_ontology.tsv.gz")
    parents = {}
    names = {}
    for line in lines:
        term, names[term], ids = line.split("\t")
        parents[term] = tuple(filter(None, ids.split("|")))
    return CellOntology(parents, names)


@cache
def orthologs(organism: str, reference: str, table: Path | None = None) -> dict[str, str]:
    """Ensembl id of `reference` for ids of `organism`, from the packaged table or a user's.

    Raises DataError for a table that is missing, lacks an organism or has no pair.
    """
    path = table or Path(__file__).parent / "orthologs.tsv.gz"
    lines = read_lines(path)
    header = [name.strip().lower() for name in next(lines, "").split("\t")]
    missing = [name for name in (organism, reference) if name not in header]
    if missing:
        wanted = f"the columns {organism} and {reference}, of Ensembl ids"
        raise DataError(
            f"{path}: expected a header with {wanted}; {missing[0]} is not there (preprocess.orthologs)"
        )
    pairs: set[tuple[str, ...]] = set()
    for number, line in enumerate(lines, start=2):
        fields = dict(zip(header, map(str.strip, line.split("\t"))))
        names = [fields.get(kind, "") for kind in (organism, reference)]
        if not all(names):
            continue  # a gene without an ortholog, as BioMart lists it
        pair = []
        for name, kind in zip(names, (organism, reference)):
            pair.append(gene_id(name, kind))
            if not pair[-1]:
                wanted = f"an Ensembl id of {kind} ({PREFIXES[kind]}...)"
                raise DataError(f"{path}, line {number}: expected {wanted}, got {name[:40]!r}")
        pairs.add(tuple(pair))
    n_pairs = Counter(chain(*pairs))
    one_to_one = {gene: other for gene, other in pairs if n_pairs[gene] == n_pairs[other] == 1}
    if not one_to_one:
        raise DataError(
            f"{path}: has no pair of genes that occur in no other pair (preprocess.orthologs)"
        )
    return one_to_one


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, plain or gzip. Raises DataError when it is missing or damaged."""
    require_file(path)
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield from (line.rstrip("\r\n") for line in file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
