"""Cells of a model's shards: their names, their counts, and statistics of their genes."""

from collections.abc import Iterable, Iterator
from contextlib import closing

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.rank_order import rank_buckets
from cellmill.data.rows import SparseCounts, row_numbers
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards, read_names, read_rank_order
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.models.objective import GeneStatistics

BLOCK = 4096  # cells of a shard that are read at once
# training cells of gene statistics; shards are shuffled, so the first cells are a random sample
MAX_TRAIN_CELLS = 200_000


def read_cell_names(manifest: Manifest, splits: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Dataset and obs name of each cell of the splits."""
    for split in splits:
        for shard in manifest.splits[split].shards:
            for dataset_and_name in read_names(manifest.shard_path(shard), "obs"):
                dataset, _, name = dataset_and_name.partition(":")
                yield dataset, name


def read_gene_statistics(
    manifest: Manifest, tokens: Tokens, with_counts: bool = False
) -> GeneStatistics:
    """Statistics over the first blocks of the training shards, until they have MAX_TRAIN_CELLS
    cells. Tokens are those of training, in rank order. Profiles are computed if `with_counts`.
    """
    n_genes = manifest.n_genes
    n_cells = 0
    total = np.zeros(n_genes)
    by_rank = np.zeros((tokens.max_tokens.bit_length(), n_genes), np.int64)
    # sums of profiles over cells; they begin with a cell that has all genes in equal parts
    count_profiles = np.full(n_genes, 1 / n_genes)
    log_count_profiles = count_profiles.copy()
    tokenizer = BatchTokenizer(tokens, n_genes, variability=manifest.variability)
    first_shard = manifest.entry("train").shards[0]
    rank_order = read_rank_order(manifest, manifest.shard_path(first_shard))
    for block in _read_first_blocks(manifest, MAX_TRAIN_CELLS, "train"):
        if rank_order is not None:
            rank_order.sort(block)
        batch = tokenizer.make_batch(block, np.arange(block.n_cells), with_counts)
        genes = batch.token_ids - len(SPECIAL)
        # position of each token in its cell, by powers of two
        cell_starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
        buckets = rank_buckets(np.arange(len(genes)) - cell_starts)
        n_pairs = np.bincount(buckets * n_genes + genes, minlength=by_rank.size)
        by_rank += n_pairs.reshape(by_rank.shape)
        total += np.bincount(genes, weights=batch.values, minlength=n_genes)
        n_cells += block.n_cells
        if with_counts:
            assert batch.counts is not None, "the batch has no counts"
            count_profiles += _sum_profiles(batch, batch.counts, n_genes)
            log_count_profiles += _sum_profiles(batch, np.log1p(batch.counts), n_genes)
    n_by_gene = by_rank.sum(0)
    overall = float(total.sum() / max(n_by_gene.sum(), 1))
    means = np.where(n_by_gene > 0, total / np.maximum(n_by_gene, 1), overall)
    return GeneStatistics(
        n_by_gene,
        means,
        overall,
        n_cells,
        by_rank,
        count_profile=count_profiles / (n_cells + 1) if with_counts else None,
        log_count_profile=log_count_profiles / (n_cells + 1) if with_counts else None,
    )


def _sum_profiles(batch: Batch, expression: np.ndarray, n_genes: int) -> np.ndarray:
    """Sum over cells the fractions of the cell's `expression`, `(tokens,)`: `(genes,)` float64."""
    token_cells = row_numbers(batch.cu_seqlens)
    cell_sums = np.bincount(token_cells, expression, len(batch.lengths))
    genes = batch.token_ids - len(SPECIAL)
    return np.bincount(genes, expression / cell_sums[token_cells], n_genes)


def read_counts(manifest: Manifest, max_cells: int, split: str = "train") -> sp.csr_matrix:
    """Counts of the first `max_cells` cells of a split, or of all if there are fewer: `(cells,
    genes)`, uint32.
    """
    blocks: list[sp.csr_matrix] = []
    n_missing = max_cells
    for block in _read_first_blocks(manifest, max_cells, split):
        n_cells = min(block.n_cells, n_missing)
        offsets = block.offsets[: n_cells + 1]
        counts = block.counts[: offsets[-1]].astype(np.uint32)
        values = (counts, block.genes[: offsets[-1]], offsets)
        blocks.append(sp.csr_matrix(values, shape=(n_cells, manifest.n_genes)))
        n_missing -= n_cells
    return sp.vstack(blocks, format="csr")


def _read_first_blocks(manifest: Manifest, max_cells: int, split: str) -> Iterator[SparseCounts]:
    """Blocks of cells of a split, until they have `max_cells`."""
    n_cells = 0
    for block in read_blocks(manifest, split):
        yield block
        n_cells += block.n_cells
        if n_cells >= max_cells:
            return


def read_blocks(manifest: Manifest, split: str) -> Iterator[SparseCounts]:
    """The cells of a split, block by block. Raises DataError for a damaged shard."""
    for shard in open_shards(manifest, split):
        with closing(shard):
            for first in range(0, shard.n_obs, BLOCK):
                yield shard.read(first, min(BLOCK, shard.n_obs - first))
