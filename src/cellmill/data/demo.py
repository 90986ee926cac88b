"""The demo data: 700 peripheral blood cells that the scanpy package ships, as the counts they were.

`10x_pbmc68k_reduced.h5ad` (Zheng et al. 2017, doi:10.1038/ncomms14049; BSD-3-Clause with scanpy) holds
log(1 + counts per 10,000) of 765 genes in `raw`, and each cell's total over all genes in `n_counts`. The logarithms
were rounded to float32, so the counts come back exactly.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import read_h5ad

from cellmill.errors import DataError

FILE = "datasets/10x_pbmc68k_reduced.h5ad"
RESIDUAL = 0.1  # largest distance from a whole number; 0.082 is seen
OBS = ["bulk_labels", "n_counts", "percent_mito"]


def shipped_file() -> Path:
    """The file in the scanpy package, which is found but not imported. Raises DataError when it is not there."""
    spec = find_spec("scanpy")
    if spec is None or spec.origin is None:
        raise DataError("the demo cells are part of the scanpy package: pip install 'cellmill[demo]'")
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise DataError(f"{path}: no such file; this scanpy does not ship the demo cells: pip install 'scanpy>=1.10'")
    return path


def read_demo(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, sp.csr_matrix]:
    """obs, var (index gene symbol) and counts, CSR `(700, 765)` uint16, of the shipped file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anndata says of each part that the file is old; nobody here can help it
        shipped = read_h5ad(path)
    counts = recover_counts(shipped.raw.X.tocsr(), shipped.obs["n_counts"].to_numpy(), path)
    names = pd.Index(shipped.raw.var_names.astype(str), name="gene")
    return shipped.obs[OBS].copy(), pd.DataFrame(index=names), counts


def recover_counts(logs: sp.csr_matrix, totals: np.ndarray, path: Path) -> sp.csr_matrix:
    """Whole counts behind `logs` = log(1 + 10,000 counts / totals); uint16.

    Raises DataError when one is further than 0.1 from a whole number.
    """
    exact = np.expm1(logs.data.astype(np.float64)) * np.repeat(totals.astype(np.float64), np.diff(logs.indptr)) / 1e4
    whole = np.rint(exact)
    if (residual := float(np.abs(exact - whole).max(initial=0))) > RESIDUAL:
        raise DataError(
            f"{path}: counts cannot be recovered: {residual:.3f} from a whole number, {RESIDUAL} is allowed"
        )
    counts = sp.csr_matrix((whole.astype(np.uint16), logs.indices, logs.indptr), shape=logs.shape)
    counts.sort_indices()
    counts.eliminate_zeros()
    return counts
