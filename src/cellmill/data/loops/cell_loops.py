"""Loops over the genes and counts of cells, compiled by numba on import: rank order, hashes, tokens.

Also has the loops over packed parts, so that `compiled_loops` loads one module.
"""

from typing import Any

import numpy as np

from cellmill.data.keys import SECOND_HASH, SPLITMIX_GAMMA, SPLITMIX_ROUNDS
from cellmill.data.loops.jit import compiled
from cellmill.data.loops.part_loops import pack_parts as pack_parts
from cellmill.data.loops.part_loops import unpack_parts as unpack_parts

# an item, uint32, stands for a gene of a cell: 16 bits of its key's distance from the largest key, so
# that items ascend where keys descend, then 16 bits of its position in the cell
_POSITION_BITS = 16
_POSITION_MASK = np.uint32((1 << _POSITION_BITS) - 1)
_DIGIT_BITS = 8
_N_VALUES = 1 << _DIGIT_BITS  # values that a digit can have
_DIGIT_MASK = np.uint32(_N_VALUES - 1)
_LOW_SHIFT = np.uint32(_POSITION_BITS)
_HIGH_SHIFT = np.uint32(_POSITION_BITS + _DIGIT_BITS)
_MAX_UPPER = np.uint32((1 << 2 * _DIGIT_BITS) - 1)
MAX_RANKED = 1 << _POSITION_BITS  # most genes of a cell that `rank_rows` sorts


@compiled("void(uint32[::1], uint32[::1], uint32[::1], uint32[::1])")
def _make_items(keys: Any, items: Any, n_with_low: Any, n_with_high: Any) -> None:
    """Fill an item for each gene of a cell, and count the items by the value of each of their two digits.

    An item has the position of its gene and the upper 16 bits of the distance from the largest key,
    among as many bits as the cell's range needs. These distinguish most keys.
    """
    size = np.uint64(len(keys))
    smallest = keys[0]
    largest = keys[0]
    for i in range(size):
        smallest = min(smallest, keys[i])
        largest = max(largest, keys[i])
    shift = np.uint32(0)
    while (largest - smallest) >> shift > _MAX_UPPER:
        shift += np.uint32(1)
    n_with_low[:] = 0
    n_with_high[:] = 0
    for i in range(size):
        upper = (largest - keys[i]) >> shift
        items[i] = upper << _LOW_SHIFT | np.uint32(i)
        n_with_low[upper & _DIGIT_MASK] += np.uint32(1)
        n_with_high[upper >> np.uint32(_DIGIT_BITS)] += np.uint32(1)


@compiled("void(uint32[::1], uint32[::1], uint32, uint32[::1])")
def _sort_by_digit(items: Any, out: Any, shift: Any, n_with_value: Any) -> None:
    """Fill `out` with the items, stably sorted by the digit from bit `shift` on.

    `n_with_value`, the number of items with each value, becomes the position in `out` after the last
    of them.
    """
    total = np.uint32(0)
    for value in range(np.uint64(_N_VALUES)):
        n = n_with_value[value]
        n_with_value[value] = total
        total += n
    for i in range(np.uint64(len(items))):
        value = items[i] >> shift & _DIGIT_MASK
        out[n_with_value[value]] = items[i]
        n_with_value[value] += np.uint32(1)


@compiled("void(uint32[::1], uint32[::1])")
def _sort_alike(items: Any, keys: Any) -> None:
    """Sort items with the same upper bits stably by their whole keys, descending: an insertion sort.

    The upper bits of two items differ if `item ^ other` is above `_POSITION_MASK`.
    """
    for i in range(np.uint64(1), np.uint64(len(items))):
        item = items[i]
        if (item ^ items[i - np.uint64(1)]) > _POSITION_MASK:
            continue
        key = keys[item & _POSITION_MASK]
        to: Any = i
        while to > np.uint64(0):
            before = items[to - np.uint64(1)]
            if (item ^ before) > _POSITION_MASK or keys[before & _POSITION_MASK] >= key:
                break
            items[to] = before
            to -= np.uint64(1)
        items[to] = item


@compiled(
    *(
        f"void(int64[::1], int64[::1], int32[::1], {counts}[::1], float32[::1])"
        for counts in ("uint16", "uint32")
    )
)
def rank_rows(starts: Any, n: Any, genes: Any, counts: Any, inverse_medians: Any) -> None:
    """Same as `rank_order.RankOrder.sort`, for cells of `n` genes from `starts` on.

    Keys are non-negative floats, so their bit patterns have the same order. A stable radix sort by two
    digits of the upper bits leaves few genes to be moved.
    """
    max_length = np.int64(1)
    for row in range(len(n)):
        max_length = max(max_length, n[row])
    keys = np.empty(max_length, np.float32)
    items = np.empty(max_length, np.uint32)
    sorted_items = np.empty(max_length, np.uint32)
    genes_before = np.empty(max_length, np.int32)
    counts_before = np.empty(max_length, counts.dtype)
    n_with_low = np.empty(_N_VALUES, np.uint32)
    n_with_high = np.empty(_N_VALUES, np.uint32)
    for row in range(len(n)):
        size = np.uint64(n[row])
        if size == np.uint64(0):
            continue
        row_genes = genes[starts[row] : starts[row] + n[row]]
        row_counts = counts[starts[row] : starts[row] + n[row]]
        for i in range(size):
            keys[i] = np.float32(row_counts[i]) * inverse_medians[np.uint32(row_genes[i])]
        key_bits = keys[:size].view(np.uint32)
        _make_items(key_bits, items, n_with_low, n_with_high)
        _sort_by_digit(items[:size], sorted_items, _LOW_SHIFT, n_with_low)
        _sort_by_digit(sorted_items[:size], items, _HIGH_SHIFT, n_with_high)
        _sort_alike(items[:size], key_bits)
        for i in range(size):
            genes_before[i] = row_genes[i]
            counts_before[i] = row_counts[i]
        for i in range(size):
            position = items[i] & _POSITION_MASK
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
def add_at(totals: Any, positions: Any, added: Any) -> None:
    """Same as `numpy.add.at`; `positions` are at least 0."""
    for i in range(np.uint64(len(positions))):
        totals[np.uint64(positions[i])] += added


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
    """Fill `sums`, `(cells, 2)`, with the sums of hashed pairs, as `split.sum_pairs`.

    `small_counts[c]` is the hash of count c.
    """
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


@compiled(*(f"void(int64[::1], {counts}[::1], int64[::1])" for counts in ("uint16", "uint32")))
def sum_cells(offsets: Any, counts: Any, totals: Any) -> None:
    """Fill `totals` with the sum of each cell's counts."""
    for cell in range(len(totals)):
        cell_counts = counts[offsets[cell] : offsets[cell + 1]]
        total = np.uint64(0)
        for i in range(len(cell_counts)):
            total += np.uint64(cell_counts[i])
        totals[cell] = total


@compiled(
    *(
        f"int64(int64[::1], int32[::1], {counts}[::1], int32[::1], float32[:, ::1], float32[::1], "
        "int32[::1], float32[::1], int32[::1], int32)"
        for counts in ("uint16", "uint32")
    )
)
def fill_tokens(
    cell_offsets: Any,
    genes: Any,
    counts: Any,
    token_offsets: Any,
    table: Any,
    scale: Any,
    ids: Any,
    values: Any,
    large: Any,
    first_id: int,
) -> int:
    """Fill the `ids` and `values` of tokens. Return how many counts are not in `table`.

    `table[i]` has the value of each small count of cell i. A larger count gets its product with the
    cell's scale as value, and its token is listed in `large`.
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


@compiled("void(int64[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32)")
def fill_positions(
    cell_offsets: Any, genes: Any, token_offsets: Any, ids: Any, values: Any, first_id: int
) -> None:
    """Fill `ids` with the token ids of each cell's first genes, `values` with positions from 0."""
    for cell in range(len(cell_offsets) - 1):
        first = token_offsets[cell]
        start = cell_offsets[cell]
        n = np.uint64(token_offsets[cell + 1] - first)
        cell_genes = genes[start : start + n]
        cell_ids = ids[first : first + n]
        cell_values = values[first : first + n]
        for i in range(n):
            cell_ids[i] = cell_genes[i] + first_id
        for i in range(n):
            cell_values[i] = i
