"""Making of tokens with two kinds of values: positions in the cell, or log(1 + counts per 10,000).

numpy makes the tokens of small batches. Compiled loops (`data.compiled_loops`) make the tokens of large
batches, because they are faster there. The results are the same, bit for bit. The loops take the logarithm
of a small count from a table, which has a row for each cell.
"""

from typing import Any

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data import compiled_loops
from cellmill.data.arrays import scale_of_totals
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import row_sums
from cellmill.data.stream.tokenizer import CellTokens, KeptGenes

LARGE_BATCH = 1 << 15  # compiled loops are faster than numpy for at least this many tokens
_TABLED_COUNTS = 64  # the table has the logarithms of counts 0 to 63


def make_position_tokens(kept: KeptGenes) -> CellTokens:
    """Make tokens of the kept genes. Their values are positions in the cell, int32, from 0."""
    values = recycled_empty(kept.cu_seqlens[-1], np.int32)
    offsets, genes, _ = kept.cells
    loops = _find_loops(kept, with_counts=False)
    if loops is not None:
        token_ids = recycled_empty(len(values), np.int32)
        loops.fill_positions(
            offsets, genes, kept.cu_seqlens, token_ids, values, np.int32(len(SPECIAL))
        )
        return CellTokens(token_ids, values, kept.cu_seqlens)
    # join slices 0:n of one array; this is twice as fast as subtracting each cell's offset
    positions = np.arange(kept.lengths.max(initial=0), dtype=np.int32)
    by_cell = [positions[:n] for n in kept.lengths.tolist()]
    np.concatenate(by_cell or [positions], out=values)
    return CellTokens(kept.token_ids(), values, kept.cu_seqlens)


def make_log_tokens(kept: KeptGenes) -> CellTokens:
    """Make tokens of the kept genes. Their values are log(1 + counts per 10,000), float32."""
    offsets, _, counts = kept.cells
    loops = _find_loops(kept, with_counts=True)
    if loops is not None:
        return _make_log_tokens_by_loops(loops, kept)
    # multiply each count by 10,000 / (total of its cell), then take the logarithm
    values = kept.select(counts, np.float32)
    values *= np.repeat(scale_of_totals(row_sums(counts, offsets), np.float32), kept.lengths)
    np.log1p(values, out=values)
    return CellTokens(kept.token_ids(), values, kept.cu_seqlens)


def _find_loops(kept: KeptGenes, with_counts: bool) -> Any:
    """Return the module of compiled loops, or None if numpy is to make the tokens.

    numpy makes the tokens if the batch is small, if the loops are not loaded, or if the loops do not accept
    the arrays. The loops accept only arrays of certain types that are contiguous and writeable. If
    `with_counts`, the loops also read the counts.
    """
    n_tokens = int(kept.cu_seqlens[-1])
    offsets, genes, counts = kept.cells
    arrays = [offsets, genes]
    is_accepted = offsets.dtype == np.int64 and genes.dtype == np.int32
    if with_counts:
        arrays.append(counts)
        is_accepted = is_accepted and counts.dtype in (np.uint16, np.uint32)
    for array in arrays:
        is_accepted = is_accepted and array.flags.c_contiguous and array.flags.writeable
    if n_tokens < LARGE_BATCH or not is_accepted:
        return None
    return compiled_loops.COMPILED.loops_for(n_tokens)


def _make_log_tokens_by_loops(loops: Any, kept: KeptGenes) -> CellTokens:
    """Make the tokens of `make_log_tokens` with the compiled loops."""
    cells = kept.cells
    n_tokens = int(kept.cu_seqlens[-1])
    totals = np.empty(cells.n_cells, np.int64)
    loops.sum_cells(cells.offsets, cells.counts, totals)
    scale = scale_of_totals(totals, np.float32)
    # table (cells, _TABLED_COUNTS): for each cell the values of counts 0, 1, 2 and so on
    table = np.multiply.outer(scale, np.arange(_TABLED_COUNTS, dtype=np.float32))
    np.log1p(table, out=table)
    token_ids = recycled_empty(n_tokens, np.int32)
    values = recycled_empty(n_tokens, np.float32)
    # `fill_tokens` writes the indices of tokens with a count that is not in the table to the start of `large`
    large = recycled_empty(n_tokens, np.int32)
    n_large = loops.fill_tokens(
        *cells,
        kept.cu_seqlens,
        table,
        scale,
        token_ids,
        values,
        large,
        np.int32(len(SPECIAL)),
    )
    # numpy takes the logarithms of these large counts
    large = large[:n_large]
    values[large] = np.log1p(values[large])
    return CellTokens(token_ids, values, kept.cu_seqlens)
