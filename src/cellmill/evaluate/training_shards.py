"""Reads the cells of a model's shards: their names, their counts, and statistics of their genes."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.rank_order import rank_buckets
from cellmill.data.rows import SparseCounts, positions_in_rows, row_numbers
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards, read_names, read_rank_order
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.models.batch import to_tensors
from cellmill.models.objective import STATISTICS_STEP, GeneStatistics, Objective
from cellmill.models.objectives.shared.views import ViewBatch, ViewConfig

BLOCK = 4096  # at most this many cells of a shard are read at once
# Blocks of training cells are read for statistics of genes until they have this many cells. Shards are
# shuffled, so the first cells are a random sample.
MAX_TRAIN_CELLS = 200_000
# Views are drawn of the first cells, until these have at least this many tokens. The mean profile of
# 20,000 genes is then exact to 0.0005 nats.
MAX_VIEW_TOKENS = 30_000_000


def read_cell_names(manifest: Manifest, splits: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the dataset and the obs name of each cell in the splits."""
    for split in splits:
        for shard in manifest.splits[split].shards:
            for dataset_and_name in read_names(manifest.shard_path(shard), "obs"):
                dataset, _, name = dataset_and_name.partition(":")
                yield dataset, name


class TokenSums:
    """Sums over the tokens of training cells, by gene."""

    def __init__(self, n_genes: int, max_tokens: int) -> None:
        self.n_cells = 0
        # number of tokens by bucket of the token's rank in its cell, and by gene: (buckets, genes)
        self.by_rank = np.zeros((max_tokens.bit_length(), n_genes), np.int64)
        self.values = np.zeros(n_genes)  # sum of the values of the tokens

    def add(self, batch: Batch) -> None:
        """Add all tokens of a batch."""
        n_genes = len(self.values)
        genes = np.asarray(batch.token_ids) - len(SPECIAL)
        # bucket of each token's rank in its cell; the buckets are bounded by powers of two
        buckets = rank_buckets(positions_in_rows(np.asarray(batch.cu_seqlens)))
        n_pairs = np.bincount(buckets * n_genes + genes, minlength=self.by_rank.size)
        self.by_rank += n_pairs.reshape(self.by_rank.shape)
        self.values += np.bincount(genes, weights=batch.values, minlength=n_genes)
        self.n_cells += len(batch.lengths)

    def to_statistics(self) -> GeneStatistics:
        """Return the mean value and the number of tokens of each gene.

        A gene without tokens has the mean of all tokens.
        """
        n_tokens: np.ndarray = self.by_rank.sum(0)
        overall_mean = float(self.values.sum() / max(n_tokens.sum(), 1))
        means = np.where(n_tokens > 0, self.values / np.maximum(n_tokens, 1), overall_mean)
        return GeneStatistics(n_tokens, means, overall_mean, self.n_cells, self.by_rank)


class ProfileSums:
    """Sums over cells of the fraction that each gene has in a cell's counts, or in its log counts.

    The sums begin with one added cell that has all genes in equal parts, so that no fraction is 0.
    """

    def __init__(self, n_genes: int) -> None:
        self.n_cells = 1
        self.of_counts = np.full(n_genes, 1 / n_genes)
        self.of_log_counts = self.of_counts.copy()

    def add(self, cells: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Add the entries of some cells. A cell without an entry does not count as a cell.

        The arrays, `(entries,)`, have the cell, the token and the count of each entry.
        """
        genes = token_ids - len(SPECIAL)
        self.of_counts += _sum_fractions(cells, genes, counts, len(self.of_counts))
        self.of_log_counts += _sum_fractions(cells, genes, np.log1p(counts), len(self.of_counts))
        self.n_cells += len(np.unique(cells))


def _sum_fractions(
    cells: np.ndarray, genes: np.ndarray, expression: np.ndarray, n_genes: int
) -> np.ndarray:
    """Divide each entry's `expression` by the sum of its cell, and sum the fractions by gene.

    The arrays are `(entries,)`, and the result is `(genes,)` float64.
    """
    cell_sums = np.bincount(cells, expression)
    return np.bincount(genes, expression / cell_sums[cells], n_genes)


def read_gene_statistics(manifest: Manifest, objective: Objective, seed: int) -> GeneStatistics:
    """Compute statistics of the genes in the first training cells, for the baselines of `objective`.

    Whole blocks of the training shards are read until they have MAX_TRAIN_CELLS cells. The tokens are
    those of training, in rank order.

    An objective may draw a view, in which some tokens of a cell are hidden. Genes have other frequencies
    among the hidden or the shown tokens than in whole cells. So such an objective also gets statistics of
    views. Views are drawn with `seed` until their cells have MAX_VIEW_TOKENS tokens.
    """
    parts = objective.parts_by_name().values()
    predicts_hidden = any(
        isinstance(part.config, ViewConfig) and part.config.target == "hidden" for part in parts
    )
    has_part_in_view = any(part.in_view for part in parts)
    with_counts = objective.config.needs_counts
    tokens = objective.tokens
    n_genes = manifest.n_genes

    # sums over whole cells and over the shown tokens of views, and the sums of profiles
    whole = TokenSums(n_genes, tokens.max_tokens)
    shown = TokenSums(n_genes, tokens.max_tokens)
    profiles = ProfileSums(n_genes)
    tokenizer = BatchTokenizer(tokens, n_genes, variability=manifest.variability)
    first_shard = manifest.entry("train").shards[0]
    rank_order = read_rank_order(manifest, manifest.shard_path(first_shard))

    n_view_tokens = 0  # tokens of the cells for which views were drawn
    for block in _read_first_blocks(manifest, MAX_TRAIN_CELLS, "train"):
        # tokens of whole cells
        if rank_order is not None:
            rank_order.sort(block)
        cell_ids = whole.n_cells + np.arange(block.n_cells)
        batch = tokenizer.make_batch(block, cell_ids, with_counts)
        whole.add(batch)

        # profiles of whole cells, unless the objective predicts the hidden part of a view
        if with_counts and not predicts_hidden:
            assert batch.counts is not None, "the batch has no counts"
            profiles.add(row_numbers(batch.cu_seqlens), batch.token_ids, batch.counts)

        # views: profiles of the hidden entries, and the shown tokens
        if (predicts_hidden or has_part_in_view) and n_view_tokens < MAX_VIEW_TOKENS:
            n_view_tokens += len(batch.token_ids)
            view = objective.view(to_tensors(batch), seed=seed, step=STATISTICS_STEP)
            if predicts_hidden:
                assert isinstance(view, ViewBatch), "expected a view"
                entries = (view.entry_cells, view.entry_token_ids, view.entry_counts)
                profiles.add(*(tensor.numpy() for tensor in entries))
            # a view may have two cells for each cell: the shown parts come first, then the hidden parts
            if isinstance(view, ViewBatch) and view.n_second_views:
                view = view.slice_cells(0, view.n_second_views)
            shown.add(view)
    return replace(
        whole.to_statistics(),
        count_profile=profiles.of_counts / profiles.n_cells if with_counts else None,
        log_count_profile=profiles.of_log_counts / profiles.n_cells if with_counts else None,
        shown=shown.to_statistics() if has_part_in_view else None,
    )


def read_counts(manifest: Manifest, max_cells: int, split: str = "train") -> sp.csr_matrix:
    """Read the counts of the first `max_cells` cells of a split, `(cells, genes)` uint32.

    A smaller split is read whole.
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
    """Yield blocks of a split until they have at least `max_cells` cells."""
    n_cells = 0
    for block in read_blocks(manifest, split):
        yield block
        n_cells += block.n_cells
        if n_cells >= max_cells:
            return


def read_blocks(manifest: Manifest, split: str) -> Iterator[SparseCounts]:
    """Yield all cells of a split, block by block. Raises DataError for a damaged shard."""
    for shard in open_shards(manifest, split):
        with closing(shard):
            for first in range(0, shard.n_obs, BLOCK):
                yield shard.read(first, min(BLOCK, shard.n_obs - first))
