"""Predicted labels in .h5ad files: written beside the cells' obs, or added to a copy of their file."""

from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem

from cellmill.data.h5_file import change_h5, create_h5
from cellmill.errors import DataError
from cellmill.evaluate.embedding_file import put
from cellmill.evaluate.predict import Prediction

LABEL, PROBABILITY = "cellmill_label", "cellmill_probability"  # obs
PROBABILITIES = "cellmill_probabilities"  # obsm, in the order of uns[ABOUT]["labels"]
ABOUT = "cellmill_prediction"  # uns


def write_prediction(path: Path, obs: pd.DataFrame, prediction: Prediction, about: dict[str, Any]) -> None:
    """Write `obs` with labels and probabilities to an .h5ad without X. Atomic; OSError names `path`."""
    columns = {LABEL: prediction.labels, PROBABILITY: prediction.highest}
    adata = ad.AnnData(obs=obs.assign(**columns), obsm={PROBABILITIES: prediction.probabilities}, uns={ABOUT: about})
    with create_h5(path) as file:
        write_elem(file, "/", adata)


def append_prediction(source: Path, out: Path, prediction: Prediction, about: dict[str, Any]) -> None:
    """Write a copy of the .h5ad `source` with labels and probabilities added or replaced; `out` may be `source`.

    Atomic, and so takes the size of `source` on disk; OSError names `out`.
    """
    with change_h5(out, source) as file:
        obs = file["obs"]
        if not isinstance(obs, h5py.Group):
            raise DataError(
                f"{source}: its obs is of an AnnData before 0.7; read and write it once, or leave out --append"
            )
        for name, column in ((LABEL, prediction.labels), (PROBABILITY, prediction.highest)):
            write_elem(obs, name, column)
        order = [name for name in obs.attrs["column-order"] if name not in (LABEL, PROBABILITY)]
        obs.attrs["column-order"] = np.array([*order, LABEL, PROBABILITY], dtype=h5py.string_dtype())
        put(file, "obsm", PROBABILITIES, prediction.probabilities)
        put(file, "uns", ABOUT, about)
