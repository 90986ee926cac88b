# bionemo-scdl 0.1.3 takes counts from `raw` and genes from `var`: with raw wider than X, counts get other genes' names.
#
# By default counts are those of `adata.raw.X`. The table of genes and the number of genes are those of `adata.var`,
# which after a selection of variable genes has only some of raw's. Columns of the counts are numbers of raw's genes, so a
# column is named after another gene, or lies beyond the table. Nothing warns.
#
# Seen: raw has genes A, B, C and X only C; a cell with 5 A and 7 C: columns 0 and 2, one gene in the table, C.
# Source: our own run; the two lines are in the package's module single_cell_memmap_dataset.
# Guess before it: the genes are raw's.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check bionemo-scdl==0.1.3
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.metadata

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset

names = np.array(["A", "B", "C"], dtype=object)
cells = anndata.AnnData(
    sp.csr_matrix(np.array([[5, 0, 7], [0, 3, 2]], np.float32)),
    obs=pd.DataFrame(index=np.array(["c1", "c2"], dtype=object)),
    var=pd.DataFrame({"feature_id": names}, index=names),
)
cells.raw = cells
cells[:, ["C"]].copy().write_h5ad("variable.h5ad")
dataset = SingleCellMemMapDataset("scdl", h5ad_path="variable.h5ad")
(values, columns), genes, _ = dataset.get_row(0, return_var_features=True, var_feature_names=["feature_id"])
print("bionemo-scdl", importlib.metadata.version("bionemo-scdl"))
print("values", values.tolist(), "columns", columns.tolist(), "genes", genes[0].tolist())
assert values.tolist() == [5, 7]
assert columns.tolist() == [0, 2]
assert genes[0].tolist() == ["C"]
PYTHON
