"""Annotations of cells by `cellmill predict` and `cellmill map`.

This module has the names of annotations in an AnnData, and replaces earlier annotations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, ClassVar

import numpy as np

# obs columns of both commands
LABEL = "cellmill_label"  # predicted label
SEEN = "cellmill_seen_in_training"  # True for a cell of the model's training or validation

# obs columns of `map`
AGREEMENT = "cellmill_agreement"  # share of the votes for the label
DONORS = "cellmill_donors"  # number of donors that voted
DISTANCE = "cellmill_distance"  # mean distance to the neighbours in the atlas
PERCENTILE = f"{DISTANCE}_percentile"  # percentile of the distance among the atlas's own cells
REFUSED = "cellmill_refused"  # True for a cell that is too far from the atlas, and has no label
IN_ATLAS = "cellmill_in_atlas"  # True for a cell with a copy in the atlas
NEAREST = "cellmill_nearest"  # dataset and row of the nearest cell
MAP_COLUMNS = (AGREEMENT, DONORS, DISTANCE, PERCENTILE, REFUSED, IN_ATLAS, NEAREST)

# obs columns of `predict`
PROBABILITY = "cellmill_probability"  # highest probability of a label
REJECTED = "cellmill_rejected"  # True for a cell below the threshold, which has no label
VALUE = "cellmill_value"  # predicted number

# tables in obsm; probabilities are in the order of uns[ABOUT_PREDICTION]["labels"]
PROBABILITIES = "cellmill_probabilities"
NEIGHBORS = "cellmill_neighbors"  # indices of cells of the atlas
NEIGHBOR_DISTANCES = "cellmill_neighbor_distances"

# entries of uns
ABOUT_PREDICTION = "cellmill_prediction"
ABOUT_MAP = "cellmill_map"
ABOUTS = (ABOUT_PREDICTION, ABOUT_MAP)


def list_prediction_names(*abouts: Iterable[str]) -> set[str]:
    """List the obs columns and obsm tables that a prediction may have.

    `abouts` are the entries of predictions in uns. Their keys say which heads there are: key
    `label_column_PART` stands for a head with the suffix `_PART`. The names of a single head have no suffix.

    A new prediction replaces all of these columns and tables. A column that stayed would be about the
    labels of an earlier prediction.
    """
    suffixes = {""}
    for key in chain(*abouts):
        for entry in ("label_column", "value_column"):
            if key.startswith(entry):
                suffixes.add(key.removeprefix(entry))
    names = product((LABEL, PROBABILITY, REJECTED, VALUE, PROBABILITIES), suffixes)
    return {SEEN, NEIGHBORS, NEIGHBOR_DISTANCES, *MAP_COLUMNS, *map("".join, names)}


@dataclass(frozen=True)
class Annotations:
    """Annotations of some cells."""

    obs: dict[str, Any]  # columns by name, (cells,) each
    obsm: dict[str, np.ndarray]  # tables by name, (cells, ...) each
    about: dict[str, Any]  # content of the entry in uns
    key: ClassVar[str]  # name of the entry in uns

    def add_to(self, adata: Any) -> None:
        """Add the annotations to the AnnData of the same cells, in place of earlier predictions."""
        earlier = adata.uns.get(ABOUT_PREDICTION, {})
        for name in list_prediction_names(earlier, self.about):
            adata.obsm.pop(name, None)
            if name in adata.obs:
                del adata.obs[name]
        for name, column in self.obs.items():
            adata.obs[name] = column
        adata.obsm.update(self.obsm)
        for key in ABOUTS:
            adata.uns.pop(key, None)
        adata.uns[self.key] = self.about
