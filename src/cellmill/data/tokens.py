"""Cells as tokens: a gene and a value each, packed one cell behind the other without padding.

Rows come in rank order, so a cell that is cut keeps its prefix, the genes that stand out most. Values that describe
the whole cell, its library and its quantiles, are taken before the cut. Everything is done for many cells at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.count_matrix import counts_per_10k
from cellmill.errors import DataError

_MAX_TABLE = 1 << 24  # entries of a table over counts; cells with larger counts are binned one by one


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; it may be empty: no cells, no tokens, `cu_seqlens` [0]."""

    genes: np.ndarray
    """`(tokens,)` int32, token ids."""
    values: np.ndarray
    """`(tokens,)`: float32 log1p of counts per 10,000 (continuous), int32 bins from 1 (binned) or places (rank)."""
    cu_seqlens: np.ndarray
    """`(cells + 1,)` int32, where each cell starts."""
    cells: np.ndarray
    """`(cells,)` int64, a stable id of each: its place in the split's shards, or in the file."""


def value_dtype(tokens: Tokens) -> np.dtype:
    """Of `Batch.values`."""
    return np.dtype(np.float32 if tokens.tokenizer == "continuous" else np.int32)


def empty_batch(tokens: Tokens) -> Batch:
    """A batch of no cells."""
    return Batch(np.empty(0, np.int32), np.empty(0, value_dtype(tokens)), np.zeros(1, np.int32), np.empty(0, np.int64))


def tokenize(
    genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray, tokens: Tokens
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, values and `cu_seqlens` of cells whose rows are in rank order.

    Parameters
    ----------
    genes
        `(nonzeros,)` rows of the vocabulary.
    counts
        `(nonzeros,)` of any integer type, above zero; the rank tokenizer does not read them.
    starts
        `(cells + 1,)`, where each row starts; the first is 0.

    Returns
    -------
    As in `Batch`; a cell has at most `tokens.max_tokens`.
    """
    lengths = np.diff(starts)
    kept = np.minimum(lengths, tokens.max_tokens)
    cu = np.zeros(len(kept) + 1, np.int32)
    np.cumsum(kept, out=cu[1:])
    cut = cu[-1] < starts[-1]
    if tokens.tokenizer == "rank":
        values = _places(kept)
    else:
        if counts is None:
            raise DataError(f"tokens.tokenizer {tokens.tokenizer} needs counts; only rank does without them")
        values = _log_counts(counts, starts) if tokens.tokenizer == "continuous" else _bins(counts, starts, tokens.bins)
        values = _prefixes(values, starts, kept) if cut else values
    return np.add(_prefixes(genes, starts, kept) if cut else genes, len(SPECIAL), dtype=np.int32), values, cu


def bin_counts(counts: np.ndarray, bins: int) -> np.ndarray:
    """The quantile bin, 1 to `bins`, of each nonzero count of one cell: how many of `bins` quantiles it reaches.

    scGPT's binning (Cui et al. 2024, Methods, "Input embeddings") with its deterministic treatment of ties.
    """
    return np.digitize(counts, np.quantile(counts, np.linspace(0, 1, bins))).astype(np.int32)


def _prefixes(array: np.ndarray, starts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    first = starts[:-1].tolist()
    pieces = [array[start : start + n] for start, n in zip(first, kept.tolist())]
    return np.concatenate(pieces) if pieces else array[:0]


def _places(lengths: np.ndarray) -> np.ndarray:
    longest = np.arange(lengths.max(initial=0), dtype=np.int32)  # stays in cache: half the time of arange - repeat
    pieces = [longest[:n] for n in lengths.tolist()]
    return np.concatenate(pieces) if pieces else longest


def _log_counts(counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    values = counts_per_10k(counts, starts, np.float32)
    return np.log1p(values, out=values)


def _bins(counts: np.ndarray, starts: np.ndarray, bins: int) -> np.ndarray:
    """`bin_counts` of every cell, by tables over the values that counts take: no sort, no search per token."""
    lengths = np.diff(starts)
    some = np.flatnonzero(lengths)
    if not len(some):
        return np.empty(0, np.int32)
    largest = np.maximum.reduceat(counts, starts[:-1][some]).astype(np.int64)
    if int((largest + 2).sum()) > _MAX_TABLE:
        edges = starts.tolist()
        return np.concatenate([bin_counts(counts[a:b], bins) for a, b in pairwise(edges) if b > a])
    n = lengths[some]
    # one table for each cell, all in a row: how often each count occurs, then how many are no larger
    first = np.concatenate([[0], np.cumsum(largest + 2)])
    at = np.repeat(first[:-1], n)
    at += counts
    up_to = np.cumsum(np.bincount(at, minlength=first[-1]))
    ends = np.cumsum(n)
    # numpy's linear quantiles, operation for operation: between the values at floor and ceil of q * (n - 1)
    virtual = np.linspace(0, 1, bins) * (n - 1)[:, None]
    low = np.floor(virtual).astype(np.int64)
    high = np.minimum(low + 1, (n - 1)[:, None])
    before = (ends - n)[:, None]
    a = np.searchsorted(up_to, before + low, side="right") - first[:-1, None]
    b = np.searchsorted(up_to, before + high, side="right") - first[:-1, None]
    part = virtual - low
    edges_of = np.where(part >= 0.5, b - (b - a) * (1 - part), a + (b - a) * part)
    # a whole number reaches a quantile when it reaches the quantile rounded up
    reached = np.bincount((first[:-1, None] + np.ceil(edges_of).astype(np.int64)).ravel(), minlength=first[-1])
    table = np.cumsum(reached)
    table -= np.repeat(np.arange(len(n)) * bins, largest + 2)
    return table.astype(np.int32)[at]
