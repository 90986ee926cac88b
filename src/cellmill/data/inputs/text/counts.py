"""Tables of counts in text, as GEO, featureCounts and umi_tools have them: .csv, .tsv or .txt,
plain or gzip.

A table has a header and a column of names. Genes are in rows or in columns: whichever names have
more Ensembl ids, common symbols or, the other way round, barcodes. Columns of text, and those of
featureCounts (Start, Length), describe the rows, as do totals. A table with one column of genes,
one of cells and one of counts, as of umi_tools, has a count a line. Tables are read in blocks of
rows; genes in rows are transposed on disk.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.arrays import row_numbers
from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import MAX_LENGTH, Pieces, StoredMatrix
from cellmill.data.inputs.source import CountSource, Format, require_matrix
from cellmill.data.inputs.text.tables import (
    BARCODE,
    ENSEMBL,
    cell_frame,
    find_separator,
    gene_frame,
    is_table,
    names_row_names,
    split_lines,
)
from cellmill.errors import DataError

_VALUES = 1 << 20  # in memory at once
_LOOKED_AT = 20  # rows whose fields say which columns have numbers
_LONGEST = 1 << 28  # bytes; longest line
_DESCRIPTIONS = frozenset(
    """
    chr chrom chromosome start end strand length gene_length exon_length entrez entrezid entrez_id entrezgene ncbi_id
    gc gc_content width total totals sum mean average n_cells ncells n_counts n_genes total_counts n_genes_by_counts
    ncount_rna nfeature_rna percent_mito percent.mt pct_counts_mt pct_counts_mito
    """.split()
)
_COUNT = frozenset("count counts umi umis umi_count n_umis reads n value midcount".split())
_CELL = frozenset("cell cells barcode cell_barcode cell_id cellid cell_index cb".split())
# the first counts
_GENE = ("gene", "gene_name", "genes", "symbol", "geneid", "gene_id", "feature", "feature_name")
_MOST_LONG = 12  # columns of a table with a count a line
_MOST_REPEATED = 4  # rows of one name, on average; a gene may have some
_COMMON = frozenset(
    """
    actb gapdh malat1 b2m rplp0 rpl13 rps27 eef1a1 tmsb4x ftl fth1 vim cd74 mt-co1 mt-nd1 hsp90ab1 tubb tp53 myc ptprc
    """.split()
)
_NO_GENE = "-"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")


@dataclass(frozen=True)
class _Layout:
    """What the first lines of a table say."""

    path: Path
    separator: str
    skipped: int  # lines up to and with the header
    header: list[str]
    names: int | None  # the column of the names of rows
    numbers: list[int]  # columns of counts
    texts: list[int]  # columns that describe a row, its name among them

    def chunks(self, types: Mapping[int, type]) -> Iterator[pd.DataFrame]:
        """Columns with the given types, some rows at a time. Raises DataError for a row of more
        fields, if counts are among them: pandas drops such fields where it reads some of the
        columns.
        """
        width = len(self.header)
        has_text = str in types.values()
        only_text = {*types.values()} == {str}
        every = {column: types.get(column, str) for column in range(width)}
        with open_bytes(self.path) as text, reading(self.path), warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than columns
            chunks = pd.read_csv(
                text, sep=self.separator, header=None, skiprows=self.skipped, names=range(width),
                dtype=str if only_text else every, usecols=list(types) if only_text else None,
                keep_default_na=not has_text, index_col=False, chunksize=max(1, _VALUES // width), encoding="utf-8",
            )  # fmt: skip
            for chunk in chunks:
                yield chunk[list(types)].fillna(
                    {column: "" for column, kind in types.items() if kind is str}
                )


def _open_table(path: Path, file: Any, counts: str) -> CountSource:
    require_matrix(path, counts, ["X"])
    layout = _read_layout(path)
    columns = _long_columns(layout)
    if columns is not None:
        return _open_long(path, counts, layout, *columns)
    if not layout.numbers:
        raise DataError(
            f"{path}: expected columns of counts after the names of rows, got text in all columns"
        )
    rows = _read_rows(layout)
    names = [layout.header[column] for column in layout.numbers]
    genes_in_rows = layout.names is not None and _are_genes(
        rows.iloc[:, 0].tolist(), names, rows.columns[0]
    )
    matrix = _TextMatrix(layout, len(rows), genes_in_rows)
    if genes_in_rows:
        var, _ = gene_frame(rows.set_axis(["", *rows.columns[1:]], axis=1))
        obs = pd.DataFrame(index=pd.Index(names, dtype=object))
        note = "genes are in rows, cells in columns"
    else:
        var = pd.DataFrame(index=pd.Index(names, dtype=object))
        obs = cell_frame(rows)
        note = "cells are in rows, genes in columns"
    described = list(rows.columns[1:])
    note += (
        f"; not counts but descriptions of rows: {', '.join(described[:8])}" if described else ""
    )
    return CountSource(path, counts, matrix, obs, var, notes=[note])


def _read_rows(layout: _Layout) -> pd.DataFrame:
    """Columns of text by name, that of the rows' names first. Rows without names are numbered."""
    if layout.texts:
        rows = pd.concat([*layout.chunks(dict.fromkeys(layout.texts, str))], ignore_index=True)
    else:
        lengths = [len(chunk) for chunk in layout.chunks({layout.numbers[0]: np.float64})]
        rows = pd.DataFrame(index=range(sum(lengths)))
    rows = rows.set_axis([layout.header[column] for column in layout.texts], axis=1)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    if layout.names is None:
        rows.insert(0, "", [f"row {number}" for number in range(1, len(rows) + 1)])
        return rows
    name = layout.header[layout.names]
    n_names = rows[name].nunique()
    if len(rows) > _MOST_REPEATED * n_names:
        raise DataError(
            f"{layout.path}: its {n_names:,} names of rows are on {len(rows):,} rows: expected a row for each gene or "
            "cell, or a table with one column of genes, one of cells and one of counts, named gene, cell and count"
        )
    return rows[[name, *(other for other in rows.columns if other != name)]]


def _read_layout(path: Path) -> _Layout:
    lines, n_before = _first_lines(path)
    separator = find_separator(lines)
    if not separator:
        separator = next(
            (each for each in ("\t", ",", ";") if all(each in line for line in lines)), ""
        )
    if not separator:
        raise DataError(
            f"{path}: expected columns separated by tabs, commas or semicolons, got {lines[0][:60]!r}"
        )
    header, *rows = split_lines([line for line in lines if line.strip()], separator)
    width = Counter(map(len, rows)).most_common(1)[0][0]
    for number, row in enumerate(rows):
        if len(row) != width:
            line = n_before + 2 + number
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
    n_numbers = sum(_is_number(name) for name in header[1:])
    # then the names of cells may be numbers
    has_names = names_row_names(header) or _has_known_name(header)
    if not has_names and (n_numbers == width - 1 or (n_numbers and width <= _MOST_LONG)):
        raise DataError(
            f"{path}: expected a header with names, got numbers in the first line; add one"
        )
    if width > MAX_LENGTH:
        raise DataError(f"{path}: has {width:,} columns; the limit is {MAX_LENGTH:,}")
    return _divide_columns(path, separator, n_before + 1, header, rows)


def _has_known_name(header: Sequence[str]) -> bool:
    known = {*_GENE, *_CELL, *_COUNT, *_DESCRIPTIONS}
    return any(name.lower() in known for name in header)


def _first_lines(path: Path) -> tuple[list[str], int]:
    """The header and some rows, and the number of comments and empty lines before them."""
    with open_bytes(path) as file, reading(path):
        first: list[str] = []
        n_bytes = 0
        n_before = 0
        for line in iter(lambda: file.readline(_LONGEST), b""):
            text = line.decode("utf-8-sig").rstrip("\r\n")
            n_bytes += len(line)
            if not first and (text.startswith("#") or not text.strip()):
                n_before += 1
                continue
            first.append(text)
            if len(first) > _LOOKED_AT or (n_bytes > 1 << 26 and len(first) > 2):
                break
    if len(first) < 2:
        raise DataError(f"{path}: expected a header and rows of counts, got {len(first)} lines")
    return first, n_before


def _divide_columns(
    path: Path, separator: str, skipped: int, header: list[str], rows: list[list[str]]
) -> _Layout:
    """Which column names the rows, which have counts, and which describe the rows. Raises DataError
    for a column of counts with something else among them.
    """
    values = [[row[column] for row in rows] for column in range(len(header))]
    n_numbers = [sum(map(_is_number, column)) for column in values]
    is_text = [2 * n < len(rows) for n in n_numbers]
    names = _column_of_names(header, values, is_text)
    # commas at the end of lines
    is_empty = [not name and not any(column) for name, column in zip(header, values)]
    describes = [name.lower().replace(" ", "_") in _DESCRIPTIONS for name in header]
    numbers = [
        column
        for column in range(len(header))
        if column != names and not (is_text[column] or describes[column] or is_empty[column])
    ]
    for column in numbers:
        if n_numbers[column] < len(rows):
            bad = next(row for row in rows if not _is_number(row[column]))
            where = f" in row {bad[names]!r}" if names is not None else ""
            raise DataError(
                f"{path}: expected counts in column {header[column]!r}, got {bad[column]!r}{where}"
            )
    texts = [
        column for column in range(len(header)) if column not in {*numbers} and not is_empty[column]
    ]
    if names is not None:
        texts = [names, *(column for column in texts if column != names)]
    return _Layout(path, separator, skipped, header, names, numbers, texts)


def _column_of_names(
    header: Sequence[str], values: Sequence[Sequence[str]], is_text: Sequence[bool]
) -> int | None:
    """The first column, unless it holds counts; then the first of text, if any."""
    first = values[0]
    is_named = names_row_names(header) or header[0].lower() in {*_CELL, *_GENE, *_DESCRIPTIONS}
    if is_text[0] or is_named or len({*first}) == len(first):
        return 0
    return next((column for column in range(1, len(header)) if is_text[column]), None)


def _is_number(text: str) -> bool:
    word = text.strip().lower()
    return word in ("", "na", "nan", "inf", "-inf") or _NUMBER.fullmatch(word) is not None


def _are_genes(rows: Sequence[str], columns: Sequence[str], header: str) -> bool:
    """True if genes are in rows: by the header of their names, else by the names of rows and
    columns.

    Also if none of these shows it, as most tables have it.
    """
    if header.lower() in (*_CELL, *_GENE):
        return header.lower() in _GENE

    def likeness(names: Sequence[str]) -> float:
        n_ids = sum(bool(ENSEMBL.search(name)) for name in names)
        n_common = sum(name.partition("|")[0].lower() in _COMMON for name in names)
        n_barcodes = sum(bool(BARCODE.search(name)) for name in names)
        return (n_ids - n_barcodes) / max(1, len(names)) + 0.1 * min(n_common, 5)

    return likeness(rows) >= likeness(columns)


class _TextMatrix(StoredMatrix):
    """Counts of a table with genes in rows or in columns."""

    def __init__(self, layout: _Layout, n_rows: int, genes_in_rows: bool):
        self._layout = layout
        self._genes_in_rows = genes_in_rows
        shape = (n_rows, len(layout.numbers))
        self.shape = shape[::-1] if genes_in_rows else shape

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for chunk in self._layout.chunks(dict.fromkeys(self._layout.numbers, np.float64)):
            yield sp.csr_matrix(chunk.to_numpy())

    def pieces(self) -> Pieces | None:
        return self._transposed() if self._genes_in_rows else None

    def _transposed(self) -> Pieces:
        first = 0
        for part in self.parts(0):
            coordinates = part.tocoo()
            yield coordinates.col, coordinates.row + first, coordinates.data
            first += part.shape[0]


def _long_columns(layout: _Layout) -> tuple[int, int, int] | None:
    """Columns of gene, cell and count of a table with a count a line; None for a table with a
    column a cell. Raises DataError if it has several columns of counts.
    """
    names = [name.lower() for name in layout.header]
    if len(names) > _MOST_LONG:
        return None
    cells = [column for column, name in enumerate(names) if name in _CELL]
    genes = [names.index(name) for name in _GENE if name in names]
    numbers = [column for column in layout.numbers if column not in (*cells, *genes)]
    counts = [column for column in numbers if names[column] in _COUNT]
    if len(cells) != 1 or not genes or not counts:
        return None
    if len(counts) > 1:
        shown = ", ".join(layout.header[column] for column in counts)
        raise DataError(
            f"{layout.path}: it has a line for each gene in each cell, and {len(counts)} columns of counts: {shown}; "
            "keep one of them"
        )
    return genes[0], cells[0], counts[0]


def _open_long(
    path: Path, counts: str, layout: _Layout, gene: int, cell: int, count: int
) -> CountSource:
    genes: dict[str, int] = {}
    cells: dict[str, int] = {}
    for chunk in layout.chunks({gene: str, cell: str}):
        for column, known in ((gene, genes), (cell, cells)):
            for name in chunk[column].unique():
                known.setdefault(name, len(known))
    matrix = _LongMatrix(layout, (gene, cell, count), genes, cells)
    notes = [f"a line is a count: {len(genes):,} genes and {len(cells):,} cells"]
    if _NO_GENE in genes:
        notes.append(
            "gene '-' has the reads that STARsolo gave to no gene, as it marks them in its BAM file"
        )
    var = pd.DataFrame(index=pd.Index(list(genes), dtype=object))
    obs = pd.DataFrame(index=pd.Index(list(cells), dtype=object))
    return CountSource(path, counts, matrix, obs, var, notes=notes)


class _LongMatrix(StoredMatrix):
    """Counts of a table with a gene, a cell and a count a line, numbered by `genes` and `cells`."""

    def __init__(
        self,
        layout: _Layout,
        columns: tuple[int, int, int],
        genes: dict[str, int],
        cells: dict[str, int],
    ):
        self._layout = layout
        self._columns = columns
        self._genes = genes
        self._cells = cells
        self.shape = (len(cells), len(genes))

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As of every matrix. Raises DataError for a gene that has two lines in one cell."""
        first = 0
        for part in super().blocks(block):
            part.sort_indices()
            rows = row_numbers(part.indptr)
            repeats = (np.diff(part.indices) == 0) & (np.diff(rows) == 0)
            if repeats.any():
                at = int(repeats.argmax())
                names = (
                    list(self._cells)[first + int(rows[at])],
                    list(self._genes)[int(part.indices[at])],
                )
                raise DataError(
                    f"{self._layout.path}: damaged: cell {names[0]!r} has two lines of gene {names[1]!r}"
                )
            yield part
            first += part.shape[0]

    def pieces(self) -> Pieces:
        gene, cell, count = self._columns
        for chunk in self._layout.chunks({gene: str, cell: str, count: np.float64}):
            rows = chunk[cell].map(self._cells).to_numpy(np.int64)
            columns = chunk[gene].map(self._genes).to_numpy(np.int64)
            yield rows, columns, chunk[count].to_numpy()


FORMAT = Format(
    "text table of counts (.csv, .tsv, .txt, also .gz)",
    lambda path, file: file is None and path.is_file() and is_table(path),
    _open_table,
)
