"""Batches of cells, made by a run's tokenizer from genes that `truncation` and `zero_frac` choose.

By default the tokens of a cell are its first genes in rank order (a cell of fewer genes may have them
in another order), and the tokens of a sequence its first residues. With `truncation: random` genes are
drawn, with `variable` they are those that vary most over the corpus, and `zero_frac` adds undetected
genes. Values are computed from the whole cell,
except positions (value kind `place`), which number the chosen tokens. Draws are keyed by seed,
epoch, gene and the cell's counts, so they are the same in every layout and file.
A cell that `weight_by` reads several times in an epoch has the same draws each time.
"""

from typing import Any, Literal

import numpy as np

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.keys import splitmix64
from cellmill.data.rows import SparseCounts, positions_in_rows, row_offsets
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer, tokenize_to_batch
from cellmill.errors import DataError

# in the keys that draw undetected genes: any constant, here "ZERO" in ASCII
_UNDETECTED_KEY = np.uint64(0x5A45524F)
_NO_LIMIT = 2**31 - 1  # a `max_tokens` above the number of genes of any cell


def _round_down(numbers: Any) -> Any:
    """Round down to integers; a number just below an integer by a rounding error becomes that integer.

    1000 * (1 - 0.8) is 199.99999999999997, and becomes 200.
    """
    return np.floor(np.round(numbers, 6))


def _max_detected_tokens(max_tokens: int, zero_frac: float) -> int:
    """Return the largest number of tokens of detected genes in a cell, by options of `Tokens`."""
    return max(1, int(_round_down(max_tokens * (1 - zero_frac))))


def count_tokens_by_kind(
    options: Tokens, genes_per_cell: np.ndarray, n_genes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of detected and of undetected genes in each cell, `(cells,)` int64 each.

    `genes_per_cell`, `(cells,)`, has the numbers of detected genes, out of the `n_genes` of the
    vocabulary. A fraction `zero_frac` of the tokens are of undetected genes.
    """
    zero_frac = options.zero_frac
    max_detected_tokens = _max_detected_tokens(options.max_tokens, zero_frac)
    n_detected_tokens = np.minimum(genes_per_cell, max_detected_tokens)
    if not zero_frac:
        return n_detected_tokens, np.zeros_like(n_detected_tokens)
    n_wanted = _round_down(n_detected_tokens * zero_frac / (1 - zero_frac))
    n_left = options.max_tokens - n_detected_tokens
    max_undetected_tokens = np.minimum(n_genes - genes_per_cell, n_left)
    return n_detected_tokens, np.minimum(n_wanted.astype(n_left.dtype), max_undetected_tokens)


def find_max_tokens_of_whole_cells(options: Tokens, genes_in_cell: int) -> int:
    """Find the smallest `max_tokens` that leaves out no gene of a cell, and none of its undetected genes."""
    zero_frac = options.zero_frac
    # room for the undetected genes; counted up from there until no detected gene is left out
    max_tokens = genes_in_cell + int(_round_down(genes_in_cell * zero_frac / (1 - zero_frac)))
    while _max_detected_tokens(max_tokens, zero_frac) < genes_in_cell:
        max_tokens += 1
    return max_tokens


def _find_smallest(values: np.ndarray, n: int) -> np.ndarray:
    """Find the indices of the `n` smallest values, in any order."""
    return np.argpartition(values, n - 1)[:n]


def _draw_undetected(
    cells: SparseCounts, n_drawn: np.ndarray, keys: np.ndarray, n_genes: int
) -> np.ndarray:
    """Draw `n_drawn`, `(cells,)`, undetected genes for each cell by its key.

    Returns their rows in the vocabulary, `(n_drawn.sum(),)` int64, which ascend within a cell.
    """
    offsets, genes, _ = cells
    all_genes = np.arange(n_genes, dtype=np.uint64)
    drawn = [np.empty(0, np.int64)]
    for cell in np.flatnonzero(n_drawn).tolist():
        draws = splitmix64(splitmix64(keys[cell : cell + 1] ^ _UNDETECTED_KEY) ^ all_genes)
        # detected genes come last, so they are not drawn
        draws[genes[offsets[cell] : offsets[cell + 1]]] = np.iinfo(np.uint64).max
        drawn.append(np.sort(_find_smallest(draws, n_drawn[cell])))
    return np.concatenate(drawn)


class BatchTokenizer:
    """Chooses genes of cells, and builds a batch from their tokens with the run's tokenizer.

    `options` is section `tokens`. Genes are rows of a vocabulary of `n_genes`. `variability`,
    `(genes,)` int32, has the position of each gene by variability, 0 for the most variable. Raises
    DataError if `variability` is None but `options` need it.
    """

    def __init__(
        self, options: Tokens, n_genes: int, seed: int = 0, variability: np.ndarray | None = None
    ) -> None:
        if options.truncation == "variable" and variability is None:
            raise DataError(
                "tokens.truncation variable: the vocabulary has no order of genes by variability; set "
                "vocabulary.variability to yes and make vocabulary and shards again"
            )
        self._variability = variability
        self._options = options
        self._n_genes = n_genes
        self._seed = seed
        self._chooses_genes = options.truncation != "top" or options.zero_frac > 0
        tokenizer_options = options
        if self._chooses_genes:
            # values are computed from whole cells: the tokenizer gets these, and truncates none
            tokenizer_options = options.model_copy(update={"max_tokens": _NO_LIMIT})
        self._tokenizer: Tokenizer = options.load()(tokenizer_options)
        self.dtype = self._tokenizer.dtype
        self.max_detected_tokens = _max_detected_tokens(options.max_tokens, options.zero_frac)

    def max_genes_to_unpack(self, with_counts: bool) -> int | None:
        """Return how many genes of each cell `make_batch` needs, if it needs no counts.

        None: it needs all genes and their counts.
        """
        needs_counts = with_counts or self._chooses_genes or self._tokenizer.needs_counts
        return None if needs_counts else self._options.max_tokens

    def cells_in_rank_order(self) -> Literal["all", "truncated", "none"]:
        """Say which cells `make_batch` needs with their genes in rank order.

        truncated: those of more than `max_detected_tokens` genes.
        """
        if self._options.value_kind == "place":
            return "all"
        return "truncated" if self._options.truncation == "top" else "none"

    def count_tokens(self, genes_per_cell: np.ndarray) -> np.ndarray:
        """Count the tokens of cells with `genes_per_cell` genes, `(cells,)` int64."""
        n_detected_tokens, n_undetected_tokens = count_tokens_by_kind(
            self._options, genes_per_cell, self._n_genes
        )
        return n_detected_tokens + n_undetected_tokens

    def make_batch(
        self, cells: SparseCounts, cell_ids: np.ndarray, with_counts: bool = False, epoch: int = 0
    ) -> Batch:
        """Make the batch of `cells`, whose ids are `cell_ids`, `(cells,)`.

        `Tokenizer.tokenize` says in which order the genes of a cell must be. The batch has the counts
        of its tokens if `with_counts`. `epoch` is a part of the key of draws.
        """
        if self._chooses_genes:
            return self._make_batch_of_chosen_genes(cells, cell_ids, with_counts, epoch)
        return tokenize_to_batch(self._tokenizer, cells, cell_ids, with_counts)

    def _make_batch_of_chosen_genes(
        self, cells: SparseCounts, cell_ids: np.ndarray, with_counts: bool, epoch: int
    ) -> Batch:
        """Make the batch of chosen detected genes, then drawn undetected genes, of each cell."""
        all_token_ids, all_values, _ = self._tokenizer.tokenize(cells)
        keys = self._compute_keys(cells, epoch)
        n_detected_tokens, n_undetected_tokens = count_tokens_by_kind(
            self._options, cells.lengths, self._n_genes
        )
        chosen = self._choose_genes(cells, n_detected_tokens, keys)
        undetected_genes = _draw_undetected(cells, n_undetected_tokens, keys, self._n_genes)
        n_tokens = n_detected_tokens + n_undetected_tokens
        token_offsets = row_offsets(n_tokens)
        positions = positions_in_rows(token_offsets)
        # tokens of two detected genes and one undetected gene: True, True, False
        is_detected = positions < np.repeat(n_detected_tokens, n_tokens)
        token_ids = np.empty(len(is_detected), np.int32)
        token_ids[is_detected] = all_token_ids[chosen]
        token_ids[~is_detected] = undetected_genes + len(SPECIAL)
        values = np.zeros(len(is_detected), self.dtype)
        if self._options.value_kind == "place":
            values[:] = positions
        else:
            values[is_detected] = all_values[chosen]
        token_counts = None
        if with_counts:
            token_counts = np.zeros(len(is_detected), np.int64)
            token_counts[is_detected] = cells.counts[chosen]
        return Batch(token_ids, values, token_offsets.astype(np.int32), cell_ids, token_counts)

    def _compute_keys(self, cells: SparseCounts, epoch: int) -> np.ndarray:
        """Compute the key of each cell's draws, `(cells,)` uint64.

        It does not depend on the order of the cell's genes.
        """
        offsets, genes, counts = cells
        hashes = splitmix64(genes.astype(np.uint64) ^ splitmix64(counts.astype(np.uint64)))
        # sum the hashes of each cell modulo 2**64
        total = np.zeros(len(hashes) + 1, np.uint64)  # of the hashes before each gene
        hashes.cumsum(out=total[1:])
        sums = total[offsets[1:]] - total[offsets[:-1]]
        seed = np.array([self._seed], np.uint64)
        return splitmix64(sums ^ splitmix64(splitmix64(seed) ^ np.uint64(epoch)))

    def _choose_genes(
        self, cells: SparseCounts, n_chosen: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Choose the `n_chosen` genes of each cell that become tokens; return their indices, ascending."""
        offsets, genes, _ = cells
        lengths = cells.lengths
        if self._options.truncation == "top":
            return np.flatnonzero(positions_in_rows(offsets) < np.repeat(n_chosen, lengths))
        is_chosen = np.ones(len(genes), bool)
        for cell in np.flatnonzero(lengths > n_chosen).tolist():
            start = offsets[cell]
            stop = offsets[cell + 1]
            cell_genes = genes[start:stop]
            if self._options.truncation == "variable":
                assert self._variability is not None
                priority = self._variability[cell_genes]  # the smallest are chosen
            else:
                priority = splitmix64(keys[cell] ^ cell_genes.astype(np.uint64))
            is_chosen[start:stop] = False
            is_chosen[start + _find_smallest(priority, n_chosen[cell])] = True
        return np.flatnonzero(is_chosen)
