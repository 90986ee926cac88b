#!/usr/bin/env bash
# scanpy 1.11.5: `downsample_counts` with counts_per_cell draws the same places in every cell, so genes are over- or
# under-counted in all cells alike.
#
# The counts of a cell are numbered gene by gene, and the kept numbers are drawn. The generator is set to `random_state`
# again before each cell. Cells of one total keep the same numbers; of other totals, with replace=True, the same
# fractions. So the error of a gene does not shrink with the number of cells: means of genes, pseudobulks and comparisons of
# depths have it in full. Nothing warns; a call for each cell with a seed of its own, or np.random.default_rng(), is safe.
#
# Seen, 50 genes, downsampled to 40 %: 200 cells of 10 counts a gene all stay equal (variance 0, 2.3 for draws of their own);
# 400 cells of Poisson counts of mean 10: means of genes, expected 4, have a standard deviation of .71, .11 for draws of their
# own; the correlation between cells is .12, 0 for these.
# Source: our own run. Guess before it: random_state begins one stream for all cells, each with draws of its own.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scanpy==1.11.5 anndata==0.12.19
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import anndata as ad
import numpy as np
import scanpy as sc

print("scanpy", version("scanpy"))
random = np.random.default_rng(0)


def downsampled(counts, kept):
    """Counts after scanpy, and after draws of each cell's own."""
    adata = ad.AnnData(counts.astype(np.float32))
    sc.pp.downsample_counts(adata, counts_per_cell=kept, replace=False)
    own = [random.multivariate_hypergeometric(cell, kept) for cell in counts]
    return np.asarray(adata.X), np.array(own)


def correlation(counts):
    return np.corrcoef(counts)[np.triu_indices(len(counts), 1)].mean()


same, own = downsampled(np.full((200, 50), 10), 200)
variances = same.var(0).mean(), own.var(0).mean()
print(f"equal cells: {len(np.unique(same, axis=0))} distinct after scanpy; variance {variances[0]:.1f}, own draws {variances[1]:.1f}")
scanpys, own = downsampled(random.poisson(10, (400, 50)), 200)
deviations = scanpys.mean(0).std(), own.mean(0).std()
correlations = correlation(scanpys), correlation(own)
print(f"Poisson cells: standard deviation of the genes' means {deviations[0]:.2f}, own draws {deviations[1]:.2f}")
print(f"Poisson cells: correlation between cells {correlations[0]:.2f}, own draws {correlations[1]:.2f}")
assert len(np.unique(same, axis=0)) == 1
assert variances[1] > 2
assert deviations[0] > 5 * deviations[1]
assert correlations[0] > 0.05 > abs(correlations[1])
PYTHON
