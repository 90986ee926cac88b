"""Packed cells for other programs: as an AnnData of chosen rows, or as an .h5ad with X."""

from collections.abc import Sequence
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp

from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.h5 import write_cells
from cellmill.data.inputs.packed_cells import is_packed, open_packed
from cellmill.data.packing.cell_file import OpenFiles
from cellmill.data.rows import row_offsets
from cellmill.errors import DataError


def read_cells(path: Path, rows: Sequence[int] | np.ndarray | None = None) -> ad.AnnData:
    """Cells of a shard, or of a file that preprocess wrote, with counts as CSR; all without `rows`.

    Only the bytes of these rows are read. Genes ascend in a row; sequences keep their order.
    Raises DataError when the file is damaged, or for a row that it does not have.
    """
    packed = open_packed(path, OpenFiles())
    chosen = np.arange(packed.n_obs) if rows is None else np.asarray(rows, np.int64).ravel()
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < packed.n_obs:
        raise DataError(
            f"{path}: expected rows from 0 to {packed.n_obs - 1:,}, got {chosen.min():,} to {chosen.max():,}"
        )
    lengths = (packed.indptr[chosen + 1] - packed.indptr[chosen]).astype(np.int64)
    offsets = row_offsets(lengths)
    genes = np.empty(offsets[-1], np.int32)
    counts = np.empty(offsets[-1], packed.kind.dtype)
    ascending = np.argsort(chosen, kind="stable")  # rows that stand together are read at once
    packed.read_rows(chosen[ascending], offsets[:-1][ascending], genes, counts)
    packed.close()
    x = sp.csr_matrix((counts, genes, offsets), shape=(len(chosen), packed.kind.n_genes))
    with open_counts(path) as reader:
        if not reader.ordered:
            x.sort_indices()
        uns = {"cellmill": reader.recorded} if reader.recorded else {}
        return ad.AnnData(x, obs=reader.obs.iloc[chosen], var=reader.var, uns=uns)


def plain_cells(path: Path, folder: Path) -> Path:
    """`path`, or if its counts are packed, a file of its name with X, written to `folder`."""
    if not path.is_file() or not is_packed(path):
        return path
    out = folder / path.name
    unpack_cells(path, out)
    return out


def unpack_cells(path: Path, out: Path) -> int:
    """Write all cells of a shard, or of a file that preprocess wrote, to `out`; return their number.

    `out` is an .h5ad whose X is CSR.
    """
    packed = open_packed(path, OpenFiles())
    with open_counts(path) as reader:
        write_cells(
            out,
            reader.obs,
            reader.var,
            reader.rows(),
            packed.nnz,
            packed.kind.dtype,
            ordered=reader.ordered,
            ranked=reader.ranked,
            recorded=reader.recorded,
        )
        return reader.n_obs
