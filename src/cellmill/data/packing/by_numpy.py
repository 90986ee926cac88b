"""Packing and unpacking of parts in numpy: where numba is missing, or not worth its start."""

from itertools import pairwise

import numpy as np

from cellmill.data.packing.layout import (
    BITS,
    GROUP,
    LANES,
    MAX_WIDTH,
    PATCH_BITS,
    PATCH_BYTES,
    PLANE_BITS,
    ROWS,
    Groups,
    aligned,
    group_sizes,
)
from cellmill.data.rows import positions_in_rows, row_offsets


def pack_parts(values: np.ndarray, borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parts, uint8 one after the other, of `values`, uint32, and the bytes of each, int64.

    Part i has values `borders[i]` to `borders[i + 1]`.
    """
    groups_of_parts = [group_sizes(n) for n in np.diff(borders).tolist()]
    lengths = [len(sizes) for sizes in groups_of_parts]
    n_groups = np.array(lengths, np.int64)
    sizes = np.concatenate([np.zeros(0, np.int64), *groups_of_parts])
    # `(groups, GROUP)`, zeros behind the values of a short group
    padded = np.zeros((len(sizes), GROUP), np.uint32)
    is_value = np.arange(GROUP) < sizes[:, None]
    padded[is_value] = values
    groups = _choose_widths(padded, sizes)
    planes = _pack_planes(padded, groups)
    widths = groups.widths.astype(np.uint32)
    # no value is wider than 32 bits; a shift by 32 is undefined
    is_narrow = groups.widths < MAX_WIDTH
    above = padded >> np.minimum(widths, MAX_WIDTH - 1)[:, None]
    is_patched = (above > 0) & is_narrow[:, None]
    _, position = np.nonzero(is_patched)
    highs = above[is_patched].astype("<u2")
    positions = position.astype(np.uint8)
    # first plane byte, patch and group of each part, and the ends
    first_group = row_offsets(n_groups)
    first_plane = row_offsets(groups.plane_bytes())[first_group].tolist()
    first_patch = row_offsets(groups.n_patches)[first_group].tolist()
    parts = [np.zeros(0, np.uint8)]
    for number, (start, stop) in enumerate(pairwise(first_group.tolist())):
        in_planes = slice(*first_plane[number : number + 2])
        in_patches = slice(*first_patch[number : number + 2])
        contents = [
            planes[in_planes],
            highs[in_patches].view(np.uint8),
            positions[in_patches],
        ]
        headers = [
            groups.n_patches[start:stop].astype(np.uint8),
            groups.widths[start:stop].astype(np.uint8),
        ]
        n_bytes = sum(map(len, contents)) + 2 * (stop - start)
        padding = np.zeros(aligned(n_bytes) - n_bytes, np.uint8)
        parts.append(np.concatenate([*contents, padding, *headers]))
    n_bytes_of_parts = [len(part) for part in parts[1:]]
    memory = np.concatenate(parts)
    return memory, np.array(n_bytes_of_parts, np.int64)


def _choose_widths(padded: np.ndarray, sizes: np.ndarray) -> Groups:
    """Width of each group that takes the fewest bytes; of equal ones the widest."""
    high = padded >> PLANE_BITS
    low = padded & 0xFFFF
    bits = np.where(high, BITS[high] + PLANE_BITS, BITS[low])
    n_groups = len(sizes)
    # values of each number of bits, `(groups, widths)`, and of more bits than each width
    widths = np.arange(MAX_WIDTH + 1)
    group = np.arange(n_groups)[:, None]
    entry = group * len(widths) + bits
    with_bits = np.bincount(entry.ravel(), minlength=n_groups * len(widths))
    with_bits = with_bits.reshape(n_groups, len(widths))
    n_up_to = np.cumsum(with_bits, axis=1)
    n_larger = GROUP - n_up_to
    most_bits = bits.max(axis=1, initial=0)[:, None]
    is_in_one_plane = widths <= PLANE_BITS
    fits_patches = (most_bits <= widths + PATCH_BITS) & (n_larger < GROUP)
    is_possible = (n_larger == 0) | (is_in_one_plane & fits_patches)
    planes = Groups(sizes[:, None], widths, n_larger).plane_bytes()
    n_bytes = planes + PATCH_BYTES * n_larger
    n_bytes[~is_possible] = np.iinfo(n_bytes.dtype).max
    # of equal ones the last
    from_last = n_bytes[:, ::-1]
    best = MAX_WIDTH - from_last.argmin(axis=1)
    n_patches = n_larger[group[:, 0], best]
    return Groups(sizes, best, n_patches)


def _pack_planes(padded: np.ndarray, groups: Groups) -> np.ndarray:
    """Planes of all groups, uint8."""
    n_bytes = groups.plane_bytes()
    ends = np.cumsum(n_bytes)
    planes = np.zeros(int(n_bytes.sum()) // 2, "<u2")
    for width, rows, chosen in groups.alike():
        values = padded[chosen].reshape(-1, ROWS, LANES)[:, :rows]
        packed = []
        for first_bit in range(0, width, PLANE_BITS):
            in_plane = ((values >> first_bit) & 0xFFFF).astype(np.uint32)
            packed.append(_pack_plane(in_plane, min(width - first_bit, PLANE_BITS)))
        if packed:
            words = np.concatenate(packed, axis=1).reshape(len(chosen), -1)
            first = (ends - n_bytes)[chosen] // 2
            planes[first[:, None] + np.arange(words.shape[1])] = words
    return planes.view(np.uint8)


def _pack_plane(values: np.ndarray, width: int) -> np.ndarray:
    """Words, `(groups, words, lanes)` uint16, of the lower `width` bits of `(groups, rows, lanes)`."""
    n_groups, n_rows, _ = values.shape
    # a word more, into which the last row may reach
    words = np.zeros((n_groups, -(-n_rows * width // PLANE_BITS) + 1, LANES), np.uint32)
    for row in range(n_rows):
        word, shift = divmod(row * width, PLANE_BITS)
        mask = (1 << width) - 1
        moved = (values[:, row] & mask) << shift
        words[:, word] |= moved & 0xFFFF
        words[:, word + 1] |= moved >> PLANE_BITS
    return words[:, :-1].astype("<u2")


def unpack_parts(
    memory: np.ndarray, starts: np.ndarray, sizes: np.ndarray, n_values: np.ndarray
) -> np.ndarray:
    """All values of parts, uint32, one part after the other. Raises ValueError for a damaged part.

    Parts are `sizes` bytes of `memory`, uint8, from `starts` on.
    """
    n_groups = -(-n_values // GROUP)
    if (sizes < 2 * n_groups).any():
        raise ValueError("a part has too few bytes for its groups")
    # part of each group, its number in the part, and its values
    first_group = row_offsets(n_groups)
    part = np.repeat(np.arange(len(starts)), n_groups)
    number = positions_in_rows(first_group)
    in_group = np.minimum(n_values[part] - number * GROUP, GROUP)
    # numbers of patches, then widths, end a part
    ends = starts + sizes
    header = (ends - 2 * n_groups)[part] + number
    n_patches = memory[header].astype(np.int64)
    widths = memory[header + n_groups[part]].astype(np.int64)
    groups = Groups(in_group, widths, n_patches)
    most_patches = np.where(widths > PLANE_BITS, 0, in_group)
    is_possible = (widths <= MAX_WIDTH) & (n_patches <= most_patches)
    # offsets over all parts, from which those in a part follow
    plane_bytes = row_offsets(groups.plane_bytes())
    patches = row_offsets(n_patches)
    bytes_of_part = np.diff(plane_bytes[first_group])
    patches_of_part = np.diff(patches[first_group])
    needed = bytes_of_part + PATCH_BYTES * patches_of_part + 2 * n_groups
    if not is_possible.all() or (sizes != aligned(needed)).any():
        raise ValueError("a part has other bytes than its groups say")
    in_part = plane_bytes[:-1] - plane_bytes[first_group][part]
    first_word = (starts[part] + in_part) // 2
    words = memory.view("<u2")
    values = _unpack_planes(words, first_word, groups)
    # patches of all parts: their groups, high bits and positions
    group = np.repeat(np.arange(len(widths)), n_patches)
    part_of_patch = part[group]
    number = np.arange(patches[-1]) - patches[first_group][part_of_patch]
    first_high = (starts + bytes_of_part)[part_of_patch]
    highs = words[first_high // 2 + number].astype(np.uint32)
    first_position = first_high + 2 * patches_of_part[part_of_patch]
    positions = memory[first_position + number]
    if (positions >= in_group[group]).any():
        raise ValueError("a patch is outside its group")
    # a damaged part may have two patches of one value
    high_bits = highs << widths[group].astype(np.uint32)
    np.bitwise_or.at(values, (group, positions), high_bits)
    is_value = np.arange(GROUP) < in_group[:, None]
    return values[is_value]


def _unpack_planes(words: np.ndarray, first_word: np.ndarray, groups: Groups) -> np.ndarray:
    """Lower bits of the values of all groups, `(groups, GROUP)` uint32.

    The planes of each group begin at `first_word` of `words`, uint16.
    """
    values = np.zeros((len(first_word), GROUP), np.uint32)
    for width, rows, chosen in groups.alike():
        first = first_word[chosen]
        unpacked = np.zeros((len(chosen), ROWS, LANES), np.uint32)
        for first_bit in range(0, width, PLANE_BITS):
            width_of_plane = min(width - first_bit, PLANE_BITS)
            n_words = -(-rows * width_of_plane // PLANE_BITS) * LANES
            word = first[:, None] + np.arange(n_words)
            plane = words[word].astype(np.uint32)
            plane = plane.reshape(len(chosen), -1, LANES)
            in_plane = _unpack_plane(plane, rows, width_of_plane)
            unpacked[:, :rows] |= in_plane << first_bit
            first = first + n_words
        values[chosen] = unpacked.reshape(len(chosen), GROUP)
    return values


def _unpack_plane(words: np.ndarray, n_rows: int, width: int) -> np.ndarray:
    """Values, `(groups, n_rows, lanes)` uint32, of words `(groups, words, lanes)`."""
    values = np.empty((len(words), n_rows, LANES), np.uint32)
    for row in range(n_rows):
        word, shift = divmod(row * width, PLANE_BITS)
        value = words[:, word] >> shift
        if shift + width > PLANE_BITS:
            n_low = PLANE_BITS - shift  # bits in the first of two words
            value = value | (words[:, word + 1] << n_low)
        mask = (1 << width) - 1
        values[:, row] = value & mask
    return values
