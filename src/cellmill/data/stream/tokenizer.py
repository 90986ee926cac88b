"""Contract of a tokenizer, and the first genes of each cell, which tokenizers share."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch


class CellTokens(NamedTuple):
    """Tokens of some cells, as in `Batch`."""

    token_ids: np.ndarray  # (tokens,) int32
    values: np.ndarray  # (tokens,) of the tokenizer's `dtype`
    cu_seqlens: np.ndarray  # (cells + 1,) int32


class Tokenizer(Protocol):
    """Implementation of the options `config.parts.tokens.Tokens`: pure, and vectorised over cells.

    The tokens of a cell are its first `max_tokens` genes, in their order.
    """

    dtype: np.dtype  # dtype of the values
    # if False, no counts are read, and only the genes that fit into `max_tokens`
    needs_counts: bool

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        """Make the tokens of cells whose genes, rows of the vocabulary, are in rank order.

        Their counts are above 0, or None unless `needs_counts`.
        """


class KeptGenes:
    """The first `max_tokens` genes of each cell.

    Attributes: the whole `cells`; `lengths` `(cells,)` and `cu_seqlens` `(cells + 1,)` int32 of
    what is kept.
    """

    def __init__(self, cells: SparseCounts, max_tokens: int) -> None:
        self.cells = cells
        self.lengths = np.minimum(cells.lengths, max_tokens)
        self.cu_seqlens = np.zeros(cells.n_cells + 1, np.int32)
        self.lengths.cumsum(out=self.cu_seqlens[1:])

    def copy(self, array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """Copy the kept entries of `array`, `(nonzeros,)`, as `dtype`, into new memory."""
        kept = recycled_empty(self.cu_seqlens[-1], dtype)
        if self._is_whole():
            kept[:] = array
        else:
            first = self.cells.offsets[:-1].tolist()
            parts = [array[start : start + n] for start, n in zip(first, self.lengths.tolist())]
            np.concatenate(parts, out=kept, casting="unsafe")
        return kept

    def token_ids(self) -> np.ndarray:
        """Token ids, int32, of the kept genes."""
        genes = self.cells.genes
        if self._is_whole():
            token_ids = recycled_empty(self.cu_seqlens[-1], np.int32)
            return np.add(genes, len(SPECIAL), out=token_ids)
        token_ids = self.copy(genes, np.int32)
        token_ids += len(SPECIAL)
        return token_ids

    def _is_whole(self) -> bool:
        """True if no cell is cut."""
        return bool(self.cu_seqlens[-1] == self.cells.offsets[-1])


def make_batch(
    tokenizer: Tokenizer,
    cells: SparseCounts,
    cell_ids: np.ndarray,
    with_counts: bool,
    **per_cell: Any,
) -> Batch:
    """Make the batch of `cells`, whose ids are `cell_ids`, `(cells,)`, by `tokenizer.tokenize`.

    It has the counts of its tokens if `with_counts`, and further fields `per_cell`.
    """
    tokens = tokenizer.tokenize(cells)
    token_counts = None
    if with_counts:
        # the tokenizer cut every cell at the same number of genes: cut the counts at the longest
        longest = int(np.diff(tokens.cu_seqlens).max(initial=0))
        token_counts = KeptGenes(cells, longest).copy(cells.counts, np.int64)
    return Batch(*tokens, cell_ids, token_counts, **per_cell)
