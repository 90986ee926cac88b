"""Makes an atlas from the embeddings of datasets.

Reference cells are drawn from the atlas. The distance of a new cell to its neighbours is compared with the
distances of reference cells to their neighbours. The neighbours of a reference cell are cells of other
donors, because a new cell is of a new donor too. In an atlas of one donor, only the reference cell itself
and cells with an equal vector are left out. Then a cell of a new donor has a larger distance than the
reference cells, even if it is of the same type.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cellmill.config.load import RECORD
from cellmill.config.run import Atlas
from cellmill.data.arrays import as_text
from cellmill.data.inputs.frames import open_obs
from cellmill.data.inputs.h5 import open_h5
from cellmill.data.shards.index import new_array
from cellmill.errors import DataError, did_you_mean
from cellmill.evaluate import draws
from cellmill.evaluate.atlas.search import (
    MAX_EXACT,
    Points,
    average_distances,
    has_faiss,
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
from cellmill.evaluate.inference.files import read_embedding
from cellmill.evaluate.inference.label_counts import list_label_texts
from cellmill.files import sha256_file, write_json

# at most this many reference cells; a share of 5 % of them has a standard error of .3 %
DRAWN = 5000
NO_COLUMN = "-"  # name of the label column of a dataset without labels


class EmbeddedCells(NamedTuple):
    """The cells of a dataset that have a vector."""

    dataset: str
    label_column: str  # name of the obs column, or NO_COLUMN
    vectors: np.ndarray  # (cells, width) float32, finite
    rows: np.ndarray  # (cells,) int64: row of each cell in the file
    labels: np.ndarray  # (cells,) object: text, or None for a cell without a label
    donors: np.ndarray  # (cells,) object: text, empty for a cell without a donor
    obs_columns: Sequence[str] = ()  # names of all obs columns of the file


def read_embedded(
    path: Path,
    label: str,
    donor_columns: Sequence[str],
    model_digest: str,
    width: int,
    embedder: str | None = None,
) -> EmbeddedCells:
    """Read the embedded cells of a file that stage `embed` has written.

    Labels are read from obs column `label`, and donors from the first of `donor_columns` that the file
    has. Raises DataError if the file is damaged, comes from another model, or lacks the column `label`.
    """
    with open_h5(path) as file:
        obs = open_obs(path, file)
        names = obs.index
        known = [*obs.columns]
        donor_column = next((name for name in donor_columns if name in known), None)
        columns = obs.read([name for name in (label, donor_column) if name in known])
    if label not in (NO_COLUMN, *known):
        raise DataError(
            f"{path}: no obs column {label!r}; {did_you_mean(label, known)}; - for no label"
        )
    vectors = read_embedding(path, names, model_digest, width, embedder)
    rows = np.flatnonzero(np.isfinite(vectors[:, 0]))
    labels = np.full(len(names), None, object)
    if label in columns:
        labels = list_label_texts(columns[label], ())
    donors = np.full(len(names), "", object)
    if donor_column is not None:
        column = columns[donor_column]
        donors = np.array([as_text(value) for value in column], object)
        donors[column.isna().to_numpy()] = ""
    return EmbeddedCells(path.stem, label, vectors[rows], rows, labels[rows], donors[rows], known)


def make_atlas(
    datasets: Sequence[EmbeddedCells],
    model_digest: str,
    section: Atlas,
    embedder: str | None = None,
) -> CellAtlas:
    """Make an atlas in memory, without a graph. At least one cell must have a vector."""
    # scale the vectors by a power of two, so that float16 can store them
    vectors = np.concatenate([cells.vectors for cells in datasets])
    largest = float(np.abs(vectors).max())
    scale = 2.0 ** np.ceil(np.log2(largest)) if largest else 1.0
    # adding 0 turns -0 into 0, which is equal to -0 but has other bytes
    stored = np.ascontiguousarray((vectors / np.float32(scale)).astype("<f2") + np.float16(0))

    # find the distinct vectors, which are the points; equal vectors have equal bytes
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
        embedder_digest=embedder,
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
    """Write an atlas to `folder`. An atlas of more than `max_exact` points also has a graph of the points."""
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
    """List the labels, in alphabetical order, and the donors, dataset by dataset.

    The index of each cell's label and donor is written into `cells`.
    """
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
    """Draw the reference cells, and measure their distances and the accuracy of their labels.

    Returns donors and distances, `(reference cells,)` REFERENCE_CELL, and the accuracy of a vote of the
    neighbours; None if no cell has a label. A drawn cell without a neighbour has no distance, and is left
    out.
    """
    # A drawn cell must not be its own neighbour. Points have groups, and a search leaves a group out.
    # With one donor, each point is a group. With several donors, a group is the points that only one
    # donor has; a point of several donors is never left out.
    drawn = draw_cells(np.arange(len(cells)), DRAWN, 0, draws.ATLAS_CELLS)
    drawn_cells = cells[drawn]
    groups = np.arange(len(points))
    left_out_groups = drawn_cells["point"]
    left_out_donors = None
    if n_donors > 1:
        groups = _find_sole_donors(cells, len(points))
        left_out_groups = drawn_cells["donor"]
        left_out_donors = drawn_cells["donor"]

    # mean distance of each drawn cell to its neighbours
    queries = points[drawn_cells["point"]].astype(np.float32)
    neighbors, distances = Points(points).nearest_exact(
        queries, section.neighbors, groups, left_out_groups
    )
    distance = average_distances(distances)
    measured = np.flatnonzero(np.isfinite(distance))
    reference = np.zeros(len(measured), REFERENCE_CELL)
    reference["donor"] = drawn_cells["donor"][measured]
    reference["distance"] = distance[measured]

    # accuracy of the labels that the neighbours vote for
    electorate = Electorate(cells["point"], cells["donor"], cells["label"], len(points), n_labels)
    votes = electorate.vote(neighbors, left_out_donors)
    labelled = (drawn_cells["label"] != NO_LABEL) & (votes.labels != NO_LABEL)
    accuracy = None
    if labelled.any():
        accuracy = float((votes.labels == drawn_cells["label"])[labelled].mean())
    return reference, accuracy


def _find_sole_donors(cells: np.ndarray, n_points: int) -> np.ndarray:
    """Find the donor of all cells of each point, (points,) int64; -1 if the cells have several donors."""
    lowest = np.full(n_points, np.iinfo(np.int64).max)
    highest = np.full(n_points, -1)
    np.minimum.at(lowest, cells["point"], cells["donor"])
    np.maximum.at(highest, cells["point"], cells["donor"])
    return np.where(lowest == highest, highest, -1)
