#!/usr/bin/env bash
# CellBender 0.3.2 gives every gene the type NA if its input has no types, and scanpy then reads a file without genes.
#
# Folders of Cell Ranger 2 and DGE tables of Drop-seq, for example, have no types of features. CellBender stores NA as
# the type, the genome and, without ids, the id of each gene, and writes them to its 10x .h5. scanpy's read_10x_h5
# keeps the rows of type Gene Expression by default (gex_only=True): no gene is left, and it neither stops nor warns.
# The same file has all genes with gex_only=False. CellBender's reader and writer are called here without a training.
#
# Seen: 3 cells x 2 genes as a folder of Cell Ranger 2 and as a DGE: types are NA, NA; read_10x_h5 gives (3, 0), and
# (3, 2) with gex_only=False.
# Source: our own run.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip install --quiet --disable-pip-version-check"
$pip scanpy==1.11.5 anndata==0.12.19 tables==3.10.2 scipy==1.16.3
$pip --no-deps cellbender==0.3.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import numpy as np
import scanpy
import scipy.io
import scipy.sparse as sp
from cellbender.remove_background.data.io import load_data, write_matrix_to_cellranger_h5

print("cellbender", version("cellbender"), "scanpy", version("scanpy"))
counts = np.array([[1, 2], [0, 3], [4, 0]])
Path("v2").mkdir()
scipy.io.mmwrite("v2/matrix.mtx", sp.coo_matrix(counts.T))
Path("v2/genes.tsv").write_text("ENSG00000000001\tA\nENSG00000000002\tB\n")
Path("v2/barcodes.tsv").write_text("AAAA\nCCCC\nGGGG\n")
Path("dge.txt").write_text("GENE\tAAAA\tCCCC\tGGGG\nA\t1\t0\t4\nB\t2\t3\t0\n")
same = True
for given in ("v2", "dge.txt"):
    read = load_data(given)
    write_matrix_to_cellranger_h5(
        cellranger_version=3,
        output_file="out.h5",
        gene_names=np.array(read["gene_names"]),
        gene_ids=read["gene_ids"],
        feature_types=read["feature_types"],
        genomes=read["genomes"],
        barcodes=np.array(read["barcodes"]),
        count_matrix=sp.csc_matrix(read["matrix"]),
    )
    default = scanpy.read_10x_h5("out.h5").shape
    every = scanpy.read_10x_h5("out.h5", gex_only=False)
    types = every.var["feature_types"].tolist()
    print(given, "types", types, "by default", default, "with gex_only=False", every.shape)
    same = same and (types, default, every.shape) == (["NA"] * 2, (3, 0), (3, 2))
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
