"""Ensembl ids of names as they are written in files.

A name is an Ensembl id (with or without a version, next to a symbol or not), a current symbol, a
previous symbol or an alias. Names that are none of these may still be one that a tool has changed:

    GRCh38_TP53, hg19-TP53    a prefix that many names of the file share, and that leaves known genes when removed
    TP53|7157, TP53 (7157)    several names of one gene
    MT.CO1                    `-` written as `.`, as R does in names of columns
    2-Sep, 2006-09-02         SEPT2 as a date, which Excel and LibreOffice make of it
    TBCE-1, TBCE.1            a suffix that scanpy or R gave a repeated name, if the name without it is there too

A suffix is left alone if the name is a symbol itself (`HLA-A`, `NKX2-1`, `AC012345.1`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cellmill.data.genes.tables import GeneTable, gene_id, gene_id_within, gene_table

MISSING_NAMES = frozenset({"", "nan", "NaN", "None", "<NA>", "NA", "N/A", "NULL", "null", "---"})
"""Texts that stand for a missing name, though NA and NaN were symbols once."""
_COPY = re.compile(r"(.+)[-._][0-9]{1,3}")
_SEPARATORS = re.compile(r"[-_.:|]+")
_PARTS = re.compile(r"[|;,]+|\s\((?=[0-9]+\)$)")
_DATE = re.compile(
    r"0?(?P<day>\d{1,2})-(?P<month>Mar|Sep)"
    r"|(?:19|20)\d\d-(?P<month_number>03|09)-0?(?P<day_of_month>\d{1,2})"
)
_FAMILY_BY_MONTH = {"Mar": "MARCH", "03": "MARCH", "Sep": "SEPT", "09": "SEPT"}
_AMBIGUOUS = frozenset({"MARCH1", "MARCH2"})  # 1-Mar may be MARC1 too
_WEAK = ("alias", "ambiguous", "unmapped")  # kinds of a match that a repeated name overrules
_MAX_PREFIX = 40  # characters
_MAX_SEPARATORS = 4  # separators of a prefix
_MIN_PREFIX_SHARE = 0.05  # share of a file's names that have a prefix
_MIN_KNOWN_SHARE = 0.5  # share of the names with a prefix that are genes without it
_MAX_REPEATED = 0.1  # share of the genes with a prefix that the file also has without it
_KINDS = "adt|cite|prot|protein|hto|hashtag|totalseq|abseq|antibody|pabo|sg|sgrna|grna|guide|crispr"
_NO_GENE = re.compile(
    # such a word begins the name (AB041806 is a gene of the mouse), ends it, or stands before an id at its end
    rf"(?i)(?:{_KINDS}|ab(?!\d{{5}}))[^a-z]|"
    rf".*[-_.|:](?:ab|(?:{_KINDS})[-_.]?\d*)(?:[-_.|:/ (]+(?:ENS[A-Z]*G\d{{11}}.*)?)?$"
)
"""Names of antibodies and guides. The symbol or id in such a name is their target's, but the counts are not."""


class Match(NamedTuple):
    """Gene of one name."""

    gene: str  # Ensembl id; empty if the name is unknown or ambiguous
    kind: str  # id, symbol, previous, alias, ambiguous or unmapped


UNMAPPED = Match("", "unmapped")


@dataclass(frozen=True)
class Matches:
    """Genes of the names of a file, one entry per name, and how tools had changed the names."""

    gene_ids: list[str]
    kinds: list[str]
    # a name with a suffix -> the name that it repeats
    made_unique: dict[str, str] = field(default_factory=dict)
    # a name -> the prefix that was removed from it
    prefixes: dict[str, str] = field(default_factory=dict)
    # a name of several parts, or with `.` for `-` -> its part
    respelled: dict[str, str] = field(default_factory=dict)

    @property
    def n_genes(self) -> int:
        """Number of different genes."""
        return len({*self.gene_ids} - {""})

    @property
    def n_matched(self) -> int:
        """Number of names that have a gene."""
        return sum(map(bool, self.gene_ids))


def look_up(name: str, organism: str) -> Match:
    """Gene of a name that no tool has changed."""
    table = gene_table(organism)
    gene = gene_id(name, organism)
    if not gene and not _NO_GENE.match(name):
        gene = gene_id_within(name, organism)
    if gene:
        return Match(gene, "id")
    return _symbol(name, table)


def match_names(names: Sequence[str], organism: str) -> Matches:
    """Genes of the names of one file, which are looked up together."""
    missing = {name for name in names if _is_missing(name)}
    known = {}
    for name in dict.fromkeys(names):
        known[name] = UNMAPPED if name in missing else look_up(name, organism)
    copies = _copies_with_id(known, organism)
    known |= dict.fromkeys(copies, UNMAPPED)
    missing |= copies
    respelled = dict[str, str]()
    unknown = list[str]()
    for name in [name for name, match in known.items() if not match.gene and name not in missing]:
        match, part = _respell(name, known, organism)
        if match.gene:  # before prefixes: HLA.A is HLA-A, and not A with a prefix
            known[name] = match
            respelled[name] = part
        else:
            unknown.append(name)
    prefixes = _shared_prefixes(unknown, known, organism)
    removed = dict[str, str]()
    for name in unknown:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        bare = name.removeprefix(prefix)
        match = look_up(bare, organism) if prefix else known[name]
        if not match.gene:
            match, part = _respell(bare, known, organism)
            if match.gene:
                respelled[name] = part
        if match.gene:
            known[name] = match
        if match.gene and prefix:
            removed[name] = prefix
    made_unique = dict[str, str]()
    for name in [name for name, match in known.items() if match.kind in _WEAK]:
        stem = _repeated_name(name, known)
        if stem is not None:
            made_unique[name] = stem
    known |= {name: known[stem] for name, stem in made_unique.items()}
    return Matches(
        [known[name].gene for name in names],
        [known[name].kind for name in names],
        made_unique,
        removed,
        respelled,
    )


def _copies_with_id(known: Mapping[str, Match], organism: str) -> set[str]:
    """Find names of an id and a text that are other rows of genes of the file.

    An example is intron_ENSG00000141510 next to ENSG00000141510.
    """
    by_text: dict[str, set[str]] = {}
    present = set[str]()
    for name, match in known.items():
        is_whole_id = gene_id(name, organism) == match.gene  # with a version or _PAR_Y
        if not is_whole_id and gene_id_within(name, organism) == match.gene:
            text = re.sub(rf"{match.gene}(\.[0-9]+)?", "", name)
            by_text.setdefault(text, set()).add(name)
        else:
            present.add(match.gene)
    copies = set[str]()
    for names in by_text.values():
        genes = {known[name].gene for name in names}
        if len(names) > 1 and len(genes & present) > _MAX_REPEATED * len(genes):
            copies |= names
    return copies


def _is_missing(name: str) -> bool:
    """Return True for a missing name, also with a suffix that made it unique, such as NA.1 of R."""
    copy = _COPY.fullmatch(name)
    return name in MISSING_NAMES or (copy is not None and copy[1] in MISSING_NAMES)


def _symbol(name: str, table: GeneTable) -> Match:
    if name.isdecimal():
        # a row or an Entrez number; a few are listed as aliases, such as 225 of EGR1
        return UNMAPPED
    for kind, ids in table.ids.items():
        gene = ids.get(name)
        if gene is not None:
            return Match(gene, kind if gene else "ambiguous")
    return UNMAPPED


def _repeated_name(name: str, known: Mapping[str, Match]) -> str | None:
    """The name in `known` that `name` repeats with a suffix; None if it repeats none."""
    stem = name
    while True:
        suffixed = _COPY.fullmatch(stem)
        if suffixed is None:
            return None
        stem = suffixed[1]
        if stem not in known:
            return None
        match = known[stem]
        # an alias such as AGT-1 is more likely a second AGT if the file has that, but not if AGT is
        # an alias too
        if match.gene and (match.kind not in _WEAK or known[name].kind != "alias"):
            return stem


def _respell(name: str, known: Mapping[str, Match], organism: str) -> tuple[Match, str]:
    """Gene of a date or a name of several parts or with `.` for `-`, and the part or spelling that names it."""
    if _NO_GENE.match(name):
        return UNMAPPED, name
    symbol = _symbol_of_date(name)
    if symbol:
        # the table of the mouse has Sept2
        match = max(look_up(symbol, organism), look_up(symbol.capitalize(), organism))
        is_present = any(match.gene == other.gene for other in known.values())
        return (UNMAPPED, name) if is_present else (match, symbol)
    matches: dict[str, tuple[Match, str]] = {}  # by gene: the first part that names it
    for part in filter(None, _PARTS.split(name.strip("\"' "))):
        match = look_up(part, organism)
        if match.gene:
            matches.setdefault(match.gene, (match, part))
    if len(matches) == 1:
        return next(iter(matches.values()))
    dashed = name.replace(".", "-")
    match = _symbol(dashed, gene_table(organism))
    if dashed != name and dashed not in known and match.kind in ("symbol", "previous"):
        return match, dashed
    return UNMAPPED, name


def _symbol_of_date(name: str) -> str:
    """The symbol that became this date; empty if `name` is no date, or of several symbols."""
    date = _DATE.fullmatch(name)
    if date is None:
        return ""
    family = _FAMILY_BY_MONTH[date["month"] or date["month_number"]]
    symbol = f"{family}{int(date['day'] or date['day_of_month'])}"
    return "" if symbol in _AMBIGUOUS else symbol


def _shared_prefixes(
    unknown: Iterable[str], known: Mapping[str, Match], organism: str
) -> list[str]:
    """Prefixes whose removal makes genes of most names that have them; the longest first."""
    carriers: dict[str, list[str]] = {}
    for name in unknown:
        for separator in list(_SEPARATORS.finditer(name, 1, _MAX_PREFIX))[:_MAX_SEPARATORS]:
            carriers.setdefault(name[: separator.end()], []).append(name)
    min_names = max(2, _MIN_PREFIX_SHARE * len(known))
    present = {match.gene for match in known.values() if match.gene}
    accepted = list[str]()
    for prefix, names in sorted(carriers.items(), key=lambda item: -len(item[1])):
        if len(names) < min_names or _NO_GENE.match(prefix):
            continue
        if look_up(prefix.rstrip("-_.:|"), organism).kind != "unmapped":
            continue  # two genes in one name
        genes = {look_up(name.removeprefix(prefix), organism).gene for name in names} - {""}
        is_copy = len(genes & present) > _MAX_REPEATED * len(genes)  # such as TP53 and intron_TP53
        if len(genes) >= _MIN_KNOWN_SHARE * len(names) and not is_copy:
            accepted.append(prefix)
            present |= genes
    return sorted(accepted, key=len, reverse=True)
