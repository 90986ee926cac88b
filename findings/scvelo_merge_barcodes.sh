#!/usr/bin/env bash
# scvelo 0.3.4: `scv.utils.merge` gives a cell the spliced and unspliced counts of another one, if their barcodes begin with the
# same 12 letters or are those of two samples.
#
# Names of Cell Ranger and velocyto differ (`AAAC...-1`, `sample:AAAC...x`), so merge cuts both to the first 12 letters of A, C, G and
# T, without the sample and the other four letters of a barcode. Names that are then equal get -1, -2 in the order of each file, and
# the first of one file is paired with the first of the other. A loom has its own order, and cells that a filter took out of the
# AnnData. Nothing warns; full barcodes with the sample are safe, if both sides have them.
#
# Seen, cells whose counts are their number: barcodes ...AAACACT and ...AAAGGGG, loom in the other order: 1 gets 2, 2 gets 1; one
# barcode in s1 and s2, loom begins with s2: the same; only the cell of s2 kept: it gets the counts of s1.
# Source: our own run. Guess before it: names are matched by barcode and sample, or equal ones are refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scvelo==0.3.4 scanpy==1.11.5 anndata==0.12.19
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import scvelo as scv

print("scvelo", version("scvelo"))
CELL = "AAACCCAAGAAACACT"
LIKE = "AAACCCAAGAAAGGGG"
OTHER = "GGGGCCAAGAAACACT"


def cells(names, numbers, layers=()):
    """AnnData of three genes, each with the cell's number as its count."""
    counts = sp.csr_matrix(np.outer(numbers, np.ones(3)).astype(np.float32))
    frames = [pd.DataFrame(index=np.array(index, dtype=object)) for index in (names, ["A", "B", "C"])]
    return ad.AnnData(counts, *frames, layers={layer: counts.copy() for layer in layers})


cases = {
    "first 12 letters alike": (
        ([f"{CELL}-1", f"{LIKE}-1"], [1, 2]),
        ([f"s1:{LIKE}x", f"s1:{CELL}x"], [2, 1]),
    ),
    "a barcode in two samples": (
        ([f"s1_{CELL}-1", f"s2_{CELL}-1"], [1, 2]),
        ([f"s2:{CELL}x", f"s1:{CELL}x"], [2, 1]),
    ),
    "cell of s1 filtered out": (
        ([f"s2_{CELL}-1", f"s2_{OTHER}-1"], [2, 3]),
        ([f"s1:{CELL}x", f"s2:{CELL}x", f"s2:{OTHER}x"], [1, 2, 3]),
    ),
}
found = {}
for name, (counted, loom) in cases.items():
    merged = scv.utils.merge(cells(*counted), cells(*loom, layers=("spliced", "unspliced")))
    pairs = zip(merged.X[:, 0].toarray().ravel(), merged.layers["spliced"][:, 0].toarray().ravel())
    found[name] = [(int(cell), int(spliced)) for cell, spliced in pairs]
    print(f"{name}: number of the cell and of its spliced counts: {found[name]}")
assert found == {
    "first 12 letters alike": [(1, 2), (2, 1)],
    "a barcode in two samples": [(1, 2), (2, 1)],
    "cell of s1 filtered out": [(2, 1), (3, 3)],
}
PYTHON
