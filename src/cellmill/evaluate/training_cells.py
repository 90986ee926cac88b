"""Training cells, which are not held out: their names, and their genes as a baseline for predicted tokens.

Held-out cells are in no training or validation shard, neither of the model's corpus nor of its ancestors'. Cells are
identified by dataset and obs name: a copy of a training cell in a dataset of another name counts as unseen.
"""

from collections.abc import Iterable, Iterator

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.gene_ranking import rank_buckets
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.tokens import Tokenizer
from cellmill.errors import DataError
from cellmill.models.objective import GeneStatistics

MAX_TRAIN_CELLS = 200_000  # training cells read at most; shards are preshuffled, so the first ones are a random sample
_ROWS = 4096


def read_gene_statistics(manifest: Manifest, tokens: Tokens, max_cells: int = MAX_TRAIN_CELLS) -> GeneStatistics:
    """Statistics over the first `max_cells` cells of the training shards."""
    n_genes, n_cells = manifest.n_genes, 0
    total, by_rank = np.zeros(n_genes), np.zeros((tokens.max_tokens.bit_length(), n_genes), np.int64)
    tokenizer: Tokenizer = tokens.load()(tokens)
    for genes, counts, starts in _training_blocks(manifest, max_cells):
        ids, values, cu_seqlens = tokenizer.tokenize(genes, counts, starts)
        rows, lengths = ids - len(SPECIAL), np.diff(cu_seqlens)
        buckets = rank_buckets(np.arange(len(rows)) - np.repeat(cu_seqlens[:-1], lengths))
        by_rank += np.bincount(buckets * n_genes + rows, minlength=by_rank.size).reshape(by_rank.shape)
        total += np.bincount(rows, weights=values, minlength=n_genes)
        n_cells += len(starts) - 1
    n = by_rank.sum(0)
    overall = float(total.sum() / max(n.sum(), 1))
    return GeneStatistics(n, np.where(n > 0, total / np.maximum(n, 1), overall), overall, n_cells, by_rank)


def read_training_counts(manifest: Manifest, max_cells: int) -> sp.csr_matrix:
    """Counts of the first training cells, at least `max_cells` if there are so many: `(cells, genes)`, uint32."""
    blocks = [
        sp.csr_matrix((counts.astype(np.uint32), genes, starts), shape=(len(starts) - 1, manifest.n_genes))
        for genes, counts, starts in _training_blocks(manifest, max_cells)
    ]
    return sp.vstack(blocks, format="csr")


def _training_blocks(manifest: Manifest, max_cells: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Genes, counts and starts (as in `Tokenizer.tokenize`) of blocks of training cells, until `max_cells`."""
    n_cells = 0
    for shard in open_shards(manifest, "train"):
        for first in range(0, shard.n_obs, _ROWS):
            if n_cells >= max_cells:
                break
            starts = shard.indptr[first : first + _ROWS + 1]
            genes = np.empty(int(starts[-1] - starts[0]), np.int32)
            counts = np.empty(len(genes), shard.dtype)
            if len(genes):
                shard.read_genes(int(starts[0]), [genes])
                shard.read_counts(int(starts[0]), [counts])
            n_cells += len(starts) - 1
            yield genes, counts, starts - starts[0]
        shard.close()


def seen_cells(manifests: Iterable[Manifest], datasets: Iterable[str]) -> dict[str, set[str]]:
    """obs names of training and validation cells, by dataset; an empty set for datasets outside the corpora."""
    seen: dict[str, set[str]] = {name: set() for name in datasets}
    for manifest in manifests:
        for shard in (shard for split in ("train", "val") for shard in manifest.splits[split].shards):
            path = manifest.shard_path(shard)
            try:
                with h5py.File(path, "r") as file:
                    names = read_elem(file["obs"][file["obs"].attrs["_index"]])
            except (OSError, KeyError) as error:
                raise DataError(f"{path}: cannot read its obs names ({error}); run shard again") from None
            for name in names:
                dataset, _, cell = str(name).partition(":")
                if dataset in seen:
                    seen[dataset].add(cell)
    return seen


def held_out(obs_names: pd.Index, seen: set[str]) -> np.ndarray:
    """Mask of the held-out cells; bool."""
    return ~obs_names.isin(list(seen)) if seen else np.ones(len(obs_names), dtype=bool)
