"""Writing of the shards of a corpus by its plan. Only the cells of one shard are in memory at a time.

The cells of a shard are read from the files of the datasets, in the order in which they lie there. They are
written in the plan's shuffled order. The content of a shard depends only on the plan and the shard's number, so any
number of jobs writes the same shards.

When a shard is finished, its entry of the manifest is stored in the plan's folder. A later process finds the entry
there, and keeps the shard (`_find_finished`).
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import SPLITS
from cellmill.config.corpus import Shard as ShardOptions
from cellmill.data import compiled_loops
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.h5 import count_dtype, open_h5
from cellmill.data.inputs.packed_cells import PACKED, locate, open_packed, write_packed
from cellmill.data.packing.cell_file import OpenFiles, PackedCellFile
from cellmill.data.rank_order import RankOrder, inverse_medians
from cellmill.data.rows import SparseCounts, row_offsets
from cellmill.data.shards.divide import make_plan, select_genes
from cellmill.data.shards.index import make_index_entry, new_index
from cellmill.data.shards.manifest import (
    CorpusSummary,
    IndexEntry,
    IndexKind,
    Manifest,
    ShardEntry,
    ShardVocabulary,
    SplitEntry,
    compute_fingerprint,
    read_stamp,
)
from cellmill.data.shards.plan import BLOCK, PlannedShard, ShardPlan, remove_plan
from cellmill.data.shards.reader import read_names
from cellmill.errors import DataError
from cellmill.files import (
    atomic_path,
    progress,
    read_json,
    remove_incomplete,
    sha256_file,
    write_json,
)

_READ_THREADS = 4
# names of shards and of files of the index, such as train-00000.h5ad and val-levels.npy
_FILE_NAME = re.compile(
    rf"({'|'.join(SPLITS)})-(\d{{5}}\.h5ad|({'|'.join(get_args(IndexKind))})\.npy)"
)


def write_shards(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, out: Path
) -> Manifest:
    """Write the shards of a corpus to the folder of `out`, then write the manifest to `out`.

    `cell_files` are .h5ad files that preprocess wrote. They are named after their datasets. Existing shards are
    replaced, except shards that an earlier process has finished from the same inputs.

    Raises DataError if the files, the vocabulary or the options do not allow a plan (`make_plan` lists the cases).
    """
    folder = out.parent
    plan = make_plan(cell_files, vocabulary, options, out)
    write_part(plan, cell_files, vocabulary, folder)
    splits = _make_split_entries(plan, folder)

    medians = hashlib.sha256(vocabulary.medians.astype("<f4").tobytes()).hexdigest()
    genes = ShardVocabulary(
        digest=vocabulary.digest, n_genes=vocabulary.n_genes, medians_digest=medians
    )
    if vocabulary.variability is not None:
        genes["variability"] = vocabulary.variability.tolist()
    split = {"by": options.split_by, "val_frac": options.val_frac, "test_frac": options.test_frac}
    manifest = Manifest(
        path=out,
        fingerprint=compute_fingerprint(genes, options.seed, split, splits),
        vocabulary=genes,
        seed=options.seed,
        split=split,
        obs_columns=plan.obs.column_names,
        gene_order=plan.gene_order,
        splits=splits,
        **plan.model_dump(include=set(CorpusSummary.model_fields)),
    )

    # remove files of earlier shards: the corpus may have had more shards, or other splits
    written = {file.name for file in manifest.files()}
    for path in folder.iterdir():
        if _FILE_NAME.fullmatch(path.name) and path.name not in written:
            path.unlink()
    manifest.write()  # last, because a manifest means that the shards are complete
    remove_plan(plan.folder)
    return manifest


def _make_split_entries(plan: ShardPlan, folder: Path) -> dict[str, SplitEntry]:
    """Make the manifest's entries of all splits from the finished shards in `folder`.

    Also writes the last array of the index, which needs the finished shards.
    """
    shards_by_split: dict[str, list[ShardEntry]] = {name: [] for name in SPLITS}
    for shard in plan.shards():
        entry = _find_finished(plan, shard, folder)
        assert entry is not None
        shards_by_split[shard.split].append(entry)
    splits = {}
    for name, shards in shards_by_split.items():
        index = plan.index[name]
        if shards:
            index = index | {"borders": _write_part_offsets(folder, name, shards)}
        nnz = sum(shard.nnz for shard in shards)
        splits[name] = SplitEntry(n_obs=plan.n_obs[name], nnz=nnz, shards=shards, index=index)
    return splits


def _write_part_offsets(folder: Path, split: str, shards: list[ShardEntry]) -> IndexEntry:
    """Write the array `borders` of the index of a split, and return its entry in the manifest.

    The array has the part offsets of all cells (`PackedCellFile.part_offsets`). They are copied from the shards.
    """
    n_offsets = sum(2 * shard.n_obs + 1 for shard in shards)
    first = 0
    with new_index(folder, split, "borders", (n_offsets,)) as part_offsets:
        for shard in shards:
            with open_h5(folder / shard.name) as file:
                stored = file[PACKED]["borders"]
                stored.read_direct(part_offsets, dest_sel=np.s_[first : first + len(stored)])
                first += len(stored)
    return make_index_entry(folder, split, "borders")


def write_part(
    plan: ShardPlan,
    cell_files: list[Path],
    vocabulary: Vocabulary,
    folder: Path,
    part: int = 0,
    parts: int = 1,
) -> int:
    """Write a part of the plan's shards to `folder`. Returns the number of shards in this part.

    The shards are divided into `parts` parts. This call writes part number `part`, counted from 0. Several
    processes may write different parts at the same time. Shards that were finished by this plan before are kept.
    """
    path_by_dataset = {path.stem: path for path in cell_files}
    shards = plan.shards()[part::parts]
    missing = [shard for shard in shards if _find_finished(plan, shard, folder) is None]
    if missing:
        files = OpenFiles()
        sources = [open_packed(path_by_dataset[name], files) for name in plan.datasets]
        writer = _Writer(plan, sources, vocabulary, folder)
        n_cells = sum(shard.n_obs for shard in missing)
        for shard in progress(missing, "shard", n_cells, size=attrgetter("n_obs")):
            writer.write(shard)
    return len(shards)


def _find_finished(plan: ShardPlan, shard: PlannedShard, folder: Path) -> ShardEntry | None:
    """Read the manifest entry of a shard that was finished by this plan.

    Returns None if there is no such entry, or if the file of the shard has changed since.
    """
    path = folder / shard.name
    try:
        tree = read_json(_entry_path(plan, shard))
        entry = ShardEntry.model_validate(tree["shard"])
        if tree["plan"] != plan.key:
            return None
        is_unchanged = tree["stamp"] == read_stamp(path) or sha256_file(path) == entry.sha256
        return entry if is_unchanged else None
    except (DataError, KeyError, TypeError, ValueError):
        return None


def _entry_path(plan: ShardPlan, shard: PlannedShard) -> Path:
    """Return the path of the stored manifest entry of a finished shard."""
    return (plan.folder / shard.name).with_suffix(".json")


class _Writer:
    """Writes shards of a plan to `folder`. `sources` are the files of the datasets, in the plan's order."""

    def __init__(
        self, plan: ShardPlan, sources: list[PackedCellFile], vocabulary: Vocabulary, folder: Path
    ):
        self._plan = plan
        self._sources = sources
        self._folder = folder
        self._n_genes = vocabulary.n_genes
        self._rank_order = RankOrder(inverse_medians(vocabulary.medians))
        # number the columns of all sources, source after source. `_target` has the row in the vocabulary of each
        # column, and `_first_columns` has the number of each source's first column
        targets = [vocabulary.rows_of(read_names(s.path, "var").tolist()) for s in sources]
        self._target = np.concatenate(targets)
        self._first_columns = row_offsets([len(target) for target in targets])
        columns = {
            "symbol": vocabulary.symbols,
            "n_cells": vocabulary.n_cells,
            "median": vocabulary.medians,
        }
        gene_ids = pd.Index(vocabulary.gene_ids, name="gene_id", dtype=object)
        self._var = pd.DataFrame(columns, index=gene_ids)

    def write(self, shard: PlannedShard) -> None:
        """Write a shard, then store its manifest entry in the folder of the plan."""
        plan = self._plan
        path = self._folder / shard.name
        cells = plan.cells(shard)
        remove_incomplete(path)
        obs = plan.obs.frame(cells["dataset"], cells["row"])
        nnz = int(cells["nnz"].sum(dtype=np.int64))
        compiled_loops.COMPILED.expect(nnz)
        dtype = count_dtype(int(cells["largest"].max()))
        content = hashlib.sha256("\n".join(obs.index).encode())
        with atomic_path(path) as temporary:
            blocks = self._iterate_blocks(cells, content.update)
            write_packed(
                temporary,
                obs,
                self._var,
                blocks,
                plan.gene_order,
                dtype,
                ordered=plan.ordered,
                ranked=plan.ranked,
            )
        with open_h5(path) as file:
            packed = locate(file[PACKED]["bytes"])
        entry = ShardEntry(
            name=path.name,
            n_obs=len(obs),
            nnz=nnz,
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            sha256=sha256_file(path),
            content=content.hexdigest(),
            bytes_at=packed.offset,
            n_bytes=packed.n_bytes,
        )
        done = {"plan": plan.key, "stamp": read_stamp(path), "shard": entry.model_dump()}
        write_json(_entry_path(plan, shard), done)

    def _iterate_blocks(
        self, cells: np.ndarray, update_hash: Callable[[Any], None]
    ) -> Iterator[sp.csr_matrix]:
        """Yield the counts of a shard's cells in blocks of `BLOCK` rows, with the vocabulary's genes as columns.

        If the plan's `gene_order` is `rank`, the genes of a row are in rank order. If it is `genes`, they ascend.
        Sequences keep their own order. `update_hash` is called with the arrays of each block.
        """
        ordered = self._plan.ordered
        offsets, columns, counts = _gather(cells, self._sources)
        for first in range(0, len(cells), BLOCK):
            in_block = cells[first : first + BLOCK]
            block_offsets = offsets[first : first + BLOCK + 1]
            nonzeros = slice(block_offsets[0], block_offsets[-1])
            # change columns of a file to columns over all sources
            first_columns = self._first_columns[in_block["dataset"]]
            columns[nonzeros] += np.repeat(first_columns, np.diff(block_offsets))
            block = sp.csr_matrix(
                (counts[nonzeros], columns[nonzeros], block_offsets - block_offsets[0]),
                shape=(len(in_block), len(self._target)),
            )
            block = select_genes(block, self._target, self._n_genes, ordered)
            if not ordered and not block.data.all():
                block.eliminate_zeros()
            if (np.diff(block.indptr) != in_block["nnz"]).any():
                raise DataError(
                    f"{self._sources[0].path.parent}: a cells file changed while shards were written; run again"
                )
            rows = SparseCounts(block.indptr.astype(np.int64), block.indices, block.data)
            if not ordered and self._plan.gene_order == "rank":
                self._rank_order.sort(rows)
            for array, dtype in zip(rows, ("<i8", "<i4", "<u4")):
                update_hash(array.astype(dtype, copy=False).data)
            yield sp.csr_matrix((rows.counts, rows.genes, rows.offsets), shape=block.shape)


def _gather(
    cells: np.ndarray, sources: list[PackedCellFile]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the rows of `cells` from the files of their datasets.

    Returns three arrays: offsets `(cells + 1,)` int64, columns `(nonzeros,)` int32, and counts `(nonzeros,)` of the
    widest type of the files. The columns of a cell are numbered in its own file.
    """
    dataset = np.ascontiguousarray(cells["dataset"])
    rows = np.ascontiguousarray(cells["row"])
    positions_by_dataset = {
        number: np.flatnonzero(dataset == number) for number in np.unique(dataset).tolist()
    }
    lengths = np.empty(len(cells), np.int64)
    for number, positions in positions_by_dataset.items():
        indptr = sources[number].indptr
        lengths[positions] = indptr[rows[positions] + 1] - indptr[rows[positions]]

    offsets = row_offsets(lengths)
    columns = np.empty(offsets[-1], np.int32)
    dtype = np.result_type(*(sources[number].kind.dtype for number in positions_by_dataset))
    counts = np.empty(offsets[-1], dtype)
    tasks = []
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        for number, positions in positions_by_dataset.items():
            # read in the order of the file, so that the disk can read ahead
            in_order = positions[np.argsort(rows[positions])]
            for first in range(0, len(in_order), BLOCK):
                block = in_order[first : first + BLOCK]
                read = sources[number].read_rows
                tasks.append(pool.submit(read, rows[block], offsets[block], columns, counts))
    for task in tasks:
        task.result()
    return offsets, columns, counts
