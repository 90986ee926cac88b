"""Held-out cells: those in no training or validation shard, neither of the model's corpus nor of its ancestors'.

Cells are identified by dataset and obs name: a copy of a training cell in a dataset of another name counts as unseen.
"""

from __future__ import annotations

from collections.abc import Iterable

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem

from cellmill.data.manifest import Manifest
from cellmill.errors import DataError


def seen_cells(manifests: Iterable[Manifest], datasets: Iterable[str]) -> dict[str, set[str]]:
    """obs names of training and validation cells, by dataset; an empty set for datasets outside the corpora."""
    seen: dict[str, set[str]] = {name: set() for name in datasets}
    for manifest in manifests:
        for shard in (shard for split in ("train", "val") for shard in manifest.splits[split].shards):
            path = manifest.shard_path(shard)
            try:
                with h5py.File(path, "r") as file:
                    names = read_elem(file["obs"][file["obs"].attrs["_index"]])
            except (OSError, KeyError) as error:
                raise DataError(f"{path}: cannot read its obs names ({error}); run shard again") from None
            for name in names:
                dataset, _, cell = str(name).partition(":")
                if dataset in seen:
                    seen[dataset].add(cell)
    return seen


def held_out(obs_names: pd.Index, seen: set[str]) -> np.ndarray:
    """Mask of the held-out cells; bool."""
    return ~obs_names.isin(list(seen)) if seen else np.ones(len(obs_names), dtype=bool)
