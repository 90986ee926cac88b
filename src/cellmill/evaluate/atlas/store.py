"""Files of an atlas, in folder `atlas` of its model.

    vectors.npy     (points, width) float16: distinct vectors of the cells, divided by `scale`
    cells.npy       (cells,) CELL: indices of the cell's point, donor, label and row in the file of its dataset
    reference.npy   (reference cells,) REFERENCE_CELL: the cell's donor, and its mean distance to its neighbours
    graph.faiss     links between the points (`search.py`); a small atlas has none
    atlas.json      an `AtlasRecord`, with the SHA-256 of the other files; written last

Nothing is unpickled. A file is used only if its SHA-256 is the one in the record.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from cellmill.config.load import RECORD, advising, check_options
from cellmill.config.section import Section
from cellmill.data.shards.index import open_array
from cellmill.errors import DataError
from cellmill.evaluate.atlas.search import Points, has_faiss, read_graph
from cellmill.evaluate.atlas.votes import NO_LABEL, Electorate
from cellmill.evaluate.inference.files import OTHER_SECTIONS
from cellmill.files import read_json, sha256_file

VECTORS = "vectors.npy"
CELLS = "cells.npy"
REFERENCE = "reference.npy"
GRAPH = "graph.faiss"
# label is NO_LABEL for a cell without a label
CELL = np.dtype([("point", "<i4"), ("donor", "<i4"), ("label", "<i4"), ("row", "<i8")])
REFERENCE_CELL = np.dtype([("donor", "<i4"), ("distance", "<f4")])
REMEDY = "make the atlas again (the `atlas` stage)"


class AtlasDonor(Section):
    """A donor of a dataset."""

    dataset: int = Field(ge=0)
    """Index of the dataset in `AtlasRecord.datasets`."""
    name: str
    """Value of the obs column of donors. Cells without a value are all of one donor with an empty name."""


class AtlasRecord(Section):
    """Contents of atlas.json."""

    format: Literal[1]
    """Version of the files."""
    model_digest: str
    """SHA-256 of the model's weights."""
    embedder_digest: str | None = None
    """`digest_embedder` of the model; null in atlases of earlier versions."""
    width: int = Field(ge=1)
    """Width of a vector."""
    scale: float = Field(gt=0)
    """Power of two by which the stored vectors are divided."""
    neighbors: int = Field(ge=1)
    """Number of neighbours of a cell."""
    n_cells: int = Field(ge=1)
    """Number of cells."""
    n_points: int = Field(ge=1)
    """Number of distinct vectors."""
    n_reference: int = Field(ge=0)
    """Number of reference cells, which have a distance in reference.npy."""
    held_out: Literal["donor", "cell"]
    """Says which cells do not count as neighbours of a reference cell: `donor` for all cells of its donor,
    or `cell` for the cell itself, in an atlas of one donor.
    """
    accuracy: float | None
    """Accuracy of the vote of the neighbours on the labels of drawn cells; null without labels."""
    datasets: list[str]
    """Names of the datasets."""
    label_columns: list[str]
    """obs column of labels in each dataset; `-` for a dataset without labels."""
    donors: list[AtlasDonor]
    """Donors by index."""
    labels: list[str]
    """Labels by index."""
    library: str | None
    """Name and version of the library of the graph; null without a graph."""
    sha256: dict[str, str]
    """SHA-256 of each other file, by its name."""


@dataclass(frozen=True)
class CellAtlas:
    """An atlas in memory."""

    record: AtlasRecord
    points: Points
    cells: np.ndarray  # (cells,) CELL
    reference: np.ndarray  # (reference cells,) REFERENCE_CELL
    notes: tuple[str, ...] = ()  # printed lines about the use of the atlas

    @classmethod
    def read(cls, folder: Path, model_digest: str, width: int, embedder: str | None = None) -> Self:
        """Read the atlas of a model, which has the digest `model_digest` and vectors of this `width`.

        Raises UserError if the atlas is missing or damaged, or if it was made with another model.
        """
        # the record
        path = folder / RECORD
        with advising(REMEDY):
            record: AtlasRecord = check_options(AtlasRecord, read_json(path), str(path))
        if record.model_digest != model_digest:
            raise DataError(
                f"{path}: expected an atlas of model {model_digest[:12]}, got of {record.model_digest[:12]}; {REMEDY}"
            )
        if None not in (embedder, record.embedder_digest) and embedder != record.embedder_digest:
            raise DataError(f"{path}: an atlas of {OTHER_SECTIONS}; {REMEDY}")
        if record.width != width:
            raise DataError(
                f"{path}: expected vectors of {width:,} numbers as of the model, got {record.width:,}; {REMEDY}"
            )

        # the digests of the other files
        names = [VECTORS, CELLS, REFERENCE, *([GRAPH] if record.library else [])]
        for name in names:
            with advising(REMEDY):
                digest = sha256_file(folder / name)
            expected = record.sha256.get(name, "none")
            if digest != expected:
                raise DataError(
                    f"{folder / name}: expected sha256 {expected[:12]} as in {RECORD}, got {digest[:12]}: "
                    f"damaged or changed; {REMEDY}"
                )

        # the arrays, with indices inside their bounds
        shape = (record.n_points, record.width)
        vectors = open_array(folder / VECTORS, shape, "<f2", REMEDY)
        cells = open_array(folder / CELLS, (record.n_cells,), CELL, REMEDY)
        reference = open_array(folder / REFERENCE, (record.n_reference,), REFERENCE_CELL, REMEDY)
        lowest_and_end = {
            "point": (0, record.n_points),
            "donor": (0, len(record.donors)),
            "label": (NO_LABEL, len(record.labels)),
        }
        for field, (lowest, end) in lowest_and_end.items():
            ids = cells[field]
            if ids.min() < lowest or ids.max() >= end:
                raise DataError(
                    f"{folder / CELLS}: damaged: it has a {field} of no entry; {REMEDY}"
                )

        # the graph
        notes: tuple[str, ...] = ()
        graph = None
        if record.library and has_faiss():
            graph = read_graph(folder / GRAPH, vectors, REMEDY)
        elif record.library:
            notes = (
                f"the package faiss is not installed: each cell is compared with all {record.n_points:,} vectors; "
                "pip install 'cellmill[atlas]'",
            )
        return cls(record, Points(vectors, graph), cells, reference, notes)

    @cached_property
    def electorate(self) -> Electorate:
        """The labelled cells, which vote on the labels of new cells."""
        cells = self.cells
        n_labels = len(self.record.labels)
        return Electorate(
            cells["point"], cells["donor"], cells["label"], self.record.n_points, n_labels
        )

    @cached_property
    def first_cells(self) -> np.ndarray:
        """Index of the first cell of each point, (points,) int64."""
        return np.unique(self.cells["point"], return_index=True)[1]

    def name_cell(self, cell: int) -> str:
        """Name a cell by its dataset and row, such as `pbmc68k:17`."""
        stored: Any = self.cells[cell]
        dataset = self.record.donors[stored["donor"]].dataset
        return f"{self.record.datasets[dataset]}:{stored['row']}"
