"""A toy input format: a text table of cells x genes, comma-separated, with names of genes in its
first line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.inputs.source import CountSource, DeclaredNames, Format


class TextMatrix(StoredMatrix):
    """Lines of a table, read in blocks of cells."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self._path = path
        self.shape = shape

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for table in pd.read_csv(self._path, index_col=0, chunksize=block):
            yield sp.csr_matrix(table.to_numpy())


def open_table(path: Path, file: Any, counts: str) -> CountSource:
    """Open the one matrix of a table."""
    cells = pd.read_csv(path, usecols=[0], index_col=0).index
    genes = pd.read_csv(path, index_col=0, nrows=0).columns
    matrix = TextMatrix(path, (len(cells), len(genes)))
    return CountSource(path, counts, matrix, pd.DataFrame(index=cells), pd.DataFrame(index=genes))


FORMAT = Format(
    "toy .counts.csv",
    lambda path, file: path.name.endswith(".counts.csv"),
    open_table,
    lambda path, file: DeclaredNames(columns=[], counts=["X"]),
)
