#!/usr/bin/env bash
# kb-python 0.30.2, workflow nac: the layer `mature` has few of the mature molecules; most are `ambiguous`, with X their sum.
#
# A read that lies within one exon fits the unspliced transcript as well, so it is ambiguous, and only reads over a
# junction are mature. The matrix of spliced molecules is mature + ambiguous (`--sum cell`). X of the .h5ad is mature +
# nascent + ambiguous, whether or not --sum is given.
#
# Seen: 400 mature and 100 nascent molecules: X 500, mature fewer than 150, mature + ambiguous 400, nascent 100.
# Source: our own run on simulated reads.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 "$here/tiny_reads.py" "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kb-python==0.30.2
cd "$folder"
venv/bin/kb ref --workflow nac -i index -g t2g.txt -f1 f1.fa -f2 f2.fa -c1 c1 -c2 c2 genome.fa genes.gtf 2> /dev/null
venv/bin/kb count --workflow nac -i index -g t2g.txt -c1 c1 -c2 c2 -x 10xv3 -w barcodes.txt -t 1 -o out --h5ad \
  R1.fastq R2.fastq 2> /dev/null
venv/bin/python -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata

print("kb-python", version("kb-python"))
data = anndata.read_h5ad("out/counts_unfiltered/adata.h5ad")
sums = {name: int(layer.sum()) for name, layer in data.layers.items() if name is not None}
total = int(data.X.sum())
print("X", total, sums)
same = total == sum(sums.values()) and sums["mature"] < 150 and sums["mature"] + sums["ambiguous"] == 400
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
