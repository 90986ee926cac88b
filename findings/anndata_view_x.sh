#!/usr/bin/env bash
# anndata 0.12.19: setting X of a subset changes the cells of the whole AnnData, setting a layer or obs of it does not.
#
# `sub = adata[mask]` is a view. `sub.layers[...] = ...`, `sub.obs[...] = ...` and functions of scanpy make a copy of it first.
# `sub.X = ...` writes into the X of `adata` and leaves `sub` a view, so the rest of the program reads cells that are normalised
# next to cells that are not, and a subset that is taken and normalised twice is normalised twice. A warning says that copy-on-write
# comes with the next minor release.
#
# Seen, four cells of ones, two of which are multiplied by 7: sum of the layer in `adata` 8, sum of X in `adata` 32; sparse or dense.
# Source: our own run. Guess before it: a subset is either always a copy when it is written to, or never.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check anndata==0.12.19
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import scipy.sparse as sp

print("anndata", version("anndata"))
for make in (np.asarray, sp.csr_matrix):
    counts = make(np.ones((4, 2), np.float32))
    adata = ad.AnnData(counts.copy(), layers={"counts": counts.copy()})
    subset = adata[:2]
    subset.layers["counts"] = subset.layers["counts"] * 7
    layer = float(adata.layers["counts"].sum()), subset.is_view
    subset = adata[:2]
    subset.X = subset.X * 7
    matrix = float(adata.X.sum()), subset.is_view
    print(f"{make.__name__}: sum in the whole and whether the subset is a view: layer {layer}, X {matrix}")
    assert layer == (8, False)
    assert matrix == (32, True)
PYTHON
