"""Plan of a corpus's shards: split, shard and position of every cell, before a shard is written.

One pass over the datasets keeps a few numbers per cell: how many of the vocabulary's genes it has,
their largest count, and a hash of its (gene id, count) pairs. The hash and the seed assign the cell
to train, val or test, so equal cells of any file are in one split. If the vocabulary was made from
training cells only, a second hash, over all genes of the file, decides instead. With `split_by` the
values of an obs column decide. The plan is kept in a folder, so that several jobs can write the
shards, and a killed job can be continued:

    plan.json      written last; its key identifies the inputs that it was made from
    SPLIT.npy      a row per cell in the order on disk: dataset, row, nnz, largest
    obs/           obs of all cells (`data/shards/obs.py`)

The arrays of the index (`index.py`), next to the manifest, are written with it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import scipy.sparse as sp
from pydantic import ConfigDict, Field

from cellmill.config.corpus import SPLITS
from cellmill.config.corpus import Shard as ShardOptions
from cellmill.config.datasets import COUNTS_RULES
from cellmill.data.arrays import select_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.source import COUNTS_RULE_KEY
from cellmill.data.keys import SHARDS, permutation
from cellmill.data.packing.cells import GeneOrder
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.index import open_array, write_split_index
from cellmill.data.shards.manifest import CorpusSummary, IndexEntry, IndexKind, stamp
from cellmill.data.shards.obs import (
    JointObs,
    ObsColumn,
    dtype_of,
    join_columns,
    write_columns,
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
# a cell of the corpus: dataset and row in its file, number of nonzeros among the vocabulary's genes,
# and the largest of their counts
CELL = np.dtype([("dataset", "<i4"), ("row", "<i8"), ("nnz", "<i4"), ("largest", "<u4")])
FORMAT = 3
PLAN_FOLDER = "parts"  # folder of the plan, next to the manifest


@dataclass(frozen=True)
class PlannedShard:
    """A shard to be written: cells `start:stop` of its split."""

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
    """The plan, as in plan.json, and the arrays in its folder."""

    model_config = ConfigDict(strict=False, populate_by_name=True)

    folder: Path = Field(exclude=True)
    key: str
    datasets: list[str]
    cells_per_shard: int
    gene_order: Annotated[GeneOrder, Field(alias="order")]
    n_obs: dict[str, int]  # by split
    index: dict[str, dict[IndexKind, IndexEntry]]  # by split
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
        """Return the cells of a shard in the order on disk, of dtype `CELL`."""
        path = self.folder / f"{shard.split}.npy"
        remedy = "make the plan again (the `divide` stage)"
        cells_of_split = open_array(path, (self.n_obs[shard.split],), CELL, remedy)
        return cells_of_split[shard.start : shard.stop]

    @classmethod
    def read(cls, folder: Path, key: str) -> ShardPlan | None:
        """Read the plan in `folder`; None if it is missing, damaged or has another key than `key`."""
        try:
            plan = cls.model_validate({**read_json(folder / "plan.json"), "folder": folder})
        except (DataError, TypeError, ValueError):
            return None
        return plan if plan.key == key else None


@dataclass(frozen=True)
class _DatasetScan:
    """What one pass over a dataset finds. Arrays have an entry per cell of the file."""

    dtypes: dict[str, str | None]  # by obs column
    split_values: np.ndarray | None  # text of the obs column `split_by`
    hashes: np.ndarray  # `(cells, 2)` uint64, over the vocabulary's genes
    # `(cells,)` uint64, over all genes of the file, if these decide the split
    split_hashes: np.ndarray | None
    cells: np.ndarray  # `(cells,)` of dtype `CELL`
    ordered: bool
    ranked: bool
    counts_rule: str | None  # how estimated counts were rounded


class _CorpusCells(NamedTuple):
    """Cells of all datasets that have a gene of the vocabulary."""

    cells: np.ndarray  # `(cells,)` of dtype `CELL`
    hashes: np.ndarray  # `(cells, 2)` uint64
    split: np.ndarray  # `(cells,)` integers: index into `SPLITS`

    def select(self, chosen: np.ndarray) -> _CorpusCells:
        return _CorpusCells(*(array[chosen] for array in self))


class _Duplicates(NamedTuple):
    """Cells that repeat another."""

    by_dataset: list[int]  # number of them in each dataset
    across_splits: int  # cells with an equal cell in another split


def remove_plan(folder: Path) -> None:
    """Remove a plan, plan.json first, so that a killed removal leaves no plan that looks complete."""
    if folder.is_dir():
        (folder / "plan.json").unlink(missing_ok=True)
        fsync(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_plan(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, manifest: Path
) -> ShardPlan:
    """Plan the shards of a corpus, or read the plan that an earlier process made from the same inputs.

    `cell_files` are preprocessed .h5ad files, named after their datasets. Removes `manifest`, and writes
    the plan's folder and the arrays of the index unless it read a plan. Raises DataError if a file or a
    column is missing, a name occurs twice, no cell has a gene of the vocabulary, or a split whose
    fraction is above 0 gets no cells. Dropping duplicates may still empty a split.
    """
    paths = sorted(cell_files, key=lambda path: path.stem)
    _check_files(paths)
    key = _compute_key(cell_files, vocabulary, options)
    folder = manifest.parent / PLAN_FOLDER
    plan = ShardPlan.read(folder, key)
    if plan is not None:
        manifest.unlink(missing_ok=True)
        return plan
    gene_hashes = hash_genes(vocabulary.gene_ids)
    scans = []
    for number, path in enumerate(progress(paths, "divide", len(paths), "files")):
        scans.append(_scan(number, path, vocabulary, gene_hashes, options.split_by))
    corpus = _assign_splits(paths, scans, options)
    corpus, duplicates = _resolve_duplicates(corpus, cell_files, paths, options)
    manifest.unlink(missing_ok=True)
    with named_errors(folder):
        remove_plan(folder)
        return _write_plan(folder, key, paths, scans, corpus, duplicates, options)


def _resolve_duplicates(
    corpus: _CorpusCells, cell_files: list[Path], paths: list[Path], options: ShardOptions
) -> tuple[_CorpusCells, _Duplicates]:
    """Count the cells that repeat another, and drop them if `options` say so.

    `cell_files` are in the order of the user's list, and `paths` are sorted by dataset name. Returns the
    cells that are left.
    """
    drops_duplicates = options.duplicates == "drop"
    # the first of equal cells is the original: by dataset name, or by the user's list if the others are
    # dropped
    priority = np.arange(len(paths))
    if drops_duplicates:
        priority = np.array([cell_files.index(path) for path in paths])
    is_repeated, across_splits = _find_duplicates(corpus, priority)
    datasets_of_repeated = corpus.cells["dataset"][is_repeated]
    by_dataset = np.bincount(datasets_of_repeated, minlength=len(paths)).tolist()
    if drops_duplicates:
        return corpus.select(~is_repeated), _Duplicates(by_dataset, across_splits=0)
    return corpus, _Duplicates(by_dataset, across_splits)


def _write_plan(
    folder: Path,
    key: str,
    paths: list[Path],
    scans: list[_DatasetScan],
    corpus: _CorpusCells,
    duplicates: _Duplicates,
    options: ShardOptions,
) -> ShardPlan:
    """Write the plan to `folder`, plan.json last, and the arrays of the index next to that folder."""
    names = [path.stem for path in paths]
    obs = JointObs(folder / "obs", names, join_columns([scan.dtypes for scan in scans]))
    kept_rows = _write_obs(obs, paths, scans, corpus)
    cells_by_split, index = _write_splits(folder, folder.parent, corpus, options)
    sizes = [len(scan.cells) for scan in scans]
    obs_levels, obs_numbers, columns_index = write_columns(
        folder.parent, obs, kept_rows, sizes, cells_by_split
    )
    ordered = any(scan.ordered for scan in scans)
    plan = ShardPlan(
        folder=folder,
        key=key,
        datasets=names,
        ordered=ordered,
        cells_per_shard=options.cells_per_shard,
        gene_order="genes" if options.order == "genes" and not ordered else "rank",
        n_obs={split: len(chosen) for split, chosen in cells_by_split.items()},
        index={split: index[split] | columns_index[split] for split in index},
        left_out={name: int((scan.cells["nnz"] == 0).sum()) for name, scan in zip(names, scans)},
        duplicates={name: n for name, n in zip(names, duplicates.by_dataset) if n},
        across_splits=duplicates.across_splits,
        columns=obs.columns,
        obs_levels=obs_levels,
        obs_numbers=obs_numbers,
        ranked=any(scan.ranked for scan in scans),
        counts_rules={
            name: scan.counts_rule
            for name, scan in zip(names, scans)
            if scan.counts_rule in COUNTS_RULES
        },
    )
    for path in folder.rglob("*.npy"):
        fsync(path)  # before plan.json, which says that they are complete
    write_json(folder / "plan.json", plan.model_dump(by_alias=True))
    return plan


def _check_files(paths: list[Path]) -> None:
    """Raise DataError if two datasets have the same name, or a file is missing."""
    names = {path.stem for path in paths}
    if len(names) < len(paths):
        raise DataError(
            f"{paths[0].parent}: two datasets have the same file name; rename one, it names the dataset"
        )
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file")


def _write_obs(
    obs: JointObs, paths: list[Path], scans: list[_DatasetScan], corpus: _CorpusCells
) -> list[np.ndarray]:
    """Write the obs of the cells of `corpus`; return the rows of these cells in each dataset's file."""
    rows_by_dataset = []
    for number, (path, scan) in enumerate(zip(paths, scans)):
        rows = corpus.cells["row"][corpus.cells["dataset"] == number]
        rows_by_dataset.append(rows)
        mask = np.zeros(len(scan.cells), bool)
        mask[rows] = True
        with open_counts(path) as reader:
            obs.write(number, reader.obs_names, reader.read_column, mask)
    return rows_by_dataset


def _write_splits(
    folder: Path, index_folder: Path, corpus: _CorpusCells, options: ShardOptions
) -> tuple[dict[str, np.ndarray], dict[str, dict[IndexKind, IndexEntry]]]:
    """Shuffle the cells of each split and write them to `folder`, their index to `index_folder`.

    Returns the cells in the order on disk, of dtype `CELL`, and the entries of the index, by split.
    """
    cells_by_split = {}
    index = {}
    for number, split in enumerate(SPLITS):
        order = np.flatnonzero(corpus.split == number)
        order = order[permutation(len(order), options.seed, SHARDS, number)]
        shuffled = corpus.select(order)
        cells_by_split[split] = shuffled.cells
        np.save(folder / f"{split}.npy", shuffled.cells)
        nnz = shuffled.cells["nnz"]
        index[split] = write_split_index(
            index_folder, split, nnz, shuffled.hashes, options.cells_per_shard
        )
    return cells_by_split, index


def find_plan(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, folder: Path
) -> ShardPlan:
    """Read the plan that `make_plan` wrote in `folder`.

    Raises DataError if there is none, or if it was made from other inputs.
    """
    _check_files(cell_files)
    plan = ShardPlan.read(folder, _compute_key(cell_files, vocabulary, options))
    if plan is not None:
        return plan
    raise DataError(f"{folder}: no plan of these cells and options; run the `divide` stage first")


def _compute_key(cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions) -> str:
    """Compute the digest of a plan's inputs. Files count by name, size and modification time."""
    facts = {
        "format": FORMAT,
        "cells": {path.stem: stamp(path) for path in cell_files},
        "vocabulary": vocabulary.digest,
        "shard": options.model_dump(mode="json", exclude={"jobs"}),
    }
    listed = [path.stem for path in cell_files]
    if options.duplicates == "drop" and listed != sorted(listed):
        facts["listed"] = listed  # the first of equal cells in the list is kept
    return digest(facts)


def _scan(
    number: int, path: Path, vocabulary: Vocabulary, gene_hashes: np.ndarray, split_by: str | None
) -> _DatasetScan:
    """Hash and measure the cells of dataset `number`, in one pass over its file."""
    hashes = []
    split_hashes = list[np.ndarray]()
    # a vocabulary of training cells was made after the split, so the split cannot depend on its genes
    over_all_genes = split_by is None and vocabulary.training is not None
    with open_counts(path) as reader:
        file_gene_hashes = hash_genes(reader.var_names if over_all_genes else [])
        target = vocabulary.rows_of(reader.var_names)
        n_read = 0
        cells = np.empty(reader.n_obs, CELL)
        cells["dataset"] = number
        cells["row"] = np.arange(reader.n_obs)
        for block in progress(reader.rows(BLOCK), f"divide {path.stem}", reader.n_obs):
            counts = select_genes(block, target, vocabulary.n_genes, reader.ordered)
            # a sequence is its residues at their positions, a cell its genes with their counts
            values = positions_in_rows(counts.indptr) if reader.ordered else counts.data
            hashes.append(hash_cells(counts.indptr, counts.indices, values, gene_hashes))
            if over_all_genes:
                all_hashes = hash_cells(block.indptr, block.indices, block.data, file_gene_hashes)
                split_hashes.append(all_hashes[:, 0])
            in_block = cells[n_read : n_read + block.shape[0]]
            in_block["nnz"] = np.diff(counts.indptr)
            in_block["largest"] = 1 if reader.ordered else counts.max(axis=1).toarray().ravel()
            n_read += block.shape[0]
        return _DatasetScan(
            dtypes={str(name): dtype_of(reader.read_column(name)) for name in reader.obs_columns},
            split_values=None if split_by is None else reader.split_values(split_by),
            hashes=np.concatenate(hashes),
            split_hashes=np.concatenate(split_hashes) if over_all_genes else None,
            cells=cells,
            ordered=reader.ordered,
            ranked=reader.ranked,
            counts_rule=reader.recorded.get(COUNTS_RULE_KEY),
        )


def select_genes(
    block: sp.csr_matrix, target: np.ndarray, n_genes: int, ordered: bool
) -> sp.csr_matrix:
    """Put `block` over the vocabulary's genes, and sum columns of the same gene.

    `target`, `(columns,)`, has the row in the vocabulary of each column, or -1. Sequences (`ordered`)
    keep every entry.
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


def _assign_splits(
    paths: list[Path], scans: list[_DatasetScan], options: ShardOptions
) -> _CorpusCells:
    """Assign the cells with a gene of the vocabulary to splits."""
    cells = np.concatenate([scan.cells for scan in scans])
    keep = cells["nnz"] > 0
    if not keep.any():
        raise DataError(
            f"{paths[0]}: none of {len(keep):,} cells of the corpus has a gene of the vocabulary; "
            "give the vocabulary made from these datasets"
        )
    hashes = np.concatenate([scan.hashes for scan in scans])[keep]
    seed_and_fractions = (options.seed, options.val_frac, options.test_frac)
    if options.split_by is None:
        parts = [scan.split_hashes for scan in scans if scan.split_hashes is not None]
        split_hashes = np.concatenate(parts)[keep] if parts else hashes[:, 0]
        split = split_by_content(split_hashes, *seed_and_fractions)
    else:
        values = np.concatenate(
            [scan.split_values for scan in scans if scan.split_values is not None]
        )[keep]
        split = split_by_value(values, options.split_by, *seed_and_fractions, options.train_values)
    return _CorpusCells(cells[keep], hashes, split)


def _find_duplicates(corpus: _CorpusCells, priority: np.ndarray) -> tuple[np.ndarray, int]:
    """Find the cells that repeat an earlier cell.

    Earlier is by the `priority`, `(datasets,)`, of a cell's dataset, then by row. Returns a mask of the
    cells that repeat one, `(cells,)` bool, and the number of cells with an equal cell in another split.
    """
    # both sorts are stable, so equal cells stay in the order of priority and row
    by_priority = np.argsort(priority[corpus.cells["dataset"]], kind="stable")
    order = by_priority[np.lexsort(corpus.hashes[by_priority].T[::-1])]
    by_hash = corpus.select(order)
    is_equal = (by_hash.hashes[1:] == by_hash.hashes[:-1]).all(axis=1)
    repeated = np.zeros(len(order), bool)
    repeated[order[1:][is_equal]] = True
    # groups of equal cells; a mixed group has cells of several splits
    starts = np.flatnonzero(np.append(True, ~is_equal))
    sizes = np.diff(starts, append=len(order))
    split = by_hash.split
    is_mixed = np.maximum.reduceat(split, starts) != np.minimum.reduceat(split, starts)
    return repeated, int(sizes[is_mixed].sum())
