#!/usr/bin/env bash
# loompy 3.0.8: `combine`, and `add_columns` with its row attributes, join genes by position, not by name, and say nothing.
#
# Files of the same genes in another order, such as those of samples that were counted apart, come out under the names of the first
# file: counts and layers of the second are those of other genes. Only `key="Gene"` sorts them, and its default is None.
# `add_columns` takes row attributes too, and does not compare them with the file's. Layers take its values in the
# file's type, so fractions that are added to a layer of whole numbers become 0.
#
# Seen: genes A, B, C of a cell with 10, 30 and 50, stored as C, A, B: combined 50, 10, 30, with key="Gene" 10, 30, 50;
# added 50, 10, 30; a layer of .5 that is added to whole numbers is 0.
# Source: our own run. Guess before it: each count stays with its gene.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check loompy==3.0.8 setuptools
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2> /dev/null <<'PYTHON'
from importlib.metadata import version

import loompy
import numpy as np


def write(name, genes, counts):
    counts = np.array(counts)[:, None]
    rows, columns = {"Gene": np.array(genes)}, {"CellID": np.array([name])}
    loompy.create(f"{name}.loom", {"": counts, "spliced": counts}, rows, columns)


def second(name):
    with loompy.connect(name) as file:
        return dict(zip(map(str, file.ra.Gene), file[:, 1].tolist())), file.layers["spliced"][:, 1].tolist()


write("one", ["A", "B", "C"], [1, 2, 3])
write("two", ["C", "A", "B"], [50, 10, 30])
loompy.combine(["one.loom", "two.loom"], "combined.loom")
loompy.combine(["one.loom", "two.loom"], "by_name.loom", key="Gene")
with loompy.connect("one.loom") as file:
    layers = {"": np.array([[50], [10], [30]]), "spliced": np.full((3, 1), 0.5)}
    file.add_columns(layers, {"CellID": np.array(["two"])}, row_attrs={"Gene": np.array(["C", "A", "B"])})
print("loompy", version("loompy"))
for name in ("combined", "by_name", "one"):
    print(name, *second(f"{name}.loom"))
shifted = {"A": 50, "B": 10, "C": 30}
assert second("combined.loom") == (shifted, [50, 10, 30])
assert second("by_name.loom") == ({"A": 10, "B": 30, "C": 50}, [10, 30, 50])
assert second("one.loom") == (shifted, [0, 0, 0])
PYTHON
