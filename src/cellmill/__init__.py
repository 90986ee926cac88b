"""cellmill: from `.h5ad` files to an evaluated, exported single-cell foundation model."""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def load(path: Path | str) -> Any:
    """Return the exported model in a folder as an `evaluate.loaded_model.LoadedModel`, on a GPU if there is one.

    >>> model = cellmill.load("results/runs/demo/model")
    >>> adata.obsm["X_cellmill"] = model.embed(adata)
    >>> adata.obs["cell_type"] = model.predict(adata).labels

    Raises errors.DataError if a file is missing, damaged or of another model. Nothing is unpickled. Torch is imported
    by this call, not with the package.
    """
    return importlib.import_module("cellmill.evaluate.loaded_model").LoadedModel(Path(path))
