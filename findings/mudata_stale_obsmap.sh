#!/usr/bin/env bash
# mudata 0.3.10 writes the rows of cells as they were before a modality was sorted or filtered, if update() was not called.
#
# A .h5mu has a table of all cells and, for each modality, `obsmap`: the row of each cell in it. MuData does not notice that
# `mdata.mod["rna"]` was replaced by a view in another order, or of fewer cells, and `write` neither recomputes obsmap nor warns.
# mudata's reader compares names and mends it, so a round trip shows nothing. A reader that goes by obsmap, as the format
# suggests, gives each cell another one's columns of the whole table, or rows that do not exist. Names are the safe key.
#
# Seen, cells a, b, c with the type A, B, C, modality sorted as c, a, b: the file has obsmap 1, 2, 3, so by it c is A, a is B and
# b is C; filtered to c, a: 1, 2, 3 for two rows. Read by mudata: 2, 3, 1. With update() before writing: 2, 3, 1.
# Source: our own run; cellmill went by obsmap until then. Guess before it: write recomputes it, or the reader trusts it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mudata==0.3.10 anndata==0.12.19
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import h5py
import mudata
import numpy as np
import pandas as pd

print("mudata", version("mudata"))
mudata.set_options(pull_on_update=False)


def written(order, update):
    """obsmap in the file of a MuData whose modality rna has the cells of `order`, and obsmap as mudata reads it."""
    modalities = {}
    for name in ("rna", "prot"):
        obs = pd.DataFrame(index=np.array(["a", "b", "c"], dtype=object))
        var = pd.DataFrame(index=np.array([f"{name}0"], dtype=object))
        modalities[name] = ad.AnnData(np.ones((3, 1), np.float32), obs, var)
    mdata = mudata.MuData(modalities)
    mdata.obs["type"] = ["A", "B", "C"]
    mdata.mod["rna"] = mdata["rna"][order].copy()
    if update:
        mdata.update()
    mdata.write("cells.h5mu")
    with h5py.File("cells.h5mu") as file:
        stored = file["obsmap/rna"][:].tolist()
        assert [name.decode() for name in file["mod/rna/obs/_index"][:]] == order
        assert [name.decode() for name in file["obs/_index"][:]] == ["a", "b", "c"]
    read = np.asarray(mudata.read_h5mu("cells.h5mu").obsmap["rna"]).ravel().astype(int).tolist()
    return stored, read


found = {}
for order, update in ((["c", "a", "b"], False), (["c", "a"], False), (["c", "a", "b"], True)):
    found["".join(order), update] = written(order, update)
    print(f"rna has {order}, update() {update}: in the file {found[''.join(order), update][0]}, read {found[''.join(order), update][1]}")
assert found["cab", False] == ([1, 2, 3], [2, 3, 1])
assert found["ca", False][0] == [1, 2, 3]
assert found["cab", True] == ([2, 3, 1], [2, 3, 1])
PYTHON
