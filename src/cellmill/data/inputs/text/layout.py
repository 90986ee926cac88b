"""Layout of a text table of counts: separator, header, and what each column holds.

The first lines of a file show it. Columns of text, and those of featureCounts (Start, Length),
describe the rows, as do totals.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import MAX_LENGTH
from cellmill.data.inputs.text.tables import find_separator, names_row_names, split_lines
from cellmill.errors import DataError

# names of columns, in lower case
DESCRIPTIONS = frozenset(
    """
    chr chrom chromosome start end strand length gene_length exon_length entrez entrezid entrez_id entrezgene ncbi_id
    gc gc_content width total totals sum mean average n_cells ncells n_counts n_genes total_counts n_genes_by_counts
    ncount_rna nfeature_rna percent_mito percent.mt pct_counts_mt pct_counts_mito
    """.split()
)
# human and mouse genes that are spelled as a description of genes (END is an alias)
_GENES = frozenset({"GC", "Gc", "END"})
COUNT = frozenset("count counts umi umis umi_count n_umis reads n value midcount".split())
FIELD_OF_VIEW = "fov"
CELL = frozenset("cell cells barcode cell_barcode cell_id cellid cell_index cb".split())
# the first that a table has counts
GENE = ("gene", "gene_name", "genes", "symbol", "geneid", "gene_id", "feature", "feature_name")
_KNOWN = frozenset((*GENE, *CELL, *COUNT, *DESCRIPTIONS))
MAX_LONG = 12  # columns of a table with a count a line
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")
_VALUES = 1 << 20  # values in memory at once
_ROWS = 20  # rows whose fields show which columns have numbers
_LINE_BYTES = 1 << 28  # longest line
_HEAD_BYTES = 1 << 26  # bytes after which fewer rows than _ROWS are enough


@dataclass(frozen=True)
class TableLayout:
    """Columns of a table, by position."""

    path: Path
    separator: str
    skipped: int  # lines up to and including the header
    header: list[str]
    names: int | None  # the column of the names of rows
    numbers: list[int]  # columns of counts
    likely_genes: list[int]  # columns of numbers that describe genes, or have the counts of one
    texts: list[int]  # columns that describe a row, its name first

    def with_genes_in_columns(self) -> "TableLayout":
        """The layout of a table with genes in columns, where GC is a gene, and not the share of G and C."""
        genes = [column for column in self.likely_genes if column in self.texts]
        texts = [column for column in self.texts if column not in genes]
        return replace(self, numbers=sorted(self.numbers + genes), texts=texts)

    def chunks(self, types: Mapping[int, type]) -> Iterator[pd.DataFrame]:
        """Columns with the given types, some rows at a time.

        Raises DataError for a row of more fields, if counts are read; pandas drops such fields
        where it reads only some columns.
        """
        width = len(self.header)
        texts = [column for column, kind in types.items() if kind is str]
        only_text = len(texts) == len(types)
        dtypes = {column: types.get(column, str) for column in range(width)}
        with open_bytes(self.path) as text, reading(self.path), warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than columns
            chunks = pd.read_csv(
                text,
                sep=self.separator,
                header=None,
                skiprows=self.skipped,
                names=range(width),
                dtype=str if only_text else dtypes,
                usecols=list(types) if only_text else None,
                keep_default_na=not texts,
                index_col=False,
                chunksize=max(1, _VALUES // width),
                encoding="utf-8",
            )
            for chunk in chunks:
                yield chunk[list(types)].fillna(dict.fromkeys(texts, ""))


def read_layout(path: Path) -> TableLayout:
    """Read the layout of the table at `path`.

    Raises DataError if it has no header, or columns of counts with anything else among them.
    """
    lines, n_before = _first_lines(path)
    separator = find_separator(lines) or _common_separator(lines)
    if not separator:
        raise DataError(
            f"{path}: expected columns separated by tabs, commas or semicolons, got {lines[0][:60]!r}"
        )
    header, *rows = split_lines([line for line in lines if line.strip()], separator)
    width = Counter(map(len, rows)).most_common(1)[0][0]
    for line, row in enumerate(rows, n_before + 2):
        if len(row) != width:
            raise DataError(
                f"{path}: expected {width:,} columns in line {line:,}, as in most lines, got {len(row):,}; is the file "
                "complete?"
            )
    if len(header) == width - 1 and not names_row_names(header):
        header = ["", *header]  # R does not name the column of row names
    if len(header) != width:
        raise DataError(
            f"{path}: expected a header with as many columns as the rows, got {len(header)} and {width}"
        )
    header = [name.strip() for name in header]
    n_numbers = sum(map(_is_number, header[1:]))
    # with a known name in the header, names of cells may be numbers
    has_names = names_row_names(header) or any(name.lower() in _KNOWN for name in header)
    if not has_names and (n_numbers == width - 1 or (n_numbers and width <= MAX_LONG)):
        raise DataError(
            f"{path}: expected a header with names, got numbers in the first line; add one, or remove the # before it"
        )
    if width > MAX_LENGTH:
        raise DataError(f"{path}: has {width:,} columns; the limit is {MAX_LENGTH:,}")
    return _divide_columns(path, separator, n_before + 1, header, rows)


def _common_separator(lines: Sequence[str]) -> str:
    """A separator that every line has; empty if there is none."""
    for separator in ("\t", ",", ";"):
        if all(separator in line for line in lines):
            return separator
    return ""


def _first_lines(path: Path) -> tuple[list[str], int]:
    """The header and some rows, and the number of comments and empty lines before them."""
    with open_bytes(path) as file, reading(path):
        first: list[str] = []
        n_bytes = 0
        n_before = 0
        for line in iter(lambda: file.readline(_LINE_BYTES), b""):
            text = line.decode("utf-8-sig").rstrip("\r\n")
            n_bytes += len(line)
            if not first and (text.startswith("#") or not text.strip()):
                n_before += 1
                continue
            first.append(text)
            if len(first) > _ROWS or (n_bytes > _HEAD_BYTES and len(first) > 2):
                break
    if len(first) < 2:
        raise DataError(f"{path}: expected a header and rows of counts, got {len(first)} lines")
    return first, n_before


def _divide_columns(
    path: Path, separator: str, skipped: int, header: list[str], rows: list[list[str]]
) -> TableLayout:
    """Find the columns that name the rows, have counts, or describe the rows."""
    values = list(zip(*rows))
    n_numbers = [sum(map(_is_number, column)) for column in values]
    is_text = [2 * n < len(rows) for n in n_numbers]
    names = _column_of_names(header, values, is_text)
    numbers = []
    likely_genes = []
    texts = [] if names is None else [names]
    for column, name in enumerate(header):
        is_empty = not name and not any(values[column])  # commas at the end of lines
        if column == names or is_empty:
            continue
        key = name.lower().replace(" ", "_")
        # CosMx numbers its cells within fields of view
        if is_text[column] or key in DESCRIPTIONS or key in CELL or key == FIELD_OF_VIEW:
            texts.append(column)
            if name in _GENES and n_numbers[column] == len(rows):
                likely_genes.append(column)
            continue
        numbers.append(column)
        if n_numbers[column] < len(rows):
            bad = next(row for row in rows if not _is_number(row[column]))
            where = f" in row {bad[names]!r}" if names is not None else ""
            raise DataError(
                f"{path}: expected counts in column {name!r}, got {bad[column]!r}{where}"
            )
    return TableLayout(path, separator, skipped, header, names, numbers, likely_genes, texts)


def _column_of_names(
    header: Sequence[str], values: Sequence[Sequence[str]], is_text: Sequence[bool]
) -> int | None:
    """The first column, unless it holds counts; then the first of text, if any."""
    first = values[0]
    is_named = names_row_names(header) or header[0].lower() in {*CELL, *GENE, *DESCRIPTIONS}
    if is_text[0] or is_named or len(set(first)) == len(first):
        return 0
    return list(is_text).index(True) if any(is_text) else None


def _is_number(text: str) -> bool:
    word = text.strip().lower()
    return word in ("", "na", "nan", "inf", "-inf") or _NUMBER.fullmatch(word) is not None
