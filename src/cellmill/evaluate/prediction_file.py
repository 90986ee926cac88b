"""Predicted labels and numbers in .h5ad files: written beside the cells' obs, or added to a copy of their file."""

from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem

from cellmill.data.counts_writer import write_anndata
from cellmill.data.h5_file import change_h5, create_h5
from cellmill.data.text_columns import plain_text
from cellmill.errors import DataError
from cellmill.evaluate.embedding_file import put
from cellmill.evaluate.predicted import ABOUT, LABEL, PROBABILITIES, PROBABILITY, VALUE, Predicted


def write_prediction(path: Path, obs: pd.DataFrame, predicted: Predicted) -> None:
    """Write `obs` with the predictions to an .h5ad without X. Atomic; OSError names `path`."""
    adata = ad.AnnData(obs=obs.assign(**predicted.obs), obsm=predicted.obsm, uns={ABOUT: predicted.about})
    with create_h5(path) as file:
        write_anndata(file, adata)


def append_prediction(source: Path, out: Path, predicted: Predicted) -> None:
    """Write a copy of the .h5ad `source` with the predictions added or replaced; `out` may be `source`.

    Atomic, and so takes the size of `source` on disk; OSError names `out`.
    """
    with change_h5(out, source) as file:
        obs = file["obs"]
        if not isinstance(obs, h5py.Group):
            raise DataError(
                f"{source}: its obs is of an AnnData before 0.7; read and write it once, or leave out --append"
            )
        _remove_others(file, obs, predicted)
        for name, column in plain_text(pd.DataFrame(predicted.obs)).items():
            write_elem(obs, name, column.array if isinstance(column.dtype, pd.CategoricalDtype) else column.to_numpy())
        order = [name for name in obs.attrs["column-order"] if name not in predicted.obs and name in obs]
        obs.attrs["column-order"] = np.array([*order, *predicted.obs], dtype=h5py.string_dtype())
        for name, table in predicted.obsm.items():
            put(file, "obsm", name, table)
        put(file, "uns", ABOUT, predicted.about)


def _remove_others(file: h5py.File, obs: h5py.Group, predicted: Predicted) -> None:
    """Remove what a model with other heads predicted: beside this model's digest it would pass for its own."""
    for name in [name for name in obs if name.startswith((LABEL, PROBABILITY, VALUE)) and name not in predicted.obs]:
        del obs[name]
    for name in [name for name in file.get("obsm", ()) if name.startswith(PROBABILITIES)]:
        if name not in predicted.obsm:
            del file["obsm"][name]
