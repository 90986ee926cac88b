#!/usr/bin/env bash
# anndata 0.13.4 lists X among the layers, under the key None, and its own writer of elements does not take that key.
#
# `adata.layers` of 0.12 has the named layers alone; since 0.13 iterating it also yields X, under None. A program that
# writes `dict(adata.layers)` with anndata's `write_elem`, as it could before, gets an AttributeError about a NoneType,
# for every AnnData that has an X. `write_h5ad` itself is not affected, so the round trip shows nothing.
#
# Seen: the keys of `layers` are None and twice; AttributeError: 'NoneType' object has no attribute ...
# Source: our own run, Python 3.12; 0.12 is what pip takes on Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=
for candidate in "${PYTHON:-}" python3.13 python3.12 python3; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "expected Python 3.12 or newer on the PATH; set PYTHON to one"; exit 2; }
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check anndata==0.13.4
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
from anndata.io import write_elem

print("anndata", version("anndata"))
adata = ad.AnnData(np.ones((2, 3), np.float32), layers={"twice": np.full((2, 3), 2, np.float32)})
keys = sorted(adata.layers, key=str)
print("keys of layers:", keys)
fault = "none"
with h5py.File(Path(sys.argv[1]) / "cells.h5", "w") as file:
    try:
        write_elem(file, "layers", dict(adata.layers))
    except AttributeError as error:
        fault = f"AttributeError: {error}".splitlines()[0]
print("write_elem:", fault)
adata.write_h5ad(Path(sys.argv[1]) / "cells.h5ad")
same = None in keys and fault.startswith("AttributeError")
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
