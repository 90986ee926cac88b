#!/usr/bin/env bash
# infercnvpy 0.6.1: the copy numbers of a cell depend on `chunksize` and on which cells share its chunk.
#
# `infercnv` works through the cells in chunks, to save memory and to use several processes. Values below `dynamic_threshold` standard
# deviations are set to 0 as noise. The standard deviation is that of the chunk. A chunk of normal cells therefore shows gains and
# losses that the same cells do not have next to tumour cells, and a tumour cell loses some of its own there. The order of cells,
# a subset, or another chunksize changes the result. Nothing warns. dynamic_threshold=None leaves each cell alone.
#
# Seen, 100 reference cells, 100 normal ones like them and 100 with twice the counts of half a chromosome, share of values that are
# not 0: in one chunk normal .009, tumour .25; in chunks of 100, by type: .13 and .18; normal cells without tumour cells: .13. With
# dynamic_threshold=None values are equal.
# Source: our own run. Guess before it: cells are treated one by one, and the chunks only save memory.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check infercnvpy==0.6.1 anndata==0.12.19 scanpy==1.11.5
"$folder/venv/bin/python" -W ignore - 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import anndata as ad
import infercnvpy as cnv
import numpy as np
import pandas as pd

counts = np.random.default_rng(0).poisson(2.0, (300, 400)).astype(np.float32)
counts[200:, :100] *= 2
starts = np.tile(np.arange(200) * 1000, 2)
genes = {"chromosome": np.repeat(["chr1", "chr2"], 200), "start": starts, "end": starts + 500}
names = [f"cell{i}" for i in range(300)]
types = np.repeat(["reference", "normal", "tumour"], 100)
cells = ad.AnnData(
    np.log1p(counts), pd.DataFrame({"type": types}, index=names), pd.DataFrame(genes, index=[f"gene{i}" for i in range(400)])
)


def copy_numbers(cells, **options):
    cells = cells.copy()
    cnv.tl.infercnv(
        cells, reference_key="type", reference_cat="reference", window_size=50, step=5, n_jobs=1, **options
    )
    return cells.obsm["X_cnv"].toarray()


def share(values):
    return round(float((values != 0).mean()), 3)


print("infercnvpy", version("infercnvpy"))
together = copy_numbers(cells)
by_type = copy_numbers(cells, chunksize=100)
without_tumour = copy_numbers(cells[:200])
print("one chunk: normal", share(together[100:200]), "tumour", share(together[200:]))
print("chunks by type: normal", share(by_type[100:200]), "tumour", share(by_type[200:]))
print("normal cells without tumour cells:", share(without_tumour[100:]))
assert share(together[100:200]) < 0.02 < 0.1 < share(by_type[100:200]) < 0.2
assert 0.1 < share(without_tumour[100:]) < 0.2 < 0.22 < share(together[200:])
assert share(by_type[200:]) < 0.2
alike = [copy_numbers(cells, chunksize=n, dynamic_threshold=None) for n in (5000, 100)]
print("dynamic_threshold=None, largest difference:", np.abs(alike[0] - alike[1]).max())
np.testing.assert_allclose(*alike, atol=1e-5)
PYTHON
