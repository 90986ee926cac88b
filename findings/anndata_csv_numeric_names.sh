#!/usr/bin/env bash
# anndata 0.12.19: `read_csv`, also as `scanpy.read_csv`, takes a header or a first column of numbers for counts.
#
# Entrez ids are numbers. A first line with a number in its second field is a cell of its own, whose counts are the ids; its name
# is the first field, and the genes are called 0, 1, 2. A first column of numbers becomes a gene of its own. `first_column_names`
# says that the first column has names; no argument says that the first line has.
#
# Seen, two cells c1 and c2 with genes 7157, 672 and 675: three cells x three genes, the first with 7157, 672 and 675 counts; with
# cells in columns: a gene called `gene` with 7157 and 672 counts. Genes called TP53, BRCA1 and BRIP1: two cells x three genes.
# Source: our own run. Guess before it: the first line and the first column are names, as those of pandas.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check anndata==0.12.19
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import anndata as ad

TABLES = {
    "symbols": "cell,TP53,BRCA1,BRIP1\nc1,5,0,2\nc2,1,3,4\n",
    "Entrez ids in the header": "cell,7157,672,675\nc1,5,0,2\nc2,1,3,4\n",
    "Entrez ids in the first column": "gene,c1,c2\n7157,5,0\n672,1,3\n",
}
print("anndata", version("anndata"))
found = {}
for name, text in TABLES.items():
    Path("counts.csv").write_text(text)
    adata = ad.io.read_csv("counts.csv")
    found[name] = [*adata.obs_names], [*adata.var_names], adata.X.astype(int).tolist()
    print(f"{name}: cells {found[name][0]}, genes {found[name][1]}, X {found[name][2]}")
counts = [[5, 0, 2], [1, 3, 4]]
assert found["symbols"] == (["c1", "c2"], ["TP53", "BRCA1", "BRIP1"], counts)
header = ["cell", "c1", "c2"], ["0", "1", "2"], [[7157, 672, 675], *counts]
assert found["Entrez ids in the header"] == header
column = ["0", "1"], ["gene", "c1", "c2"], [[7157, 5, 0], [672, 1, 3]]
assert found["Entrez ids in the first column"] == column
named = ad.io.read_csv("counts.csv", first_column_names=True)
assert [*named.obs_names] == ["7157", "672"]
PYTHON
