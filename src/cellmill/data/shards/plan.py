"""Plan of a corpus's shards: split, shard and position of every cell, before a shard is written.

One pass over the datasets keeps a few numbers per cell: nonzeros and largest count among the
vocabulary's genes, and a hash of its (gene id, count) pairs. Cells are assigned to train, val and
test by that hash and the seed, so equal cells of any file are in one split, or by the values of an
obs column. The plan lies in a folder, so that shards can be written by several jobs, and after a
kill by the next:

    plan.json      written last; its key identifies the inputs that it was made from
    SPLIT.npy      a row per cell in the order on disk: dataset, row, nnz, largest
    obs/           obs of all cells (`data/shards/obs.py`)

The arrays that are read beside the manifest (`index.py`) are written with it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from pydantic import ConfigDict, Field

from cellmill.config.corpus import SPLITS
from cellmill.config.corpus import Shard as ShardOptions
from cellmill.config.datasets import COUNTS_RULES
from cellmill.data.arrays import select_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.source import COUNTS_RULE
from cellmill.data.keys import SHARDS, permutation
from cellmill.data.packing.cells import GeneOrder
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.index import open_array
from cellmill.data.shards.manifest import CorpusSummary, IndexEntry, Kind
from cellmill.data.shards.obs import (
    JointObs,
    ObsColumn,
    dtype_of,
    join_columns,
    write_columns,
    write_split_index,
)
from cellmill.data.split import (
    hash_cells,
    hash_genes,
    split_by_content,
    split_by_value,
)
from cellmill.errors import DataError
from cellmill.files import digest, fsync, named_errors, progress, read_json, write_json

BLOCK = 1024  # cells read, ordered and written at a time
CELL = np.dtype([("dataset", "<i4"), ("row", "<i8"), ("nnz", "<i4"), ("largest", "<u4")])
FORMAT = 3
FOLDER = "parts"  # folder of the plan, beside the manifest


@dataclass(frozen=True)
class PlannedShard:
    """A shard to be written: cells `start:stop` of the split."""

    split: str
    number: int  # in its split
    start: int
    stop: int

    @property
    def n_obs(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.h5ad"


class ShardPlan(CorpusSummary):
    """Contents of the plan's folder."""

    model_config = ConfigDict(strict=False)

    folder: Path = Field(exclude=True)
    key: str
    datasets: list[str]
    cells_per_shard: int
    order: GeneOrder
    n_obs: dict[str, int]  # by split
    index: dict[str, dict[Kind, IndexEntry]]  # by split
    columns: list[ObsColumn]

    @cached_property
    def obs(self) -> JointObs:
        return JointObs(self.folder / "obs", self.datasets, self.columns)

    def shards(self) -> list[PlannedShard]:
        """All shards of all splits, in order."""
        size = self.cells_per_shard
        shards = []
        for split, n_obs in self.n_obs.items():
            for number, start in enumerate(range(0, n_obs, size)):
                shards.append(PlannedShard(split, number, start, min(start + size, n_obs)))
        return shards

    def cells(self, shard: PlannedShard) -> np.ndarray:
        """Cells of a shard in the order on disk, of dtype `CELL`."""
        path = self.folder / f"{shard.split}.npy"
        remedy = "make the plan again (the `divide` stage)"
        cells_of_split = open_array(path, (self.n_obs[shard.split],), CELL, remedy)
        return cells_of_split[shard.start : shard.stop]

    @classmethod
    def read(cls, folder: Path, key: str) -> ShardPlan | None:
        """Plan whose key equals `key`; None if missing or made from other inputs."""
        try:
            plan = cls.model_validate({**read_json(folder / "plan.json"), "folder": folder})
        except (DataError, TypeError, ValueError):
            return None
        return plan if plan.key == key else None


@dataclass(frozen=True)
class _DatasetScan:
    """Numbers of each cell of a dataset."""

    dtypes: dict[str, str | None]  # by obs column
    values: np.ndarray | None  # text of the column that splits
    hashes: np.ndarray
    # hashes over all genes of the file, if these decide the split
    split_hashes: np.ndarray | None
    # of dtype `CELL`: nonzeros among the vocabulary's genes, and the largest count of them
    cells: np.ndarray
    ordered: bool
    ranked: bool
    counts_rule: str | None  # how estimated counts were rounded


class _CorpusCells(NamedTuple):
    """Cells with a gene of the vocabulary, by dataset."""

    cells: np.ndarray  # of dtype `CELL`
    hashes: np.ndarray
    split: np.ndarray  # index into `SPLITS`

    def select(self, chosen: np.ndarray) -> _CorpusCells:
        return _CorpusCells(*(array[chosen] for array in self))


def remove_plan(folder: Path) -> None:
    """Remove a plan, plan.json first: what a killed removal leaves must not pass for a whole plan."""
    if folder.is_dir():
        (folder / "plan.json").unlink(missing_ok=True)
        fsync(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_plan(
    cells: list[Path], vocabulary: Vocabulary, options: ShardOptions, manifest: Path
) -> ShardPlan:
    """Plan the shards of a corpus, or find the plan that an earlier process made of the same
    inputs.

    `cells` are preprocessed .h5ad files, named after their datasets. Writes the plan's folder and
    the arrays of the index beside `manifest`, which is removed first. Raises DataError when a name
    occurs twice, a column is missing, a split is empty, or no cell has a gene of the vocabulary.
    """
    listed = cells
    cells = sorted(cells, key=lambda path: path.stem)
    names = [path.stem for path in cells]
    folder = manifest.parent / FOLDER
    if len(set(names)) < len(names):
        raise DataError(
            f"{cells[0].parent}: two datasets have the same file name; rename one, it names the dataset"
        )
    for path in cells:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    key = _key(listed, vocabulary, options)
    plan = ShardPlan.read(folder, key)
    if plan is not None:
        manifest.unlink(missing_ok=True)
        return plan
    gene_hashes = hash_genes(vocabulary.gene_ids)
    scans = []
    for number, path in enumerate(progress(cells, "divide", len(cells), "files")):
        scans.append(_scan(number, path, vocabulary, gene_hashes, options.split_by))
    corpus = _divide(cells, scans, options)
    # of equal cells the first one is kept: by dataset, or as they are listed
    is_dropped = options.duplicates == "drop"
    rank = np.arange(len(cells))
    if is_dropped:
        rank = np.array([listed.index(path) for path in cells])
    repeated, across_splits = _find_duplicates(corpus, rank)
    duplicates = np.bincount(corpus.cells["dataset"][repeated], minlength=len(cells)).tolist()
    if is_dropped:
        corpus = corpus.select(~repeated)
        across_splits = 0
    manifest.unlink(missing_ok=True)
    with named_errors(folder):
        remove_plan(folder)
        obs = JointObs(folder / "obs", names, join_columns([scan.dtypes for scan in scans]))
        kept = []
        for number, (path, scan) in enumerate(zip(cells, scans)):
            rows = corpus.cells["row"][corpus.cells["dataset"] == number]
            kept.append(rows)
            mask = np.zeros(len(scan.cells), bool)
            mask[rows] = True
            with open_counts(path) as reader:
                obs.write(number, reader.obs_names, reader.read_column, mask)
        in_splits = {}
        index = {}
        for number, name in enumerate(SPLITS):
            order = np.flatnonzero(corpus.split == number)
            order = order[permutation(len(order), options.seed, SHARDS, number)]
            shuffled = corpus.select(order)
            in_splits[name] = shuffled.cells
            np.save(folder / f"{name}.npy", shuffled.cells)
            index[name] = write_split_index(
                manifest.parent,
                name,
                shuffled.cells["nnz"],
                shuffled.hashes,
                options.cells_per_shard,
            )
        sizes = [len(scan.cells) for scan in scans]
        obs_levels, obs_numbers = write_columns(manifest.parent, obs, kept, sizes, in_splits, index)
        by_name = dict(zip(names, scans))
        ordered = any(scan.ordered for scan in scans)
        plan = ShardPlan(
            folder=folder,
            key=key,
            datasets=names,
            ordered=ordered,
            cells_per_shard=options.cells_per_shard,
            order="genes" if options.order == "genes" and not ordered else "rank",
            n_obs={name: len(chosen) for name, chosen in in_splits.items()},
            index=index,
            left_out={name: int((scan.cells["nnz"] == 0).sum()) for name, scan in by_name.items()},
            duplicates={name: n for name, n in zip(names, duplicates) if n},
            across_splits=across_splits,
            columns=obs.columns,
            obs_levels=obs_levels,
            obs_numbers=obs_numbers,
            ranked=any(scan.ranked for scan in scans),
            counts_rules={
                name: scan.counts_rule
                for name, scan in by_name.items()
                if scan.counts_rule in COUNTS_RULES
            },
        )
        for path in folder.rglob("*.npy"):
            fsync(path)  # before plan.json, which says that they are complete
        write_json(folder / "plan.json", plan.model_dump())
    return plan


def find_plan(
    cells: list[Path], vocabulary: Vocabulary, options: ShardOptions, folder: Path
) -> ShardPlan:
    """Read the plan that `make_plan` wrote in `folder`. Raises DataError if it has no plan of these
    inputs.
    """
    plan = ShardPlan.read(folder, _key(cells, vocabulary, options))
    if plan is not None:
        return plan
    raise DataError(f"{folder}: no plan of these cells and options; run the `divide` stage first")


def _key(cells: list[Path], vocabulary: Vocabulary, options: ShardOptions) -> str:
    """Digest of everything that a plan follows from; files of cells count by name, size and time."""
    stamps = {path.stem: [path.stat().st_size, path.stat().st_mtime_ns] for path in cells}
    facts = {
        "format": FORMAT,
        "cells": stamps,
        "vocabulary": vocabulary.digest,
        "shard": options.model_dump(mode="json", exclude={"jobs"}),
    }
    listed = [path.stem for path in cells]
    if options.duplicates == "drop" and listed != sorted(listed):
        facts["listed"] = listed  # of equal cells the first one listed is kept
    return digest(facts)


def _scan(
    number: int, path: Path, vocabulary: Vocabulary, gene_hashes: np.ndarray, split_by: str | None
) -> _DatasetScan:
    """Hash and measure the cells of dataset `number`, in one pass over its file."""
    hashes = []
    first = 0
    split_hashes = list[np.ndarray]()
    over_all_genes = split_by is None and vocabulary.training is not None
    with open_counts(path) as reader:
        file_hashes = hash_genes(reader.var_names if over_all_genes else [])
        target = vocabulary.rows_of(reader.var_names)
        cells = np.empty(reader.n_obs, CELL)
        cells["dataset"] = number
        cells["row"] = np.arange(reader.n_obs)
        for block in progress(reader.rows(BLOCK), f"divide {path.stem}", reader.n_obs):
            counts = select_genes(block, target, vocabulary.n_genes, reader.ordered)
            # a sequence is its residues at their positions, a cell its genes with their counts
            values = positions_in_rows(counts.indptr) if reader.ordered else counts.data
            hashes.append(hash_cells(counts.indptr, counts.indices, values, gene_hashes))
            if over_all_genes:
                in_file = hash_cells(block.indptr, block.indices, block.data, file_hashes)
                split_hashes.append(in_file[:, 0])
            part = cells[first : first + block.shape[0]]
            part["nnz"] = np.diff(counts.indptr)
            part["largest"] = 1 if reader.ordered else counts.max(axis=1).toarray().ravel()
            first += block.shape[0]
        split_values = None if split_by is None else reader.split_values(split_by)
        return _DatasetScan(
            dtypes={str(name): dtype_of(reader.read_column(name)) for name in reader.obs_columns},
            values=split_values,
            hashes=np.concatenate(hashes),
            split_hashes=np.concatenate(split_hashes) if over_all_genes else None,
            cells=cells,
            ordered=reader.ordered,
            ranked=reader.ranked,
            counts_rule=reader.recorded.get(COUNTS_RULE),
        )


def select_genes(
    block: sp.csr_matrix, target: np.ndarray, n_genes: int, ordered: bool
) -> sp.csr_matrix:
    """`block` over the vocabulary's genes, with columns of one gene summed; sequences lose and sum
    nothing.
    """
    if not ordered:
        return select_columns(block, target, n_genes)
    if (target < 0).any():
        raise DataError(
            "the vocabulary lacks residues or ranked genes; make it from these datasets (`vocabulary`)"
        )
    return sp.csr_matrix(
        (block.data, target[block.indices], block.indptr), shape=(block.shape[0], n_genes)
    )


def _divide(paths: list[Path], scans: list[_DatasetScan], options: ShardOptions) -> _CorpusCells:
    """Assign the cells with a gene of the vocabulary to splits."""
    cells = np.concatenate([scan.cells for scan in scans])
    keep = cells["nnz"] > 0
    if not keep.any():
        raise DataError(
            f"{paths[0]}: none of {len(keep):,} cells of the corpus has a gene of the vocabulary; "
            "give the vocabulary made from these datasets"
        )
    hashes = np.concatenate([scan.hashes for scan in scans])[keep]
    fractions = (options.seed, options.val_frac, options.test_frac)
    if options.split_by is None:
        over_all = [scan.split_hashes for scan in scans if scan.split_hashes is not None]
        deciding = np.concatenate(over_all)[keep] if over_all else hashes[:, 0]
        split = split_by_content(deciding, *fractions)
    else:
        values = np.concatenate([scan.values for scan in scans if scan.values is not None])[keep]
        split = split_by_value(values, options.split_by, *fractions, options.train_values)
    return _CorpusCells(cells[keep], hashes, split)


def _find_duplicates(corpus: _CorpusCells, rank: np.ndarray) -> tuple[np.ndarray, int]:
    """Mask of duplicates of earlier cells, and the number of cells with a duplicate in another
    split.

    Cells of datasets of lower `rank`, `(datasets,)`, are earlier, and within a dataset those that
    come first.
    """
    by_rank = np.argsort(rank[corpus.cells["dataset"]], kind="stable")
    order = by_rank[np.lexsort(corpus.hashes[by_rank].T[::-1])]
    ordered = corpus.select(order)
    is_equal = (ordered.hashes[1:] == ordered.hashes[:-1]).all(axis=1)
    repeated = np.zeros(len(order), bool)
    repeated[order[1:][is_equal]] = True
    # groups of equal cells, and those with cells of several splits
    starts = np.flatnonzero(np.append(True, ~is_equal))
    sizes = np.diff(starts, append=len(order))
    split = ordered.split
    is_mixed = np.maximum.reduceat(split, starts) != np.minimum.reduceat(split, starts)
    return repeated, int(sizes[is_mixed].sum())
