"""Tables of counts in text: .csv, .tsv or .txt, plain or gzip.

GEO, featureCounts and umi_tools have them. A table has a header and a column of names. Genes are in
rows or in columns, as the header of the rows' names says, else whichever names have more Ensembl ids,
common symbols or, the other way round, barcodes and numbers of cells. Tables are read in blocks of
rows; genes in rows are transposed on disk. `long_tables.py` reads tables with a count a line.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.arrays import named_frame
from cellmill.data.inputs.matrices import Pieces, StoredMatrix
from cellmill.data.inputs.source import CountSource, Format, mark_missing, require_matrix
from cellmill.data.inputs.text.layout import CELL, FIELD_OF_VIEW, GENE, TableLayout, read_layout
from cellmill.data.inputs.text.long_tables import find_long_columns, open_long_table
from cellmill.data.inputs.text.tables import (
    BARCODE,
    ENSEMBL,
    cell_frame,
    gene_frame,
    is_numbering,
    is_table,
)
from cellmill.errors import DataError

_MAX_REPEATED = 4  # rows of one name, on average; a gene may have some
_MAX_LISTED = 8  # columns named in a note
_COMMON = frozenset(
    """
    actb gapdh malat1 b2m rplp0 rpl13 rps27 eef1a1 tmsb4x ftl fth1 vim cd74 mt-co1 mt-nd1 hsp90ab1 tubb tp53 myc ptprc
    """.split()
)
# MERSCOPE names its cells by long numbers; numbers of genes (Entrez) have at most 10 digits
_NUMBERED_CELL = re.compile(r"(?i)\d{11,}|(?:cell|nucleus|spot)[-_. ]?\d+")


def _open_table(path: Path, file: Any, counts: str) -> CountSource:
    require_matrix(path, counts, ["X"])
    layout = read_layout(path)
    long_columns = find_long_columns(layout)
    if long_columns is not None:
        return open_long_table(path, counts, layout, long_columns)
    if not layout.numbers:
        raise DataError(
            f"{path}: expected columns of counts after the names of rows, got text in all columns"
        )
    rows = _read_rows(layout)
    name, *described = rows.columns
    columns = [layout.header[column] for column in layout.numbers]
    likely_genes = [layout.header[column] for column in layout.likely_genes]
    sure = [column for column in described if column not in likely_genes]
    # without texts, rows that are numbered have no names of genes
    is_named = layout.names is not None and (sure or not is_numbering(rows[name]))
    likeness = [_likeness_to_genes(rows[name].tolist()), _likeness_to_genes(columns)]
    is_said = name.lower() in (*CELL, *GENE)
    # as in most tables, if neither shows it
    are_genes = name.lower() in GENE if is_said else likeness[0] >= likeness[1]
    genes_in_rows = is_named and are_genes
    if genes_in_rows:
        var, _ = gene_frame(rows.set_axis(["", *described], axis=1))
        obs = named_frame(columns)
        missing: list[str] = []
        written: dict[str, Any] = {}
        note = "genes are in rows, cells in columns"
        if not is_said and likeness[0] == likeness[1]:
            note += "; if it is the other way round, name the first column cell"
    else:
        layout = layout.with_genes_in_columns()
        described = sure
        var = named_frame([layout.header[column] for column in layout.numbers])
        obs, written, missing = mark_missing(cell_frame(rows[[name, *described]]))
        note = "cells are in rows, genes in columns"
    if described:
        note += f"; not counts but descriptions of rows: {', '.join(described[:_MAX_LISTED])}"
    if FIELD_OF_VIEW in rows and "cell_ID" in rows:
        n_outside = (rows["cell_ID"] == "0").sum()
        if n_outside:
            note += (
                f'; {n_outside:,} rows are what lies outside of cells: set filter to cell_ID != "0"'
            )
    matrix = _TextMatrix(layout, len(rows), genes_in_rows)
    return CountSource(path, counts, matrix, obs, var, notes=[note, *missing], written=written)


def _read_rows(layout: TableLayout) -> pd.DataFrame:
    """Columns of text by name, the rows' names first. Rows without names are numbered."""
    if layout.texts:
        rows = pd.concat([*layout.chunks(dict.fromkeys(layout.texts, str))], ignore_index=True)
    else:
        chunks = layout.chunks({layout.numbers[0]: np.float64})
        rows = pd.DataFrame(index=range(sum(map(len, chunks))))
    rows = rows.set_axis([layout.header[column] for column in layout.texts], axis=1)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    if layout.names is None:
        rows.insert(0, "", [f"row {number}" for number in range(1, len(rows) + 1)])
        return rows
    names = rows.iloc[:, 0]
    if is_numbering(names) and len(layout.numbers) == 1 and len(rows.columns) > 1:
        names = rows.iloc[:, 1]  # numbered rows with one count may be a gene of a cell each
    n_names = names.nunique()
    if len(rows) > _MAX_REPEATED * n_names:
        raise DataError(
            f"{layout.path}: its {n_names:,} names of rows are on {len(rows):,} rows: expected a row for each gene or "
            "cell, or a table with one column of genes, one of cells and one of counts, named gene, cell and count"
        )
    return rows


def _likeness_to_genes(names: Sequence[str]) -> float:
    n_ids = sum(bool(ENSEMBL.search(name)) for name in names)
    n_cells = sum(bool(BARCODE.search(name) or _NUMBERED_CELL.fullmatch(name)) for name in names)
    n_common = sum(name.partition("|")[0].lower() in _COMMON for name in names)
    return (n_ids - n_cells) / max(1, len(names)) + 0.1 * min(n_common, 5)


class _TextMatrix(StoredMatrix):
    """Counts of a table with genes in rows or in columns."""

    def __init__(self, layout: TableLayout, n_rows: int, genes_in_rows: bool):
        self._layout = layout
        self._genes_in_rows = genes_in_rows
        n_columns = len(layout.numbers)
        self.shape = (n_columns, n_rows) if genes_in_rows else (n_rows, n_columns)

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for chunk in self._layout.chunks(dict.fromkeys(self._layout.numbers, np.float64)):
            yield sp.csr_matrix(chunk.to_numpy())

    def pieces(self) -> Pieces | None:
        return self._transpose() if self._genes_in_rows else None

    def _transpose(self) -> Pieces:
        first = 0
        for part in self.parts(0):
            coordinates = part.tocoo()
            yield coordinates.col, coordinates.row + first, coordinates.data
            first += part.shape[0]


FORMAT = Format(
    "text table of counts (.csv, .tsv, .txt, also .gz)",
    lambda path, file: file is None and path.is_file() and is_table(path),
    _open_table,
)
