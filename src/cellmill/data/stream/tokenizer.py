"""Contract of a tokenizer, and what tokenizers share: cutting cells to their first genes."""

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

    The tokens of a cell are its first `max_tokens` genes, in the cell's order. If `BatchTokenizer`
    chooses genes (`truncation` other than top, or `zero_frac`), `max_tokens` exceeds every cell.
    """

    dtype: np.dtype  # dtype of the values
    # if False, `tokenize` may get only the first `max_tokens` genes of each cell, and None as counts
    needs_counts: bool

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        """Make the tokens of cells. Genes are rows of the vocabulary.

        They are in rank order where the tokens depend on it: if values are of kind `place`, and with
        `truncation: top` in cells of more genes than are kept (`max_tokens`, less with `zero_frac`).
        Sequences are in their own order.

        Counts are above 0. They may be None unless `needs_counts`.
        """


class KeptGenes:
    """The first `max_tokens` genes of each cell.

    Attributes: `cells`, which are uncut; `lengths`, `(cells,)` int64, the numbers of kept genes; and
    `cu_seqlens`, `(cells + 1,)` int32, their offsets.
    """

    def __init__(self, cells: SparseCounts, max_tokens: int) -> None:
        self.cells = cells
        self.lengths = np.minimum(cells.lengths, max_tokens)
        self.cu_seqlens = np.zeros(cells.n_cells + 1, np.int32)
        self.lengths.cumsum(out=self.cu_seqlens[1:])

    def select(self, array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """Select the entries of `array`, `(nonzeros,)`, of kept genes: `(tokens,)` of `dtype`."""
        kept = recycled_empty(self.cu_seqlens[-1], dtype)
        if self._keeps_all():
            kept[:] = array
        else:
            starts = self.cells.offsets[:-1].tolist()
            parts = [array[start : start + n] for start, n in zip(starts, self.lengths.tolist())]
            np.concatenate(parts, out=kept, casting="unsafe")
        return kept

    def token_ids(self) -> np.ndarray:
        """Return the token ids of the kept genes, `(tokens,)` int32, in an array of their own."""
        genes = self.cells.genes
        if self._keeps_all():
            token_ids = recycled_empty(self.cu_seqlens[-1], np.int32)
            return np.add(genes, len(SPECIAL), out=token_ids)
        token_ids = self.select(genes, np.int32)
        token_ids += len(SPECIAL)
        return token_ids

    def _keeps_all(self) -> bool:
        """True if all genes are kept."""
        return bool(self.cu_seqlens[-1] == self.cells.offsets[-1])


def tokenize_to_batch(
    tokenizer: Tokenizer,
    cells: SparseCounts,
    cell_ids: np.ndarray,
    with_counts: bool,
    **per_cell: Any,
) -> Batch:
    """Tokenize `cells`, whose ids are `cell_ids`, `(cells,)`, and make their batch.

    It has the counts of its tokens if `with_counts`, and further fields `per_cell`, by name.
    """
    tokens = tokenizer.tokenize(cells)
    token_counts = None
    if with_counts:
        # the tokenizer cuts all cells at one number of genes; cutting at the longest gives the same
        longest = int(np.diff(tokens.cu_seqlens).max(initial=0))
        token_counts = KeptGenes(cells, longest).select(cells.counts, np.int64)
    return Batch(*tokens, cell_ids, token_counts, **per_cell)
