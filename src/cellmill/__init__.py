"""cellmill: from `.h5ad` files to an evaluated, exported single-cell foundation model."""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def load(path: Path | str) -> Any:
    """Return the exported model in a folder as an `evaluate.inference.loaded_model.LoadedModel`, on a GPU
    if there is one.

    `hf://owner/name`, also with `@revision`, is a model on the Hugging Face hub (extra `hub`).

    >>> model = cellmill.load("results/runs/demo/model")
    >>> adata.obsm["X_cellmill"] = model.embed(adata)
    >>> adata.obs["cell_type"] = model.predict(adata).labels

    Raises errors.DataError if a file is missing, damaged or of another model. Nothing is unpickled.
    Torch is imported by this call, not with the package.
    """
    if isinstance(path, str) and path.startswith("hf://"):
        path = importlib.import_module("cellmill.models.hub").download(path)
    module = importlib.import_module("cellmill.evaluate.inference.loaded_model")
    return module.LoadedModel(Path(path))


def stream(manifest: Path | str, split: str = "train", **options: Any) -> Any:
    """Return batches of tensors for a training loop of your own, as a
    `train.tensor_stream.TensorStream`.

    >>> for batch in cellmill.stream("results/corpora/pbmc/shards/manifest.json", columns=["bulk_labels"]):
    ...     batch["token_ids"], batch["values"], batch["cu_seqlens"], batch["levels"]

    Its `state_dict()` resumes it at any step, at any number of ranks. Torch is imported by this
    call.
    """
    return importlib.import_module("cellmill.train.tensor_stream").TensorStream(
        Path(manifest), split, **options
    )


def open_cells(path: Path | str, rows: Any = None) -> Any:
    """Return cells of a shard, or of a file that preprocess wrote, as an AnnData with counts.

    >>> cellmill.open_cells("results/corpora/pbmc/shards/train-00000.h5ad", rows=[5, 3])

    `rows` are row numbers, `(cells,)`; all without it. Only the bytes of these rows are read. Genes
    ascend within a cell. Raises errors.DataError when the file is damaged or has no such row.
    """
    return importlib.import_module("cellmill.data.prepare.unpack").read_cells(Path(path), rows)
