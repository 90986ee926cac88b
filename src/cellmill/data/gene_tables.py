"""The packaged tables of human and mouse genes (genes/README.md): names of each Ensembl id, and its biotype."""

import gzip
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PREFIXES = {"human": "ENSG", "mouse": "ENSMUSG"}
"""Beginning of the Ensembl ids of each organism."""
ORGANISMS = tuple(PREFIXES)
PROTEIN_CODING = "protein_coding"

_IDS = {organism: re.compile(rf"({prefix}\d{{11}})(?:\.\d+)?(?:_PAR_Y)?") for organism, prefix in PREFIXES.items()}
_NAMES_WITH_ID = {  # HLA-DRA_ENSG00000204287, as tools write to make symbols unique, or ENSG00000204287.12_HLA-DRA
    organism: re.compile(rf"\S.*[_|:]{pattern.pattern}|{pattern.pattern}[_|:]+[A-Za-z].*")
    for organism, pattern in _IDS.items()
}
_OPEN_FRAME = re.compile(r"C[\dXY]+orf\d+")


class GeneTable(NamedTuple):
    """Genes of one organism, by ascending Ensembl id."""

    symbols: dict[str, str]  # symbol of an id; the id itself for a gene without one
    ids: dict[str, dict[str, str]]  # kind of name (symbol, previous, alias) -> name -> id; empty for an ambiguous name
    protein_coding: frozenset[str]  # ids


def gene_id(name: str, organism: str) -> str:
    """The Ensembl id that `name` is, without a version such as `.12`; empty if it is none of the organism."""
    match = _IDS[organism].fullmatch(name)
    return match[1] if match else ""


def gene_id_within(name: str, organism: str) -> str:
    """The Ensembl id before or after a symbol in `name`, such as `HLA-DRA_ENSG00000204287`; empty if it has none."""
    if name.count(PREFIXES[organism]) != 1:
        return ""
    match = _NAMES_WITH_ID[organism].fullmatch(name)
    return match[1] or match[2] if match else ""


def organism_of(gene: str) -> str | None:
    """The organism of an Ensembl id; None if it is no id of a packaged table's organism."""
    return next((organism for organism in ORGANISMS if gene_id(gene, organism)), None)


def gene_symbols(organism: str) -> dict[str, str]:
    """Symbol of every Ensembl id of an organism, by ascending id; the id itself for a gene without a symbol."""
    return gene_table(organism).symbols


@cache
def gene_table(organism: str) -> GeneTable:
    symbols: dict[str, str] = {}
    ids: dict[str, dict[str, str]] = {"symbol": {}, "previous": {}, "alias": {}}
    coding = []
    with gzip.open(Path(__file__).parent / "genes" / f"{organism}.tsv.gz", "rt", encoding="utf-8") as file:
        next(file)
        for line in file:
            gene, symbol, previous, aliases, biotype = line.rstrip("\n").split("\t")
            symbols[gene] = symbol
            coding += [gene] if biotype == PROTEIN_CODING else []
            # C1orf159 is often spelled C1ORF159
            capitals = "|".join(n.upper() for n in (symbol, *previous.split("|")) if _OPEN_FRAME.fullmatch(n))
            for kind, names in (("symbol", symbol), ("previous", previous), ("alias", aliases), ("alias", capitals)):
                for name in names.split("|") if names else ():
                    ids[kind][name] = gene if ids[kind].get(name, gene) == gene else ""
    return GeneTable(symbols, ids, frozenset(coding))
