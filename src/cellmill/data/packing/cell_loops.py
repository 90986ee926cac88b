"""Loops over the genes and counts of cells: rank order, and tokens. Compiled by numba on import."""

from typing import Any

import numpy as np

from cellmill.data.packing.compiled import compiled
from cellmill.data.packing.layout import TABLED_COUNTS

_DIGITS = 3
_DIGIT_BITS = 11


@compiled(
    *(
        f"void(int64[::1], int64[::1], int32[::1], {counts}[::1], float32[::1])"
        for counts in ("uint16", "uint32")
    )
)
def rank_rows(starts: Any, n: Any, genes: Any, counts: Any, inverse_medians: Any) -> None:
    """Sort cells in place, as `rank_order.RankOrder.sort`: a radix sort of the inverted bits of each
    key, which is not negative, in three digits of 11 bits. It is stable, so ties stay in order.
    """
    most = np.int64(1)
    for row in range(len(n)):
        most = max(most, n[row])
    keys = np.empty(most, np.float32)
    bits = keys.view(np.uint32)
    items = np.empty(most, np.uint64)  # key, position
    moved = np.empty(most, np.uint64)
    counts_before = np.empty(most, counts.dtype)
    digit_bits = np.uint64(_DIGIT_BITS)
    mask = (np.uint64(1) << digit_bits) - np.uint64(1)
    n_with_digit = np.empty((_DIGITS, 1 << _DIGIT_BITS), np.uint32)
    for row in range(len(n)):
        size = np.uint64(n[row])
        row_genes = genes[starts[row] : starts[row] + n[row]]
        row_counts = counts[starts[row] : starts[row] + n[row]]
        n_with_digit[:] = 0
        for i in range(size):
            keys[i] = np.float32(row_counts[i]) * inverse_medians[np.uint32(row_genes[i])]
        for i in range(size):
            key = np.uint64(~bits[i])
            items[i] = (key << np.uint64(32)) | i
            for digit in range(_DIGITS):
                n_with_digit[digit, (key >> (np.uint64(digit) * digit_bits)) & mask] += np.uint32(1)
        for digit in range(_DIGITS):
            position_of = n_with_digit[digit]
            shift = np.uint64(32) + np.uint64(digit) * digit_bits
            if size == 0 or position_of[(items[0] >> shift) & mask] == size:
                continue  # all have the same digit
            total = np.uint32(0)
            for value in range(1 << _DIGIT_BITS):
                n_here = position_of[value]
                position_of[value] = total
                total += n_here
            for i in range(size):
                value = (items[i] >> shift) & mask
                moved[position_of[value]] = items[i]
                position_of[value] += np.uint32(1)
            items, moved = moved, items
        for i in range(size):
            counts_before[i] = row_counts[i]
            bits[i] = np.uint32(row_genes[i])
        for i in range(size):
            position = items[i] & np.uint64(0xFFFFFFFF)
            row_genes[i] = bits[position]
            row_counts[i] = counts_before[position]


@compiled(*(f"void({counts}[::1], int64[::1], int64[::1])" for counts in ("uint16", "uint32")))
def sum_cells(counts: Any, starts: Any, totals: Any) -> None:
    """Fill `totals` with the sum of each cell's counts."""
    for cell in range(len(totals)):
        cell_counts = counts[starts[cell] : starts[cell + 1]]
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
    starts: Any,
    ends: Any,
    table: Any,
    scale: Any,
    ids: Any,
    values: Any,
    large: Any,
    first_id: int,
) -> int:
    """Fill `ids` and `values`; return how many counts are not in `table`.

    Those get their product with the scale instead, and their tokens are listed in `large`.
    """
    n_large = 0
    for cell in range(len(scale)):
        first = ends[cell]
        start = starts[cell]
        n = np.uint64(ends[cell + 1] - ends[cell])
        cell_counts = counts[start : start + n]
        value_of_count = table[cell]
        cell_values = values[first : first + n]
        cell_genes = genes[start : start + n]
        cell_ids = ids[first : first + n]
        for i in range(n):
            cell_ids[i] = cell_genes[i] + first_id
        for i in range(n):
            count = np.uint64(cell_counts[i])
            if count < np.uint64(TABLED_COUNTS):
                cell_values[i] = value_of_count[count]
            else:
                cell_values[i] = np.float32(cell_counts[i]) * scale[cell]
                large[n_large] = first + i
                n_large += 1
    return n_large
