"""Families of names that are not genes of an organism with a table, and what to do about them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cellmill.data.genes.lookup import MISSING_NAMES
from cellmill.data.genes.tables import gene_table

_MIN_SHARE = 0.3  # share of the unknown names
_TO_IDS = "replace them by Ensembl gene ids, with the annotation that the file was made with"
_OTHER_ORGANISM = (
    "set preprocess.organism to null to use the names as they are, or map them to "
    "human or mouse orthologs"
)
_NUMBER = re.compile(r"[0-9]+")


class Family(NamedTuple):
    """Names of one pattern."""

    pattern: re.Pattern[str]
    kind: str  # as in "they look like ..."
    remedy: str


def _family(pattern: str, kind: str, remedy: str) -> Family:
    return Family(re.compile(pattern), kind, remedy)


FAMILIES = (
    _family(
        r"ENS[A-Z]*T\d{11}(\.\d+)?",
        "Ensembl ids of transcripts",
        "add up the transcripts of each gene first",
    ),
    _family(r"ENS[A-Z]*P\d{11}(\.\d+)?", "Ensembl ids of proteins", _TO_IDS),
    _family(
        r"ENS[A-Z]*E\d{11}(\.\d+)?", "Ensembl ids of exons", "add up the exons of each gene first"
    ),
    _family(
        r"ENS(?!MUSG)[A-Z]{2,}G\d{11}(\.\d+)?", "Ensembl ids of another organism", _OTHER_ORGANISM
    ),
    _family(
        r"(FBgn|WBGene)\d+|AT[1-5MC]G\d{5}|Y[A-P][LR]\d{3}[WC].*",
        "genes of another organism",
        _OTHER_ORGANISM,
    ),
    _family(
        r"[NX][MR]_\d+(\.\d+)?", "RefSeq transcripts", "add up the transcripts of each gene first"
    ),
    _family(
        r"[NX]P_\d+(\.\d+)?|[OPQ]\d[A-Z0-9]{3}\d|[A-NR-Z]\d[A-Z][A-Z0-9]{2}\d",
        "ids of proteins",
        _TO_IDS,
    ),
    _family(r"\d+(_[a-z])?_at|AFFX.*", "Affymetrix probes", "map probes to genes first"),
    _family(r"ILMN_\d+|A_\d\d_P\d+|cg\d{8}", "probes of an array", "map probes to genes first"),
    _family(
        r"(chr)?[0-9XYM]{1,2}[:_-]\d+[_-]\d+",
        "regions of the genome",
        "use the gene expression matrix",
    ),
    _family(
        r"(?i)(adt|ab|cite|prot|protein|hto|totalseq|abseq|antibody)[-_.:].*"
        r"|.*(totalseq|hashtag|isotype|\|pabo).*|anti[-_ ].*|.+-[acgt]{15}",
        "antibodies",
        "use the matrix of gene expression",
    ),
    _family(
        r"(?i)(sg|sgrna|grna|guide|crispr)[-_.:].*|.*[-_]sg\d+",
        "guides",
        "use the matrix of gene expression",
    ),
    _family(r"(hsa|mmu)-(mir|let|miR)-.*", "microRNAs of miRBase", _TO_IDS),
)


def describe_names(names: Sequence[str], organism: str) -> str | None:
    """Say what names that are not genes of `organism` look like, and what to do about them.

    None if they look like nothing known.
    """
    names = [name for name in names if name not in MISSING_NAMES]
    min_names = max(1.0, _MIN_SHARE * len(names))
    numbers = [int(name) for name in names if _NUMBER.fullmatch(name)]
    if numbers and len(numbers) >= min_names:
        return _describe_numbers(numbers)
    tally = Counter(map(_family_of, names))
    tally.pop(None, None)
    for family, count in tally.most_common(1):
        if family is not None and count >= min_names:
            return f"{count:,} look like {family.kind}: {family.remedy}"
    same_letters = _in_other_case(names, organism)
    if same_letters and len(same_letters) >= min_names:
        name, symbol = next(iter(same_letters.items()))
        return (
            f"{len(same_letters):,} differ from {organism} symbols in upper and lower case, as "
            f"{name!r} from {symbol!r}"
        )
    return None


def _describe_numbers(numbers: list[int]) -> str:
    if sorted(numbers) == list(range(min(numbers), min(numbers) + len(numbers))):
        return f"{len(numbers):,} are row numbers: the names of the genes were lost when the file was written"
    return f"{len(numbers):,} are numbers, such as the gene ids of NCBI (Entrez): {_TO_IDS}"


def _family_of(name: str) -> Family | None:
    return next((family for family in FAMILIES if family.pattern.fullmatch(name)), None)


def _in_other_case(names: Iterable[str], organism: str) -> dict[str, str]:
    """Symbols that differ from a name only in upper and lower case, by name."""
    symbols = {symbol.upper(): symbol for symbol in gene_table(organism).symbols.values()}
    respelled = {name: symbols.get(name.upper(), name) for name in names}
    return {name: symbol for name, symbol in respelled.items() if symbol != name}
