"""Training cells, which are not held out: their names and contents, and their genes as a baseline for predicted tokens.

Held-out cells are in no training or validation shard, neither of the model's corpus nor of its ancestors': neither by
dataset and obs name, nor by the counts of the vocabulary's genes, under whatever name. Of few counts, different cells
may be equal by chance; they are not held out either.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.cell_tokens import CellTokenizer
from cellmill.data.counts_reader import CountsReader
from cellmill.data.gene_ranking import rank_buckets
from cellmill.data.genes import match_columns
from cellmill.data.h5_file import open_h5
from cellmill.data.manifest import REMEDY, Manifest
from cellmill.data.shard_file import open_shards, read_gene_ids
from cellmill.data.shard_index import HASHES, are_in, hash_order, open_index
from cellmill.data.shard_plan import select_genes
from cellmill.data.split import hash_cells, hash_genes, places
from cellmill.data.verified_shards import READ, verify_once
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.models.objective import GeneStatistics

MAX_TRAIN_CELLS = 200_000  # training cells read at most; shards are preshuffled, so the first ones are a random sample
_ROWS = 4096
_HASHED_ROWS = 1024


def read_gene_statistics(manifest: Manifest, tokens: Tokens, max_cells: int = MAX_TRAIN_CELLS) -> GeneStatistics:
    """Statistics over the first `max_cells` cells of the training shards."""
    n_genes, n_cells = manifest.n_genes, 0
    total, by_rank = np.zeros(n_genes), np.zeros((tokens.max_tokens.bit_length(), n_genes), np.int64)
    tokenizer = CellTokenizer(tokens, n_genes, variability=manifest.variability)
    for genes, counts, starts in _blocks(manifest, "train", max_cells):
        made = tokenizer.batch(genes, counts, starts, np.arange(len(starts) - 1))
        values, cu_seqlens = made.values, made.cu_seqlens
        rows, lengths = made.genes - len(SPECIAL), np.diff(cu_seqlens)
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
        for genes, counts, starts in _blocks(manifest, "train", max_cells)
    ]
    return sp.vstack(blocks, format="csr")


def _blocks(
    manifest: Manifest, split: str, max_cells: float = np.inf
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Genes, counts and starts (as in `Tokenizer.tokenize`) of blocks of cells of a split, until `max_cells`."""
    n_cells = 0
    for shard in open_shards(manifest, split):
        if n_cells >= max_cells:
            break
        for first in range(0, shard.n_obs, _ROWS):
            if n_cells >= max_cells:
                break
            starts = shard.indptr[first : first + _ROWS + 1].astype(np.int64)
            genes = np.empty(int(starts[-1] - starts[0]), np.int32)
            counts = np.empty(len(genes), shard.dtype)
            if len(genes):
                shard.read_genes(int(starts[0]), [genes])
                shard.read_counts(int(starts[0]), [counts])
                if not 0 <= genes.min() <= genes.max() < manifest.n_genes:  # which crashes scipy
                    raise DataError(f"{shard.path}: damaged: X/indices are not genes of the vocabulary; {REMEDY}")
            n_cells += len(starts) - 1
            yield genes, counts, starts - starts[0]
        shard.close()


def seen_cells(manifests: Iterable[Manifest], datasets: Iterable[str]) -> dict[str, set[str]]:
    """obs names of training and validation cells, by dataset; an empty set for datasets outside the corpora.

    Raises DataError for a shard that is not as when it was written.
    """
    seen: dict[str, set[str]] = {name: set() for name in datasets}
    for manifest in manifests:
        verify_once(manifest)
        for shard in (shard for split in READ for shard in manifest.splits[split].shards):
            path = manifest.shard_path(shard)
            try:
                with open_h5(path, REMEDY) as file:
                    names = read_elem(file["obs"][file["obs"].attrs["_index"]])
            except (OSError, KeyError) as error:
                raise DataError(f"{path}: cannot read its obs names ({error}); run shard again") from None
            for name in names:
                dataset, _, cell = str(name).partition(":")
                if dataset in seen:
                    seen[dataset].add(cell)
    return seen


@dataclass(frozen=True)
class _Corpus:
    """Genes of a corpus, and the hashes of its training and validation cells."""

    gene_ids: list[str]
    gene_hashes: np.ndarray
    cells: list[np.ndarray]  # of each split `(2, cells)` uint64, ascending

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        trained = [split for split in READ if manifest.splits[split].n_obs]
        gene_ids = read_gene_ids(manifest.shard_path(manifest.splits[trained[0]].shards[0]))
        hashes = hash_genes(gene_ids)
        return cls(gene_ids, hashes, [cell_hashes(manifest, split, hashes) for split in trained])


class TrainedContents:
    """Contents of the training and validation cells of corpora; of shards of earlier versions they are hashed once."""

    def __init__(self, manifests: Iterable[Manifest]):
        self._corpora = [_Corpus.of(m) for m in {manifest.fingerprint: manifest for manifest in manifests}.values()]

    def copies(self, reader: CountsReader, among: np.ndarray) -> np.ndarray:
        """Mask, bool `(n_obs,)`, of the cells of mask `among` with the counts of a trained cell of any name."""
        found = np.zeros(reader.n_obs, bool)
        for corpus in self._corpora if among.any() else ():
            try:
                target = match_columns(reader, _vocabulary_of(corpus.gene_ids)).target
            except DataError:
                continue  # no gene in common: no copies
            last = 0
            for raw in reader.rows(_HASHED_ROWS):
                first, last = last, last + raw.shape[0]
                rows = np.flatnonzero(among[first:last])
                if not len(rows):
                    continue
                block = select_genes(raw[rows], target, len(corpus.gene_ids), reader.ordered)
                values = places(block.indptr) if reader.ordered else block.data
                hashes = hash_cells(block.indptr, block.indices, values, corpus.gene_hashes)
                for known in corpus.cells:
                    found[first + rows] |= are_in(hashes, known)
        return found


def _vocabulary_of(gene_ids: list[str]) -> Vocabulary:
    return Vocabulary(gene_ids, gene_ids, np.ones(len(gene_ids), np.int64), np.ones(len(gene_ids), np.float32))


def cell_hashes(manifest: Manifest, split: str, gene_hashes: np.ndarray) -> np.ndarray:
    """`hash_cells` of a split's cells, `(2, cells)` uint64 in ascending order; made from shards of earlier versions."""
    stored = open_index(manifest, split, HASHES)
    if stored is not None:
        return stored
    hashes = np.concatenate(
        [
            hash_cells(starts, genes, places(starts) if manifest.ordered else counts, gene_hashes)
            for genes, counts, starts in _blocks(manifest, split)
        ]
    )
    return hashes[hash_order(hashes)].T.copy()


def held_out(obs_names: pd.Index, seen: set[str]) -> np.ndarray:
    """Mask of the held-out cells; bool."""
    return ~obs_names.isin(list(seen)) if seen else np.ones(len(obs_names), dtype=bool)
