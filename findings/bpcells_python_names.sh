# bpcells 0.3.0rc2 (Python) writes a matrix folder without names of cells and genes, and whole numbers only.
#
# The format has files for both names. `DirMatrix.from_h5ad` writes them empty, though the .h5ad has names, so whoever opens the
# folder in R has a matrix without dimnames. `from_scipy_sparse` cuts fractions off without saying so; for `from_h5ad`
# the documentation says it. Corrected or normalised values come back as other numbers, most of them 0.
#
# Seen: files row_names and col_names of 0 bytes; .5, 1.7, 2 come back as 0, 1, 2, uint32.
# Source: our own run. Guess before it: names are kept, and fractions are stored as floats.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check bpcells==0.3.0rc2 anndata
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.metadata
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from bpcells.experimental import DirMatrix

values = sp.csr_matrix(np.array([[0.5, 1.7, 2.0]], np.float32))
cells = anndata.AnnData(
    values,
    obs=pd.DataFrame(index=np.array(["c1"], dtype=object)),
    var=pd.DataFrame(index=np.array(["A", "B", "C"], dtype=object)),
)
cells.write_h5ad("cells.h5ad")
DirMatrix.from_h5ad("cells.h5ad", "from_h5ad")
sizes = [Path("from_h5ad", name).stat().st_size for name in ("row_names", "col_names")]
read = DirMatrix.from_scipy_sparse(values, "from_scipy")[:, :].toarray()
print("bpcells", importlib.metadata.version("bpcells"), "bytes of names", sizes, "values", read.tolist(), read.dtype)
assert sizes == [0, 0]
assert read.tolist() == [[0, 1, 2]]
PYTHON
