"""Cells of a model's shards: their names, their counts, and statistics of their genes."""

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

BLOCK = 4096  # cells of a shard that are read at once
# training cells of gene statistics; shards are shuffled, so the first cells are a random sample
MAX_TRAIN_CELLS = 200_000
# tokens of these cells whose views are drawn: the mean profile of 20,000 genes is then exact to 0.0005 nats
MAX_VIEW_TOKENS = 30_000_000


def read_cell_names(manifest: Manifest, splits: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Dataset and obs name of each cell of the splits."""
    for split in splits:
        for shard in manifest.splits[split].shards:
            for dataset_and_name in read_names(manifest.shard_path(shard), "obs"):
                dataset, _, name = dataset_and_name.partition(":")
                yield dataset, name


class TokenSums:
    """Sums over tokens of training cells, by gene."""

    def __init__(self, n_genes: int, max_tokens: int) -> None:
        self.n_cells = 0
        self.by_rank = np.zeros((max_tokens.bit_length(), n_genes), np.int64)
        self.values = np.zeros(n_genes)

    def add(self, batch: Batch) -> None:
        n_genes = len(self.values)
        genes = np.asarray(batch.token_ids) - len(SPECIAL)
        # position of each token in its cell, by powers of two
        buckets = rank_buckets(positions_in_rows(np.asarray(batch.cu_seqlens)))
        n_pairs = np.bincount(buckets * n_genes + genes, minlength=self.by_rank.size)
        self.by_rank += n_pairs.reshape(self.by_rank.shape)
        self.values += np.bincount(genes, weights=batch.values, minlength=n_genes)
        self.n_cells += len(batch.lengths)

    def to_statistics(self) -> GeneStatistics:
        n_tokens: np.ndarray = self.by_rank.sum(0)
        overall = float(self.values.sum() / max(n_tokens.sum(), 1))
        means = np.where(n_tokens > 0, self.values / np.maximum(n_tokens, 1), overall)
        return GeneStatistics(n_tokens, means, overall, self.n_cells, self.by_rank)


class ProfileSums:
    """Sums over cells of each gene's fraction; one further cell has all genes in equal parts."""

    def __init__(self, n_genes: int) -> None:
        self.n_cells = 1
        self.of_counts = np.full(n_genes, 1 / n_genes)
        self.of_log_counts = self.of_counts.copy()

    def add(self, cells: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Add cells by their entries, `(entries,)` each; a cell without an entry does not count."""
        genes = token_ids - len(SPECIAL)
        self.of_counts += _sum_fractions(cells, genes, counts, len(self.of_counts))
        self.of_log_counts += _sum_fractions(cells, genes, np.log1p(counts), len(self.of_counts))
        self.n_cells += len(np.unique(cells))


def _sum_fractions(
    cells: np.ndarray, genes: np.ndarray, expression: np.ndarray, n_genes: int
) -> np.ndarray:
    """Sum over cells the fractions of the cell's `expression`, `(entries,)`: `(genes,)` float64."""
    cell_sums = np.bincount(cells, expression)
    return np.bincount(genes, expression / cell_sums[cells], n_genes)


def read_gene_statistics(manifest: Manifest, objective: Objective, seed: int) -> GeneStatistics:
    """Statistics over the first blocks of the training shards, until they have MAX_TRAIN_CELLS
    cells. Tokens are those of training, in rank order.

    The targets of a view have baselines that are made of views, drawn by `seed` from the first
    MAX_VIEW_TOKENS tokens: what a view hides or shows has other frequencies than whole cells.
    """
    parts = objective.parts_by_name().values()
    predicts_hidden = any(
        isinstance(part.config, ViewConfig) and part.config.target == "hidden" for part in parts
    )
    has_part_in_view = any(part.in_view for part in parts)
    with_counts = objective.config.needs_counts
    tokens = objective.tokens
    n_genes = manifest.n_genes
    whole = TokenSums(n_genes, tokens.max_tokens)
    shown = TokenSums(n_genes, tokens.max_tokens)
    profiles = ProfileSums(n_genes)
    tokenizer = BatchTokenizer(tokens, n_genes, variability=manifest.variability)
    first_shard = manifest.entry("train").shards[0]
    rank_order = read_rank_order(manifest, manifest.shard_path(first_shard))
    n_view_tokens = 0
    for block in _read_first_blocks(manifest, MAX_TRAIN_CELLS, "train"):
        if rank_order is not None:
            rank_order.sort(block)
        cell_ids = whole.n_cells + np.arange(block.n_cells)
        batch = tokenizer.make_batch(block, cell_ids, with_counts)
        whole.add(batch)
        if with_counts and not predicts_hidden:
            assert batch.counts is not None, "the batch has no counts"
            profiles.add(row_numbers(batch.cu_seqlens), batch.token_ids, batch.counts)
        if (predicts_hidden or has_part_in_view) and n_view_tokens < MAX_VIEW_TOKENS:
            n_view_tokens += len(batch.token_ids)
            view = objective.view(to_tensors(batch), seed=seed, step=STATISTICS_STEP)
            if predicts_hidden:
                assert isinstance(view, ViewBatch), "expected a view"
                entries = (view.entry_cells, view.entry_token_ids, view.entry_counts)
                profiles.add(*(tensor.numpy() for tensor in entries))
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
