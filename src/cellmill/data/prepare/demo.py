"""Demo data: the 700 peripheral blood cells shipped with scanpy, with their counts recovered.

`10x_pbmc68k_reduced.h5ad` (Zheng et al. 2017, doi:10.1038/ncomms14049; BSD-3-Clause) has
log(1 + counts per 10,000) of 765 genes in `raw` and totals in `n_counts`, precise enough to recover
the counts exactly.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import read_h5ad

from cellmill.data.arrays import TARGET_SUM
from cellmill.errors import DataError

FILE = "datasets/10x_pbmc68k_reduced.h5ad"
RESIDUAL = 0.1  # largest accepted distance from a whole number; 0.082 is the largest observed
OBS = ["bulk_labels", "n_counts", "percent_mito"]


def read_demo() -> tuple[pd.DataFrame, pd.DataFrame, sp.csr_matrix]:
    """obs, var (index gene symbol) and counts, CSR `(700, 765)` uint16, of the demo cells.

    The file is read from the scanpy package, which is not imported. Raises DataError when it is
    missing.
    """
    spec = find_spec("scanpy")
    if spec is None or spec.origin is None:
        raise DataError(
            "the demo cells are part of the scanpy package: pip install 'cellmill[demo]'"
        )
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; this scanpy does not ship the demo cells: pip install 'scanpy>=1.10'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anndata warns about the old format of each part
        shipped = read_h5ad(path)
    counts = recover_counts(shipped.raw.X.tocsr(), shipped.obs["n_counts"].to_numpy(), path)
    names = pd.Index(shipped.raw.var_names.astype(str), name="gene")
    return shipped.obs[OBS].copy(), pd.DataFrame(index=names), counts


def recover_counts(logs: sp.csr_matrix, totals: np.ndarray, path: Path) -> sp.csr_matrix:
    """Counts, uint16, from `logs` = log(1 + 10,000 counts / totals).

    Raises DataError when one is more than `RESIDUAL` away from a whole number.
    """
    total = np.repeat(totals.astype(np.float64), np.diff(logs.indptr))
    exact = np.expm1(logs.data.astype(np.float64)) * total / TARGET_SUM
    whole = np.rint(exact)
    residual = float(np.abs(exact - whole).max(initial=0))
    if residual > RESIDUAL:
        raise DataError(
            f"{path}: cannot recover counts: expected whole numbers within {RESIDUAL}, got one {residual:.3f} away"
        )
    counts = sp.csr_matrix((whole.astype(np.uint16), logs.indices, logs.indptr), shape=logs.shape)
    counts.sort_indices()
    counts.eliminate_zeros()
    return counts
