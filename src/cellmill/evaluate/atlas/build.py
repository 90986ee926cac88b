"""An atlas from the embeddings of datasets.

The distance of a new cell is compared with those of reference cells, which are drawn from the atlas.
The neighbours of a reference cell are cells of the other donors, as for a cell of a new donor. In an
atlas of one donor, only the cell itself and cells of an equal vector are left out, so distances are
too small for a new donor.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from anndata.io import read_elem

from cellmill.config.load import RECORD
from cellmill.config.run import Atlas
from cellmill.data.arrays import as_text
from cellmill.data.inputs.h5 import open_h5
from cellmill.data.shards.index import new_array
from cellmill.errors import DataError, did_you_mean
from cellmill.evaluate import draws
from cellmill.evaluate.atlas.search import (
    MAX_EXACT,
    Points,
    has_faiss,
    mean_distance,
    write_graph,
)
from cellmill.evaluate.atlas.store import (
    CELL,
    CELLS,
    GRAPH,
    REFERENCE,
    REFERENCE_CELL,
    VECTORS,
    AtlasDonor,
    AtlasRecord,
    CellAtlas,
)
from cellmill.evaluate.atlas.votes import NO_LABEL, Electorate
from cellmill.evaluate.draws import draw_cells
from cellmill.evaluate.inference.files import explain_damage, read_embedding
from cellmill.evaluate.inference.label_counts import label_texts
from cellmill.files import sha256_file, write_json

DRAWN = 5000
"""Cells drawn at most: a share of 5 % of them has a standard error of .3 %."""
NO_COLUMN = "-"


class EmbeddedCells(NamedTuple):
    """Cells of a dataset that have a vector."""

    dataset: str
    label_column: str  # NO_COLUMN for none
    vectors: np.ndarray  # (cells, width) float32, finite
    rows: np.ndarray  # (cells,) int64: row of each in the file
    labels: np.ndarray  # (cells,) object: text, None without a label
    donors: np.ndarray  # (cells,) object: text, empty without a donor
    obs_columns: Sequence[str] = ()  # names of all that the file has


def read_embedded(
    path: Path, label: str, donor_columns: Sequence[str], model_digest: str, width: int
) -> EmbeddedCells:
    """Read the cells of a file of stage `embed`: their vectors, obs column `label`, and the first of
    `donor_columns` that the file has.

    Raises DataError if the file is damaged, of another model, or has no column `label`.
    """
    with open_h5(path) as file, explain_damage(f"{path}: obs"):
        obs = file["obs"]
        names = pd.Index(read_elem(obs[obs.attrs["_index"]])).astype(str)
        known = [str(name) for name in obs if name != obs.attrs["_index"]]
        donor_column = next((name for name in donor_columns if name in known), None)
        columns = {}
        for name in (label, donor_column):
            if name in known:
                columns[name] = pd.Series(read_elem(obs[name]))
    if label not in (NO_COLUMN, *known):
        raise DataError(
            f"{path}: no obs column {label!r}; {did_you_mean(label, known)}; - for no label"
        )
    vectors = read_embedding(path, names, model_digest, width)
    rows = np.flatnonzero(np.isfinite(vectors[:, 0]))
    labels = np.full(len(names), None, object)
    if label in columns:
        labels = label_texts(columns[label], ())
    donors = np.full(len(names), "", object)
    if donor_column is not None:
        column = columns[donor_column]
        donors = np.array([as_text(value) for value in column], object)
        donors[column.isna().to_numpy()] = ""
    return EmbeddedCells(path.stem, label, vectors[rows], rows, labels[rows], donors[rows], known)


def make_atlas(datasets: Sequence[EmbeddedCells], model_digest: str, section: Atlas) -> CellAtlas:
    """An atlas in memory, without a graph; at least one cell has a vector."""
    vectors = np.concatenate([cells.vectors for cells in datasets])
    largest = float(np.abs(vectors).max())
    scale = 2.0 ** np.ceil(np.log2(largest)) if largest else 1.0
    # adding 0 turns -0 into 0, which is equal but has other bytes
    stored = np.ascontiguousarray((vectors / np.float32(scale)).astype("<f2") + np.float16(0))
    width = stored.shape[1]
    as_bytes = stored.view(np.dtype((np.void, 2 * width))).ravel()
    distinct, point = np.unique(as_bytes, return_inverse=True)
    points = distinct.view("<f2").reshape(-1, width)
    cells = np.zeros(len(stored), CELL)
    cells["point"] = point.ravel()
    cells["row"] = np.concatenate([part.rows for part in datasets])
    labels, donors = _number_labels_and_donors(datasets, cells)
    reference, accuracy = _measure_reference(points, cells, len(donors), len(labels), section)
    record = AtlasRecord(
        format=1,
        model_digest=model_digest,
        width=width,
        scale=scale,
        neighbors=section.neighbors,
        n_cells=len(cells),
        n_points=len(points),
        n_reference=len(reference),
        held_out="donor" if len(donors) > 1 else "cell",
        accuracy=accuracy,
        datasets=[part.dataset for part in datasets],
        label_columns=[part.label_column for part in datasets],
        donors=donors,
        labels=labels,
        library=None,
        sha256={},
    )
    return CellAtlas(record, Points(points), cells, reference)


def write_atlas(folder: Path, atlas: CellAtlas, max_exact: int = MAX_EXACT) -> None:
    """Write an atlas; with more than `max_exact` points also their graph."""
    points = atlas.points.vectors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    arrays = {VECTORS: points, CELLS: atlas.cells, REFERENCE: atlas.reference}
    for name, array in arrays.items():
        with new_array(folder / name, array.shape, array.dtype) as file:
            file[:] = array
    names = [*arrays]
    library = None
    (folder / GRAPH).unlink(missing_ok=True)
    if len(points) > max_exact and has_faiss():
        library = write_graph(folder / GRAPH, points)
        names.append(GRAPH)
    elif len(points) > max_exact:
        print(
            f"warning: no graph of {len(points):,} vectors, each mapped cell is compared with all: the package faiss "
            "is not installed; pip install 'cellmill[atlas]'",
            flush=True,
        )
    digests = {name: sha256_file(folder / name) for name in names}
    record = atlas.record.model_copy(update={"library": library, "sha256": digests})
    write_json(folder / RECORD, record.model_dump(mode="json"))


def _number_labels_and_donors(
    datasets: Sequence[EmbeddedCells], cells: np.ndarray
) -> tuple[list[str], list[AtlasDonor]]:
    """Names of labels, sorted, and donors by dataset. Their indices are written to `cells`."""
    texts = np.concatenate([part.labels for part in datasets])
    labels = sorted({*texts} - {None})
    number = {None: NO_LABEL} | {label: index for index, label in enumerate(labels)}
    cells["label"] = [number[text] for text in texts]
    donors: list[AtlasDonor] = []
    first = 0
    for index, part in enumerate(datasets):
        names, donor_of_cell = np.unique(part.donors.astype(str), return_inverse=True)
        cells["donor"][first : first + len(part.rows)] = donor_of_cell + len(donors)
        donors += [AtlasDonor(dataset=index, name=str(name)) for name in names]
        first += len(part.rows)
    return labels, donors


def _measure_reference(
    points: np.ndarray, cells: np.ndarray, n_donors: int, n_labels: int, section: Atlas
) -> tuple[np.ndarray, float | None]:
    """Donors and distances of drawn cells, `(cells drawn,)` REFERENCE_CELL, and the accuracy of
    their labels by the vote of the others.

    Cells without another donor's cell have no distance and are left out.
    """
    drawn = draw_cells(np.arange(len(cells)), DRAWN, 0, draws.ATLAS_CELLS)
    chosen = cells[drawn]
    groups = np.arange(len(points))
    left_out = chosen["point"]
    voters = None
    if n_donors > 1:
        groups = _find_sole_donors(cells, len(points))
        left_out = chosen["donor"]
        voters = left_out
    queries = points[chosen["point"]].astype(np.float32)
    neighbors, distances = Points(points).nearest_exact(
        queries, section.neighbors, groups, left_out
    )
    mean = mean_distance(distances)
    measured = np.flatnonzero(np.isfinite(mean))
    reference = np.zeros(len(measured), REFERENCE_CELL)
    reference["donor"] = chosen["donor"][measured]
    reference["distance"] = mean[measured]
    electorate = Electorate(cells["point"], cells["donor"], cells["label"], len(points), n_labels)
    votes = electorate.vote(neighbors, voters)
    labelled = (chosen["label"] != NO_LABEL) & (votes.labels != NO_LABEL)
    accuracy = None
    if labelled.any():
        accuracy = float((votes.labels == chosen["label"])[labelled].mean())
    return reference, accuracy


def _find_sole_donors(cells: np.ndarray, n_points: int) -> np.ndarray:
    """(points,) int64: donor of all cells of a point, -1 if they have several."""
    lowest = np.full(n_points, np.iinfo(np.int64).max)
    highest = np.full(n_points, -1)
    np.minimum.at(lowest, cells["point"], cells["donor"])
    np.maximum.at(highest, cells["point"], cells["donor"])
    return np.where(lowest == highest, highest, -1)
