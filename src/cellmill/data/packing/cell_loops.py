"""Loops over the genes and counts of cells, compiled by numba on import: rank order, hashes, tokens.

The loops over packed parts are here too, so that this module has them all.
"""

from typing import Any

import numpy as np

from cellmill.data.keys import SECOND_HASH, SPLITMIX_GAMMA, SPLITMIX_ROUNDS
from cellmill.data.packing.compiled import compiled
from cellmill.data.packing.loops import pack_parts as pack_parts
from cellmill.data.packing.loops import unpack_parts as unpack_parts

_DIGITS = 4
_DIGIT_BITS = 8
_N_VALUES = 1 << _DIGIT_BITS  # of a digit
_DIGIT_MASK = np.uint64(_N_VALUES - 1)


@compiled(
    *(
        f"void(int32[::1], {counts}[::1], float32[::1], float32[::1], uint64[::1], uint32[:, ::1])"
        for counts in ("uint16", "uint32")
    )
)
def _make_items(
    genes: Any, counts: Any, inverse_medians: Any, keys: Any, items: Any, n_with_digit: Any
) -> None:
    """Fill an item for each gene of a cell, and the number of items with each value of each digit.

    The upper 32 bits of an item are its inverted key, so that the highest comes first; the lower
    ones are its position.
    """
    n = np.uint64(len(genes))
    for i in range(n):
        keys[i] = np.float32(counts[i]) * inverse_medians[np.uint32(genes[i])]
    bits = keys.view(np.uint32)
    n_with_digit[:] = 0
    for i in range(n):
        key = np.uint64(~bits[i])
        items[i] = (key << np.uint64(32)) | i
        for digit in range(_DIGITS):
            value = (key >> (np.uint64(digit) * np.uint64(_DIGIT_BITS))) & _DIGIT_MASK
            n_with_digit[digit, value] += np.uint32(1)


@compiled("void(uint64[::1], uint64[::1], uint64, uint32[::1])")
def _sort_by_digit(items: Any, out: Any, shift: Any, n_with_value: Any) -> None:
    """Fill `out` with the items in the order of the digit from bit `shift` on; equal ones stay in
    their order.

    `n_with_value`, the number of items with each value, becomes the end of each in `out`.
    """
    total = np.uint32(0)
    for value in range(_N_VALUES):
        n = n_with_value[value]
        n_with_value[value] = total
        total += n
    for i in range(np.uint64(len(items))):
        value = (items[i] >> shift) & _DIGIT_MASK
        out[n_with_value[value]] = items[i]
        n_with_value[value] += np.uint32(1)


@compiled(
    *(
        f"void(int64[::1], int64[::1], int32[::1], {counts}[::1], float32[::1])"
        for counts in ("uint16", "uint32")
    )
)
def rank_rows(starts: Any, n: Any, genes: Any, counts: Any, inverse_medians: Any) -> None:
    """Sort cells in place as `rank_order.RankOrder.sort` does.

    Keys are non-negative floats, so their bit patterns sort in the same order. A stable radix sort by
    digits of 8 bits leaves ties in order. With digits of 11 bits, 2,048 numbers would be summed up for each of
    them, which takes longer than a fourth pass over the genes of max_length cells.
    """
    max_length = np.int64(1)
    for row in range(len(n)):
        max_length = max(max_length, n[row])
    keys = np.empty(max_length, np.float32)
    items = np.empty(max_length, np.uint64)
    sorted_items = np.empty(max_length, np.uint64)
    genes_before = np.empty(max_length, np.int32)
    counts_before = np.empty(max_length, counts.dtype)
    n_with_digit = np.empty((_DIGITS, _N_VALUES), np.uint32)
    for row in range(len(n)):
        size = n[row]
        if size == 0:
            continue
        row_genes = genes[starts[row] : starts[row] + size]
        row_counts = counts[starts[row] : starts[row] + size]
        _make_items(row_genes, row_counts, inverse_medians, keys, items, n_with_digit)
        for digit in range(_DIGITS):
            n_with_value = n_with_digit[digit]
            shift = np.uint64(32) + np.uint64(digit) * np.uint64(_DIGIT_BITS)
            if n_with_value[(items[0] >> shift) & _DIGIT_MASK] == size:
                continue  # all have the same digit
            _sort_by_digit(items[:size], sorted_items, shift, n_with_value)
            unsorted = items
            items = sorted_items
            sorted_items = unsorted
        genes_before[:size] = row_genes
        counts_before[:size] = row_counts
        for i in range(np.uint64(size)):
            position = items[i] & np.uint64(0xFFFFFFFF)
            row_genes[i] = genes_before[position]
            row_counts[i] = counts_before[position]


@compiled(
    *(
        f"bool(int64[::1], int32[::1], {counts}[::1], bool, uint32[::1])"
        for counts in ("uint16", "uint32")
    )
)
def join_values(offsets: Any, genes: Any, counts: Any, ascending: bool, values: Any) -> bool:
    """Same as `cells._join_values`: fill `values` with each cell's genes, then its counts less one.

    Returns False if genes that should ascend do not.
    """
    is_ascending = True
    for cell in range(len(offsets) - 1):
        first = offsets[cell]
        n = np.uint64(offsets[cell + 1] - first)
        cell_genes = genes[first : first + n]
        cell_counts = counts[first : first + n]
        gene_values = values[2 * first : 2 * first + n]
        count_values = values[2 * first + n : 2 * first + 2 * n]
        if ascending:
            before = np.int32(-1)
            for i in range(n):
                is_ascending &= cell_genes[i] > before
                gene_values[i] = cell_genes[i] - before - np.int32(1)
                before = cell_genes[i]
        else:
            for i in range(n):
                gene_values[i] = cell_genes[i]
        for i in range(n):
            count_values[i] = np.uint32(cell_counts[i]) - np.uint32(1)
    return is_ascending


@compiled("void(uint32[::1], int64[::1], uint32)")
def add_at(numbers: Any, positions: Any, added: Any) -> None:
    """Same as `numpy.add.at`; `positions` are at least 0."""
    for i in range(np.uint64(len(positions))):
        numbers[np.uint64(positions[i])] += added


@compiled("uint64(uint64)")
def _mix(value: Any) -> Any:
    """Same as `keys.splitmix64`."""
    value += SPLITMIX_GAMMA
    for bits, factor in SPLITMIX_ROUNDS:
        value = (value ^ (value >> bits)) * factor
    return value


@compiled(
    *(
        f"void(int64[::1], int32[::1], {counts}[::1], uint64[::1], uint64[::1], uint64[:, ::1])"
        for counts in ("uint16", "uint32")
    )
)
def sum_hashes(
    offsets: Any, genes: Any, counts: Any, gene_hashes: Any, small_counts: Any, sums: Any
) -> None:
    """Fill the sums of cells' hashed pairs, as `split.hash_cells`; `small_counts` are mixed."""
    for cell in range(len(sums)):
        first = np.uint64(0)
        second = np.uint64(0)
        for i in range(np.uint64(offsets[cell]), np.uint64(offsets[cell + 1])):
            count = np.uint64(counts[i])
            if count < np.uint64(len(small_counts)):
                pair = small_counts[count]
            else:
                pair = _mix(count)
            pair = _mix(pair ^ gene_hashes[np.uint32(genes[i])])
            first += pair
            second += _mix(pair ^ SECOND_HASH)
        sums[cell, 0] = first
        sums[cell, 1] = second


@compiled(*(f"void({counts}[::1], int64[::1], int64[::1])" for counts in ("uint16", "uint32")))
def sum_cells(counts: Any, offsets: Any, totals: Any) -> None:
    """Fill `totals` with the sum of each cell's counts."""
    for cell in range(len(totals)):
        cell_counts = counts[offsets[cell] : offsets[cell + 1]]
        total = np.uint64(0)
        for i in range(len(cell_counts)):
            total += np.uint64(cell_counts[i])
        totals[cell] = total


@compiled(
    *(
        f"int64(int32[::1], {counts}[::1], int64[::1], int32[::1], float32[:, ::1], float32[::1], "
        "int32[::1], float32[::1], int32[::1], int32)"
        for counts in ("uint16", "uint32")
    )
)
def fill_tokens(
    genes: Any,
    counts: Any,
    cell_offsets: Any,
    token_offsets: Any,
    table: Any,
    scale: Any,
    ids: Any,
    values: Any,
    large: Any,
    first_id: int,
) -> int:
    """Fill `ids` and `values`. Return how many counts are not in `table`.

    Row i of `table` has the value of each small count of cell i. Other counts get their product
    with the scale instead, and their tokens are listed in `large`.
    """
    n_tabled = np.uint64(table.shape[1])
    n_large = 0
    for cell in range(len(scale)):
        first = token_offsets[cell]
        start = cell_offsets[cell]
        n = np.uint64(token_offsets[cell + 1] - token_offsets[cell])
        cell_counts = counts[start : start + n]
        value_of_count = table[cell]
        cell_values = values[first : first + n]
        cell_genes = genes[start : start + n]
        cell_ids = ids[first : first + n]
        for i in range(n):
            cell_ids[i] = cell_genes[i] + first_id
        for i in range(n):
            count = np.uint64(cell_counts[i])
            if count < n_tabled:
                cell_values[i] = value_of_count[count]
            else:
                cell_values[i] = np.float32(cell_counts[i]) * scale[cell]
                large[n_large] = first + i
                n_large += 1
    return n_large
