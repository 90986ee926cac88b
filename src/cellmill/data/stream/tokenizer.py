"""Contract of a tokenizer, and what tokenizers share: truncating cells to their first genes."""

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
    """Turns the genes of cells into tokens: pure, and vectorised over cells.

    It implements the options `config.parts.tokens.Tokens`, and is constructed with them. The tokens of
    a cell are its first `max_tokens` genes, in the cell's order. `BatchTokenizer` may choose genes itself
    (`truncation` other than top, or `zero_frac`). It then sets a `max_tokens` that truncates no cell.
    """

    dtype: np.dtype  # dtype of the values
    # if False, `tokenize` may get only the first `max_tokens` genes of each cell, and None as counts
    needs_counts: bool

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        """Turn the genes of cells into tokens. Genes are rows of the vocabulary.

        The genes of a cell are in rank order in each of these cases:

        - The model reads the order of tokens (`FamilyConfig.reads_token_order`).
        - The value kind is `place`.
        - `truncation` is top, and the cell has more genes than are kept: `max_tokens`, or fewer with
          `zero_frac`.

        In all other cases they may be in any order. The residues of a sequence are always in their own
        order. Counts are above 0. They may be None unless `needs_counts`.
        """


class KeptGenes:
    """The first `max_tokens` genes of each cell.

    Attributes: `cells`, the whole cells; `lengths`, `(cells,)` int64, the numbers of kept genes; and
    `cu_seqlens`, `(cells + 1,)` int32, the offsets of the kept genes.
    """

    def __init__(self, cells: SparseCounts, max_tokens: int) -> None:
        self.cells = cells
        self.lengths = np.minimum(cells.lengths, max_tokens)
        self.cu_seqlens = np.zeros(cells.n_cells + 1, np.int32)
        self.lengths.cumsum(out=self.cu_seqlens[1:])

    def select(self, array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """Copy the entries of `array`, `(nonzeros,)`, of the kept genes: `(tokens,)` of `dtype`."""
        kept = recycled_empty(self.cu_seqlens[-1], dtype)
        if self._keeps_all():
            kept[:] = array
        else:
            starts = self.cells.offsets[:-1].tolist()
            by_cell = [array[start : start + n] for start, n in zip(starts, self.lengths.tolist())]
            np.concatenate(by_cell, out=kept, casting="unsafe")
        return kept

    def token_ids(self) -> np.ndarray:
        """Compute the token ids of the kept genes, `(tokens,)` int32; the array shares no memory."""
        genes = self.cells.genes
        if self._keeps_all():
            token_ids = recycled_empty(self.cu_seqlens[-1], np.int32)
            return np.add(genes, len(SPECIAL), out=token_ids)
        token_ids = self.select(genes, np.int32)
        token_ids += len(SPECIAL)
        return token_ids

    def _keeps_all(self) -> bool:
        """Return True if all genes are kept."""
        return bool(self.cu_seqlens[-1] == self.cells.offsets[-1])


def tokenize_to_batch(
    tokenizer: Tokenizer,
    cells: SparseCounts,
    cell_ids: np.ndarray,
    with_counts: bool,
    **cell_fields: Any,
) -> Batch:
    """Tokenize `cells`, whose ids are `cell_ids`, `(cells,)`, and build a batch from their tokens.

    It has the counts of its tokens if `with_counts`, and the further fields `cell_fields`.
    """
    tokens = tokenizer.tokenize(cells)
    token_counts = None
    if with_counts:
        # a cell's tokens are its first genes: if any cell was truncated, the longest has `max_tokens`
        max_tokens = int(np.diff(tokens.cu_seqlens).max(initial=0))
        token_counts = KeptGenes(cells, max_tokens).select(cells.counts, np.int64)
    return Batch(*tokens, cell_ids, token_counts, **cell_fields)
