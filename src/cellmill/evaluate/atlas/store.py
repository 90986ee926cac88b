"""Files of an atlas, in folder `atlas` of its model.

    vectors.npy     (points, width) float16: distinct vectors of the cells, divided by `scale`
    cells.npy       (cells,): point, donor, label (NO_LABEL for none) and row in its dataset's file, as indices
    reference.npy   (cells drawn,): donor of a cell of the atlas, and its mean distance to neighbours of other donors
    graph.faiss     links between the points (`search.py`); absent from a small atlas
    atlas.json      an `AtlasRecord`, with the SHA-256 of the others; written last

Nothing is unpickled, and a file is used only if its SHA-256 is the record's.
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
from cellmill.files import read_json, sha256_file

VECTORS = "vectors.npy"
CELLS = "cells.npy"
REFERENCE = "reference.npy"
GRAPH = "graph.faiss"
CELL = np.dtype([("point", "<i4"), ("donor", "<i4"), ("label", "<i4"), ("row", "<i8")])
REFERENCE_CELL = np.dtype([("donor", "<i4"), ("distance", "<f4")])
REMEDY = "make the atlas again (the `atlas` stage)"


class AtlasDonor(Section):
    """Donor of a dataset."""

    dataset: int = Field(ge=0)
    """Index of the dataset in `AtlasRecord.datasets`."""
    name: str
    """Value of the obs column; empty for all cells without a value."""


class AtlasRecord(Section):
    """Contents of atlas.json."""

    format: Literal[1]
    """Version of the files."""
    model_digest: str
    """SHA-256 of the model's weights."""
    width: int = Field(ge=1)
    """Width of a vector."""
    scale: float = Field(gt=0)
    """Power of two by which vectors are divided."""
    neighbors: int = Field(ge=1)
    """Neighbours of a cell that are looked up."""
    n_cells: int = Field(ge=1)
    """Number of cells."""
    n_points: int = Field(ge=1)
    """Number of distinct vectors."""
    n_reference: int = Field(ge=0)
    """Number of cells with a distance in reference.npy."""
    held_out: Literal["donor", "cell"]
    """Cells that do not count as neighbours of a cell of reference.npy: all cells of its donor, or in
    an atlas of one donor only the cell itself.
    """
    accuracy: float | None
    """Share of the labelled cells of reference.npy whose label the other cells' vote predicts; null
    without labels.
    """
    datasets: list[str]
    """Names of the datasets."""
    label_columns: list[str]
    """obs column of the labels of each; `-` for none."""
    donors: list[AtlasDonor]
    """Donors by number."""
    labels: list[str]
    """Labels by number."""
    library: str | None
    """Library of the graph; null without one."""
    sha256: dict[str, str]
    """Digests of the files."""


@dataclass(frozen=True)
class CellAtlas:
    """An atlas in memory."""

    record: AtlasRecord
    points: Points
    cells: np.ndarray  # (cells,) CELL
    reference: np.ndarray  # (cells drawn,) REFERENCE_CELL
    notes: tuple[str, ...] = ()  # lines about its use

    @classmethod
    def read(cls, folder: Path, model_digest: str, width: int) -> Self:
        """Read the atlas of a model. Raises UserError if it is missing, damaged or another model's."""
        path = folder / RECORD
        with advising(REMEDY):
            record: AtlasRecord = check_options(AtlasRecord, read_json(path), str(path))
        if record.model_digest != model_digest:
            raise DataError(
                f"{path}: expected an atlas of model {model_digest[:12]}, got of {record.model_digest[:12]}; {REMEDY}"
            )
        if record.width != width:
            raise DataError(
                f"{path}: expected vectors of {width:,} numbers as of the model, got {record.width:,}; {REMEDY}"
            )
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
        shape = (record.n_points, record.width)
        vectors = open_array(folder / VECTORS, shape, "<f2", REMEDY)
        cells = open_array(folder / CELLS, (record.n_cells,), CELL, REMEDY)
        reference = open_array(folder / REFERENCE, (record.n_reference,), REFERENCE_CELL, REMEDY)
        limits = {
            "point": (0, record.n_points),
            "donor": (0, len(record.donors)),
            "label": (NO_LABEL, len(record.labels)),
        }
        for field, (low, high) in limits.items():
            ids = cells[field]
            if ids.min() < low or ids.max() >= high:
                raise DataError(
                    f"{folder / CELLS}: damaged: it has a {field} of no entry; {REMEDY}"
                )
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
        """Labelled cells, which vote on new cells."""
        cells = self.cells
        n_labels = len(self.record.labels)
        return Electorate(
            cells["point"], cells["donor"], cells["label"], self.record.n_points, n_labels
        )

    @cached_property
    def first_cells(self) -> np.ndarray:
        """(points,) int64: the first cell of each point."""
        return np.unique(self.cells["point"], return_index=True)[1]

    def name_cell(self, cell: int) -> str:
        """Dataset and row of a cell, such as `pbmc68k:17`."""
        stored: Any = self.cells[cell]
        dataset = self.record.donors[stored["donor"]].dataset
        return f"{self.record.datasets[dataset]}:{stored['row']}"
