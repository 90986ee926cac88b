#!/usr/bin/env bash
# pegasusio 0.11.0 renames the cells of a 10x file: it cuts "-1" from barcodes, or puts the number in front of them.
#
# Names of cells are in an index called `barcodekey`. Labels, guides and doublet scores that were computed on Cell
# Ranger's file have the suffix, and a join by name finds no cell. If all barcodes end in -1 the suffix is cut; if an
# aggregated run has other numbers too, AAAC-2 becomes 2-AAAC, and so does AAAC-1.
#
# Seen: AAACCCAAGAAACACT-1 alone becomes AAACCCAAGAAACACT; with a cell of -2 it becomes 1-AAACCCAAGAAACACT.
# Source: our own run.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pegasusio==0.11.0 anndata pyarrow
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
from importlib.metadata import version

import h5py
import numpy as np
import pegasusio

print("pegasusio", version("pegasusio"))
found = []
for last in ("-1", "-2"):
    barcodes = ["AAACCCAAGAAACACT-1", "AAACCCAAGAAACCAT-1", f"AAACCCAAGAAACGGT{last}"]
    with h5py.File("cells.h5", "w") as file:
        group = file.create_group("matrix")
        group["data"] = np.array([1, 2, 3], np.int32)
        group["indices"] = np.array([0, 1, 0], np.int64)
        group["indptr"] = np.array([0, 1, 2, 3], np.int64)
        group["shape"] = np.array([2, 3], np.int32)
        group["barcodes"] = np.array(barcodes, "S")
        columns = {"id": ["ENSG00000000001", "ENSG00000000002"], "name": ["A", "B"]}
        columns |= {"feature_type": ["Gene Expression"] * 2, "genome": ["GRCh38"] * 2}
        for name, values in columns.items():
            group[f"features/{name}"] = np.array(values, "S")
    data = pegasusio.read_input("cells.h5")
    print(data.obs.index.name, list(data.obs_names))
    found.append(data.obs_names[0])
same = found == ["AAACCCAAGAAACACT", "1-AAACCCAAGAAACACT"]
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
