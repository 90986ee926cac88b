#!/usr/bin/env bash
# scDataset 0.3.0: ClassBalancedSampling and BlockWeightedSampling give the labels and weights of unsorted `indices` to other cells.
#
# Indices of a random split are seldom sorted. The strategy sorts them, and warns that it did so for speed; labels or weights that
# were given for these indices, one each, stay in the old order. So the classes of an epoch are as unbalanced as the cells, and
# a cell gets the weight of another one. With sorted indices, or with labels of all cells, classes are balanced.
#
# Seen, 900 T cells and 100 DC, all of them as `indices`, an epoch of 1,000 draws: sorted 473 T and 527 DC; shuffled, with
# the labels shuffled alike, 900 and 100. Weights of 1 for DC and 0 for T cells: sorted 1,000 DC, shuffled 107.
# Source: our own run. Guess before it: labels and weights are sorted together with their indices.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scdataset==0.3.0 torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from scdataset import BlockWeightedSampling, ClassBalancedSampling

print("scdataset", version("scdataset"))
labels = np.array(["T"] * 900 + ["DC"] * 100)
cells = np.arange(1000)
orders = {"sorted": cells, "shuffled": np.random.default_rng(0).permutation(cells)}
balanced, weighted = {}, {}
for name, indices in orders.items():
    strategy = ClassBalancedSampling(labels[indices], indices=indices, block_size=4)
    drawn = labels[strategy.get_indices(cells, seed=0)]
    balanced[name] = (int((drawn == "T").sum()), int((drawn == "DC").sum()))
    strategy = BlockWeightedSampling(block_size=4, indices=indices, weights=(labels[indices] == "DC").astype(float))
    weighted[name] = int((labels[strategy.get_indices(cells, seed=0)] == "DC").sum())
    print(f"{name}: balanced: {balanced[name][0]} T, {balanced[name][1]} DC; weights for DC only: {weighted[name]} DC of 1000")
assert balanced["sorted"] == (473, 527)
assert balanced["shuffled"] == (900, 100)
assert weighted["sorted"] == 1000
assert weighted["shuffled"] == 107
PYTHON
