"""Hashes of the cells of a training corpus, by which a cell is recognised under any name.

Hashes of all training and validation cells are stored next to the shards. If a file lacks some
genes, the cells of the shards are hashed again over the other genes. A model's folder has a digest
list of these cells (`data/shards/cell_digests`), also after it was copied elsewhere; a digest cannot
be computed again.
"""

from typing import NamedTuple, Self

import numpy as np

from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.cell_digests import CorpusDigests
from cellmill.data.shards.index import open_index
from cellmill.data.shards.manifest import TRAINING_SPLITS, Manifest
from cellmill.data.shards.reader import read_names
from cellmill.data.split import hash_cells, hash_genes, hash_pairs
from cellmill.evaluate.training_shards import read_blocks

MIN_GENES = 20  # with counts, in a file that lacks genes; on fewer, different cells may be equal
# terms of a missing gene (genes that a file lacks, times counts) that are tried for each cell
MAX_COMPLETIONS = 4096
MAX_COMPLETED_COUNT = 16


class HashedCorpus(NamedTuple):
    """Genes of a corpus, and the hashes of its training and validation cells."""

    genes: Vocabulary
    # for each split, `(2, cells)` uint64 in ascending order; `(1, cells)` from a digest list
    hashes: list[np.ndarray]
    manifest: Manifest | None  # None if read from a digest list

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """Genes and cells of the shards that a training reads."""
        splits = filled_splits(manifest)
        first_shard = manifest.shard_path(manifest.splits[splits[0]].shards[0])
        genes = _make_vocabulary(read_names(first_shard, "var").tolist())
        hashes = [open_index(manifest, split, "hashes") for split in splits]
        return cls(genes, hashes, manifest)

    @classmethod
    def from_digests(cls, corpus: CorpusDigests) -> Self:
        """Genes and cells of a digest list."""
        return cls(_make_vocabulary(corpus.gene_ids), [corpus.cells[None]], None)

    def hashes_over(self, shared: np.ndarray) -> list[np.ndarray]:
        """Hashes of the counts of genes `shared` only, bool `(n_genes,)`, for cells with enough such
        genes. Without shards, the hashes of all genes: see `missing_gene_terms`.
        """
        if self.manifest is None:
            return self.hashes
        gene_hashes = hash_genes(self.genes.gene_ids)
        parts = [np.zeros((0, 2), np.uint64)]
        for split in filled_splits(self.manifest):
            for block in read_blocks(self.manifest, split):
                is_shared = shared.take(block.genes)
                n_shared_before = np.concatenate([[0], np.cumsum(is_shared)])
                offsets = n_shared_before[block.offsets]
                counts = block.counts[is_shared]
                hashes = hash_cells(offsets, block.genes[is_shared], counts, gene_hashes)
                parts.append(hashes[np.diff(offsets) >= MIN_GENES])
        hashes = np.concatenate(parts)
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        return [hashes[order].T]

    def missing_gene_terms(self, lacked: np.ndarray) -> np.ndarray | None:
        """Terms, uint64 `(n,)`, of small counts of the genes `lacked`, bool `(n_genes,)`. None with
        shards, or for more genes than MAX_COMPLETIONS.

        A digest is made from a sum over genes, and cannot be computed over fewer genes. If a file lacks
        only one gene that a cell expresses, its own sum plus one of these terms is the whole cell's sum.
        """
        if self.manifest is not None:
            return None
        n_counts = min(MAX_COMPLETED_COUNT, MAX_COMPLETIONS // lacked.sum())
        if n_counts == 0:
            return None
        genes = hash_genes(np.array(self.genes.gene_ids, object)[lacked])
        return hash_pairs(genes[:, None], np.arange(1, n_counts + 1)).ravel()


def filled_splits(manifest: Manifest) -> list[str]:
    """Splits with cells, of those that a training reads."""
    return [split for split in TRAINING_SPLITS if manifest.splits[split].n_obs]


def _make_vocabulary(ids: list[str]) -> Vocabulary:
    n_cells = np.ones(len(ids), np.int64)
    medians = np.ones(len(ids), np.float32)
    return Vocabulary(ids, ids, n_cells, medians)
