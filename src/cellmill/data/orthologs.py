"""One-to-one orthologs of human and mouse, which map genes of one organism to those of another.

The packaged table is Ensembl's (genes/README.md). A pair counts if both of its genes occur in no other pair; others, of
duplicated genes, would make counts of one gene those of several.
"""

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from cellmill.data.gene_tables import PREFIXES, gene_id
from cellmill.errors import ConfigError, DataError
from cellmill.files import refuse_special

PACKAGED = Path(__file__).parent / "genes" / "orthologs.tsv.gz"


@cache
def orthologs(organism: str, reference: str, table: Path | None = None) -> dict[str, str]:
    """Ensembl id of `reference` for ids of `organism`, from the packaged table or a user's.

    Raises ConfigError for a table that is missing, and DataError for one that lacks an organism or has no pair.
    """
    path = PACKAGED if table is None else table
    lines = _lines(path)
    header = [name.strip().lower() for name in next(lines, "").split("\t")]
    if missing := [name for name in (organism, reference) if name not in header]:
        raise DataError(
            f"{path}: expected a header with the columns {organism} and {reference}, of Ensembl ids; {missing[0]} is "
            "not there (preprocess.orthologs)"
        )
    places = [header.index(name) for name in (organism, reference)]
    pairs: set[tuple[str, str]] = set()
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if not line.strip() or not all(place < len(cells) and cells[place].strip() for place in places):
            continue  # a gene without an ortholog, as BioMart lists it
        names = [cells[place].strip() for place in places]
        ids = [gene_id(name, kind) for name, kind in zip(names, (organism, reference))]
        if not all(ids):
            wrong = ids.index("")
            kind = (organism, reference)[wrong]
            raise DataError(
                f"{path}, line {number}: expected an Ensembl id of {kind} ({PREFIXES[kind]}...), got "
                f"{names[wrong][:40]!r}"
            )
        pairs.add((ids[0], ids[1]))
    return _one_to_one(path, pairs)


def _one_to_one(path: Path, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    ours, theirs = Counter(own for own, _ in pairs), Counter(other for _, other in pairs)
    kept = {own: other for own, other in pairs if ours[own] == theirs[other] == 1}
    if not kept:
        raise DataError(f"{path}: has no pair of genes that occur in no other pair (preprocess.orthologs)")
    return kept


def _lines(path: Path) -> Iterator[str]:
    refuse_special(path)
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield from (line.rstrip("\r\n") for line in file)
    except FileNotFoundError:
        raise ConfigError(f"preprocess.orthologs: {path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
