"""Choosing the genes that become tokens, and building batches from them with the run's tokenizer.

By default the tokens of a cell are its first genes in rank order, and the tokens of a sequence are its
first residues. A cell that is not truncated may keep its genes in another order. `truncation: random`
draws genes instead. `truncation: variable` takes the genes that vary most over the corpus. `zero_frac`
adds undetected genes.

Values are computed from the whole cell. The exception is positions (value kind `place`): they number the
chosen tokens.

A draw depends only on the seed, the epoch, the gene and the cell's genes and counts. So draws are the same
in every layout and file. If `weight_by` reads a cell several times in an epoch, the draws are the same each
time.
"""

from typing import Any, Literal

import numpy as np

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.keys import splitmix64
from cellmill.data.rows import SparseCounts, positions_in_rows, row_offsets
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer, tokenize_to_batch
from cellmill.errors import DataError

# any constant, here "ZERO" in ASCII. It makes draws of undetected genes differ from draws of detected genes
_UNDETECTED_KEY = np.uint64(0x5A45524F)
_NO_LIMIT = 2**31 - 1  # a `max_tokens` that is larger than the number of genes of any cell
_N_DECIMALS = 6  # numbers are rounded to so many decimals before they are rounded down


def _round_down(numbers: Any) -> Any:
    """Round numbers down to integers, but ignore rounding errors.

    A number may lie just below an integer because of a rounding error. It then becomes this integer:
    1000 * (1 - 0.8) is 199.99999999999997, and becomes 200.
    """
    return np.floor(np.round(numbers, _N_DECIMALS))


def _compute_max_detected_tokens(max_tokens: int, zero_frac: float) -> int:
    """Compute how many tokens of a cell may be detected genes. The arguments are options of `Tokens`."""
    return max(1, int(_round_down(max_tokens * (1 - zero_frac))))


def count_detected_and_undetected_tokens(
    options: Tokens, genes_per_cell: np.ndarray, n_genes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of each cell: first the detected genes, then the undetected genes.

    Returns two arrays, `(cells,)` int64 each. `genes_per_cell`, `(cells,)`, has the number
    of detected genes of each cell. The vocabulary has `n_genes` genes.

    At most a fraction `zero_frac` of the tokens are undetected genes. The fraction is smaller if the
    vocabulary has too few genes, or `max_tokens` leaves too little room.
    """
    zero_frac = options.zero_frac
    max_detected_tokens = _compute_max_detected_tokens(options.max_tokens, zero_frac)
    n_detected_tokens = np.minimum(genes_per_cell, max_detected_tokens)
    if not zero_frac:
        return n_detected_tokens, np.zeros_like(n_detected_tokens)
    n_wanted = _round_down(n_detected_tokens * zero_frac / (1 - zero_frac))
    n_left = options.max_tokens - n_detected_tokens
    max_undetected_tokens = np.minimum(n_genes - genes_per_cell, n_left)
    return n_detected_tokens, np.minimum(n_wanted.astype(n_left.dtype), max_undetected_tokens)


def find_max_tokens_of_whole_cells(options: Tokens, genes_in_cell: int) -> int:
    """Find the smallest `max_tokens` that keeps all genes of a cell with `genes_in_cell` genes.

    The result also leaves room for the undetected genes of `zero_frac`.
    """
    zero_frac = options.zero_frac
    # start with room for all detected and undetected genes; raise it until no detected gene is left out
    max_tokens = genes_in_cell + int(_round_down(genes_in_cell * zero_frac / (1 - zero_frac)))
    while _compute_max_detected_tokens(max_tokens, zero_frac) < genes_in_cell:
        max_tokens += 1
    return max_tokens


def _find_smallest(values: np.ndarray, n: int) -> np.ndarray:
    """Find the indices of the `n` smallest values. The indices are in any order."""
    return np.argpartition(values, n - 1)[:n]


def _draw_undetected(
    cells: SparseCounts, n_drawn: np.ndarray, keys: np.ndarray, n_genes: int
) -> np.ndarray:
    """Draw undetected genes for each cell.

    `n_drawn`, `(cells,)`, has the number of genes to draw for each cell, and `keys`, `(cells,)`, has the
    key of the draw. Returns the rows of the drawn genes in the vocabulary, cell after cell,
    `(drawn genes of all cells,)` int64. The rows of a cell ascend.
    """
    offsets, genes, _ = cells
    all_genes = np.arange(n_genes, dtype=np.uint64)
    drawn = [np.empty(0, np.int64)]
    for cell in np.flatnonzero(n_drawn).tolist():
        # give each gene a random number; the genes with the smallest numbers are drawn
        priority = splitmix64(splitmix64(keys[cell : cell + 1] ^ _UNDETECTED_KEY) ^ all_genes)
        # detected genes get the largest number, so they are not drawn
        priority[genes[offsets[cell] : offsets[cell + 1]]] = np.iinfo(np.uint64).max
        drawn.append(np.sort(_find_smallest(priority, n_drawn[cell])))
    return np.concatenate(drawn)


class BatchTokenizer:
    """Chooses which genes of cells become tokens, and builds batches from the tokens.

    `options` is section `tokens` of the configuration. Genes are rows of a vocabulary with `n_genes` genes.
    `variability`, `(genes,)` int32, has the position of each gene if the genes are sorted by variability.
    Position 0 is the most variable gene.

    Raises DataError if `variability` is None but `options` need it.

    Attributes: `dtype`, the type of the values; `max_detected_tokens`, how many tokens of a cell may be
    detected genes.
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
            # values are computed from whole cells, so the tokenizer must not truncate any cell
            tokenizer_options = options.model_copy(update={"max_tokens": _NO_LIMIT})
        self._tokenizer: Tokenizer = options.load()(tokenizer_options)
        self.dtype = self._tokenizer.dtype
        self.max_detected_tokens = _compute_max_detected_tokens(
            options.max_tokens, options.zero_frac
        )

    def find_max_genes_to_unpack(self, with_counts: bool) -> int | None:
        """Return how many genes of each cell `make_batch` reads if it reads no counts.

        Returns None if `make_batch` reads all genes of a cell with their counts.
        """
        needs_counts = with_counts or self._chooses_genes or self._tokenizer.needs_counts
        return None if needs_counts else self._options.max_tokens

    def which_cells_need_rank_order(self) -> Literal["all", "truncated", "none"]:
        """Say for which cells `make_batch` needs the genes in rank order.

        `truncated` means only the cells with more than `max_detected_tokens` genes.
        """
        if self._options.value_kind == "place":
            return "all"
        return "truncated" if self._options.truncation == "top" else "none"

    def count_tokens(self, genes_per_cell: np.ndarray) -> np.ndarray:
        """Count the tokens of each cell, `(cells,)` int64.

        `genes_per_cell`, `(cells,)`, has the number of detected genes of each cell.
        """
        n_detected_tokens, n_undetected_tokens = count_detected_and_undetected_tokens(
            self._options, genes_per_cell, self._n_genes
        )
        return n_detected_tokens + n_undetected_tokens

    def make_batch(
        self, cells: SparseCounts, cell_ids: np.ndarray, with_counts: bool = False, epoch: int = 0
    ) -> Batch:
        """Make a batch of `cells`. Their ids are `cell_ids`, `(cells,)`.

        If `with_counts`, the batch has the counts of its tokens. `epoch` is a part of the key of draws.
        `Tokenizer.tokenize` says in which order the genes of a cell must be.
        """
        if self._chooses_genes:
            return self._make_batch_of_chosen_genes(cells, cell_ids, with_counts, epoch)
        return tokenize_to_batch(self._tokenizer, cells, cell_ids, with_counts)

    def _make_batch_of_chosen_genes(
        self, cells: SparseCounts, cell_ids: np.ndarray, with_counts: bool, epoch: int
    ) -> Batch:
        """Make a batch in which each cell has its chosen detected genes, then its drawn undetected genes."""
        all_token_ids, all_values, _ = self._tokenizer.tokenize(cells)
        keys = self._compute_keys(cells, epoch)
        n_detected_tokens, n_undetected_tokens = count_detected_and_undetected_tokens(
            self._options, cells.lengths, self._n_genes
        )
        chosen = self._choose_genes(cells, n_detected_tokens, keys)
        undetected_genes = _draw_undetected(cells, n_undetected_tokens, keys, self._n_genes)

        # say for each token if it is a detected gene. A cell with two detected genes and one undetected
        # gene has True, True, False
        n_tokens = n_detected_tokens + n_undetected_tokens
        token_offsets = row_offsets(n_tokens)
        positions = positions_in_rows(token_offsets)
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

        The key is computed from the seed, the epoch, and the genes and counts of the cell. The order of
        the genes does not change the key.
        """
        offsets, genes, counts = cells
        hashes = splitmix64(genes.astype(np.uint64) ^ splitmix64(counts.astype(np.uint64)))
        # sum the hashes of each cell, modulo 2**64: the difference of two cumulative sums
        sum_before = np.zeros(len(hashes) + 1, np.uint64)  # sum of the hashes before each gene
        hashes.cumsum(out=sum_before[1:])
        sums = sum_before[offsets[1:]] - sum_before[offsets[:-1]]
        seed = np.array([self._seed], np.uint64)
        return splitmix64(sums ^ splitmix64(splitmix64(seed) ^ np.uint64(epoch)))

    def _choose_genes(
        self, cells: SparseCounts, n_chosen: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Choose the detected genes that become tokens.

        `n_chosen`, `(cells,)`, has the number of genes to choose of each cell. `keys`, `(cells,)`, has the
        key of each cell's draws. Returns the indices of the chosen genes in `cells.genes`, ascending.
        """
        offsets, genes, _ = cells
        lengths = cells.lengths
        if self._options.truncation == "top":
            return np.flatnonzero(positions_in_rows(offsets) < np.repeat(n_chosen, lengths))
        is_chosen = np.ones(len(genes), bool)
        # cells with too many genes; all other cells keep all their genes
        for cell in np.flatnonzero(lengths > n_chosen).tolist():
            start = offsets[cell]
            stop = offsets[cell + 1]
            cell_genes = genes[start:stop]
            # the genes with the smallest priority are chosen
            if self._options.truncation == "variable":
                assert self._variability is not None
                priority = self._variability[cell_genes]
            else:
                priority = splitmix64(keys[cell] ^ cell_genes.astype(np.uint64))
            is_chosen[start:stop] = False
            is_chosen[start + _find_smallest(priority, n_chosen[cell])] = True
        return np.flatnonzero(is_chosen)
