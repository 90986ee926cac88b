"""Writing the shards of many datasets by a plan, with one shard of cells in memory at a time.

The cells of each shard are gathered from the datasets, by pread in disk order, and written in the
plan's shuffled order. A shard depends only on the plan and its number, so any number of jobs writes
the same shards. The manifest entry of each finished shard is stored in the plan's folder, so that a
later process keeps the shard (`_find_finished`).
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
from cellmill.data.shards.index import make_index_entry, new_index
from cellmill.data.shards.manifest import (
    CorpusSummary,
    IndexEntry,
    IndexKind,
    Manifest,
    ShardEntry,
    ShardVocabulary,
    SplitEntry,
    fingerprint_of,
    stamp,
)
from cellmill.data.shards.plan import (
    BLOCK,
    PlannedShard,
    ShardPlan,
    make_plan,
    remove_plan,
    select_genes,
)
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
_FILE_NAME = re.compile(
    rf"({'|'.join(SPLITS)})-(\d{{5}}\.h5ad|({'|'.join(get_args(IndexKind))})\.npy)"
)


def write_shards(
    cell_files: list[Path], vocabulary: Vocabulary, options: ShardOptions, out: Path
) -> Manifest:
    """Write the shards of a corpus next to `out`, then the manifest to `out`.

    `cell_files` are preprocessed .h5ad files, named after their datasets. Existing shards are replaced,
    except those that a killed process finished from the same inputs. Raises DataError as `make_plan`
    does.
    """
    plan = make_plan(cell_files, vocabulary, options, out)
    write_part(plan, cell_files, vocabulary, out.parent)
    entries: dict[str, list[ShardEntry]] = {name: [] for name in SPLITS}
    for shard in plan.shards():
        entry = _find_finished(plan, shard, out.parent)
        assert entry is not None
        entries[shard.split].append(entry)
    splits = {}
    for name, shards in entries.items():
        index = plan.index[name]
        if shards:
            index = index | {"borders": _write_part_offsets(out.parent, name, shards)}
        nnz = sum(shard.nnz for shard in shards)
        splits[name] = SplitEntry(n_obs=plan.n_obs[name], nnz=nnz, shards=shards, index=index)
    medians = hashlib.sha256(vocabulary.medians.astype("<f4").tobytes()).hexdigest()
    genes = ShardVocabulary(
        digest=vocabulary.digest, n_genes=vocabulary.n_genes, medians_digest=medians
    )
    if vocabulary.variability is not None:
        genes["variability"] = vocabulary.variability.tolist()
    split = {"by": options.split_by, "val_frac": options.val_frac, "test_frac": options.test_frac}
    manifest = Manifest(
        path=out,
        fingerprint=fingerprint_of(genes, options.seed, split, splits),
        vocabulary=genes,
        seed=options.seed,
        split=split,
        obs_columns=plan.obs.column_names,
        gene_order=plan.gene_order,
        splits=splits,
        **plan.model_dump(include=set(CorpusSummary.model_fields)),
    )
    written = {file.name for file in manifest.files()}
    # remove files of earlier shards: there may have been more of them, or other splits
    for path in out.parent.iterdir():
        if _FILE_NAME.fullmatch(path.name) and path.name not in written:
            path.unlink()
    manifest.write()  # last: its existence means that the shards are complete
    remove_plan(plan.folder)
    return manifest


def _write_part_offsets(folder: Path, split: str, shards: list[ShardEntry]) -> IndexEntry:
    """Copy the part offsets of a split from its shards into the file `borders` of the index."""
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
    """Write part `part` of `parts` of a plan's shards to `folder`; return the number of these shards.

    Several processes may write parts at the same time. Shards that are finished by this plan are kept.
    """
    paths = {path.stem: path for path in cell_files}
    shards = plan.shards()[part::parts]
    missing = [shard for shard in shards if _find_finished(plan, shard, folder) is None]
    if missing:
        files = OpenFiles()
        sources = [open_packed(paths[name], files) for name in plan.datasets]
        writer = _Writer(plan, sources, vocabulary, folder)
        n_cells = sum(shard.n_obs for shard in missing)
        for shard in progress(missing, "shard", n_cells, size=attrgetter("n_obs")):
            writer.write(shard)
    return len(shards)


def _find_finished(plan: ShardPlan, shard: PlannedShard, folder: Path) -> ShardEntry | None:
    """Read the entry of a shard that this plan wrote; None if there is none, or the file has changed."""
    path = folder / shard.name
    try:
        tree = read_json(_entry_path(plan, shard))
        entry = ShardEntry.model_validate(tree["shard"])
        if tree["plan"] != plan.key:
            return None
        is_whole = tree["stamp"] == stamp(path) or sha256_file(path) == entry.sha256
        return entry if is_whole else None
    except (DataError, KeyError, TypeError, ValueError):
        return None


def _entry_path(plan: ShardPlan, shard: PlannedShard) -> Path:
    return (plan.folder / shard.name).with_suffix(".json")


class _Writer:
    """Writes shards of a plan from the datasets' files, `sources`."""

    def __init__(
        self, plan: ShardPlan, sources: list[PackedCellFile], vocabulary: Vocabulary, folder: Path
    ):
        self._plan = plan
        self._sources = sources
        self._folder = folder
        self._n_genes = vocabulary.n_genes
        self._rank_order = RankOrder(inverse_medians(vocabulary.medians))
        # the columns of all sources are numbered one source after the other: the vocabulary row of each
        # column, and the first column of each source
        targets = [vocabulary.rows_of(read_names(s.path, "var").tolist()) for s in sources]
        self._target = np.concatenate(targets)
        self._first_column = row_offsets([len(target) for target in targets])
        columns = {
            "symbol": vocabulary.symbols,
            "n_cells": vocabulary.n_cells,
            "median": vocabulary.medians,
        }
        gene_ids = pd.Index(vocabulary.gene_ids, name="gene_id", dtype=object)
        self._var = pd.DataFrame(columns, index=gene_ids)

    def write(self, shard: PlannedShard) -> None:
        """Write a shard, then its manifest entry in the folder of the plan."""
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
            blocks = self._shard_blocks(cells, content.update)
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
        done = {"plan": plan.key, "stamp": stamp(path), "shard": entry.model_dump()}
        write_json(_entry_path(plan, shard), done)

    def _shard_blocks(
        self, cells: np.ndarray, update: Callable[[Any], None]
    ) -> Iterator[sp.csr_matrix]:
        """Yield the rows of a shard over the vocabulary's genes, `BLOCK` at a time; `update` hashes them.

        Genes of a row are in rank order, or ascend if `plan.gene_order` is genes. Sequences keep their own
        order.
        """
        ordered = self._plan.ordered
        offsets, columns, counts = _gather(cells, self._sources)
        for first in range(0, len(cells), BLOCK):
            in_block = cells[first : first + BLOCK]
            block_offsets = offsets[first : first + BLOCK + 1]
            nonzeros = slice(block_offsets[0], block_offsets[-1])
            first_column = self._first_column[in_block["dataset"]]
            columns[nonzeros] += np.repeat(first_column, np.diff(block_offsets))
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
                update(array.astype(dtype, copy=False).data)
            yield sp.csr_matrix((rows.counts, rows.genes, rows.offsets), shape=block.shape)


def _gather(
    cells: np.ndarray, sources: list[PackedCellFile]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the rows of `cells` from their files.

    Returns their offsets (int64), columns (int32) and counts (of the widest dtype of the files).
    """
    dataset = np.ascontiguousarray(cells["dataset"])
    rows = np.ascontiguousarray(cells["row"])
    chosen = {number: np.flatnonzero(dataset == number) for number in np.unique(dataset).tolist()}
    lengths = np.empty(len(cells), np.int64)
    for number, positions in chosen.items():
        indptr = sources[number].indptr
        lengths[positions] = indptr[rows[positions] + 1] - indptr[rows[positions]]
    offsets = row_offsets(lengths)
    columns = np.empty(offsets[-1], np.int32)
    counts = np.empty(
        offsets[-1], np.result_type(*(sources[number].kind.dtype for number in chosen))
    )
    tasks = []
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        for number, positions in chosen.items():
            in_order = positions[np.argsort(rows[positions])]  # disk order, for read-ahead
            for first in range(0, len(in_order), BLOCK):
                part = in_order[first : first + BLOCK]
                read = sources[number].read_rows
                tasks.append(pool.submit(read, rows[part], offsets[part], columns, counts))
    for task in tasks:
        task.result()
    return offsets, columns, counts
