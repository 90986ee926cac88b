"""Built-in tokenizers: a gene's value is its log-normalised count, its quantile bin, or its place in the cell.

Library size and quantiles are those of the whole cell, also where it is cut.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from cellmill.data.count_matrix import counts_per_10k
from cellmill.data.tokens import Prefixes

_MAX_TABLE = 1 << 24  # entries of a table over counts; cells with larger counts are binned one by one


class _FirstGenes:
    """Base: tokens of the first `max_tokens` genes of each cell."""

    dtype: np.dtype
    needs_counts: bool

    def __init__(self, options: Any) -> None:
        self._options = options

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert counts is not None or not self.needs_counts
        kept = Prefixes(starts, self._options.max_tokens)
        return kept.token_ids(genes), self._values(kept, counts, starts), kept.cu_seqlens

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class ContinuousTokenizer(_FirstGenes):
    """Values are log(1 + counts per 10,000), float32."""

    dtype, needs_counts = np.dtype(np.float32), True

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        values = counts_per_10k(counts, starts, np.float32)
        return kept.of(np.log1p(values, out=values))


class RankTokenizer(_FirstGenes):
    """Values are places in the cell from 0, int32."""

    dtype, needs_counts = np.dtype(np.int32), False

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        longest = np.arange(kept.lengths.max(initial=0), dtype=np.int32)  # in cache: half the time of arange - repeat
        return np.concatenate([longest[:n] for n in kept.lengths.tolist()] or [longest])


class BinnedTokenizer(_FirstGenes):
    """Values are quantile bins from 1, int32."""

    dtype, needs_counts = np.dtype(np.int32), True

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        return kept.of(_bins(counts, starts, self._options.bins))


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """Quantile bin, 1 to `bins`, of each nonzero count of one cell: the number of `bins` quantiles that it reaches.

    scGPT's binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment of ties.
    """
    return np.digitize(counts, np.quantile(counts, np.linspace(0, 1, bins))).astype(np.int32)


def _bins(counts: np.ndarray, starts: np.ndarray, bins: int) -> np.ndarray:
    """`bin_counts` of every cell, by lookup tables over the values of counts: no sort, no search per token."""
    lengths = np.diff(starts)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, starts[:-1][filled]).astype(np.int64)
    if int((largest + 2).sum()) > _MAX_TABLE:
        edges = starts.tolist()
        return np.concatenate([bin_counts(counts[a:b], bins) for a, b in pairwise(edges) if b > a])
    n = lengths[filled]
    # tables of all cells in one array: how often each count occurs, then how many counts are no larger
    first = np.concatenate([[0], np.cumsum(largest + 2)])
    at = np.repeat(first[:-1], n)
    at += counts
    up_to = np.cumsum(np.bincount(at, minlength=first[-1]))
    ends = np.cumsum(n)
    # numpy's linear quantiles, operation by operation: between the values at floor and ceil of q * (n - 1)
    virtual = np.linspace(0, 1, bins) * (n - 1)[:, None]
    low = np.floor(virtual).astype(np.int64)
    high = np.minimum(low + 1, (n - 1)[:, None])
    before = (ends - n)[:, None]
    a = np.searchsorted(up_to, before + low, side="right") - first[:-1, None]
    b = np.searchsorted(up_to, before + high, side="right") - first[:-1, None]
    part = virtual - low
    edges_of = np.where(part >= 0.5, b - (b - a) * (1 - part), a + (b - a) * part)
    # an integer reaches a quantile when it reaches the quantile rounded up
    reached = np.bincount((first[:-1, None] + np.ceil(edges_of).astype(np.int64)).ravel(), minlength=first[-1])
    table = np.cumsum(reached)
    table -= np.repeat(np.arange(len(n)) * bins, largest + 2)
    return table.astype(np.int32)[at]
