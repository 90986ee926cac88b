#!/usr/bin/env bash
# A .h5ad of snapatac2 2.9.0 cannot be read by anndata unless hdf5plugin is imported: its arrays are compressed by Blosc.
#
# The file has the ending and the groups of an AnnData. Opening works, and reading X fails with a message of HDF5 about a
# filter or a plugin path. `import hdf5plugin` before reading suffices. The root group has no encoding-type either.
#
# Seen: without hdf5plugin: OSError; with it: the counts.
# Source: our own run.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snapatac2==2.9.0 anndata==0.12.19 hdf5plugin
cd "$folder"
cat > write.py <<'PYTHON'
from importlib.metadata import version

import numpy as np
import scipy.sparse as sp
import snapatac2

print("snapatac2", version("snapatac2"))
counts = sp.csr_matrix(np.random.default_rng(0).poisson(1.0, (200, 50)).astype(np.float32))
data = snapatac2.AnnData(filename="cells.h5ad", X=counts)
data.obs_names = [f"c{number}" for number in range(200)]
data.var_names = [f"g{number}" for number in range(50)]
data.close()
print("sum written", int(counts.sum()))
PYTHON
cat > read.py <<'PYTHON'
import sys

if len(sys.argv) > 1:
    import hdf5plugin
import h5py

with h5py.File("cells.h5ad") as file:
    print("encoding-type of the root:", file.attrs.get("encoding-type"))
    print("sum read", int(file["X/data"][:].sum()))
PYTHON
venv/bin/python -W ignore write.py
venv/bin/python -W ignore read.py with
if venv/bin/python -W ignore read.py 2> message.txt; then echo "the behaviour has changed"; exit 1; fi
tail -1 message.txt
grep -q "OSError" message.txt || { echo "the behaviour has changed"; exit 1; }
