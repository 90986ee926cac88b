"""scVI (Lopez et al. 2018) with the defaults of scvi-tools, fitted on the counts of the training cells alone.

All genes are read. An embedding is the mean of the posterior, 10 numbers. The decoder reads the batches, if the dataset
has any; the encoder does not, so a cell of a batch without training cells is given another batch, which changes no
number of its embedding. On one machine with the same number of threads, the same cells give the same numbers; other
machines, threads and GPUs round differently.
"""

from missing import end_without

try:
    import logging

    import anndata as ad
    import numpy as np
    import scvi
    import torch
    from zoo_cells import batches_of, run
except ImportError as error:
    end_without("scvi-tools", "1.4.2", error, "scvi")


def embed(cells: ad.AnnData, train: np.ndarray, threads: int) -> np.ndarray:
    """Means of the latent variables, `(cells, 10)`."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    scvi.settings.seed = 0
    batches = batches_of(cells)
    if batches is not None:
        known = np.isin(batches, np.unique(batches[train]))
        cells.obs["batch"] = np.where(known, batches, batches[train][0])
    fitted = cells[train].copy()
    scvi.model.SCVI.setup_anndata(fitted, batch_key=None if batches is None else "batch")
    model = scvi.model.SCVI(fitted)
    model.train(train_size=1.0, enable_progress_bar=False)
    return np.asarray(model.get_latent_representation(cells))


if __name__ == "__main__":
    run("scvi", "scvi-tools", embed)
