"""Annotations of cells by `cellmill predict` and `cellmill map`: their names in an AnnData, and the
removal of earlier ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, ClassVar

import numpy as np

LABEL = "cellmill_label"  # obs
AGREEMENT = "cellmill_agreement"  # obs: share of the votes for the label
DONORS = "cellmill_donors"  # obs: number of donors that voted
DISTANCE = "cellmill_distance"  # obs
PERCENTILE = f"{DISTANCE}_percentile"
REFUSED = "cellmill_refused"  # obs
IN_ATLAS = "cellmill_in_atlas"  # obs
NEAREST = "cellmill_nearest"  # obs: dataset and row of the nearest cell
SEEN = "cellmill_seen_in_training"  # obs: True for a cell of the model's training or validation
MAP_COLUMNS = (AGREEMENT, DONORS, DISTANCE, PERCENTILE, REFUSED, IN_ATLAS, NEAREST)
"""obs columns that only `map` writes."""
PROBABILITY = "cellmill_probability"  # obs
REJECTED = "cellmill_rejected"  # obs: True for a cell below the threshold, whose label is missing
VALUE = "cellmill_value"  # obs
PROBABILITIES = "cellmill_probabilities"  # obsm, in the order of uns[ABOUT_PREDICTION]["labels"]
ABOUT_PREDICTION = "cellmill_prediction"  # uns
NEIGHBORS = "cellmill_neighbors"  # obsm: indices of cells of the atlas
NEIGHBOR_DISTANCES = "cellmill_neighbor_distances"  # obsm
ABOUT_MAP = "cellmill_map"  # uns
ABOUTS = (ABOUT_PREDICTION, ABOUT_MAP)


def names_of_predictions(*abouts: Iterable[str]) -> set[str]:
    """obs columns and obsm tables that a prediction may have: for a single head, and for each head that
    is named in keys of its entries in uns, `abouts`.

    A prediction replaces all of them: a column that it lacks would be about other labels.
    """
    heads = {""}
    for key in chain(*abouts):
        for entry in ("label_column", "value_column"):
            if key.startswith(entry):
                heads.add(key.removeprefix(entry))
    names = product((LABEL, PROBABILITY, REJECTED, VALUE, PROBABILITIES), heads)
    return {SEEN, NEIGHBORS, NEIGHBOR_DISTANCES, *MAP_COLUMNS, *map("".join, names)}


@dataclass(frozen=True)
class Annotations:
    """Obs, obsm and uns of some cells; they replace earlier predictions."""

    obs: dict[str, Any]  # (cells,) each
    obsm: dict[str, np.ndarray]
    about: dict[str, Any]
    key: ClassVar[str]  # of `about` in uns

    def add_to(self, adata: Any) -> None:
        """Add obs, obsm and uns to the AnnData whose cells these are."""
        earlier = adata.uns.get(ABOUT_PREDICTION, {})
        for name in names_of_predictions(earlier, self.about):
            adata.obsm.pop(name, None)
            if name in adata.obs:
                del adata.obs[name]
        for name, column in self.obs.items():
            adata.obs[name] = column
        adata.obsm.update(self.obsm)
        for key in ABOUTS:
            adata.uns.pop(key, None)
        adata.uns[self.key] = self.about
