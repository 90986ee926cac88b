#!/usr/bin/env bash
# scanorama 1.7.4: `correct_scanpy` returns the genes sorted by name, also for inputs that share one order of genes.
#
# The cells keep their order and the shape is that of the input, so the corrected matrix fits the input's layers, where each value
# is then under another gene's name. Nothing warns. The `var` of what is returned has the sorted names, and indexing by them
# restores the order.
#
# Seen: two AnnData with the genes F, B, A, D, C, E: both come back as A, B, C, D, E, F, cells as before.
# Source: our own run; the order has been reported for earlier versions (anndata's issue 458). Guess before it: genes that all
# inputs share in one order stay in it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanorama==1.7.4 anndata==0.12.19
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import pandas as pd
import scanorama

GENES = list("FBADCE")
print("scanorama", version("scanorama"))
random = np.random.default_rng(0)
given = []
for sample in "xy":
    obs = pd.DataFrame(index=[f"{sample}{number}" for number in range(40)])
    given.append(ad.AnnData(random.poisson(3, (40, 6)).astype(np.float32), obs, pd.DataFrame(index=GENES)))
returned = scanorama.correct_scanpy(given, verbose=False)
for before, after in zip(given, returned):
    print("genes", list(before.var_names), "->", list(after.var_names), "same cells:", list(before.obs_names) == list(after.obs_names))
    assert list(before.var_names) == GENES and list(after.var_names) == sorted(GENES)
    assert list(before.obs_names) == list(after.obs_names)
PYTHON
