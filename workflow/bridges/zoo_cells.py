"""Cells that a preset of `evaluate.external` reads, and the embedding that it writes in the form of stage `embed`.

Presets run in the interpreter of their package, so nothing of cellmill is imported. A preset is fitted on the training
cells of one dataset and embeds all its cells. Cells are called DATASET:NAME in shards, and those of split `train` are
the training cells.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import scipy.sparse as sp
from anndata.io import read_elem

Embed = Callable[[ad.AnnData, np.ndarray, int], np.ndarray]
"""Vectors `(cells, width)` of the cells, given with the mask of the training cells, bool, and a number of threads."""


def run(preset: str, package: str, embed: Embed) -> None:
    """Embed the cells that the arguments name, and write the result: all of a preset.

    Ends the process with a last line of what is wrong, below the traceback of the package.
    """
    parser = argparse.ArgumentParser()
    for name in ("cells", "manifest", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    where, started = f"{given.cells.stem}: preset {preset}", time.perf_counter()
    cells = ad.read_h5ad(given.cells)
    if cells.X is None:
        sys.exit(f"cellmill: {where}: expected cells with X; write them by `cellmill unpack`")
    cells.X = sp.csr_matrix(cells.X).astype(np.float32)  # torch has no uint16
    if not (train := training_cells(given.manifest, given.cells.stem, cells)).any():
        sys.exit(
            f"cellmill: {where}: expected training cells, got none in {given.manifest}; lower shard.test_frac"
        )
    try:
        vectors = np.asarray(embed(cells, train, given.threads), np.float32)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split())
        sys.exit(
            f"cellmill: {where}: {package} {version(package)} failed: {type(error).__name__}: {reason}"
        )
    if not np.isfinite(vectors).all():
        sys.exit(
            f"cellmill: {where}: expected finite numbers from {package} {version(package)}, got others"
        )
    seconds = time.perf_counter() - started
    about = {
        "model_digest": preset,
        "package": package,
        "version": version(package),
        "seconds": seconds,
    }
    made = ad.AnnData(obs=cells.obs[[]], obsm={"X_cellmill": vectors}, uns={"cellmill": about})
    beside = given.out.with_name(f".{given.out.stem}.{os.getpid()}.h5ad")  # complete or not at all
    try:
        made.write_h5ad(beside)
        beside.replace(given.out)
    finally:
        beside.unlink(missing_ok=True)
    print(
        f"{where}: {package} {version(package)}, fitted on {int(train.sum()):,} training cells, {cells.n_obs:,} cells, "
        f"{vectors.shape[1]:,} numbers each, {seconds:.1f} s -> {given.out}"
    )


def training_cells(manifest: Path, dataset: str, cells: ad.AnnData) -> np.ndarray:
    """Mask of the cells of the dataset that are in training shards, bool `(cells,)`."""
    names: set[str] = set()
    for shard in json.loads(manifest.read_text(encoding="utf-8"))["splits"]["train"]["shards"]:
        with h5py.File(manifest.with_name(shard["name"])) as file:
            names.update(read_elem(file["obs"][file["obs"].attrs["_index"]]))
    return np.array([f"{dataset}:{name}" in names for name in cells.obs_names], bool)


def batches_of(cells: ad.AnnData) -> np.ndarray | None:
    """Batch of each cell as text, `nan` for a missing one; None without column `batch`.

    pandas 3 leaves a missing value of text as it is where earlier versions wrote `nan`.
    """
    if "batch" not in cells.obs:
        return None
    column = cells.obs["batch"]
    return np.array(
        ["nan" if missing else str(batch) for batch, missing in zip(column, column.isna())], object
    )
