"""Counts of an AnnData in memory, as an input like those on disk. Nothing is copied but one block at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.anndata_layout import layer_name
from cellmill.data.inputs.source import CountSource
from cellmill.data.inputs.values import native
from cellmill.data.text_columns import text_index
from cellmill.errors import DataError, did_you_mean


class MemoryMatrix:
    """A numpy array or scipy matrix of cells x genes."""

    def __init__(self, values: Any) -> None:
        # a matrix stored by gene is transposed once: slices of cells would each read all of it
        self._values = values.tocsr() if sp.issparse(values) else values
        self.shape: tuple[int, int] = values.shape

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        for first in range(0, self.shape[0], block):
            rows = self._values[first : first + block]
            yield sp.csr_matrix(rows if sp.issparse(rows) else native(rows))

    def close(self) -> None:
        """Do nothing: there is no file."""


def open_memory(adata: Any, counts: str, dataset: str) -> CountSource:
    """The matrix `counts` (`X`, `raw` or the name of a layer) of an AnnData, called `dataset` in messages.

    Raises DataError for a matrix that is missing, or is neither of numpy nor of scipy.
    """
    if adata.isbacked:
        raise DataError(f"{dataset}: it is backed by {adata.filename}; pass adata.to_memory(), or embed the file")
    values = {"X": adata.X} | ({} if adata.raw is None else {"raw": adata.raw.X})
    values |= {layer_name(name): matrix for name, matrix in adata.layers.items() if name is not None}
    there = [name for name, matrix in values.items() if matrix is not None]
    if counts not in there:
        raise DataError(f"{dataset}: no {counts} (`counts`); {did_you_mean(counts, there)}")
    matrix = values[counts]
    if not (sp.issparse(matrix) or isinstance(matrix, np.ndarray)):
        kind = f"{type(matrix).__module__}.{type(matrix).__name__}"
        raise DataError(f"{dataset}: {counts} is a {kind}; expected a numpy array or a scipy matrix")
    obs, var = (
        table.set_axis(text_index(table.index), axis=0)
        for table in (adata.obs, (adata.raw if counts == "raw" else adata).var)
    )
    others = [name for name in there if name != counts]
    return CountSource(Path(dataset), counts, MemoryMatrix(matrix), obs, var, others, option="argument `counts`")
