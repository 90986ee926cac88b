"""Loops over packed parts, compiled by numba on import. They release the GIL.

Four columns of 16 bits are shifted at once, as a word of 64 bits, which LLVM turns into vector
instructions of any processor.
"""

from typing import Any

import numpy as np

from cellmill.data.loops.jit import compiled
from cellmill.data.packing.layout import (
    ALIGNMENT,
    COLUMNS,
    GROUP,
    MAX_WIDTH,
    PATCH_BITS,
    PATCH_BYTES,
    PLANE_BITS,
    ROWS,
)

_WORD_BYTES = 8  # bytes of a 64-bit word
_WORD_COLUMNS = 4  # columns of 16 bits in a 64-bit word
_ROW_WORDS = COLUMNS // _WORD_COLUMNS  # 64-bit words in a row
# multiplied by a mask of 16 bits, gives that mask in each of a word's four columns
_EACH_COLUMN = np.uint64(0x0001_0001_0001_0001)


@compiled("void(uint64[::1], uint64, uint64, uint64, uint64[::1])")
def _unpack_plane(words: Any, start: Any, n_rows: Any, width: Any, values: Any) -> None:
    """Fill rows of `values` from a plane that begins at word `start`.

    All integers are unsigned, since numba checks whether signed indices count from an array's end.
    """
    mask = ((np.uint64(1) << width) - np.uint64(1)) * _EACH_COLUMN
    row_words = np.uint64(_ROW_WORDS)
    bit = np.uint64(0)
    to = np.uint64(0)
    for _ in range(n_rows):
        first = start + bit // np.uint64(PLANE_BITS) * row_words
        shift = bit % np.uint64(PLANE_BITS)
        if shift + width <= np.uint64(PLANE_BITS):
            for i in range(row_words):
                values[to + i] = (words[first + i] >> shift) & mask
        else:
            n_low = np.uint64(PLANE_BITS) - shift  # bits in the first of two words
            low = ((np.uint64(1) << n_low) - np.uint64(1)) * _EACH_COLUMN
            high = mask & ~low
            for i in range(row_words):
                in_first = (words[first + i] >> shift) & low
                in_second = (words[first + row_words + i] << n_low) & high
                values[to + i] = in_first | in_second
        bit += width
        to += row_words


@compiled("int64(uint64[::1], int64, int64, int64, uint64[::1])")
def _pack_plane(values: Any, n_rows: int, width: int, start: int, words: Any) -> Any:
    """Write the lower `width` bits of rows from word `start` on. Return the word after the last.

    Every word is set before bits are added to it, so its earlier content does not matter.
    """
    n_bits = np.uint64(width)
    plane_bits = np.uint64(PLANE_BITS)
    mask = ((np.uint64(1) << n_bits) - np.uint64(1)) * _EACH_COLUMN
    row_words = np.uint64(_ROW_WORDS)
    first = np.uint64(start)
    shift = np.uint64(0)  # first bit of the row in its word
    row_start = np.uint64(0)
    for _ in range(n_rows):
        n_low = plane_bits - shift  # bits of a value in the first of two words
        low = mask
        if n_bits > n_low:
            low = ((np.uint64(1) << n_low) - np.uint64(1)) * _EACH_COLUMN
        if shift == np.uint64(0):
            for i in range(row_words):
                words[first + i] = values[row_start + i] & mask
        else:
            for i in range(row_words):
                words[first + i] |= (values[row_start + i] & low) << shift
        if n_bits >= n_low:
            first += row_words
        if n_bits > n_low:
            high = mask & ~low
            for i in range(row_words):
                words[first + i] = (values[row_start + i] & high) >> n_low
        shift = (shift + n_bits) & (plane_bits - np.uint64(1))
        row_start += row_words
    is_begun = np.int64(shift > np.uint64(0))
    return np.int64(first) + is_begun * _ROW_WORDS


@compiled("int64(int64, int64)")
def _plane_words(n_rows: int, width: int) -> int:
    """Return the number of 64-bit words of a group's planes."""
    n_words = (n_rows * min(width, PLANE_BITS) + PLANE_BITS - 1) // PLANE_BITS
    if width > PLANE_BITS:
        n_words += (n_rows * (width - PLANE_BITS) + PLANE_BITS - 1) // PLANE_BITS
    return n_words * _ROW_WORDS


@compiled("int64(uint8[::1], int64, int64, int64, int64[::1], int64[::1])")
def _read_trailer(
    memory: Any, start: int, size: int, n_values: int, first_word: Any, first_patch: Any
) -> Any:
    """Fill the 64-bit word at which each group begins in its part, and its first patch.

    Returns the number of patches, or -1 if the part is damaged.
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
        n_words += _plane_words((n + COLUMNS - 1) // COLUMNS, width)
        n_patches += patches
    first_word[n_groups] = n_words
    first_patch[n_groups] = n_patches
    n_bytes = _WORD_BYTES * n_words + PATCH_BYTES * n_patches + 2 * n_groups
    return n_patches if size == (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT else -1


@compiled("void(uint64[::1], int64, int64, int64, uint64[::1], uint64[::1])")
def _unpack_group(
    words: Any, start: int, n_values: int, width: int, low_64: Any, high_64: Any
) -> None:
    """Fill the lower 16 bits of a group's values, and those above if it has them."""
    n_rows = (n_values + COLUMNS - 1) // COLUMNS
    low_width = np.uint64(min(width, PLANE_BITS))
    _unpack_plane(words, np.uint64(start), np.uint64(n_rows), low_width, low_64)
    if width > PLANE_BITS:
        second = start + n_rows * _ROW_WORDS
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
    """Add the bits above the width to patched values of a group.

    Returns 1 if a patch sets bits above the lower 16, 0 if none does, -1 if a patch is outside the
    group.
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
    """Fill ascending values, which follow `last`, from differences minus one. Return the last value."""
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
    """Fill values, each increased by `added`. Return the largest one."""
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
    starts: Any,
    sizes: Any,
    n_values: Any,
    n_kept: Any,
    targets: Any,
    ascending: bool,
    added: int,
    limit: int,
    out: Any,
) -> int:
    """Unpack parts into `out`. Return the number of the first damaged one, or -1.

    Same as `codec.unpack_parts`; the three memories are views of one.
    """
    max_groups = np.int64(1)
    for part in range(len(starts)):
        max_groups = max(max_groups, (n_values[part] + GROUP - 1) // GROUP)
    first_word = np.empty(max_groups + 1, np.int64)
    first_patch = np.empty(max_groups + 1, np.int64)
    low_64 = np.empty(ROWS * _ROW_WORDS, np.uint64)
    high_64 = np.empty(ROWS * _ROW_WORDS, np.uint64)
    low = low_64.view(np.uint16)
    high = high_64.view(np.uint16)
    for part in range(len(starts)):
        start = starts[part]
        n_in_part = n_values[part]
        n_patches = _read_trailer(memory, start, sizes[part], n_in_part, first_word, first_patch)
        if n_patches < 0 or n_kept[part] > n_in_part:
            return part
        n_groups = (n_in_part + GROUP - 1) // GROUP
        widths = start + sizes[part] - n_groups
        highs = start + _WORD_BYTES * first_word[n_groups]
        positions = highs + 2 * n_patches
        last_value = np.int64(-1)
        for group in range((n_kept[part] + GROUP - 1) // GROUP):
            n_in_group = min(n_in_part - group * GROUP, GROUP)
            width = np.int64(memory[widths + group])
            word = start // _WORD_BYTES + first_word[group]
            _unpack_group(memory_64, word, n_in_group, width, low_64, high_64)
            patch_status = _apply_patches(
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
            if patch_status < 0:
                return part
            is_wide = width > PLANE_BITS or patch_status > 0
            n_filled = min(n_kept[part] - group * GROUP, GROUP)
            to = targets[part] + group * GROUP
            filled = out[to : to + n_filled]
            if ascending:
                last_value = _write_ascending(low, high, is_wide, last_value, filled)
                largest = last_value
            else:
                largest = _write_plain(low, high, is_wide, added, filled)
            if largest > limit:
                return part
    return -1


@compiled("int64(uint32[::1], int64[::1])")
def _count_larger(values: Any, n_larger: Any) -> Any:
    """Fill, for each width from 0 to `MAX_WIDTH`, how many of a group's values need more bits.

    Returns the bits of the largest value.
    """
    union = np.uint32(0)
    for i in range(np.uint64(GROUP)):
        union |= values[i]
    max_bits = np.int64(0)
    while max_bits < MAX_WIDTH and union >> np.uint32(max_bits):
        max_bits += 1
    for width in range(max_bits):
        largest = np.uint32((np.int64(1) << width) - 1)
        n = np.uint32(0)
        for i in range(np.uint64(GROUP)):
            n = np.uint32(n + np.uint32(values[i] > largest))
        n_larger[width] = n
    for width in range(max_bits, MAX_WIDTH + 1):
        n_larger[width] = 0
    return max_bits


@compiled("int64(int64[::1], int64, int64)")
def _choose_width(n_larger: Any, max_bits: int, n_rows: int) -> int:
    """Return the width of a group that takes the fewest bytes; of several, the largest.

    `n_larger` and `max_bits` are those of `_count_larger`.
    """
    best = MAX_WIDTH
    fewest = _plane_words(n_rows, MAX_WIDTH) * _WORD_BYTES
    for width in range(MAX_WIDTH - 1, -1, -1):
        n_patches = n_larger[width]
        # the number of patches is a byte, so not all 256 values may be patched
        may_patch = width <= PLANE_BITS and max_bits <= width + PATCH_BITS and n_patches < GROUP
        n_bytes = _plane_words(n_rows, width) * _WORD_BYTES + PATCH_BYTES * n_patches
        if n_bytes < fewest and (may_patch or n_patches == 0):
            best = width
            fewest = n_bytes
    return best


@compiled("void(uint32[::1], int64, uint16[::1])")
def _copy_bits(values: Any, first_bit: int, plane: Any) -> None:
    """Fill `plane` with 16 bits of each of a group's values, from `first_bit` on."""
    shift = np.uint32(first_bit)
    for i in range(np.uint64(GROUP)):
        plane[i] = np.uint16(values[i] >> shift)


@compiled("void(uint32[::1], int64[::1], int64[::1], int64, int64, uint8[::1], uint16[::1])")
def _write_patches(
    values: Any,
    widths: Any,
    n_patches: Any,
    first_high: int,
    first_position: int,
    memory: Any,
    memory_16: Any,
) -> None:
    """Write the patches of a part: 16-bit words from `first_high` on, bytes from `first_position`."""
    for group in range(len(widths)):
        if not n_patches[group]:
            continue
        in_group = values[group * GROUP : (group + 1) * GROUP]
        width = np.uint32(widths[group])
        for i in range(np.uint64(len(in_group))):
            above = in_group[i] >> width
            if above:
                memory_16[first_high] = above
                memory[first_position] = i
                first_high += 1
                first_position += 1


@compiled("int64(uint32[::1], uint8[::1], uint16[::1], uint64[::1], int64)")
def _pack_part(values: Any, memory: Any, memory_16: Any, memory_64: Any, start: int) -> int:
    """Write a part into `memory` from byte `start` on. Return the byte after its last."""
    n_values = len(values)
    n_groups = (n_values + GROUP - 1) // GROUP
    widths = np.empty(n_groups, np.int64)
    n_patches = np.empty(n_groups, np.int64)
    padded = np.empty(GROUP, np.uint32)
    plane_64 = np.empty(ROWS * _ROW_WORDS, np.uint64)
    plane = plane_64.view(np.uint16)
    n_larger = np.empty(MAX_WIDTH + 1, np.int64)
    word = start // _WORD_BYTES
    for group in range(n_groups):
        in_group = values[group * GROUP : (group + 1) * GROUP]
        n_rows = (len(in_group) + COLUMNS - 1) // COLUMNS
        if len(in_group) < GROUP:
            padded[:] = 0
        padded[: len(in_group)] = in_group
        max_bits = _count_larger(padded, n_larger)
        width = _choose_width(n_larger, max_bits, n_rows)
        widths[group] = width
        n_patches[group] = n_larger[width]
        for first_bit in range(0, width, PLANE_BITS):
            width_of_plane = min(width - first_bit, PLANE_BITS)
            _copy_bits(padded, first_bit, plane)
            word = _pack_plane(plane_64, n_rows, width_of_plane, word, memory_64)
    # `word` counts 64-bit words
    total_patches = n_patches.sum()
    first_position = _WORD_BYTES * word + 2 * total_patches
    first_high = _WORD_COLUMNS * word
    _write_patches(values, widths, n_patches, first_high, first_position, memory, memory_16)
    padding_start = first_position + total_patches
    stop = (padding_start + 2 * n_groups + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    trailer_start = stop - 2 * n_groups
    memory[padding_start:trailer_start] = 0
    for group in range(n_groups):
        memory[trailer_start + group] = n_patches[group]
        memory[trailer_start + n_groups + group] = widths[group]
    return stop


@compiled("int64(uint32[::1], int64[::1], uint8[::1], uint16[::1], uint64[::1], int64[::1])")
def pack_parts(
    values: Any, offsets: Any, memory: Any, memory_16: Any, memory_64: Any, sizes: Any
) -> int:
    """Same as `codec.pack_parts`: write parts into `memory` and fill `sizes`. Return the bytes of all.

    `memory_16` and `memory_64` are views of `memory`.
    """
    stop = 0
    for part in range(len(sizes)):
        in_part = values[offsets[part] : offsets[part + 1]]
        start = stop
        stop = _pack_part(in_part, memory, memory_16, memory_64, start)
        sizes[part] = stop - start
    return stop
