#!/usr/bin/env bash
# zarr 3.1.6: rows that `resize` cut off are there again when the array grows, as far as their chunk stayed. h5py's are 0.
#
# Chunks beyond the new shape are deleted; the chunk that the new end divides stays as it is. A buffer of cells that is emptied by
# `resize`, or a store that is cut at a checkpoint and appended to with gaps, then has counts of cells that were removed. Chunks of
# their own, or a whole chunk that begins at the cut, read as the fill value, so small tests with other chunks show nothing.
#
# Seen, 1 to 10 in chunks of 4, resized to 5 and to 10: zarr 1 to 8, 0, 0, in formats 2 and 3; h5py 1 to 5 and five zeros.
# Source: our own run. Guess before it: new elements are the fill value.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check zarr==3.1.6 h5py==3.16.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import h5py
import numpy as np
import zarr

print("zarr", version("zarr"), "h5py", version("h5py"))
numbers = np.arange(1, 11)


def resized(array):
    array.resize((5,))
    array.resize((10,))
    return array[:].tolist()


found = {}
for form in (2, 3):
    array = zarr.create_array(f"numbers{form}.zarr", data=numbers, chunks=(4,), zarr_format=form)
    found[f"zarr, format {form}"] = resized(array)
with h5py.File("numbers.h5", "w") as file:
    found["h5py"] = resized(file.create_dataset("x", data=numbers, chunks=(4,), maxshape=(None,)))
for name, values in found.items():
    print(f"{name}: {values}")
assert found["zarr, format 2"] == found["zarr, format 3"] == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
assert found["h5py"] == [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
PYTHON
