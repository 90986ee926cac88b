#!/usr/bin/env bash
# scanpy 1.11.5 with harmonypy 2.1.0: `sc.external.pp.harmony_integrate` raises for every AnnData; no warning names the versions.
#
# harmonypy before 0.1 returned Z_corr with a row per component, and scanpy transposes it. harmonypy 2 returns a row per cell.
# The transposed array does not fit into obsm, and the ValueError tells of obsm and shapes. pip installs both together, because
# scanpy asks for no highest version. With as many cells as components nothing would be raised.
#
# Seen: 40 cells with 5 components: Z_corr has the shape (40, 5), and harmony_integrate raises a ValueError that obsm's value
# has the shape (5,) while it should have had (40,).
# Source: our own run. Guess before it: the wrapper works with what pip installs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5 harmonypy==2.1.0
"$folder/venv/bin/python" -W ignore - 2> "$folder/log" <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import harmonypy
import numpy as np
import pandas as pd
import scanpy as sc

print("scanpy", version("scanpy"), "harmonypy", version("harmonypy"))
components = np.random.default_rng(0).normal(size=(40, 5))
obs = pd.DataFrame({"batch": ["a", "b"] * 20}, index=[f"c{number}" for number in range(40)])
shape = np.shape(harmonypy.run_harmony(components, obs, "batch").Z_corr)
print("Z_corr of harmonypy:", shape)
adata = ad.AnnData(np.ones((40, 3), np.float32), obs, obsm={"X_pca": components})
fault = "none"
try:
    sc.external.pp.harmony_integrate(adata, "batch")
except ValueError as error:
    fault = f"ValueError: {error}"
print("harmony_integrate:", fault)
same = shape == (40, 5) and "shape (5,)" in fault and "(40,)" in fault
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
