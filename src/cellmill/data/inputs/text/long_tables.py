"""Tables with a count a line, as umi_tools writes them.

They have one column of genes, one of cells and one of counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from cellmill.data.arrays import named_frame
from cellmill.data.inputs.matrices import Pieces, StoredMatrix
from cellmill.data.inputs.source import CountSource
from cellmill.data.inputs.text.layout import CELL, COUNT, GENE, MAX_LONG, TableLayout
from cellmill.data.rows import row_numbers
from cellmill.errors import DataError

_NO_GENE = "-"


class LongColumns(NamedTuple):
    """Columns of a table with a count a line, by position."""

    gene: int
    cell: int
    counts: int


def find_long_columns(layout: TableLayout) -> LongColumns | None:
    """Columns of a table with a count a line; None for a table with a column a cell.

    Raises DataError if it has several columns of counts, or numbers in place of names.
    """
    names = [name.lower() for name in layout.header]
    if len(names) > MAX_LONG:
        return None
    if names[-3:] == ["i", "j", "x"]:
        raise DataError(
            f"{layout.path}: expected names of genes and cells, got their numbers, as in R's summary of a sparse "
            "matrix; write the names, in columns called gene, cell and count"
        )
    cells = [column for column, name in enumerate(names) if name in CELL]
    genes = [names.index(name) for name in GENE if name in names]
    numbers = [column for column in layout.numbers if column not in (*cells, *genes)]
    counts = [column for column in numbers if names[column] in COUNT]
    if not counts and [names[column] for column in numbers] == ["x"]:
        counts = numbers  # of R's summary of a sparse matrix, with names
    if len(cells) != 1 or not genes or not counts:
        return None
    if len(counts) > 1:
        shown = ", ".join(layout.header[column] for column in counts)
        raise DataError(
            f"{layout.path}: it has a line for each gene in each cell, and {len(counts)} columns of counts: {shown}; "
            "keep one of them"
        )
    return LongColumns(genes[0], cells[0], counts[0])


def open_long_table(
    path: Path, counts: str, layout: TableLayout, columns: LongColumns
) -> CountSource:
    """Open a table with a count a line; genes and cells are numbered as they come."""
    genes: dict[str, int] = {}
    cells: dict[str, int] = {}
    for chunk in layout.chunks({columns.gene: str, columns.cell: str}):
        for column, numbers in ((columns.gene, genes), (columns.cell, cells)):
            for name in chunk[column].unique():
                numbers.setdefault(name, len(numbers))
    notes = [f"a line is a count: {len(genes):,} genes and {len(cells):,} cells"]
    if _NO_GENE in genes:
        notes.append(
            "gene '-' has the reads that STARsolo gave to no gene, as it marks them in its BAM file"
        )
    matrix = _LongMatrix(layout, columns, genes, cells)
    return CountSource(
        path, counts, matrix, named_frame(list(cells)), named_frame(list(genes)), notes=notes
    )


class _LongMatrix(StoredMatrix):
    """Counts of a table with a count a line, whose genes and cells have numbers."""

    def __init__(
        self,
        layout: TableLayout,
        columns: LongColumns,
        genes: dict[str, int],
        cells: dict[str, int],
    ):
        self._layout = layout
        self._columns = columns
        self._genes = genes
        self._cells = cells
        self.shape = (len(cells), len(genes))

    def blocks(self, block: int, first: int = 0) -> Iterator[sp.csr_matrix]:
        """Same as `StoredMatrix.blocks`. Raises DataError for a gene that has two lines in one cell."""
        for part in super().blocks(block, first):
            part.sort_indices()
            rows = row_numbers(part.indptr)
            is_repeat = (np.diff(part.indices) == 0) & (np.diff(rows) == 0)
            if is_repeat.any():
                i = int(is_repeat.argmax())
                cell = list(self._cells)[first + int(rows[i])]
                gene = list(self._genes)[int(part.indices[i])]
                raise DataError(
                    f"{self._layout.path}: damaged: cell {cell!r} has two lines of gene {gene!r}"
                )
            yield part
            first += part.shape[0]

    def pieces(self) -> Pieces:
        gene, cell, count = self._columns
        for chunk in self._layout.chunks({gene: str, cell: str, count: np.float64}):
            rows = chunk[cell].map(self._cells).to_numpy(np.int64)
            columns = chunk[gene].map(self._genes).to_numpy(np.int64)
            yield rows, columns, chunk[count].to_numpy()
