"""The tables that name rows and columns of a Matrix Market file.

They are files of its folder, chosen by prefix and by length.

    sample_matrix.mtx  sample_features.tsv.gz  sample_barcodes.tsv.gz            genes in rows: Cell Ranger, STARsolo
    cells_x_genes.mtx  cells_x_genes.barcodes.txt  cells_x_genes.genes.txt       cells in rows: kb-python
    quants_mat.mtx     quants_mat_rows.txt  quants_mat_cols.txt                  cells in rows: alevin-fry
    count_matrix.mtx   all_genes.csv  cell_metadata.csv                          cells in rows: Parse
    NAME.mtx  NAME.mtx_rows  NAME.mtx_cols                                       genes in rows: Expression Atlas
    NAME.mtx  NAME.mtx.rownames  NAME.mtx.colnames                               genes in rows: bcbio

Genes are in rows if the table of genes has as many names as the matrix has rows. A table belongs to
the matrix with which its name shares most words from the first on, so that files of several samples
in one folder are not mixed.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations, takewhile
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from cellmill.data.inputs.text.tables import CELLS, GENES, TextTable, is_table, name_words, peek
from cellmill.errors import DataError

_MAX_TABLES = 40  # tables of one matrix


class Companions(NamedTuple):
    """Names of a matrix, and whether its rows are cells."""

    genes: pd.DataFrame
    # further tables of the same genes, as kb-python writes their symbols
    more_genes: list[pd.DataFrame]
    cells: pd.DataFrame
    cells_in_rows: bool
    gene_file: Path


class _Choice(NamedTuple):
    score: tuple[int, ...]
    genes: TextTable
    cells: TextTable
    cells_in_rows: bool


def is_matrix(path: Path) -> bool:
    """True for a file whose name ends as that of a Matrix Market file, plain or gzip."""
    return path.name.lower().removesuffix(".gz").endswith(".mtx") and not path.name.startswith(".")


def matrix_stem(path: Path) -> str:
    """Return the name of a Matrix Market file without its endings."""
    return path.name[: len(path.name.lower().removesuffix(".gz").removesuffix(".mtx"))]


def find_companions(matrix: Path, n_rows: int, n_columns: int) -> Companions:
    """Find tables of names for a matrix of `n_rows` x `n_columns`.

    Raises DataError, naming the table, if one is too short.
    """
    tables = list(_tables_of(matrix, max(n_rows, n_columns)))
    choices = list(_choices(matrix, tables, n_rows, n_columns))
    if not choices:
        raise DataError(_explain(matrix, tables, n_rows, n_columns))
    best = max(choices, key=lambda choice: choice.score)
    n_genes, n_cells = (n_columns, n_rows) if best.cells_in_rows else (n_rows, n_columns)
    others = [
        table
        for table in tables
        if table.path not in (best.genes.path, best.cells.path)
        and table.role() == GENES
        and table.fits(n_genes)
    ]
    more = [table.read(n_genes) for table in others]
    return Companions(
        best.genes.read(n_genes),
        more,
        best.cells.read(n_cells),
        best.cells_in_rows,
        best.genes.path,
    )


def _tables_of(matrix: Path, longest: int) -> Iterator[TextTable]:
    """List the tables in the folder of a matrix that share more words with no other matrix.

    Tables that are longer than the matrix hold something else.
    """
    files = sorted(matrix.parent.iterdir())
    others = [file for file in files if is_matrix(file) and file != matrix]
    candidates = [file for file in files if is_table(file) and file.is_file()]
    nearest = []
    for file in candidates:
        closest = max((_shared(file, other) for other in others), default=0)
        if _shared(file, matrix) >= closest:
            nearest.append(file)
    nearest.sort(key=lambda file: -_shared(file, matrix))
    for file in nearest[:_MAX_TABLES]:
        table = peek(file, 2 * longest + 2)
        if table is not None and table.n_lines:
            yield table


def _shared(table: Path, matrix: Path) -> int:
    """Number of words from the first on that the names of two files have in common."""
    pairs = zip(name_words(table), name_words(matrix))
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _choices(
    matrix: Path, tables: Sequence[TextTable], n_rows: int, n_columns: int
) -> Iterator[_Choice]:
    words = name_words(matrix)
    for genes, cells in permutations(tables, 2):
        if genes.role() == CELLS or cells.role() == GENES:
            continue
        for cells_in_rows in (False, True):
            n_genes, n_cells = (n_columns, n_rows) if cells_in_rows else (n_rows, n_columns)
            if not (genes.fits(n_genes) and cells.fits(n_cells)):
                continue
            roles = (genes.role() == GENES) + (cells.role() == CELLS)
            contents = (genes.content() == GENES) + (cells.content() == CELLS)
            prefix = _shared(genes.path, matrix) + _shared(cells.path, matrix)
            # genes.txt before genes.names.txt
            shortest = -len(genes.path.name) - len(cells.path.name)
            is_named = words[:1] == ["cells"] or "rows" in name_words(cells.path)
            usual = int(cells_in_rows == is_named)  # as many cells as genes
            yield _Choice((roles, prefix, contents, usual, shortest), genes, cells, cells_in_rows)


def _explain(matrix: Path, tables: Sequence[TextTable], n_rows: int, n_columns: int) -> str:
    """Say which table is missing, or how many names each has and which is short."""
    genes = _likeliest(matrix, tables, GENES)
    cells = _likeliest(matrix, tables, CELLS)
    if genes is None or cells is None:
        stem = matrix_stem(matrix)
        prefix = stem.removesuffix("matrix") if stem.endswith("matrix") else f"{stem}_"
        wanted = f"{prefix}{'features' if genes is None else 'barcodes'}.tsv"
        present = [f"{table.path.name} with {table.n_rows():,}" for table in tables[:4]]
        return (
            f"{matrix.parent}: no {wanted}; expected it beside {matrix.name}, plain or as .gz, with {n_rows:,} or "
            f"{n_columns:,} names; there is {', '.join(present) or 'no text table'}"
        )
    n_genes = n_rows
    n_cells = n_columns
    if genes.fits(n_columns) or cells.fits(n_rows):
        n_genes = n_columns
        n_cells = n_rows
    faults = []
    for table, n in ((genes, n_genes), (cells, n_cells)):
        difference = table.n_rows() - n
        if difference:
            faults.append(
                f"{table.path.name} has {abs(difference):,} {'more' if difference > 0 else 'fewer'}"
            )
    return (
        f"{matrix}: has {n_rows:,} rows and {n_columns:,} columns, {genes.path.name} names {genes.n_rows():,} genes "
        f"and {cells.path.name} {cells.n_rows():,} cells: {' and '.join(faults)}; is it from another matrix, such as "
        "the raw or the filtered one?"
    )


def _likeliest(matrix: Path, tables: Sequence[TextTable], role: str) -> TextTable | None:
    """The table of a role whose name shares most words with the matrix's."""
    candidates = [table for table in tables if table.role() == role]
    return max(candidates, key=lambda table: _shared(table.path, matrix), default=None)
