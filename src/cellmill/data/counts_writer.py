"""Writing cells as .h5ad with contiguous, unfiltered, aligned CSR, so that a row is one pread, or compressed.

anndata's own writer chunks sparse arrays.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import write_elem

from cellmill.data.h5_file import ALIGNMENT, NewH5File, create_h5
from cellmill.data.text_columns import plain_text


def count_dtype(largest: int) -> np.dtype[Any]:
    """uint16 if counts up to `largest` fit, else uint32."""
    return np.dtype("<u2" if largest <= np.iinfo(np.uint16).max else "<u4")


def write_cells(
    path: Path,
    obs: pd.DataFrame | Callable[[], pd.DataFrame],
    var: pd.DataFrame,
    blocks: Iterable[sp.csr_matrix],
    nnz: int | None,
    dtype: np.dtype[Any],
    ordered: bool = False,
    compression: Literal["gzip"] | None = None,
    ranked: bool = False,
) -> None:
    """Write an .h5ad whose X is CSR: `dtype` data, int32 indices, int64 indptr, little-endian.

    `obs` may be a function, called after the last block: for when only the blocks tell which cells remain. `blocks` are
    rows of X in order, columns in any order within a row; one is held in memory at a time. With `nnz`, the number of
    values in all blocks, arrays are contiguous, unfiltered and aligned to 4,096 bytes; without it they grow in chunks.
    With `compression` they are in chunks of 4,096 values, shuffled and compressed at level 1 (`compressed_rows`).
    `ordered` says that rows are sequences, and `ranked` that these are genes in rank order. Raises OSError naming
    `path` when the disk is full; `path` is then left as it was.
    """
    with create_h5(path, 1 if compression else ALIGNMENT) as file:  # padding would be half of a compressed chunk
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        group = file.create_group("X")
        indptr = _write_values(file, group, blocks, _layout(nnz, compression), np.dtype(dtype))
        group.create_dataset("indptr", data=indptr)
        shape = np.array([len(indptr) - 1, len(var)], np.int64)
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
        frame = plain_text(obs() if callable(obs) else obs)
        assert len(frame) == len(indptr) - 1, f"{len(frame)} obs for {len(indptr) - 1} rows"
        write_elem(file, "obs", frame)
        write_elem(file, "var", plain_text(var))
        for name in ("layers", "obsm", "obsp", "varm", "varp"):
            write_elem(file, name, {})
        kinds = {name: True for name, holds in (("ordered", ordered), ("ranked", ranked)) if holds}
        write_elem(file, "uns", {"cellmill": kinds} if kinds else {})


def write_anndata(file: h5py.File, adata: Any) -> None:
    """Write an AnnData to a new file. `AnnData` turns text into the `str` of pandas 3, which anndata 0.12 refuses."""
    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    if adata.X is not None:
        write_elem(file, "X", adata.X)
    for name in ("obs", "var"):
        write_elem(file, name, plain_text(getattr(adata, name)))
    for name in ("layers", "obsm", "obsp", "uns", "varm", "varp"):
        write_elem(file, name, dict(getattr(adata, name)))


def _write_values(
    file: NewH5File, group: h5py.Group, blocks: Iterable[sp.csr_matrix], layout: dict[str, Any], dtype: np.dtype[Any]
) -> np.ndarray:
    """Write `data` and `indices` of `group`; return indptr."""
    data = group.create_dataset("data", dtype=dtype.newbyteorder("<"), **layout)
    indices = group.create_dataset("indices", dtype="<i4", **layout)
    start, indptr = 0, [np.zeros(1, np.int64)]
    for block in blocks:
        assert not block.nnz or block.data.max() <= np.iinfo(dtype).max, f"a count is too large for {dtype}"
        stop = start + block.nnz
        if "maxshape" in layout:
            data.resize((stop,))
            indices.resize((stop,))
        if block.nnz:
            data[start:stop] = block.data.astype(dtype, copy=False)
            indices[start:stop] = block.indices
            file.raise_if_failed()
        indptr.append(start + block.indptr[1:].astype(np.int64))
        start = stop
    assert start == len(data), f"expected {len(data)} values, got {start}"
    return np.concatenate(indptr)


def _layout(nnz: int | None, compression: Literal["gzip"] | None) -> dict[str, Any]:
    """Arguments of h5py for an array of `nnz` values; None is for one that grows."""
    if nnz is None:
        return {"shape": (0,), "maxshape": (None,), "chunks": (1 << 18,)}
    if compression is None:
        return {"shape": (nnz,)}
    # larger chunks are a tenth smaller, but a row is then read with many others
    return {"shape": (nnz,), "chunks": (min(nnz, 4096),), "compression": "gzip", "compression_opts": 1, "shuffle": True}
