"""Maps cells to an atlas. A cell gets a label by a vote of its neighbours, or is refused.

A cell is refused if it is far from all cells of the atlas. The distance of a cell is its mean distance to
its neighbours. The percentile of a cell is 100 c / (n + 1): the atlas has n reference cells, and c of
these are nearer to their own neighbours. Cells with a percentile of at least 100 (1 - refuse_frac) are
refused.

The neighbours of a reference cell are cells of other donors, so reference cells are like cells of a new
donor. For new cells that are like them, the refused share is at most `refuse_frac` on average (conformal
prediction: Vovk, Gammerman & Shafer 2005).

The neighbours of a cell are points, which are the distinct vectors of the atlas. A point belongs to one
cell, or to several cells.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.run import Map
from cellmill.evaluate.atlas.ontology import find_terms
from cellmill.evaluate.atlas.search import NOWHERE, average_distances
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.atlas.votes import NO_LABEL, Votes
from cellmill.evaluate.inference.annotations import (
    ABOUT_MAP,
    AGREEMENT,
    DISTANCE,
    DONORS,
    IN_ATLAS,
    LABEL,
    NEAREST,
    NEIGHBOR_DISTANCES,
    NEIGHBORS,
    PERCENTILE,
    REFUSED,
    SEEN,
    Annotations,
)
from cellmill.evaluate.seen.seen_cells import Seen

BLOCK = 16_384  # at most this many cells are mapped at once
# this many more points than neighbours are looked up, because copies of the cell are left out
SPARE_NEIGHBORS = 4
# A point is a copy of a cell if its distance, divided by the length of the cell's vector, is at most
# this. It is twice the rounding error of float16.
COPY_DISTANCE = 2.0**-10
MIN_SHOWN = 20  # a donor's share is printed if the donor has at least this many reference cells
ROUNDING = 1e-9  # a percentile that is below the bound by at most this is refused


@dataclass(frozen=True)
class AtlasMapping(Annotations):
    """Entries of obs, obsm and uns that `cellmill map` writes. Refused cells have no label."""

    lines: list[str]  # printed lines about the result
    key = ABOUT_MAP

    @property
    def labels(self) -> pd.Categorical:
        """Label of each cell, (cells,)."""
        return self.obs[LABEL]

    def __repr__(self) -> str:
        return "\n    ".join(["AtlasMapping", *self.lines])


def map_vectors(atlas: CellAtlas, vectors: np.ndarray, seen: Seen, section: Map) -> AtlasMapping:
    """Map cells by their `vectors`, `(cells, width)` float32.

    A cell without any gene has a row of NaN, and gets no label. Copies of a cell in the atlas do not count
    as its neighbours. Cells of the atlas, and cells that the model was trained on, have no percentile,
    because their distances are smaller than the distances of new cells.
    """
    record = atlas.record
    scale = np.float32(record.scale)

    # neighbours and votes of all cells
    blocks = [*_map_blocks(atlas, vectors, section)]
    joined: dict[str, Any] = {}
    for name in ("points", "distances", "in_atlas", "codes", "agreement", "n_donors"):
        joined[name] = np.concatenate([getattr(block, name) for block in blocks])
    voted = replace(blocks[0], **joined)
    distance = average_distances(voted.distances)  # in the unit of the stored vectors

    # compare the distances of new cells with the distances of reference cells
    is_new = ~voted.in_atlas if seen.is_seen is None else ~voted.in_atlas & ~seen.is_seen
    n_reference = len(atlas.reference)
    is_new &= np.isfinite(distance) & (n_reference > 0)
    percentile = np.where(is_new, find_percentiles(atlas.reference["distance"], distance), np.nan)
    refused = find_refused(percentile, section.refuse_frac)
    codes = np.where(refused, NO_LABEL, voted.codes)

    # the first cell of a point stands for the point
    points = voted.points
    neighbor_cells = np.where(points == NOWHERE, NOWHERE, atlas.first_cells[points])
    obs: dict[str, Any] = {
        LABEL: pd.Categorical.from_codes(codes, voted.names),
        AGREEMENT: voted.agreement.astype(np.float32),
        DONORS: voted.n_donors.astype(np.int32),
        DISTANCE: distance * scale,
        PERCENTILE: percentile.astype(np.float32),
        REFUSED: refused,
        IN_ATLAS: voted.in_atlas,
        NEAREST: _name_cells(atlas, neighbor_cells[:, 0]),
    }
    if seen.is_seen is not None:
        obs[SEEN] = seen.is_seen
    obsm = {
        NEIGHBORS: neighbor_cells.astype(np.int32),
        NEIGHBOR_DISTANCES: (voted.distances * scale).astype(np.float32),
    }
    about = {
        "model_digest": record.model_digest,
        "refuse_frac": section.refuse_frac,
        "certainty": section.certainty,
        "ontology": voted.is_ontology,
        "held_out": record.held_out,
        "neighbors": record.neighbors,
        "n_reference": n_reference,
        "n_refused": int(refused.sum()),
        "n_in_atlas": int(voted.in_atlas.sum()),
        "datasets": record.datasets,
    }
    lines = [*atlas.notes, *_describe(atlas, obs, section)]
    if seen.caveat:
        about["training_cells_unknown"] = seen.caveat
        lines.append(
            f"warning: cells of the model's training may have a percentile, which is too low: {seen.caveat}"
        )
    return AtlasMapping(obs, obsm, about, lines)


@dataclass(frozen=True)
class _VotedCells:
    """Neighbours and labels of some cells."""

    points: np.ndarray  # (cells, k) int64: neighbours of each cell
    distances: np.ndarray  # (cells, k) float32: in the unit of the stored vectors
    in_atlas: np.ndarray  # (cells,) bool: True for cells with a copy in the atlas
    codes: np.ndarray  # (cells,) int64: index of the label in `names`, or NO_LABEL
    agreement: np.ndarray  # (cells,) float64: share of the votes for the label
    n_donors: np.ndarray  # (cells,) int64: number of donors that voted
    names: list[str]  # labels of the atlas; in the Cell Ontology also the terms above these
    is_ontology: bool  # True if all labels are terms of the Cell Ontology


def _name_cells(atlas: CellAtlas, cells: np.ndarray) -> np.ndarray:
    """Name the dataset and row of each of `cells` (indices), (cells,) object; empty for NOWHERE."""
    names = np.full(len(cells), "", object)
    is_cell = cells != NOWHERE
    names[is_cell] = [atlas.name_cell(cell) for cell in cells[is_cell].tolist()]
    return names


def find_percentiles(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Compute the percentile of each of `values`, (cells,), among the `reference` values: (cells,) float64."""
    return 100 * np.searchsorted(np.sort(reference), values) / (len(reference) + 1)


def find_refused(percentile: np.ndarray, refuse_frac: float) -> np.ndarray:
    """Mark the cells with a percentile of at least 100 (1 - refuse_frac), (cells,) bool.

    A NaN is not refused.
    """
    return percentile >= 100 * (1 - refuse_frac) - ROUNDING


def _map_blocks(atlas: CellAtlas, vectors: np.ndarray, section: Map) -> Iterator[_VotedCells]:
    """Yield the neighbours and labels of the cells, block by block.

    Without any cell there is one empty block.
    """
    record = atlas.record
    terms = find_terms(record.labels)
    for block_start in range(0, max(len(vectors), 1), BLOCK):
        block = vectors[block_start : block_start + BLOCK]

        # neighbours of the cells that have a vector
        points = np.full((len(block), record.neighbors), NOWHERE, np.int64)
        distances = np.full(points.shape, np.inf, np.float32)
        in_atlas = np.zeros(len(block), bool)
        has_vector = np.flatnonzero(np.isfinite(block).all(axis=1))
        nearest = _find_neighbors(atlas, block[has_vector])
        points[has_vector] = nearest.points
        distances[has_vector] = nearest.distances
        in_atlas[has_vector] = nearest.in_atlas

        # labels, or terms of the Cell Ontology
        votes: Votes = atlas.electorate.vote(points)
        names = record.labels
        codes = votes.labels
        agreement = votes.agreement
        if terms is not None:
            names = terms.names
            codes, agreement = terms.climb(votes.shares, section.certainty)
        yield _VotedCells(
            points, distances, in_atlas, codes, agreement, votes.n_donors, names, terms is not None
        )


class _Neighbors(NamedTuple):
    """Nearest points of the atlas. Copies of the cell are left out."""

    points: np.ndarray  # (cells, k) int64; NOWHERE if there are fewer than k
    distances: np.ndarray  # (cells, k) float32, in the unit of the stored vectors
    in_atlas: np.ndarray  # (cells,) bool: True for cells with a copy in the atlas


def _find_neighbors(atlas: CellAtlas, vectors: np.ndarray) -> _Neighbors:
    """Find the neighbours of cells by their finite `vectors`, (cells, width) float32."""
    k = atlas.record.neighbors
    queries = np.ascontiguousarray(vectors / np.float32(atlas.record.scale), np.float32)
    points, distances = atlas.points.nearest(queries, k + SPARE_NEIGHBORS)
    lengths = np.sqrt(np.einsum("ij,ij->i", queries, queries))
    is_copy = distances <= COPY_DISTANCE * lengths[:, None]
    # move copies to the end; the other points keep their order
    points = np.where(is_copy, NOWHERE, points)
    distances = np.where(is_copy, np.inf, distances)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return _Neighbors(
        np.take_along_axis(points, order, axis=1),
        np.take_along_axis(distances, order, axis=1),
        is_copy.any(axis=1),
    )


def _describe(atlas: CellAtlas, obs: dict[str, Any], section: Map) -> list[str]:
    """Return the printed lines about labels, refusals and the atlas."""
    record = atlas.record
    n_cells = len(obs[REFUSED])
    n_in_atlas = int(obs[IN_ATLAS].sum())
    n_seen = int(obs[SEEN].sum()) if SEEN in obs else 0
    n_new = int(np.isfinite(obs[PERCENTILE]).sum())
    n_refused = int(obs[REFUSED].sum())
    new = f"{n_refused / n_new:.1%} of {n_new:,} new cells" if n_new else "no new cells"
    lines = [
        f"{int(obs[LABEL].notna().sum()):,} of {n_cells:,} cells have a label, {n_refused:,} are refused ({new})"
    ]

    # how many reference cells are refused by the rule for new cells
    n_reference = len(atlas.reference)
    left_out = "their donor" if record.held_out == "donor" else "each"
    distances = atlas.reference["distance"]
    is_refused = find_refused(find_percentiles(distances, distances), section.refuse_frac)
    if section.refuse_frac * (n_reference + 1) < 1:
        lines.append(
            f"warning: no cell can be refused: {n_reference:,} distances of the atlas allow no rate of "
            f"{section.refuse_frac:g}; raise --refuse-frac (in Python refuse_frac)"
        )
    else:
        shares = pd.Series(is_refused).groupby(atlas.reference["donor"]).agg(["size", "mean"])
        shares = shares.loc[shares["size"] >= MIN_SHOWN, "mean"]
        by_donor = (
            f" ({shares.min():.1%} to {shares.max():.1%} by donor)" if len(shares) > 1 else ""
        )
        lines.append(
            f"by the same rule, {is_refused.mean():.1%} of the atlas's own {n_reference:,} cells would be refused if "
            f"{left_out} were left out{by_donor}"
        )
        if record.held_out == "cell":
            lines.append(
                "warning: the atlas has one donor, so cells of a new donor are refused more often than that"
            )

    if not record.labels:
        lines.append("warning: the atlas has no labels")
    if n_in_atlas:
        lines.append(f"{n_in_atlas:,} of {n_cells:,} cells are in the atlas: no percentile")
    if n_seen:
        lines.append(
            f"{n_seen:,} of {n_cells:,} cells come from the model's training or validation cells: no percentile"
        )
    return lines
