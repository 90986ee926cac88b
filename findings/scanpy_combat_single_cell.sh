#!/usr/bin/env bash
# scanpy 1.11.5: `pp.combat` returns NaN for every cell of every batch if one batch has a single cell; nothing is raised or warned.
#
# The variance within that batch has no value. It goes into the prior that all genes share, and NaN reaches the other batches. A
# donor of whom one cell passed quality control is enough, and neighbors or PCA raise later, about NaN. With two cells in
# the smallest batch all values are finite.
#
# Seen, batches of 10, 10 and 1 cells: all values of all cells are NaN; of 10, 10 and 2 cells: none.
# Source: our own run. Guess before it: the single cell is NaN, or an error names the batch.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5
"$folder/venv/bin/python" -W error::RuntimeWarning - 2> "$folder/log" <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc

print("scanpy", version("scanpy"))
found = {}
for cells in (1, 2):
    values = np.random.default_rng(0).normal(5, 1, (20 + cells, 30)).astype(np.float32)
    obs = pd.DataFrame({"batch": ["a"] * 10 + ["b"] * 10 + ["c"] * cells}, index=[f"c{number}" for number in range(20 + cells)])
    adata = ad.AnnData(values, obs)
    sc.pp.combat(adata, "batch")
    found[cells] = float(np.isnan(adata.X).mean())
    print(f"smallest batch of {cells}: {100 * found[cells]:.0f} % of all values are NaN")
assert found == {1: 1, 2: 0}
PYTHON
