#!/usr/bin/env bash
# scanpy 1.11.5 computes with counts in the matrix's own dtype in two functions: uint8 and int16 counts give wrong percentages and
# variances.
#
# `pct_counts_in_top_N_genes` of calculate_qc_metrics adds up the N largest counts of a sparse matrix. Sums beyond 255 start again
# at 0 for uint8, beyond 65535 for uint16, while total_counts, by which they are divided, is right: the column is above 100, or
# falls as N grows. `sc.get.aggregate` with "var" squares the counts, also of a dense matrix: beyond 15 for uint8 and 181 for
# int16 the variance is 0 or otherwise wrong, next to a right mean and sum. Filters and tests on them take the wrong cells and genes.
#
# Seen, % of the counts in the top 1, 2 and 3 genes of a cell with 200, 100, 50 and 20: uint8, CSR: 175.4, 38.6, 82.5; uint8,
# dense and float32, CSR: 54.1, 81.1, 94.6. Variance of the counts 20 and 10: 50, in uint8 0; of 200 and 100: 5000, in int16 0.
# Source: our own run. Guess before it: floats or int64 are used throughout, as for the totals.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
import scipy.sparse as sp

print("scanpy", version("scanpy"))
counts = np.array([[200, 100, 50, 20, 0, 0]])
matrices = {
    "uint8, CSR": sp.csr_matrix(counts.astype(np.uint8)),
    "uint8, dense": counts.astype(np.uint8),
    "float32, CSR": sp.csr_matrix(counts.astype(np.float32)),
}
found = {}
for name, matrix in matrices.items():
    cells, _ = sc.pp.calculate_qc_metrics(ad.AnnData(matrix), percent_top=[1, 2, 3])
    found[name] = cells.filter(like="pct_counts_in_top").iloc[0].round(1).tolist()
    print(f"{name}: {found[name]} %, total {float(cells['total_counts'].iloc[0])}")
    assert cells["total_counts"].iloc[0] == 370
assert found["uint8, CSR"] == [175.4, 38.6, 82.5]
assert found["uint8, dense"] == found["float32, CSR"] == [54.1, 81.1, 94.6]


def variance(values, dtype, make):
    obs = pd.DataFrame({"group": ["a", "a"]}, index=["c0", "c1"])
    adata = ad.AnnData(make(np.array(values, dtype)[:, None]), obs)
    return float(np.asarray(sc.get.aggregate(adata, "group", "var").layers["var"])[0, 0])


for make in (sp.csr_matrix, np.asarray):
    given = {}
    for dtype, values in ((np.uint8, [20, 10]), (np.int16, [20, 10]), (np.int16, [200, 100]), (np.float32, [200, 100])):
        given[dtype.__name__, values[0]] = variance(values, dtype, make)
    print(f"variances, {make.__name__}: {given}")
    assert given == {("uint8", 20): 0, ("int16", 20): 50, ("int16", 200): 0, ("float32", 200): 5000}
PYTHON
