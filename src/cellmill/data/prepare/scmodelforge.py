"""Shards of scModelForge: counts of a cell's detected genes, padded to the longest cell of a shard.

    manifest.json                       `n_shards`, `shard_sizes`, `vocab_hash`
    shard_000/X.npy, gene_indices.npy   (cells, genes of the longest): values float32, indices of the gene vocabulary
    shard_000/n_genes.npy               (cells,): detected genes
    shard_000/obs.parquet               metadata, without names of cells

The shards have no names of genes; those are in a JSON file of their own, whose hash the manifest has.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.h5 import reading
from cellmill.data.inputs.matrices import REAL, WHOLE, StoredMatrix, native, require_kind
from cellmill.data.inputs.source import CountSource, as_obs, optional_package
from cellmill.errors import DataError
from cellmill.files import read_json

_SPECIAL = 4  # tokens before the genes, in a vocabulary that is a list


def open_shard_folder(folder: Path, genes: Path) -> CountSource:
    """Open shards with the gene vocabulary `genes`. Raises DataError when they are damaged or of another vocabulary."""
    manifest = read_json(folder / "manifest.json")
    try:
        sizes, made_with = [int(n) for n in manifest["shard_sizes"]], str(manifest["vocab_hash"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{folder}/manifest.json: no shard_sizes and vocab_hash: not shards of scModelForge") from None
    names, row_of_index = _genes(genes, made_with)
    matrix = PaddedShards(folder, sizes, row_of_index, len(names))
    obs = _obs(folder, sizes)
    return CountSource(folder, "X", matrix, obs, pd.DataFrame(index=pd.Index(names, dtype=object)))


class PaddedShards(StoredMatrix):
    """Matrix of several shards, one after another, read through memory maps."""

    def __init__(self, folder: Path, sizes: list[int], row_of_index: np.ndarray, n_genes: int) -> None:
        self._folder, self._row, self.shape = folder, row_of_index, (sum(sizes), n_genes)
        self._shards = [self._open(number, n) for number, n in enumerate(sizes)]

    def _open(self, number: int, n: int) -> tuple[np.ndarray, ...]:
        kinds = {"X": REAL, "gene_indices": WHOLE, "n_genes": WHOLE}
        arrays = []
        for name, kind in kinds.items():
            path = self._folder / f"shard_{number:03d}" / f"{name}.npy"
            if not path.is_file():
                raise DataError(f"{path}: no such file; copy the shards again")
            with reading(path):
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays.append(require_kind(path, name, array, kind, 1 if name == "n_genes" else 2))
            if len(array) != n:
                raise DataError(f"{path}: expected {n:,} cells, as manifest.json, got {len(array):,}")
        if arrays[0].shape != arrays[1].shape:
            raise DataError(f"{path.parent}: X and gene_indices differ in shape: {arrays[0].shape}, {arrays[1].shape}")
        return tuple(arrays)

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for number, (values, indices, lengths) in enumerate(self._shards):
            where = self._folder / f"shard_{number:03d}"
            for first in range(0, len(lengths), block):
                with reading(where):
                    n = np.asarray(lengths[first : first + block]).astype(np.int64)
                    width = values.shape[1]
                    if len(n) and not 0 <= n.min() <= n.max() <= width:
                        raise DataError(f"{where}: n_genes is outside 0 to {width:,}: damaged")
                    is_own = np.arange(width) < n[:, None]
                    found = np.asarray(indices[first : first + block])[is_own]
                    data = native(values[first : first + block])[is_own]
                inside = (found >= 0) & (found < len(self._row))
                rows = np.where(inside, self._row[np.where(inside, found, 0)], -1)
                if (rows < 0).any():
                    wrong = found[int((rows < 0).argmax())]
                    raise DataError(f"{where}: gene index {wrong} is not in the gene vocabulary: damaged")
                starts = np.concatenate([[0], np.cumsum(n)])
                yield sp.csr_matrix((data, rows.astype(np.int32), starts), shape=(len(n), self.shape[1]))


def _genes(path: Path, made_with: str) -> tuple[list[str], np.ndarray]:
    """Names of genes, and the place in them of each index of the vocabulary, -1 for none."""
    tree: Any = read_json(path)
    if isinstance(tree, list) and all(isinstance(name, str) for name in tree):
        tree = {str(name): place + _SPECIAL for place, name in enumerate(dict.fromkeys(tree))}
    whole = isinstance(tree, dict) and all(type(n) is int and 0 <= n < 2**24 for n in tree.values()) and bool(tree)
    if not whole or len(set(tree.values())) < len(tree):
        raise DataError(f"{path}: expected a gene vocabulary of scModelForge: a list of genes, or each with its index")
    digest = hashlib.md5(json.dumps(tree, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
    if digest != made_with:
        raise DataError(f"{path}: its hash is {digest[:12]}, the shards were made with {made_with[:12]}; give theirs")
    row_of_index = np.full(max(tree.values()) + 1, -1, np.int32)
    row_of_index[list(tree.values())] = np.arange(len(tree))
    return list(tree), row_of_index


def _obs(folder: Path, sizes: list[int]) -> pd.DataFrame:
    frames = [pd.DataFrame(index=range(n)) for n in sizes]
    for number, n in enumerate(sizes):
        path = folder / f"shard_{number:03d}" / "obs.parquet"
        if not path.is_file():
            continue
        parquet = optional_package("pyarrow.parquet", "arrow")
        with reading(path):
            frame = parquet.read_table(path, memory_map=True).to_pandas()
        if len(frame.columns) and len(frame) != n:
            raise DataError(f"{path}: expected {n:,} cells, as manifest.json, got {len(frame):,}")
        if len(frame.columns):
            frames[number] = frame
    names = [f"{number:03d}_{row}" for number, n in enumerate(sizes) for row in range(n)]
    return as_obs(pd.concat([pd.DataFrame(), *frames], ignore_index=True), names)
