"""Loops over packed parts, compiled by numba on import. They release the GIL.

Lanes of 16 bits are shifted four at a time in words of 64 bits, which LLVM turns into vector
instructions of any processor.
"""

from typing import Any

import numpy as np

from cellmill.data.packing.compiled import compiled
from cellmill.data.packing.layout import (
    ALIGNMENT,
    GROUP,
    LANES,
    MAX_WIDTH,
    PATCH_BITS,
    PATCH_BYTES,
    PLANE_BITS,
    ROWS,
)

_QUAD = LANES // 4  # 64-bit words in a row of lanes
_EACH_LANE = np.uint64(0x0001_0001_0001_0001)


@compiled("void(uint64[::1], uint64, uint64, uint64, uint64[::1])")
def _unpack_plane(words: Any, start: Any, n_rows: Any, width: Any, values: Any) -> None:
    """Fill rows of `values` from a plane that begins at word `start`; all numbers are unsigned, as
    numba lets signed ones count from the end of an array.
    """
    mask = ((np.uint64(1) << width) - np.uint64(1)) * _EACH_LANE
    quad = np.uint64(_QUAD)
    bit = np.uint64(0)
    to = np.uint64(0)
    for _ in range(n_rows):
        first = start + (bit >> np.uint64(4)) * quad
        shift = bit & np.uint64(15)
        if shift + width <= np.uint64(PLANE_BITS):
            for i in range(quad):
                values[to + i] = (words[first + i] >> shift) & mask
        else:
            n_low = np.uint64(PLANE_BITS) - shift  # bits in the first of two words
            low = ((np.uint64(1) << n_low) - np.uint64(1)) * _EACH_LANE
            high = mask & ~low
            for i in range(quad):
                in_first = (words[first + i] >> shift) & low
                in_second = (words[first + quad + i] << n_low) & high
                values[to + i] = in_first | in_second
        bit += width
        to += quad


@compiled("void(uint64[::1], int64, int64, int64, uint64[::1])")
def _pack_plane(values: Any, n_rows: int, width: int, start: int, words: Any) -> None:
    """Add rows of `values`, below 2**width, to the zeros from word `start` on."""
    for row in range(n_rows):
        bit = row * width
        first = start + (bit >> 4) * _QUAD
        shift = np.uint64(bit & 15)
        if shift + np.uint64(width) <= np.uint64(PLANE_BITS):
            for i in range(_QUAD):
                words[first + i] |= values[row * _QUAD + i] << shift
        else:
            n_low = np.uint64(PLANE_BITS) - shift
            low = ((np.uint64(1) << n_low) - np.uint64(1)) * _EACH_LANE
            high = ((np.uint64(1) << (np.uint64(width) - n_low)) - np.uint64(1)) * _EACH_LANE
            for i in range(_QUAD):
                value = values[row * _QUAD + i]
                words[first + i] |= (value & low) << shift
                words[first + _QUAD + i] |= (value >> n_low) & high


@compiled("int64(int64, int64)")
def _plane_words(n_rows: int, width: int) -> int:
    """64-bit words of the planes of a group."""
    n_words = (n_rows * min(width, PLANE_BITS) + PLANE_BITS - 1) // PLANE_BITS
    if width > PLANE_BITS:
        n_words += (n_rows * (width - PLANE_BITS) + PLANE_BITS - 1) // PLANE_BITS
    return n_words * _QUAD


@compiled("int64(uint8[::1], int64, int64, int64, int64[::1], int64[::1])")
def _read_headers(
    memory: Any, start: int, size: int, n_values: int, first_word: Any, first_patch: Any
) -> Any:
    """Fill the 64-bit word at which each group begins in its part, and its first patch; the number
    of patches, or -1 if the part is damaged.
    """
    n_groups = (n_values + GROUP - 1) // GROUP
    if size < 2 * n_groups:
        return -1
    widths = start + size - n_groups
    n_words = np.int64(0)
    n_patches = np.int64(0)
    for group in range(n_groups):
        width = np.int64(memory[widths + group])
        patches = np.int64(memory[widths - n_groups + group])
        n = min(n_values - group * GROUP, GROUP)
        if width > MAX_WIDTH or patches > n or (width > PLANE_BITS and patches > 0):
            return -1
        first_word[group] = n_words
        first_patch[group] = n_patches
        n_words += _plane_words((n + LANES - 1) // LANES, width)
        n_patches += patches
    first_word[n_groups] = n_words
    first_patch[n_groups] = n_patches
    n_bytes = 8 * n_words + PATCH_BYTES * n_patches + 2 * n_groups
    return n_patches if size == (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT else -1


@compiled("void(uint64[::1], int64, int64, int64, uint64[::1], uint64[::1])")
def _unpack_group(
    words: Any, start: int, n_values: int, width: int, low_64: Any, high_64: Any
) -> None:
    """Fill the lower 16 bits of a group's values, and those above if it has them."""
    n_rows = (n_values + LANES - 1) // LANES
    low_width = np.uint64(min(width, PLANE_BITS))
    _unpack_plane(words, np.uint64(start), np.uint64(n_rows), low_width, low_64)
    if width > PLANE_BITS:
        second = start + n_rows * _QUAD
        high_width = np.uint64(width - PLANE_BITS)
        _unpack_plane(words, np.uint64(second), np.uint64(n_rows), high_width, high_64)


@compiled(
    "int64(uint8[::1], uint16[::1], int64, int64, int64, int64, int64, uint16[::1], uint16[::1])"
)
def _apply_patches(
    memory: Any,
    memory_16: Any,
    first_high: int,
    first_position: int,
    n_patches: int,
    n_values: int,
    width: int,
    low: Any,
    high: Any,
) -> int:
    """Add the bits above the width to patched values of a group; 1 if some have more than 16 bits,
    0 if none has, -1 if a patch is outside the group.
    """
    is_wide = 0
    for patch in range(n_patches):
        position = np.int64(memory[first_position + patch])
        if position >= n_values:
            return -1
        above = np.int64(memory_16[first_high + patch]) << width
        if above >> PLANE_BITS:
            if not is_wide:
                high[:] = 0
                is_wide = 1
            high[position] |= above >> PLANE_BITS
        low[position] |= above & 0xFFFF
    return is_wide


@compiled(
    *(
        f"int64(uint16[::1], uint16[::1], bool, int64, {out}[::1])"
        for out in ("int32", "uint16", "uint32")
    )
)
def _write_ascending(low: Any, high: Any, is_wide: bool, last: Any, filled: Any) -> int:
    """Fill values from differences less one, after the value `last`; the new last value."""
    for i in range(np.uint64(len(filled))):
        last += np.int64(low[i]) + np.int64(1)
        if is_wide:
            last += np.int64(high[i]) << PLANE_BITS
        filled[i] = last
    return last


@compiled(
    *(
        f"int64(uint16[::1], uint16[::1], bool, uint32, {out}[::1])"
        for out in ("int32", "uint16", "uint32")
    )
)
def _write_plain(low: Any, high: Any, is_wide: bool, added: Any, filled: Any) -> Any:
    """Fill values, each increased by `added`; the largest one."""
    size = np.uint64(len(filled))
    if is_wide:
        largest = np.int64(0)
        for i in range(size):
            value = np.int64(low[i]) | (np.int64(high[i]) << PLANE_BITS)
            value += np.int64(added)
            largest = max(largest, value)
            filled[i] = value
        return largest
    largest_low = np.uint16(0)
    for i in range(size):
        largest_low = max(largest_low, low[i])
    for i in range(size):
        filled[i] = np.uint32(low[i]) + added
    return np.int64(largest_low) + np.int64(added) if size else np.int64(0)


_ARGUMENTS = ", ".join(["int64[::1]"] * 5 + ["bool", "uint32", "int64"])


@compiled(
    *(
        f"int64(uint8[::1], uint16[::1], uint64[::1], {_ARGUMENTS}, {out}[::1])"
        for out in ("int32", "uint16", "uint32")
    )
)
def unpack_parts(
    memory: Any,
    memory_16: Any,
    memory_64: Any,
    begins: Any,
    sizes: Any,
    n_values: Any,
    kept: Any,
    targets: Any,
    ascending: bool,
    added: int,
    limit: int,
    out: Any,
) -> int:
    """Unpack parts into `out`; the number of a damaged one, or -1.

    As `codec.unpack_parts`; the three memories are views of one.
    """
    most_groups = np.int64(1)
    for part in range(len(begins)):
        most_groups = max(most_groups, (n_values[part] + GROUP - 1) // GROUP)
    first_word = np.empty(most_groups + 1, np.int64)
    first_patch = np.empty(most_groups + 1, np.int64)
    low_64 = np.empty(ROWS * _QUAD, np.uint64)
    high_64 = np.empty(ROWS * _QUAD, np.uint64)
    low = low_64.view(np.uint16)
    high = high_64.view(np.uint16)
    for part in range(len(begins)):
        begin = begins[part]
        n_in_part = n_values[part]
        n_patches = _read_headers(memory, begin, sizes[part], n_in_part, first_word, first_patch)
        if n_patches < 0 or kept[part] > n_in_part:
            return part
        n_groups = (n_in_part + GROUP - 1) // GROUP
        widths = begin + sizes[part] - n_groups
        highs = begin + 8 * first_word[n_groups]
        positions = highs + 2 * n_patches
        last_value = np.int64(-1)
        for group in range((kept[part] + GROUP - 1) // GROUP):
            n_in_group = min(n_in_part - group * GROUP, GROUP)
            width = np.int64(memory[widths + group])
            word = begin // 8 + first_word[group]
            _unpack_group(memory_64, word, n_in_group, width, low_64, high_64)
            patched = _apply_patches(
                memory,
                memory_16,
                highs // 2 + first_patch[group],
                positions + first_patch[group],
                first_patch[group + 1] - first_patch[group],
                n_in_group,
                width,
                low,
                high,
            )
            if patched < 0:
                return part
            is_wide = width > PLANE_BITS or patched > 0
            n_kept = min(kept[part] - group * GROUP, GROUP)
            to = targets[part] + group * GROUP
            filled = out[to : to + n_kept]
            if ascending:
                last_value = _write_ascending(low, high, is_wide, last_value, filled)
                largest = last_value
            else:
                largest = _write_plain(low, high, is_wide, added, filled)
            if largest > limit:
                return part
    return -1


@compiled("int64(int64[::1], int64)")
def _choose_width(with_bits: Any, n_rows: int) -> int:
    """Width of a group that takes the fewest bytes; of equal ones the largest.

    `with_bits` is its number of values of each number of bits.
    """
    most_bits = MAX_WIDTH
    while most_bits and not with_bits[most_bits]:
        most_bits -= 1
    best = MAX_WIDTH
    fewest = _plane_words(n_rows, MAX_WIDTH) * 8
    n_larger = 0  # values of more than `width` bits
    for step in range(MAX_WIDTH):
        width = MAX_WIDTH - 1 - step
        n_larger += with_bits[width + 1]
        may_patch = width <= PLANE_BITS and most_bits <= width + PATCH_BITS and n_larger < GROUP
        n_bytes = _plane_words(n_rows, width) * 8 + PATCH_BYTES * n_larger
        if n_bytes < fewest and (may_patch or n_larger == 0):
            best = width
            fewest = n_bytes
    return best


@compiled("int64(uint32[::1], uint8[::1], uint8[::1], uint16[::1], uint64[::1], int64)")
def _pack_part(
    values: Any, bits: Any, memory: Any, memory_16: Any, memory_64: Any, start: int
) -> int:
    """Write a part into `memory` from byte `start` on; its end."""
    n_values = len(values)
    n_groups = (n_values + GROUP - 1) // GROUP
    widths = np.empty(n_groups, np.int64)
    n_patches = np.zeros(n_groups, np.int64)
    low_64 = np.zeros(ROWS * _QUAD, np.uint64)
    high_64 = np.zeros(ROWS * _QUAD, np.uint64)
    low = low_64.view(np.uint16)
    high = high_64.view(np.uint16)
    with_bits = np.empty(MAX_WIDTH + 1, np.int64)  # values of each number of bits
    word = start // 8
    total_patches = 0
    for group in range(n_groups):
        first = group * GROUP
        n = min(n_values - first, GROUP)
        n_rows = (n + LANES - 1) // LANES
        with_bits[:] = 0
        for i in range(n):
            value = values[first + i]
            above = value >> np.uint32(PLANE_BITS)
            if above:
                with_bits[np.int64(bits[above]) + PLANE_BITS] += 1
            else:
                with_bits[bits[value]] += 1
        best = _choose_width(with_bits, n_rows)
        n_patches[group] = with_bits[best + 1 :].sum()
        widths[group] = best
        total_patches += n_patches[group]
        mask = np.uint32((np.int64(1) << min(best, PLANE_BITS)) - 1)
        for i in range(n_rows * LANES):
            value = values[first + i] if i < n else np.uint32(0)
            low[i] = value & mask
            high[i] = value >> np.uint32(PLANE_BITS)
        _pack_plane(low_64, n_rows, min(best, PLANE_BITS), word, memory_64)
        if best > PLANE_BITS:
            _pack_plane(high_64, n_rows, best - PLANE_BITS, word + n_rows * _QUAD, memory_64)
        word += _plane_words(n_rows, best)
    high_at = 4 * word  # in 16-bit words
    position_at = 8 * word + 2 * total_patches
    for group in range(n_groups):
        if n_patches[group]:
            first = group * GROUP
            for i in range(min(n_values - first, GROUP)):
                above = values[first + i] >> np.uint32(widths[group])
                if above:
                    memory_16[high_at] = above
                    memory[position_at] = i
                    high_at += 1
                    position_at += 1
    size = (position_at + 2 * n_groups + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    for group in range(n_groups):
        memory[size - n_groups + group] = widths[group]
        memory[size - 2 * n_groups + group] = n_patches[group]
    return size


@compiled(
    "int64(uint32[::1], int64[::1], uint8[::1], uint8[::1], uint16[::1], uint64[::1], int64[::1])"
)
def pack_parts(
    values: Any, borders: Any, bits: Any, memory: Any, memory_16: Any, memory_64: Any, sizes: Any
) -> int:
    """Write parts into `memory`, zeros with three views, and their `sizes`; return their bytes.

    As `codec.pack_parts`; `bits` is `layout.BITS`.
    """
    end = 0
    for part in range(len(sizes)):
        in_part = values[borders[part] : borders[part + 1]]
        start = end
        end = _pack_part(in_part, bits, memory, memory_16, memory_64, start)
        sizes[part] = end - start
    return end
