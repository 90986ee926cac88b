#!/usr/bin/env bash
# harmonypy 2.1.0 cannot correct 15 or fewer cells: it raises a bare ValueError about an argument nobody gave.
#
# The number of clusters is, unless it is given, the number of cells over 30, rounded: none for 15 cells. The function
# then complains of `nclust`, and does not say that cells are too few or how many it needs. With 16 cells it runs.
#
# Seen: 15 cells: ValueError: nclust must be at least 1; 16 cells: an array of 16 rows.
# Source: our own run; nothing was read of other reports.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check harmonypy==2.1.0 pandas
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import harmonypy
import numpy as np
import pandas as pd

print("harmonypy", version("harmonypy"))
found = {}
for n in (15, 16):
    vectors = np.random.default_rng(0).normal(size=(n, 3))
    batches = pd.DataFrame({"batch": np.array(["a", "b"])[np.arange(n) % 2]})
    try:
        found[n] = str(np.shape(harmonypy.run_harmony(vectors, batches, "batch", verbose=False).Z_corr))
    except ValueError as error:
        found[n] = f"ValueError: {error}"
    print(f"{n} cells: {found[n]}")
same = found[15] == "ValueError: nclust must be at least 1" and found[16] in ("(16, 3)", "(3, 16)")
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
