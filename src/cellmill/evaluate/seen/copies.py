"""Copies of training cells in a file, found by equal counts or by the barcode of a training cell."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from cellmill.data.genes.names import match_columns
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.keys import splitmix64
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.cell_digests import CorpusDigests
from cellmill.data.shards.divide import select_genes
from cellmill.data.shards.index import are_in
from cellmill.data.split import hash_genes, sum_pairs
from cellmill.errors import DataError
from cellmill.evaluate.seen.corpus_hashes import MIN_GENES, HashedCorpus

HASHED_ROWS = 1024  # at most this many cells of a file are hashed at once


def find_equal_cells(
    reader: CountsReader, corpora: Sequence[HashedCorpus], among: np.ndarray
) -> np.ndarray:
    """Mark the cells that have the same counts as a cell in `corpora`, `(n_obs,)` bool.

    Only the cells in the mask `among`, `(n_obs,)` bool, are compared, and only by genes that both the file
    and the corpus have. If the file lacks genes of a corpus, a cell must express at least MIN_GENES of the
    shared genes. Other cells are not marked, because different cells may be equal on few genes.
    """
    is_equal = np.zeros(reader.n_obs, bool)
    if not among.any():
        return is_equal
    for corpus in corpora:
        try:
            target = match_columns(reader, corpus.genes).target
        except DataError:
            continue  # the file shares no gene with this corpus, so no cell is equal
        is_equal |= _find_in_corpus(reader, corpus, target, among & ~is_equal)
    return is_equal


def _find_in_corpus(
    reader: CountsReader, corpus: HashedCorpus, target: np.ndarray, among: np.ndarray
) -> np.ndarray:
    """Mark the cells in the mask `among` that have the same counts as a cell in `corpus`.

    `target`, (columns,), has for each column of the file the row among the genes of the corpus, or -1.
    """
    training = _TrainingHashes.over_shared_genes(corpus, target, reader.ordered)
    gene_hashes = hash_genes(corpus.genes.gene_ids)
    is_equal = np.zeros(reader.n_obs, bool)
    block_start = 0
    for block in reader.rows(HASHED_ROWS):
        rows = np.flatnonzero(among[block_start : block_start + block.shape[0]])
        if len(rows):
            known = select_genes(block[rows], target, corpus.genes.n_genes, reader.ordered)
            values = positions_in_rows(known.indptr) if reader.ordered else known.data
            sums = sum_pairs(known.indptr, known.indices, values, gene_hashes)
            is_equal[block_start + rows] = training.find(sums, np.diff(known.indptr))
        block_start += block.shape[0]
    return is_equal


@dataclass(frozen=True)
class _TrainingHashes:
    """Hashes of the cells of a corpus, over the genes that the corpus shares with a file."""

    hashes: list[np.ndarray]  # in the form of `HashedCorpus.hashes`
    missing_gene_terms: np.ndarray | None  # the result of `HashedCorpus.missing_gene_terms`
    min_genes: int  # a cell of the file must express at least this many shared genes

    @classmethod
    def over_shared_genes(cls, corpus: HashedCorpus, target: np.ndarray, ordered: bool) -> Self:
        """Return the hashes of a corpus. If the file lacks genes of the corpus, compute them again.

        `target` is as in `_find_in_corpus`.
        """
        is_shared = np.zeros(corpus.genes.n_genes, bool)
        is_shared[target[target >= 0]] = True
        if is_shared.all() or ordered:
            return cls(corpus.hashes, None, min_genes=0)
        return cls(corpus.hashes_over(is_shared), corpus.missing_gene_terms(~is_shared), MIN_GENES)

    def find(self, sums: np.ndarray, n_genes: np.ndarray) -> np.ndarray:
        """Mark the cells that have the same counts as a training cell, `(cells,)` bool.

        `sums`, `(cells, 2)` uint64, are the result of `sum_pairs`. `n_genes`, `(cells,)`, is the number of
        shared genes that each cell expresses.
        """
        has_enough = n_genes >= self.min_genes
        is_equal = np.zeros(len(sums), bool)
        hashes = splitmix64(sums)
        for split_hashes in self.hashes:
            is_equal |= has_enough & are_in(hashes, split_hashes)
        if self.missing_gene_terms is not None:
            not_found = np.flatnonzero(has_enough & ~is_equal)
            is_equal[not_found] = self._find_with_a_gene(sums[not_found], self.missing_gene_terms)
        return is_equal

    def _find_with_a_gene(self, sums: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Mark the cells that equal a training cell if a small count of one missing gene is added.

        Each of `terms` is such a gene and count.
        """
        completed = splitmix64(sums[:, :1] + terms)  # digests, (cells, terms)
        is_listed = are_in(completed.reshape(-1, 1), self.hashes[0])
        return np.asarray(is_listed.reshape(completed.shape).any(axis=1))


def find_barcodes(reader: CountsReader, corpora: Iterable[CorpusDigests]) -> np.ndarray:
    """Mark the cells with the barcode of a training cell in `corpora`, `(n_obs,)` bool.

    A barcode counts only if the sample of the cell and a training sample share more barcodes than chance
    explains (`CorpusDigests.find_known_barcodes`).
    """
    is_near = np.zeros(reader.n_obs, bool)
    for corpus in corpora:
        is_near |= corpus.find_known_barcodes(reader.obs_names)
    return is_near
