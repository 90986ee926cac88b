"""The contract of a tokenizer, and code for all tokenizers: it truncates cells to their first genes."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch


class CellTokens(NamedTuple):
    """Tokens of some cells, cell after cell. The arrays are those of the fields of `Batch`."""

    token_ids: np.ndarray  # (tokens,) int32
    values: np.ndarray  # (tokens,), of the tokenizer's `dtype`
    # (cells + 1,) int32: index of each cell's first token, and the number of tokens
    cu_seqlens: np.ndarray


class Tokenizer(Protocol):
    """Turns the genes of cells into tokens.

    The options of a tokenizer are a subclass of `config.parts.tokens.Tokens`. A tokenizer is constructed with
    these options. Its tokens depend only on the cells and the options. It handles all cells of a call at once,
    with array code.

    The tokens of a cell are its first `max_tokens` genes, in the order in which the cell has them. If
    `truncation` is not top, or `zero_frac` is above 0, `BatchTokenizer` chooses the genes itself. It then
    sets a `max_tokens` that truncates no cell.
    """

    dtype: np.dtype  # type of the values
    # False: `tokenize` may get only the first `max_tokens` genes of each cell, with None as counts
    needs_counts: bool

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        """Turn the genes of cells into tokens. Genes are rows of the vocabulary.

        The genes of a cell are in rank order in each of these cases:

        - The model reads the order of tokens (`FamilyConfig.reads_token_order`).
        - The value kind is `place`.
        - `truncation` is top, and the cell has more genes than it keeps. A cell keeps `max_tokens` genes, or
          fewer with `zero_frac`.

        In all other cases the genes of a cell may be in any order. The residues of a sequence are always in
        the order of the sequence.

        Counts are above 0. If `needs_counts` is False, the counts may be None.
        """


class KeptGenes:
    """The first `max_tokens` genes of each cell.

    Attributes:

    - `cells`: the whole cells
    - `lengths`, `(cells,)` int64: the number of kept genes of each cell
    - `cu_seqlens`, `(cells + 1,)` int32: the index of each cell's first kept gene among all kept genes; the
      last entry is the number of kept genes
    """

    def __init__(self, cells: SparseCounts, max_tokens: int) -> None:
        self.cells = cells
        self.lengths = np.minimum(cells.lengths, max_tokens)
        self.cu_seqlens = np.zeros(cells.n_cells + 1, np.int32)
        self.lengths.cumsum(out=self.cu_seqlens[1:])

    def select(self, array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """Copy the entries of the kept genes from `array`, as `(tokens,)` of type `dtype`.

        `array`, `(nonzeros,)`, has an entry for each gene of the whole cells.
        """
        kept = recycled_empty(self.cu_seqlens[-1], dtype)
        if self._keeps_all():
            kept[:] = array
        else:
            starts = self.cells.offsets[:-1].tolist()
            by_cell = [array[start : start + n] for start, n in zip(starts, self.lengths.tolist())]
            np.concatenate(by_cell, out=kept, casting="unsafe")
        return kept

    def token_ids(self) -> np.ndarray:
        """Compute the token ids of the kept genes, `(tokens,)` int32, as a new array."""
        genes = self.cells.genes
        if self._keeps_all():
            token_ids = recycled_empty(self.cu_seqlens[-1], np.int32)
            return np.add(genes, len(SPECIAL), out=token_ids)
        token_ids = self.select(genes, np.int32)
        token_ids += len(SPECIAL)
        return token_ids

    def _keeps_all(self) -> bool:
        """Return True if every cell keeps all its genes."""
        return bool(self.cu_seqlens[-1] == self.cells.offsets[-1])


def tokenize_to_batch(
    tokenizer: Tokenizer,
    cells: SparseCounts,
    cell_ids: np.ndarray,
    with_counts: bool,
    **cell_fields: Any,
) -> Batch:
    """Tokenize `cells`, and build a batch from their tokens.

    `cell_ids`, `(cells,)`, has the ids of the cells. If `with_counts`, the batch has the counts of its
    tokens. `cell_fields` are further fields of the batch, by name.
    """
    tokens = tokenizer.tokenize(cells)
    token_counts = None
    if with_counts:
        # the tokens of a cell are its first genes, so their counts are its first counts. Truncating to the
        # longest cell's number of tokens finds them: if any cell was truncated, this number is `max_tokens`
        max_tokens = int(np.diff(tokens.cu_seqlens).max(initial=0))
        token_counts = KeptGenes(cells, max_tokens).select(cells.counts, np.int64)
    return Batch(*tokens, cell_ids, token_counts, **cell_fields)
