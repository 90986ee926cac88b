#!/usr/bin/env bash
# scanpy 1.11.5: normalize_total(exclude_highly_expressed=True) leaves a cell as raw counts if all its counts are excluded.
#
# A gene that has more than `max_fraction` of the counts in any one cell is left out of the sizes of all cells. A cell with
# counts of such genes only, as plasma and red blood cells nearly are, then has the size 0, and cells of size 0 are not divided. It
# keeps its counts among cells that add up to the target. The warning, that some cells have zero counts, is wrong about it, and
# a cell with few other counts becomes many times the target.
#
# Seen, target 10,000, max_fraction .5: cells with 100 of one gene or 50 of another keep 100 and 50; a cell with 10 of
# each of four genes adds up to 20,000; one with 90, 5, 3 and 2 to 200,000. In CSR and dense.
# Source: our own run. Guess before it: such a cell is divided by all its counts, or is refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp

print("scanpy", version("scanpy"))
counts = np.array([[100, 0, 0, 0], [0, 50, 0, 0], [10, 10, 10, 10], [90, 5, 3, 2]], np.float32)
found = {}
for name, matrix in {"CSR": sp.csr_matrix(counts), "dense": counts.copy()}.items():
    adata = ad.AnnData(matrix)
    sc.pp.normalize_total(adata, target_sum=1e4, exclude_highly_expressed=True, max_fraction=0.5)
    found[name] = np.asarray(adata.X.sum(1)).ravel().round().tolist()
    print(f"{name}: sums of cells {found[name]}")
assert found["CSR"] == found["dense"] == [100, 50, 20000, 200000]
PYTHON
