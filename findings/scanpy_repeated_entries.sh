#!/usr/bin/env bash
# scanpy 1.11.5 takes a gene that is stored twice in a row of a sparse matrix for two: wrong logarithms and numbers of genes.
#
# A CSR matrix may store several values at one place, and their sum is the value there, for scipy as for `X.toarray()`. AnnData's
# format says nothing of it, and anndata writes and reads such a matrix as it is. scanpy works on the stored values: log1p
# takes the logarithm of each part, and a cell has more genes than the matrix. Totals are right. X.sum_duplicates() mends it.
#
# Seen, a cell with 5 of gene A and 1 + 2 of gene B, written and read by anndata 0.12.19: 3 values are stored; n_genes_by_counts
# is 3 of 2 genes; log1p of gene B is 1.79 instead of 1.39.
# Source: our own run. Guess before it: parts are summed by the writer or before a function that is not linear.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5 anndata==0.12.19
"$folder/venv/bin/python" -W ignore - "$folder/cells.h5ad" <<'PYTHON'
import sys
from importlib.metadata import version

import anndata as ad
import numpy as np
import scanpy as sc
import scipy.sparse as sp

print("scanpy", version("scanpy"), "anndata", version("anndata"))
parts = sp.csr_matrix((np.array([1, 2, 5], np.float32), np.array([1, 1, 0]), np.array([0, 3])), (1, 2))
assert parts.toarray().tolist() == [[5, 3]]
ad.AnnData(parts).write_h5ad(sys.argv[1])
adata = ad.read_h5ad(sys.argv[1])
stored = adata.X.nnz
cells, _ = sc.pp.calculate_qc_metrics(adata, percent_top=None)
genes, total = int(cells["n_genes_by_counts"].iloc[0]), float(cells["total_counts"].iloc[0])
sc.pp.log1p(adata)
logarithm = float(adata.X.toarray()[0, 1])
print(f"stored {stored}, genes {genes} of {adata.n_vars}, total {total}, log1p of 3: {logarithm:.2f}, right {np.log1p(3):.2f}")
assert (stored, genes, total) == (3, 3, 8)
assert abs(logarithm - np.log1p(1) - np.log1p(2)) < 1e-5
PYTHON
