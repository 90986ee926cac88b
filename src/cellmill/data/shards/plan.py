"""The plan of a corpus's shards: the split, the shard and the position of every cell.

Stage `divide` makes the plan (`divide.py`) before the first shard is written. It is kept in a folder. So several
jobs can write the shards, and another job can go on after a killed one. The folder has these files:

    plan.json      the plan. It is written last. Its key identifies the inputs from which it was made
    SPLIT.npy      a `CELL` for each cell of the split, in the order in which the shards have them
    obs/           the obs columns of all cells (`data/shards/obs.py`)

The arrays of the index (`index.py`) are written together with the plan, next to the manifest.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from cellmill.config.corpus import Shard as ShardOptions
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.packing.cells import GeneOrder
from cellmill.data.shards.index import open_array
from cellmill.data.shards.manifest import CorpusSummary, IndexEntry, IndexKind, read_stamp
from cellmill.data.shards.obs import JointObs, ObsColumn
from cellmill.errors import DataError
from cellmill.files import digest, fsync, read_json

BLOCK = 1024  # number of cells that are read, ordered and written at a time
# a cell of the corpus: the number of its dataset, its row in the dataset's file, the number of the vocabulary's
# genes that it has, and the largest of their counts
CELL = np.dtype([("dataset", "<i4"), ("row", "<i8"), ("nnz", "<i4"), ("largest", "<u4")])
FORMAT = 3
PLAN_FOLDER = "parts"  # folder of the plan, next to the manifest


@dataclass(frozen=True)
class PlannedShard:
    """A shard to be written. It has cells `start:stop` of its split."""

    split: str
    number: int  # the shard's number in its split
    start: int
    stop: int

    @property
    def n_obs(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.h5ad"


class ShardPlan(CorpusSummary):
    """The content of plan.json. The arrays of the plan are in the same folder."""

    model_config = ConfigDict(strict=False, populate_by_name=True)

    folder: Path = Field(exclude=True)
    key: str  # digest of the inputs from which the plan was made
    datasets: list[str]
    cells_per_shard: int
    gene_order: Annotated[GeneOrder, Field(alias="order")]  # the file calls it `order`
    n_obs: dict[str, int]  # number of cells of each split
    # by split, files of the index that are already written
    index: dict[str, dict[IndexKind, IndexEntry]]
    columns: list[ObsColumn]

    @cached_property
    def obs(self) -> JointObs:
        return JointObs(self.folder / "obs", self.datasets, self.columns)

    def shards(self) -> list[PlannedShard]:
        """List the shards of all splits, in order."""
        size = self.cells_per_shard
        shards = []
        for split, n_obs in self.n_obs.items():
            for number, start in enumerate(range(0, n_obs, size)):
                shards.append(PlannedShard(split, number, start, min(start + size, n_obs)))
        return shards

    def cells(self, shard: PlannedShard) -> np.ndarray:
        """Return the cells of a shard in the order in which it has them, `(cells,)` of type `CELL`."""
        path = self.folder / f"{shard.split}.npy"
        remedy = "make the plan again (the `divide` stage)"
        cells_of_split = open_array(path, (self.n_obs[shard.split],), CELL, remedy)
        return cells_of_split[shard.start : shard.stop]

    @classmethod
    def read(cls, folder: Path, key: str) -> ShardPlan | None:
        """Read the plan in `folder`. Returns None if there is no readable plan with this key."""
        try:
            plan = cls.model_validate({**read_json(folder / "plan.json"), "folder": folder})
        except (DataError, TypeError, ValueError):
            return None
        return plan if plan.key == key else None


def find_plan(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, folder: Path
) -> ShardPlan:
    """Read the plan that stage `divide` has written to `folder`.

    Raises DataError if there is no plan, or if it was made from other inputs.
    """
    check_files(cell_files)
    plan = ShardPlan.read(folder, compute_key(cell_files, vocabulary, options))
    if plan is not None:
        return plan
    raise DataError(f"{folder}: no plan of these cells and options; run the `divide` stage first")


def check_files(paths: list[Path]) -> None:
    """Raise DataError if two datasets have the same name, or a file is missing."""
    names = {path.stem for path in paths}
    if len(names) < len(paths):
        raise DataError(
            f"{paths[0].parent}: two datasets have the same file name; rename one, it names the dataset"
        )
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file")


def compute_key(cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions) -> str:
    """Compute the key of a plan: a digest of its inputs.

    Of the files, only names, sizes and modification times are part of the key.
    """
    facts = {
        "format": FORMAT,
        "cells": {path.stem: read_stamp(path) for path in cell_files},
        "vocabulary": vocabulary.digest,
        "shard": options.model_dump(mode="json", exclude={"jobs"}),
    }
    listed = [path.stem for path in cell_files]
    if options.duplicates == "drop" and listed != sorted(listed):
        # the order of the files matters: of equal cells, the first in this order is kept
        facts["listed"] = listed
    return digest(facts)


def remove_plan(folder: Path) -> None:
    """Remove the folder of a plan.

    The file plan.json is removed first. So a killed removal does not leave a plan that looks complete.
    """
    if folder.is_dir():
        (folder / "plan.json").unlink(missing_ok=True)
        fsync(folder)
        shutil.rmtree(folder, ignore_errors=True)
