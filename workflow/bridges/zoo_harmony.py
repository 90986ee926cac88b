"""Principal components of the training cells, corrected by Harmony (Korsunsky et al. 2019) with its own defaults.

The 50 components of log(1 + counts per 10,000) of all genes are fitted on the training cells. Harmony then moves all
cells of the dataset together and reads their batches, held-out cells included: it is transductive, and has no function
for a cell that comes later. The same cells give the same numbers with any number of threads.
"""

from missing import end_without

try:
    import sys

    import anndata as ad
    import harmonypy
    import numpy as np
    import pandas as pd
    from embedded_cells import COMPONENTS, log_normalise
    from sklearn.decomposition import PCA
    from threadpoolctl import threadpool_limits
    from zoo_cells import batches_of, run
except ImportError as error:
    end_without("harmonypy", "2.1.0", error, "harmony")


def embed(cells: ad.AnnData, train: np.ndarray, threads: int) -> np.ndarray:
    """Corrected components, `(cells, 50)`, or fewer of few training cells."""
    batches = batches_of(cells)
    if batches is None or len(set(batches)) < 2:
        sys.exit(
            "cellmill: preset harmony: expected two or more batches in column batch of the dataset, got fewer"
        )
    profiles = log_normalise(cells.X)
    n = max(1, min(COMPONENTS, int(train.sum()) - 1, cells.n_vars - 1))
    with threadpool_limits(1):  # sums in one order
        components = (
            PCA(n, svd_solver="arpack", random_state=0).fit(profiles[train]).transform(profiles)
        )
    frame = pd.DataFrame({"batch": batches})
    done = harmonypy.run_harmony(
        components, frame, "batch", verbose=False, random_state=0, ncores=threads
    )
    corrected = np.asarray(done.Z_corr)
    return corrected if corrected.shape == components.shape else corrected.T


if __name__ == "__main__":
    run("harmony", "harmonypy", embed)
