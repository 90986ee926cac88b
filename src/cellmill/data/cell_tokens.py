"""Tokens of cells as a run reads them: its tokenizer, and its choice among the genes of a cell.

By default the tokens of a cell are its first genes in rank order. Where a cell has more than fit, `truncation: random`
draws them, and `truncation: variable` takes those that vary most over the corpus. `zero_frac` adds genes without
counts. Values are those of the whole cell in each case. Draws are keyed by seed, epoch, the cell's counts and the gene:
the same in every layout and file, and anew each epoch of a training.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.split import places, splitmix64
from cellmill.data.tokens import Batch, Prefixes, Tokenizer
from cellmill.errors import DataError

WHOLE = 2**31 - 1  # above the genes of any cell
_ZEROS = np.uint64(0x5A45524F)  # part of the keys of genes without counts


@dataclass(frozen=True)
class TokenNumbers:
    """Tokens of cells, (cells,) int64 each."""

    detected: np.ndarray
    zeros: np.ndarray  # of genes without counts

    @property
    def all(self) -> np.ndarray:
        return self.detected + self.zeros


def token_numbers(tokens: Tokens, detected: np.ndarray, n_genes: int) -> TokenNumbers:
    """Return numbers of tokens of cells with `detected` genes of `n_genes`: `zero_frac` of them have no counts."""
    share = tokens.zero_frac
    most = max(1, int(tokens.max_tokens * (1 - share))) if share else tokens.max_tokens
    kept = np.minimum(detected, most)
    if not share:
        return TokenNumbers(kept, np.zeros_like(kept))
    zeros = np.floor(kept * share / (1 - share)).astype(kept.dtype)
    return TokenNumbers(kept, np.minimum(zeros, np.minimum(n_genes - detected, tokens.max_tokens - kept)))


class CellTokenizer:
    """A run's tokenizer and its choice of genes, over a vocabulary of `n_genes`.

    `variability` is the vocabulary's. Raises DataError if it has none and the options need it.
    """

    def __init__(self, tokens: Tokens, n_genes: int, seed: int = 0, variability: np.ndarray | None = None) -> None:
        if tokens.truncation == "variable" and variability is None:
            raise DataError(
                "tokens.truncation variable: the vocabulary has no order of genes by variability; set "
                "vocabulary.variability to yes and make vocabulary and shards again"
            )
        self._variability = variability
        self._tokens, self._n_genes, self._seed = tokens, n_genes, seed
        self._chooses = tokens.truncation != "top" or tokens.zero_frac > 0
        given = tokens.model_copy(update={"max_tokens": WHOLE}) if self._chooses else tokens
        self._tokenizer: Tokenizer = given.load()(given)
        self.dtype = self._tokenizer.dtype

    def max_genes(self, counted: bool) -> int | None:
        """Genes of each cell that have to be read; None for all of them and their counts."""
        reads_all = counted or self._chooses or self._tokenizer.needs_counts
        return None if reads_all else self._tokens.max_tokens

    def numbers(self, detected: np.ndarray) -> np.ndarray:
        """(cells,) int64: tokens of cells with `detected` genes."""
        return token_numbers(self._tokens, detected, self._n_genes).all

    def batch(
        self,
        genes: np.ndarray,
        counts: Any,
        starts: np.ndarray,
        cells: np.ndarray,
        counted: bool = False,
        levels: np.ndarray | None = None,
        epoch: int = 0,
    ) -> Batch:
        """Batch of cells whose genes, (nonzeros,), are in rank order, as `Tokenizer.tokenize` takes them.

        `counted` batches have the counts of their tokens; `levels` are those of the cells.
        """
        ids, values, cu_seqlens = self._tokenizer.tokenize(genes, counts, starts)
        if not self._chooses:
            kept = Prefixes(starts, self._tokens.max_tokens).copy(counts, np.int64) if counted else None
            return Batch(ids, values, cu_seqlens, cells, kept, levels)
        keys = self._cell_keys(genes, counts, starts, epoch)
        numbers = token_numbers(self._tokens, np.diff(starts), self._n_genes)
        kept = self._kept(genes, starts, numbers.detected, keys)
        zeros = _absent(genes, starts, numbers.zeros, keys, self._n_genes)
        ends = np.concatenate([[0], np.cumsum(numbers.all)])
        # of each cell the tokens with counts stand first, then those without
        is_zero = places(ends) >= np.repeat(numbers.detected, numbers.all)

        def tokens_of(detected: np.ndarray, absent: Any, dtype: Any) -> np.ndarray:
            made = np.empty(len(is_zero), dtype)
            made[~is_zero], made[is_zero] = detected[kept], absent
            return made

        of_value = places(ends) if self._tokens.value_kind == "place" else tokens_of(values, 0, self.dtype)
        of_count = tokens_of(counts, 0, np.int64) if counted else None
        of_gene = tokens_of(ids, zeros + len(SPECIAL), np.int32)
        return Batch(of_gene, of_value.astype(self.dtype), ends.astype(np.int32), cells, of_count, levels)

    def _cell_keys(self, genes: np.ndarray, counts: np.ndarray, starts: np.ndarray, epoch: int) -> np.ndarray:
        """(cells,) uint64: keys of the draws of each cell, by its genes and counts in any order."""
        pairs = splitmix64(genes.astype(np.uint64) ^ splitmix64(counts.astype(np.uint64)))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(pairs, dtype=np.uint64)])
        run = splitmix64(splitmix64(np.array([self._seed], np.uint64)) ^ np.uint64(epoch))
        return splitmix64((total[starts[1:]] - total[starts[:-1]]) ^ run)

    def _kept(self, genes: np.ndarray, starts: np.ndarray, n_kept: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Indices of the kept ones of `genes`, in their order: the first of each cell, random or variable ones."""
        lengths = np.diff(starts)
        if self._tokens.truncation == "top":
            return np.flatnonzero(places(starts) < np.repeat(n_kept, lengths))
        keep = np.ones(len(genes), bool)
        for cell in np.flatnonzero(lengths > n_kept).tolist():
            start, stop = int(starts[cell]), int(starts[cell + 1])
            own = genes[start:stop]
            if self._tokens.truncation == "variable":
                assert self._variability is not None
                first = self._variability[own]
            else:
                first = splitmix64(keys[cell] ^ own.astype(np.uint64))
            keep[start:stop] = False
            keep[start + np.argpartition(first, n_kept[cell] - 1)[: n_kept[cell]]] = True
        return np.flatnonzero(keep)


def _absent(genes: np.ndarray, starts: np.ndarray, n: np.ndarray, keys: np.ndarray, n_genes: int) -> np.ndarray:
    """Rows of genes that have no counts, `n` of each cell, ascending in a cell and drawn by the cell's key."""
    every, drawn = np.arange(n_genes, dtype=np.uint64), [np.empty(0, np.int64)]
    for cell, (start, stop) in enumerate(pairwise(starts.tolist())):
        if n[cell]:
            draws = splitmix64(splitmix64(keys[cell : cell + 1] ^ _ZEROS) ^ every)
            draws[genes[start:stop]] = np.iinfo(np.uint64).max
            drawn.append(np.sort(np.argpartition(draws, n[cell] - 1)[: n[cell]]))
    return np.concatenate(drawn)
