"""Files of a user that name genes: sets (GMT), lists, edges. Names are matched to a vocabulary by their readers."""

from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import require_file

Edge = tuple[str, str]
"""Transcription factor and target, as they are written."""


def read_gene_sets(path: Path) -> dict[str, list[str]]:
    """Genes of each set of a GMT file, each once. Raises DataError naming the malformed line."""
    sets: dict[str, list[str]] = {}
    for number, fields in _lines(path):
        genes = [gene for gene in fields[2:] if gene]
        if not fields[0] or not genes:
            raise DataError(
                f"{path}, line {number}: expected a name, a description and genes, separated by tabs (GMT), got "
                f"{len(fields)} columns"
            )
        if fields[0] in sets:
            raise DataError(f"{path}, line {number}: a second set {fields[0]!r}; leave one out")
        sets[fields[0]] = [*dict.fromkeys(genes)]
    return sets


def read_genes(path: Path) -> list[str]:
    """First column of a file without a header, each name once. Raises DataError for an empty file."""
    return [*dict.fromkeys(fields[0] for _, fields in _lines(path) if fields[0])]


def read_edges(path: Path) -> list[Edge]:
    """Edges, each once. Raises DataError naming the malformed line."""
    edges: dict[Edge, None] = {}
    for number, fields in _lines(path):
        if len(fields) < 2 or not fields[0] or not fields[1]:
            raise DataError(
                f"{path}, line {number}: expected a transcription factor and a target, separated by a tab, got "
                f"{len(fields)} columns"
            )
        edges[fields[0], fields[1]] = None
    return [*edges]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line that is neither empty nor a comment (#). Raises DataError if there is none."""
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    lines = [
        (number, [field.strip() for field in line.split("\t")])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        raise DataError(f"{path}: empty")
    return lines
