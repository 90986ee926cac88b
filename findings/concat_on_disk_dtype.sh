# anndata's concat_on_disk (0.12.19, 0.13.4) stores every file's sparse values in the dtype of the first file, whatever they are.
#
# The output's X is created from the first file; values of the others are cast on their way to disk. If the first file has uint8
# or uint16 counts, larger counts of the others become 255 or 65535 and fractions are cut off, without a warning. The same files
# in another order, or `anndata.concat` in memory, keep all values. Dense matrices are not affected.
#
# Seen: files of uint8 and float32 with .5 and 70000.25: 0 and 255, uint8; in the other order .5 and 70000.25, float32.
# Source: our own run, with 0.13.4 on Python 3.12 too. Guess before it: the dtype that numpy would promote to.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check anndata==0.12.19
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.experimental import concat_on_disk


def write(name, values):
    obs = pd.DataFrame(index=np.array([name], dtype=object))
    var = pd.DataFrame(index=np.array(["A", "B"], dtype=object))
    anndata.AnnData(sp.csr_matrix(values), obs=obs, var=var).write_h5ad(f"{name}.h5ad")


write("small", np.array([[1, 200]], np.uint8))
write("large", np.array([[0.5, 70000.25]], np.float32))
print("anndata", anndata.__version__)
read = {}
for first, second in (("small", "large"), ("large", "small")):
    concat_on_disk([f"{first}.h5ad", f"{second}.h5ad"], f"{first}-first.h5ad")
    joined = anndata.read_h5ad(f"{first}-first.h5ad")
    read[first] = joined["large"].X.toarray()[0].tolist()
    print(f"{first} first: {joined.X.dtype}, values of large: {read[first]}")
in_memory = anndata.concat([anndata.read_h5ad("small.h5ad"), anndata.read_h5ad("large.h5ad")])
print("in memory:", in_memory["large"].X.toarray()[0].tolist())
assert read == {"small": [0, 255], "large": [0.5, 70000.25]}
assert in_memory["large"].X.toarray()[0].tolist() == [0.5, 70000.25]
PYTHON
