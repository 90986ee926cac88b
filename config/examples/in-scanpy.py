# %% [markdown]
# # A model's vectors and labels in a scanpy analysis, in memory
# Open this file as a notebook (VS Code, Jupyter with jupytext), or run `python config/examples/in-scanpy.py`, after the
# demo of docs/first-run.md and config/examples/annotate-and-predict.yaml. Use your own cells and models alike.

# %%
import anndata as ad
import scanpy as sc

import cellmill

adata = ad.read_h5ad(
    "data/demo/pbmc68k.h5ad"
)  # raw counts in X; for a layer: model.embed(adata, "counts")

# %% [markdown]
# ## Vectors
# Genes are matched by Ensembl id or symbol. The vectors are those that `cellmill embed` writes, under the same names.

# %%
model = cellmill.load("results/runs/demo/model")
adata.obsm["X_cellmill"] = model.embed(adata)
adata.uns["cellmill"] = {"model_digest": model.config["weights_sha256"]}

# %% [markdown]
# ## Neighbours, UMAP and clusters
# As after a PCA: `use_rep` names the vectors, and scanpy notes it in `uns["neighbors"]`.

# %%
sc.pp.neighbors(adata, use_rep="X_cellmill", metric="cosine")
sc.tl.umap(adata)

# %% [markdown]
# ## Labels
# `add_to` writes `obs["cellmill_label"]`, `obs["cellmill_probability"]`, `obsm["cellmill_probabilities"]` and
# `uns["cellmill_prediction"]`, whose `labels` name the columns of the probabilities. A cell below `min_probability` has
# no label, and True in `obs["cellmill_rejected"]`.

# %%
annotator = cellmill.load("results/runs/annotator/model")
annotator.predict(adata, min_probability=0.5).add_to(adata)
print(adata.obs["cellmill_label"].value_counts())

# %%
adata.write_h5ad("analysed.h5ad")
