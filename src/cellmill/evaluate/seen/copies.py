"""Copies of training cells in a file: cells with equal counts, or with the barcode of a training cell."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from cellmill.data.genes.names import match_columns
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.keys import splitmix64
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.cell_digests import CorpusDigests
from cellmill.data.shards.index import are_in
from cellmill.data.shards.plan import select_genes
from cellmill.data.split import hash_genes, sum_pairs
from cellmill.errors import DataError
from cellmill.evaluate.seen.corpus_hashes import MIN_GENES, HashedCorpus

HASHED_ROWS = 1024  # cells of a file that are hashed at once


def find_equal_cells(
    reader: CountsReader, corpora: Sequence[HashedCorpus], among: np.ndarray
) -> np.ndarray:
    """Mask, bool `(n_obs,)`, of the cells in mask `among` whose counts equal those in `corpora`.

    Only genes that both have are compared. If the file lacks genes of a corpus, a cell that expresses
    fewer than MIN_GENES of the others equals none.
    """
    is_equal = np.zeros(reader.n_obs, bool)
    if not among.any():
        return is_equal
    for corpus in corpora:
        try:
            target = match_columns(reader, corpus.genes).target
        except DataError:
            continue  # no gene in common: no equal cells
        is_equal |= _find_in_corpus(reader, corpus, target, among & ~is_equal)
    return is_equal


def _find_in_corpus(
    reader: CountsReader, corpus: HashedCorpus, target: np.ndarray, among: np.ndarray
) -> np.ndarray:
    """Mask of the cells in mask `among` that have equal counts to a cell of `corpus`.

    `target` has the row among the corpus's genes of each column of the file.
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
    """Hashes of the cells of a corpus over the genes that it shares with a file."""

    hashes: list[np.ndarray]  # as in `HashedCorpus`
    missing_gene_terms: np.ndarray | None  # see `HashedCorpus.missing_gene_terms`
    min_genes: int  # shared genes with counts that a cell of the file needs

    @classmethod
    def over_shared_genes(cls, corpus: HashedCorpus, target: np.ndarray, ordered: bool) -> Self:
        """The hashes of a corpus, computed again if the file lacks some of its genes."""
        is_shared = np.zeros(corpus.genes.n_genes, bool)
        is_shared[target[target >= 0]] = True
        if is_shared.all() or ordered:
            return cls(corpus.hashes, None, min_genes=0)
        return cls(corpus.hashes_over(is_shared), corpus.missing_gene_terms(~is_shared), MIN_GENES)

    def find(self, sums: np.ndarray, n_genes: np.ndarray) -> np.ndarray:
        """Mask, bool `(cells,)`, of the cells whose counts equal those of a training cell.

        `sums`, `(cells, 2)` uint64, are the result of `sum_pairs`. `n_genes`, `(cells,)`, counts the
        shared genes that a cell expresses.
        """
        has_enough = n_genes >= self.min_genes
        is_equal = np.zeros(len(sums), bool)
        hashes = splitmix64(sums)
        for split_hashes in self.hashes:
            is_equal |= has_enough & are_in(hashes, split_hashes)
        if self.missing_gene_terms is not None:
            others = np.flatnonzero(has_enough & ~is_equal)
            is_equal[others] = self._find_with_a_gene(sums[others], self.missing_gene_terms)
        return is_equal

    def _find_with_a_gene(self, sums: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Mask of the cells that equal a training cell after a small count of a missing gene is added."""
        completed = splitmix64(sums[:, :1] + terms)  # (cells, terms): digests
        is_listed = are_in(completed.reshape(-1, 1), self.hashes[0])
        return np.asarray(is_listed.reshape(completed.shape).any(axis=1))


def find_barcodes(reader: CountsReader, corpora: Iterable[CorpusDigests]) -> np.ndarray:
    """Mask, bool `(n_obs,)`, of the cells whose barcode is in a training sample of `corpora` that
    shares more barcodes with the cell's sample than chance explains (`CorpusDigests.has_barcodes`).
    """
    is_near = np.zeros(reader.n_obs, bool)
    for corpus in corpora:
        is_near |= corpus.has_barcodes(reader.obs_names)
    return is_near
