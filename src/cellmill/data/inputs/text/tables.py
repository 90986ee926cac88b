"""Text tables of names: separators, quotes, headers, and whether a table names genes or cells.

R writes names in quotes and rows with numbers, Excel writes semicolons, and many tools write a
header. A column of row numbers is dropped. A first line is a header if it has a word such as
`gene_id`, or if it alone has no Ensembl id or barcode.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pandas as pd

from cellmill.data.arrays import named_frame
from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import MAX_LENGTH
from cellmill.errors import DataError

GENES = "genes"
CELLS = "cells"
# how the Single Cell Expression Atlas and bcbio call the names of a matrix of genes x cells
_ENDS_OF_NAMES = {
    "mtx_rows": GENES,
    "mtx.rownames": GENES,
    "mtx_cols": CELLS,
    "mtx.colnames": CELLS,
}
ENDS = (".tsv", ".csv", ".txt", *(f".{end}" for end in _ENDS_OF_NAMES))
WORDS = {  # in the name of a file
    GENES: {"gene", "genes", "feature", "features", "var", "probes", "symbols", "cols"},
    CELLS: {"barcode", "barcodes", "cell", "cells", "obs", "rows", "metadata", "samples", "meta"},
}
_VAGUE_WORDS = ("metadata", "meta")
AXES = ("rows", "cols")  # words for cells and genes in alevin, and the other way round in R
_HEADERS = frozenset(
    """
    gene genes gene_id gene_ids geneid gene_name gene_names genename gene_symbol symbol symbols hgnc_symbol
    feature features feature_id feature_name feature_type feature_types ensembl ensembl_id ensembl_gene_id
    barcode barcodes cell cells cell_id cellid cell_barcode cell_name cb bc_wells x v1 v2 index name names id
    """.split()
)
_HEADER_WORDS = frozenset(
    "gene genes symbol symbols barcode barcodes cell cells feature features name names id".split()
)
ENSEMBL = re.compile(r"(?:^|[-_|:./ (])ENS[A-Z]*G\d{11}")  # alone or after a symbol
BARCODE = re.compile(r"(?:^|[^A-Za-z])[ACGT]{8,}(?:$|[^A-Za-z])")
_DIGIT = re.compile(r"\d")
_SAMPLE = 200  # rows that are looked at
_CHUNK = 1 << 20  # bytes
_TENX_TYPES = frozenset(
    """
    gene expression|antibody capture|crispr guide capture|crispr direct capture|peaks|custom|multiplexing capture
    |antigen capture|vdj|vdj-t|vdj-b|cell hashing
    """.replace("\n    ", "")
    .strip()
    .split("|")
)


@dataclass(frozen=True)
class TextTable:
    """A table as its first rows show it.

    `n_lines` counts every line up to the last that is not empty.
    """

    path: Path
    n_lines: int
    separator: str  # empty: one column
    first: list[list[str]]
    axis: str | None = None  # role that the table of the other axis shows to be left

    @property
    def has_header(self) -> bool:
        """True if the first line clearly has the names of columns."""
        return is_header(self.first[0], self.first[1:]) if self.first else False

    @property
    def may_have_header(self) -> bool:
        """True if the first line differs from the others, without being clearly a header."""
        if not self.first or self.has_header:
            return False
        return _differs_as_a_header(self.first[0], self.first[1:])

    def fits(self, n: int) -> bool:
        """True if the table has `n` rows after its header, if any."""
        if not self.first:
            return False
        first, *others = self.first
        if self.n_lines == n:
            # the first gene may be a transgene, and have a name where all others have ids
            is_gene = self.content() == GENES and not _has_known_header(first, others)
            return is_gene or not self.has_header
        is_longer = self.n_lines == n + 1
        return is_longer and (self.has_header or _differs_as_a_header(first, others))

    def n_rows(self) -> int:
        """Number of rows after a clear header."""
        return self.n_lines - self.has_header

    def role(self) -> str | None:
        """GENES or CELLS by the file's name, else by its first rows; None if neither says."""
        words = name_words(self.path)
        named_roles: list[str | None] = []
        for before, word in pairwise(["", *words]):
            if word in AXES and (self.content() or self.axis) is not None:
                named_roles.append(self.content() or self.axis)
            elif word in WORDS[GENES]:
                named_roles.append(GENES)
            # gene-metadata has genes, and so may have the cells of genes.mtx
            elif word in _VAGUE_WORDS and before in WORDS[GENES]:
                named_roles.append(None)
            elif word in WORDS[CELLS]:
                named_roles.append(CELLS)
        if len(set(named_roles)) == 1:
            return named_roles[0]
        return self.content() or (named_roles[-1] if named_roles else None)

    def content(self) -> str | None:
        """GENES or CELLS by Ensembl ids and barcodes in the first rows."""
        rows = self.first[1:] or self.first
        for role, pattern in ((GENES, ENSEMBL), (CELLS, BARCODE)):
            if 2 * sum(_has_match(row, pattern) for row in rows) > len(rows):
                return role
        return None

    def read(self, n: int) -> pd.DataFrame:
        """Read all `n` rows as columns of text, named by the header, else by number from 0.

        Row numbers are left out.
        """
        with open_bytes(self.path) as file, reading(self.path):
            text = file.read().decode("utf-8-sig")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")
        header: list[str] | None = None
        if len(lines) == n + 1:
            [header] = split_lines(lines[:1], self.separator)
            del lines[0]
        if len(lines) != n:
            raise DataError(f"{self.path}: it changed while it was read")
        columns = _columns(lines, self.separator)
        # R does not name the column of row names
        if header is not None and len(header) == len(columns) - 1:
            header = ["", *header]
        if header is not None and len(header) < len(columns):
            raise DataError(
                f"{self.path}: has {len(columns)} columns, and {len(header)} names in its header"
            )
        names = range(len(columns)) if header is None else header[: len(columns)]
        frame = pd.DataFrame(dict(enumerate(columns)), dtype=object).set_axis(list(names), axis=1)
        frame = frame.loc[:, ~frame.columns.duplicated()]
        numbers = [name for name in frame if is_numbering(frame[name])]
        return frame.drop(columns=numbers[: frame.shape[1] - 1])


def name_words(path: Path) -> list[str]:
    """Words of a file's name without its endings, in lower case."""
    name = path.name
    for end, role in _ENDS_OF_NAMES.items():
        name = re.sub(rf"\.{re.escape(end)}(\.gz)?$", f".{role}", name, flags=re.IGNORECASE)
    stem = re.sub(r"(\.(tsv|csv|txt|mtx|gz))+$", "", name, flags=re.IGNORECASE)
    return [word.lower() for word in re.findall(r"[A-Za-z]+|\d+", stem)]


def is_table(path: Path) -> bool:
    """True for a file whose name ends as that of a text table, plain or gzip."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith(ENDS) and not path.name.startswith(".")


def peek(path: Path, max_lines: int) -> TextTable | None:
    """Separator, first rows and number of lines of a table; None if it has more than `max_lines` lines."""
    n_lines = 0
    head = b""
    tail = b""
    with open_bytes(path) as file, reading(path):
        for chunk in iter(partial(file.read, _CHUNK), b""):
            if chunk.endswith(b"\r"):
                chunk += file.read(1)
            if len(head) < _CHUNK:
                head += chunk
            n_lines += _count_lines(chunk)
            tail = (tail + chunk)[-4096:]
            if n_lines > max_lines + len(tail) + 1:  # empty lines at the end do not count
                return None
    blank = tail[len(tail.rstrip(b"\r\n")) :]
    n_lines += bool(head.strip(b"\r\n")) - _count_lines(blank)
    if n_lines > min(max_lines, MAX_LENGTH):
        return None
    text = head.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    if not n_lines:
        return TextTable(path, 0, "", [])
    lines = text.rstrip("\n").split("\n")[:_SAMPLE]
    separator = find_separator(lines)
    rows = split_lines(lines, separator)
    # without a header `|` is a part of names, such as AAACCCAAGTTAAAA|sample1
    if separator == "|" and not _has_known_header(rows[0], rows[1:]):
        separator = ""
        rows = split_lines(lines, separator)
    return TextTable(path, n_lines, separator, rows)


def _count_lines(chunk: bytes) -> int:
    returns = chunk.count(b"\r")
    pairs = chunk.count(b"\r\n") if returns else 0
    return chunk.count(b"\n") + returns - pairs


def find_separator(lines: Sequence[str]) -> str:
    """Find the character that divides every line after the first into equally many fields.

    Empty if there is none.
    """
    body = [line for line in lines[1:] if line] or list(lines)
    for separator in ("\t", ",", ";", "|", " "):
        if separator == " " and not all(line.startswith('"') for line in body):
            continue  # a name may have a space; R puts quotes
        if separator == "," and ";" in lines[0] and "," not in lines[0]:
            continue  # decimal commas
        widths = {len(fields) for fields in split_lines(body, separator)}
        if separator == "\t" and min(widths, default=1) > 1:
            return separator
        has_ids = separator == "|" and any("ENS" in line for line in body)
        if len(widths) == 1 and widths != {1} and not has_ids:
            return separator
    return ""


def split_lines(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Split each line into fields, without their quotes.

    Quotes that do not come in pairs are part of the text.
    """
    if not separator:
        return [[_unquoted(line)] for line in lines]
    if any('"' in line for line in lines):
        rows = list(csv.reader(lines, delimiter=separator))
        if len(rows) == len(lines):
            return rows
    return [line.split(separator) for line in lines]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _has_match(row: Sequence[str], pattern: re.Pattern[str]) -> bool:
    return any(map(pattern.search, row))


def _all_match(rows: Sequence[Sequence[str]], pattern: re.Pattern[str]) -> bool:
    return all(_has_match(row, pattern) for row in rows)


def _columns(lines: list[str], separator: str) -> list[list[str]]:
    """Columns that every line has."""
    if not separator:
        return [[_unquoted(line) for line in lines]]
    rows = split_lines(lines, separator)
    width = min(map(len, rows), default=1)
    return [[row[column].strip() for row in rows] for column in range(width)]


def is_numbering(column: pd.Series) -> bool:
    """True for numbers from 0 or 1 on."""
    if len(column) < 2 or column.iloc[0] not in ("0", "1"):
        return False
    start = int(column.iloc[0])
    return column.tolist() == [str(start + row) for row in range(len(column))]


def is_header(first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Return True if `first` is a header.

    It has a usual name of a column, or is the only line without an Ensembl id or barcode.
    """
    if _has_match(first, ENSEMBL) or _has_match(first, BARCODE):
        return False
    if _has_known_header(first, others):
        return True
    return len(others) > 2 and (_all_match(others, ENSEMBL) or _all_match(others, BARCODE))


def _has_known_header(first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """True if the first line has a usual name of a column."""
    return not _HEADERS.isdisjoint(text.strip().lower() for text in _only_in_first(first, others))


def names_row_names(header: Sequence[str]) -> bool:
    """Return True if the first field of a header names the column of row names.

    Then no field is missing; tables of R leave this one out.
    """
    first = header[0].strip().lower() if header else ""
    return not first or first in _HEADERS


def _only_in_first(first: Sequence[str], others: Sequence[Sequence[str]]) -> list[str]:
    """Fields of the first row that no other row has: `Gene` in every row is a type and no header."""
    repeated = {(column, text) for row in others for column, text in enumerate(row)}
    return [text for column, text in enumerate(first) if (column, text) not in repeated]


def _differs_as_a_header(first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """True if the first line of a table with one line too many differs from the others.

    It has a word of a header, or no digits where all others have some. It has no id or barcode.
    """
    if _has_match(first, ENSEMBL) or _has_match(first, BARCODE):
        return False
    if len(first) > 1 and first[0] == "":
        return True
    for field, *values in zip(first, *others):
        if not _DIGIT.search(field) and len(values) > 2 and all(map(_DIGIT.search, values)):
            return True
    fields = " ".join(_only_in_first(first, others))
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", fields)
    return not _HEADER_WORDS.isdisjoint(map(str.lower, words))


def gene_frame(
    table: pd.DataFrame, more: Sequence[pd.DataFrame] = ()
) -> tuple[pd.DataFrame, str | None]:
    """Make `var` from a table of genes, with every text column.

    It is indexed by Ensembl id, else by the first column. Columns without a header become `symbol`,
    `feature_types` (if they hold types of 10x) and `column_N`. Returns a sentence too where the third
    column holds something else than types.
    """
    columns: dict[str, list[str]] = {}
    sentence = None
    for number, (name, values) in enumerate(table.items()):
        texts = values.astype(str).tolist()
        kinds = {text.strip().lower() for text in texts}
        if isinstance(name, str) and name:
            key = name if name != "feature_types" or kinds & _TENX_TYPES else "feature_kind"
        elif number == 2 and kinds & _TENX_TYPES:
            key = "feature_types"
        elif number and share(texts, ENSEMBL) > 0.5:
            key = "gene_ids"
        elif number == 1:
            key = "symbol"
        else:
            key = f"column_{number + 1}"
        if number == 2 and key != "feature_types" and not isinstance(name, str):
            sentence = (
                f"its third column is no type of 10x ({_listed(texts)}); all rows are read as genes"
            )
        columns[key] = texts
    for other in more:
        for name, values in other.items():
            key = name if isinstance(name, str) and name else "symbol"
            columns.setdefault(
                key if key not in columns else f"{key}_2", values.astype(str).tolist()
            )
    with_ids = [key for key, texts in columns.items() if share(texts, ENSEMBL) > 0.5]
    names = columns.pop([*with_ids, *columns][0])
    return named_frame(names, columns), sentence


def cell_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Make `obs` from a table of cells; headers are kept.

    It is indexed by the first column of barcodes, else of unique text.
    """
    names = list(table)
    shares = {name: share(table[name].astype(str).tolist()[:_SAMPLE], BARCODE) for name in names}
    barcodes = [name for name in names if shares[name] > 0.5]
    unique = [name for name in names if table[name].is_unique]
    index = [*barcodes, *unique, names[0]][0]
    # a header, or the number of a column without one, is no name of the index of an AnnData
    return named_frame(
        table[index].astype(str).tolist(), label_columns(table.drop(columns=[index]))
    )


def label_columns(table: pd.DataFrame) -> dict[str, pd.Categorical]:
    """Columns of a table that have a header, as categories of text."""
    kept = [name for name in table if isinstance(name, str) and name]
    return {name: pd.Categorical(table[name].astype(str)) for name in kept}


def share(texts: Sequence[str], pattern: re.Pattern[str]) -> float:
    """Share of the first texts in which a pattern is found."""
    sample = texts[:_SAMPLE]
    return sum(bool(pattern.search(text)) for text in sample) / max(1, len(sample))


def _listed(texts: Sequence[str]) -> str:
    """The most frequent values with their numbers."""
    numbers = pd.Series(texts, dtype=object).value_counts()
    shown = ", ".join(f"{value!r} {number:,}" for value, number in numbers.iloc[:4].items())
    return shown + (f" and {len(numbers) - 4:,} more values" if len(numbers) > 4 else "")
