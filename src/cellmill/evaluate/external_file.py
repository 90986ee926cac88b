"""Embeddings that a model of another package wrote to an .h5ad: obsm["X_emb"], or X, of the same cells in order."""

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem

from cellmill.data.h5_file import one_line, open_h5
from cellmill.errors import DataError

KEY = "X_emb"  # key in obsm


def read_external(path: Path, names: pd.Index, command: str) -> np.ndarray:
    """Vectors `(cells, width)` float32, finite. Raises DataError, beginning with `command`, for anything else."""
    if not path.exists():
        raise DataError(f"{command}: it ended well and wrote no file to {{out}}")
    with open_h5(path, command) as file:
        try:
            own = pd.Index(read_elem(file["obs"][file["obs"].attrs["_index"]])).astype(str)
            has_key = KEY in file.get("obsm", {})
            stored = file["obsm"][KEY] if has_key else file.get("X")
        except Exception as error:  # damaged bytes raise almost anything
            raise DataError(f"{command}: what it wrote is no AnnData: {one_line(error)}") from None
        where = f"obsm[{KEY!r}]" if has_key else "X"
        _check_cells(own, names, command)
        if not isinstance(stored, h5py.Dataset) or stored.ndim != 2 or stored.dtype.kind not in "fiu":
            form = f"shape {stored.shape} of {stored.dtype}" if isinstance(stored, h5py.Dataset) else "no dense array"
            raise DataError(f"{command}: expected a dense array of numbers in obsm[{KEY!r}] or X, got {form}")
        if stored.shape[0] != len(names) or not stored.shape[1]:
            raise DataError(f"{command}: expected {len(names):,} rows in {where}, got shape {stored.shape}")
        try:
            vectors = np.asarray(stored[:], np.float32)
        except Exception as error:
            raise DataError(f"{command}: {where} of what it wrote cannot be read: {one_line(error)}") from None
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{command}: {int((~finite).sum()):,} cells have numbers in {where} that are not finite, the first is "
            f"{names[int((~finite).argmax())]!r}; expected an embedding of every cell"
        )
    return vectors


def _check_cells(own: pd.Index, names: pd.Index, command: str) -> None:
    if len(own) == len(names) and (own == names).all():
        return
    at = next((i for i, (a, b) in enumerate(zip(own, names)) if a != b), min(len(own), len(names)))
    there, here = (repr(index[at]) if at < len(index) else "no cell" for index in (own, names))
    raise DataError(
        f"{command}: expected the {len(names):,} cells of {{cells}} in their order, got {len(own):,}; the first that "
        f"differs is cell {at + 1:,}, {there} instead of {here}"
    )
