"""Making of the plan of a corpus's shards: each cell gets its split, its shard and its position there.

One pass over the datasets finds a few numbers for each cell: how many of the vocabulary's genes it has, the
largest of their counts, and a hash of its pairs of gene id and count.

The hash and the seed decide if a cell is for training, validation or test. So equal cells of any files are in the
same split. If the vocabulary was made from training cells only, a second hash decides instead, which is over all
genes of the file. With `split_by`, the values of an obs column decide.

The cells of each split are then shuffled. Consecutive cells of the shuffled order form a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from cellmill.config.corpus import SPLITS
from cellmill.config.corpus import Shard as ShardOptions
from cellmill.config.datasets import COUNTS_RULES
from cellmill.data.arrays import select_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.source import COUNTS_RULE_KEY
from cellmill.data.keys import SHARDS, permutation
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.index import write_split_index
from cellmill.data.shards.manifest import IndexEntry, IndexKind
from cellmill.data.shards.obs import JointObs, find_stored_dtype, join_columns, write_columns
from cellmill.data.shards.plan import (
    BLOCK,
    CELL,
    PLAN_FOLDER,
    ShardPlan,
    check_files,
    compute_key,
    remove_plan,
)
from cellmill.data.split import hash_cells, hash_genes, split_by_content, split_by_value
from cellmill.errors import DataError
from cellmill.files import fsync, named_errors, progress, write_json


@dataclass(frozen=True)
class _DatasetScan:
    """The facts that one pass over a dataset finds. Arrays have an entry per cell of the file."""

    dtypes: dict[str, str | None]  # stored type of each obs column, by name
    split_values: np.ndarray | None  # `(cells,)` text of the obs column `split_by`
    hashes: np.ndarray  # `(cells, 2)` uint64: hash over the vocabulary's genes
    # `(cells,)` uint64: hash over all genes of the file. None unless this hash decides the split
    split_hashes: np.ndarray | None
    cells: np.ndarray  # `(cells,)` of type `CELL`
    ordered: bool  # True if rows are sequences, or genes in rank order
    ranked: bool  # True if rows are genes in rank order, without counts
    counts_rule: str | None  # how estimated counts were rounded


class _CorpusCells(NamedTuple):
    """The cells of all datasets that have a gene of the vocabulary."""

    cells: np.ndarray  # `(cells,)` of type `CELL`
    hashes: np.ndarray  # `(cells, 2)` uint64: hash over the vocabulary's genes
    split: np.ndarray  # `(cells,)` integers: index of the cell's split in `SPLITS`

    def select(self, chosen: np.ndarray) -> _CorpusCells:
        return _CorpusCells(*(array[chosen] for array in self))


class _DuplicateCounts(NamedTuple):
    """Numbers of cells that equal another cell."""

    by_dataset: list[int]  # for each dataset, the number of cells that equal an earlier cell
    across_splits: int  # number of cells that equal a cell of another split


def make_plan(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, manifest: Path
) -> ShardPlan:
    """Make the plan of a corpus's shards, or read the plan that was made from the same inputs before.

    `cell_files` are .h5ad files that preprocess wrote. They are named after their datasets. `manifest` is the path
    of the manifest; an existing manifest is removed. A new plan is written to its folder next to the manifest,
    together with the arrays of the index.

    Raises DataError if

    - a file or a column is missing, or two files have the same name;
    - no cell has a gene of the vocabulary;
    - a split has a fraction above 0, but gets no cells. Dropping duplicates may still leave a split without cells.
    """
    paths = sorted(cell_files, key=lambda path: path.stem)
    check_files(paths)
    key = compute_key(cell_files, vocabulary, options)
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


def _scan(
    number: int, path: Path, vocabulary: Vocabulary, gene_hashes: np.ndarray, split_by: str | None
) -> _DatasetScan:
    """Hash and measure the cells of dataset `number`, in one pass over its file."""
    hashes = []
    split_hashes = list[np.ndarray]()
    # a vocabulary of training cells is made after the split, so the split must not depend on its genes
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
            # hash the residues of a sequence with their positions, and the genes of a cell with their counts
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
            dtypes={
                str(name): find_stored_dtype(reader.read_column(name))
                for name in reader.obs_columns
            },
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
    """Return the counts of `block` with a column for each of the vocabulary's `n_genes` genes.

    `target`, `(columns,)`, has the row in the vocabulary of each column of `block`, or -1 for a column whose gene
    is not in the vocabulary. Columns of the same gene are summed. Rows that are `ordered`, such as sequences, keep
    every entry; DataError is raised if the vocabulary does not have all their genes.
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
    """Find the cells that have a gene of the vocabulary, and assign each of them to a split.

    Raises DataError if there are no such cells, or if a split with a fraction above 0 gets none.
    """
    cells = np.concatenate([scan.cells for scan in scans])
    has_genes = cells["nnz"] > 0
    if not has_genes.any():
        raise DataError(
            f"{paths[0]}: none of {len(has_genes):,} cells of the corpus has a gene of the vocabulary; "
            "give the vocabulary made from these datasets"
        )
    hashes = np.concatenate([scan.hashes for scan in scans])[has_genes]
    seed_and_fractions = (options.seed, options.val_frac, options.test_frac)
    if options.split_by is None:
        parts = [scan.split_hashes for scan in scans if scan.split_hashes is not None]
        split_hashes = np.concatenate(parts)[has_genes] if parts else hashes[:, 0]
        split = split_by_content(split_hashes, *seed_and_fractions)
    else:
        values = np.concatenate(
            [scan.split_values for scan in scans if scan.split_values is not None]
        )[has_genes]
        split = split_by_value(values, options.split_by, *seed_and_fractions, options.train_values)
    return _CorpusCells(cells[has_genes], hashes, split)


def _resolve_duplicates(
    corpus: _CorpusCells, cell_files: list[Path], paths: list[Path], options: ShardOptions
) -> tuple[_CorpusCells, _DuplicateCounts]:
    """Count the cells that equal another cell, and drop duplicates if `options` say so.

    Returns the cells that are left, and the counts. `cell_files` are in the order of the user's list. `paths` are
    the same files, sorted by the name of the dataset.
    """
    drops_duplicates = options.duplicates == "drop"
    # of equal cells, the cell of the first dataset is the original. Datasets are in the order of the user's list if
    # duplicates are dropped, otherwise in the order of their names
    priority = np.arange(len(paths))
    if drops_duplicates:
        priority = np.array([cell_files.index(path) for path in paths])
    is_duplicate, across_splits = _find_duplicates(corpus, priority)
    datasets_of_duplicates = corpus.cells["dataset"][is_duplicate]
    by_dataset = np.bincount(datasets_of_duplicates, minlength=len(paths)).tolist()
    if drops_duplicates:
        return corpus.select(~is_duplicate), _DuplicateCounts(by_dataset, across_splits=0)
    return corpus, _DuplicateCounts(by_dataset, across_splits)


def _find_duplicates(corpus: _CorpusCells, priority: np.ndarray) -> tuple[np.ndarray, int]:
    """Find the cells that equal an earlier cell.

    Cells are in the order of `priority`, `(datasets,)`, of their datasets, then of their rows. Returns a mask of
    the cells that equal an earlier cell, `(cells,)` bool, and the number of cells that equal a cell of another
    split.
    """
    # both sorts are stable, so equal cells stay in the order of priority and row
    by_priority = np.argsort(priority[corpus.cells["dataset"]], kind="stable")
    order = by_priority[np.lexsort(corpus.hashes[by_priority].T[::-1])]
    by_hash = corpus.select(order)
    equals_previous = (by_hash.hashes[1:] == by_hash.hashes[:-1]).all(axis=1)
    is_duplicate = np.zeros(len(order), bool)
    is_duplicate[order[1:][equals_previous]] = True

    # count the cells of groups of equal cells that are in several splits
    starts = np.flatnonzero(np.append(True, ~equals_previous))
    sizes = np.diff(starts, append=len(order))
    split = by_hash.split
    is_mixed = np.maximum.reduceat(split, starts) != np.minimum.reduceat(split, starts)
    return is_duplicate, int(sizes[is_mixed].sum())


def _write_plan(
    folder: Path,
    key: str,
    paths: list[Path],
    scans: list[_DatasetScan],
    corpus: _CorpusCells,
    duplicates: _DuplicateCounts,
    options: ShardOptions,
) -> ShardPlan:
    """Write the plan to `folder`, and the arrays of the index next to that folder. plan.json is written last."""
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
        cells_per_shard=options.cells_per_shard,
        gene_order="genes" if options.order == "genes" and not ordered else "rank",
        n_obs={split: len(chosen) for split, chosen in cells_by_split.items()},
        index={split: index[split] | columns_index[split] for split in index},
        columns=obs.columns,
        # the summary, which the manifest repeats
        left_out={name: int((scan.cells["nnz"] == 0).sum()) for name, scan in zip(names, scans)},
        obs_levels=obs_levels,
        obs_numbers=obs_numbers,
        ordered=ordered,
        duplicates={name: n for name, n in zip(names, duplicates.by_dataset) if n},
        ranked=any(scan.ranked for scan in scans),
        across_splits=duplicates.across_splits,
        counts_rules={
            name: scan.counts_rule
            for name, scan in zip(names, scans)
            if scan.counts_rule in COUNTS_RULES
        },
    )
    # the arrays must be on disk before plan.json, because plan.json says that they are complete
    for path in folder.rglob("*.npy"):
        fsync(path)
    write_json(folder / "plan.json", plan.model_dump(by_alias=True))
    return plan


def _write_obs(
    obs: JointObs, paths: list[Path], scans: list[_DatasetScan], corpus: _CorpusCells
) -> list[np.ndarray]:
    """Write the obs columns of the cells of `corpus`.

    Returns, for each dataset, the rows of these cells in its file.
    """
    rows_by_dataset = []
    for number, (path, scan) in enumerate(zip(paths, scans)):
        rows = corpus.cells["row"][corpus.cells["dataset"] == number]
        rows_by_dataset.append(rows)
        is_kept = np.zeros(len(scan.cells), bool)
        is_kept[rows] = True
        with open_counts(path) as reader:
            obs.write(number, reader.obs_names, reader.read_column, is_kept)
    return rows_by_dataset


def _write_splits(
    folder: Path, index_folder: Path, corpus: _CorpusCells, options: ShardOptions
) -> tuple[dict[str, np.ndarray], dict[str, dict[IndexKind, IndexEntry]]]:
    """Shuffle the cells of each split. Write the cells to `folder`, and their index to `index_folder`.

    Returns two dicts by split: the cells in the order in which the shards have them, `(cells,)` of type `CELL`,
    and the entries of the index.
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
