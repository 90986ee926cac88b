"""A gene's value is the bin of its count: by quantiles of the cell, or by edges that all cells share."""

from itertools import pairwise
from typing import Any

import numpy as np

from cellmill.config.tokens import BinnedTokens
from cellmill.data.log_values import log_values
from cellmill.data.tokenizers.first_genes import FirstGenes
from cellmill.data.tokens import Prefixes
from cellmill.errors import ConfigError

_MAX_TABLE = 1 << 24  # entries of a table over counts; cells with larger counts are binned one by one


class BinnedTokenizer(FirstGenes):
    """Values are bins from 1, int32."""

    dtype, needs_counts = np.dtype(np.int32), True

    def __init__(self, options: BinnedTokens) -> None:
        super().__init__(options)
        self._edges = shared_edges(options)

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        if self._edges is None:
            return kept.of(_bins(counts, starts, self._options.bins))
        return shared_bins(log_values(kept, counts, starts), self._edges)


def shared_edges(options: BinnedTokens) -> np.ndarray | None:
    """Inner edges, `(bins - 1,)`, of bins of log(1 + counts per 10,000); None where each cell has its own.

    Raises ConfigError where they are not fitted.
    """
    if options.binning == "quantile_cell":
        return None
    if options.binning == "uniform":
        return np.linspace(0, options.max_value, options.bins + 1)[1:-1]
    if options.edges is None:
        raise ConfigError("tokens.binning quantile_corpus: no edges are fitted; give them as tokens.edges")
    return np.array(options.edges)


def shared_bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Bin from 1, int32, of each value: a value at an edge is in the bin above it."""
    return (1 + np.searchsorted(edges, values, side="right")).astype(np.int32)


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
