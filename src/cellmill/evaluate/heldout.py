"""Which cells a model has never seen: those that are in no training or validation shard of its corpus, nor of those
that the run its first weights came from was trained on.

A cell is known by its dataset and its name: the same cells under another dataset's name are not recognised.
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
    """obs names, by dataset, of the cells that were trained or validated on; empty for one outside the corpora."""
    seen: dict[str, set[str]] = {name: set() for name in datasets}
    for manifest in manifests:
        for shard in (shard for split in ("train", "val") for shard in manifest.splits[split].shards):
            path = manifest.shard_path(shard)
            try:
                with h5py.File(path, "r") as file:
                    names = read_elem(file["obs"][file["obs"].attrs["_index"]])
            except (OSError, KeyError) as error:
                raise DataError(
                    f"{path}: the names of its cells cannot be read ({error}); make the shards again"
                ) from None
            for name in names:
                dataset, _, cell = str(name).partition(":")
                if dataset in seen:
                    seen[dataset].add(cell)
    return seen


def held_out(obs_names: pd.Index, seen: set[str]) -> np.ndarray:
    """Whether each cell is held out; bool."""
    return ~obs_names.isin(list(seen)) if seen else np.ones(len(obs_names), dtype=bool)
