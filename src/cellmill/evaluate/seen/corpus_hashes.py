"""Hashes of the cells of a training corpus. A cell is recognised by its hash under any name.

The hashes of all training and validation cells are stored next to the shards. If a file lacks some genes
of the corpus, the cells of the shards are hashed again over the genes that both have.

The folder of a model has a digest list of these cells (`data/shards/cell_digests`), which stays with the
folder when that is copied. Without shards, digests cannot be computed again over fewer genes.
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

# In a file that lacks genes, a cell must express at least this many of the shared genes. On fewer genes,
# different cells may have equal counts.
MIN_GENES = 20
# For each cell, at most this many additions are tried. An addition is one count of one missing gene.
MAX_COMPLETIONS = 4096
MAX_COMPLETED_COUNT = 16  # the largest count of a missing gene that is tried


class HashedCorpus(NamedTuple):
    """Genes of a corpus, and the hashes of its training and validation cells."""

    genes: Vocabulary
    # an array for each split, in ascending order: (2, cells) uint64, or (1, cells) from a digest list
    hashes: list[np.ndarray]
    manifest: Manifest | None  # of the shards; None if the hashes come from a digest list

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """Read the genes and the hashes of the shards that a training reads."""
        splits = list_filled_splits(manifest)
        first_shard = manifest.shard_path(manifest.splits[splits[0]].shards[0])
        genes = _make_vocabulary(read_names(first_shard, "var").tolist())
        hashes = [open_index(manifest, split, "hashes") for split in splits]
        return cls(genes, hashes, manifest)

    @classmethod
    def from_digests(cls, corpus: CorpusDigests) -> Self:
        """Take the genes and the digests of a digest list."""
        return cls(_make_vocabulary(corpus.gene_ids), [corpus.cells[None]], None)

    def hashes_over(self, shared: np.ndarray) -> list[np.ndarray]:
        """Hash the cells of the shards again, over the genes in the mask `shared`, `(n_genes,)` bool.

        A cell that expresses fewer than MIN_GENES of these genes is left out. Without shards, returns the
        digests over all genes, which `missing_gene_terms` helps to compare.
        """
        if self.manifest is None:
            return self.hashes
        gene_hashes = hash_genes(self.genes.gene_ids)
        parts = [np.zeros((0, 2), np.uint64)]
        for split in list_filled_splits(self.manifest):
            for block in read_blocks(self.manifest, split):
                # keep the entries of shared genes, and find where each cell begins among these
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
        """Compute the terms that small counts of missing genes add to the sum of a cell, `(n,)` uint64.

        `lacked`, `(n_genes,)` bool, marks the genes that the file lacks. Returns None if there are shards, or
        if the file lacks more than MAX_COMPLETIONS genes.

        A digest is made from a sum over all genes of a cell, and cannot be computed over fewer genes. But a
        file may lack only one of the genes that a cell expresses. Then the sum over the cell's genes in the
        file, plus one of these terms, is the sum over all genes of the cell.
        """
        if self.manifest is not None:
            return None
        n_counts = min(MAX_COMPLETED_COUNT, MAX_COMPLETIONS // lacked.sum())
        if n_counts == 0:
            return None
        genes = hash_genes(np.array(self.genes.gene_ids, object)[lacked])
        return hash_pairs(genes[:, None], np.arange(1, n_counts + 1)).ravel()


def list_filled_splits(manifest: Manifest) -> list[str]:
    """Return the splits that a training reads and that have cells."""
    return [split for split in TRAINING_SPLITS if manifest.splits[split].n_obs]


def _make_vocabulary(ids: list[str]) -> Vocabulary:
    """Make a vocabulary of gene ids, with numbers of cells and medians that are not used."""
    n_cells = np.ones(len(ids), np.int64)
    medians = np.ones(len(ids), np.float32)
    return Vocabulary(ids, ids, n_cells, medians)
