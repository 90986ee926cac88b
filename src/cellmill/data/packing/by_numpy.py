"""Packing and unpacking of parts by numpy, for when numba is missing or would not pay off."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.packing.layout import (
    COLUMNS,
    GROUP,
    MAX_WIDTH,
    PATCH_BITS,
    PATCH_BYTES,
    PLANE_BITS,
    ROWS,
    Groups,
    align_up,
    group_sizes,
    plane_bytes,
)
from cellmill.data.rows import positions_in_rows, row_offsets

# bit length of every number below 2**16
_BITS = np.array([number.bit_length() for number in range(1 << PLANE_BITS)], np.uint8)


def pack_parts(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Do the same as `codec.pack_parts`, for `values` of uint32."""
    sizes_by_part = [group_sizes(n) for n in np.diff(offsets).tolist()]
    n_groups = np.array([len(sizes) for sizes in sizes_by_part], np.int64)  # for each part
    n_values = np.concatenate([np.zeros(0, np.int64), *sizes_by_part])  # for each group
    # `(groups, GROUP)`: values of each group, then zeros if it is short
    padded = np.zeros((len(n_values), GROUP), np.uint32)
    is_value = np.arange(GROUP) < n_values[:, None]
    padded[is_value] = values
    groups = _choose_widths(padded, n_values)
    planes = _pack_planes(padded, groups)
    highs, positions = _find_patches(padded, groups.widths)
    # where each part begins among all groups, bytes of planes, and patches
    group_offsets = row_offsets(n_groups)
    plane_offsets = row_offsets(groups.plane_bytes())[group_offsets].tolist()
    patch_offsets = row_offsets(groups.n_patches)[group_offsets].tolist()
    parts = [np.zeros(0, np.uint8)]
    for number, (start, stop) in enumerate(pairwise(group_offsets.tolist())):
        in_planes = slice(*plane_offsets[number : number + 2])
        in_patches = slice(*patch_offsets[number : number + 2])
        contents = [
            planes[in_planes],
            highs[in_patches].view(np.uint8),
            positions[in_patches],
        ]
        trailer = [
            groups.n_patches[start:stop].astype(np.uint8),
            groups.widths[start:stop].astype(np.uint8),
        ]
        n_bytes = sum(map(len, contents)) + 2 * (stop - start)
        padding = np.zeros(align_up(n_bytes) - n_bytes, np.uint8)
        parts.append(np.concatenate([*contents, padding, *trailer]))
    part_bytes = [len(part) for part in parts[1:]]
    return np.concatenate(parts), np.array(part_bytes, np.int64)


def _find_patches(padded: np.ndarray, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the values of all groups that are wider than their group's width.

    Returns their bits above the width, uint16, and their positions in the group, uint8. `padded` is
    `(groups, GROUP)` uint32, and `widths` is `(groups,)`.
    """
    # no value is wider than 32 bits, and a shift by 32 is undefined
    is_narrow = widths < MAX_WIDTH
    shift = np.minimum(widths, MAX_WIDTH - 1).astype(np.uint32)
    above = padded >> shift[:, None]
    is_patched = (above > 0) & is_narrow[:, None]
    _, position = np.nonzero(is_patched)
    return above[is_patched].astype("<u2"), position.astype(np.uint8)


def _choose_widths(padded: np.ndarray, n_values: np.ndarray) -> Groups:
    """Choose the width of each group that takes the fewest bytes; of several, the largest.

    `padded`, `(groups, GROUP)` uint32, has the `n_values`, `(groups,)`, of each group, then zeros.
    """
    high = padded >> PLANE_BITS
    low = padded & 0xFFFF
    bits = np.where(high, _BITS[high] + PLANE_BITS, _BITS[low])
    n_groups = len(padded)
    # for each group and width, `(groups, widths)`: the number of values with as many bits
    widths = np.arange(MAX_WIDTH + 1)
    group = np.arange(n_groups)[:, None]
    entry = group * len(widths) + bits
    n_with_bits = np.bincount(entry.ravel(), minlength=n_groups * len(widths))
    n_with_bits = n_with_bits.reshape(n_groups, len(widths))
    # and the number of values with more bits
    n_larger = GROUP - np.cumsum(n_with_bits, axis=1)
    largest_bits = bits.max(axis=1, initial=0)[:, None]
    is_in_one_plane = widths <= PLANE_BITS
    # the number of patches is a byte, so not all 256 values may be patched
    fits_patches = (largest_bits <= widths + PATCH_BITS) & (n_larger < GROUP)
    is_possible = (n_larger == 0) | (is_in_one_plane & fits_patches)
    n_bytes = plane_bytes(n_values[:, None], widths) + PATCH_BYTES * n_larger
    n_bytes[~is_possible] = np.iinfo(n_bytes.dtype).max
    # argmin finds the first minimum, so search from the largest width down
    best = MAX_WIDTH - n_bytes[:, ::-1].argmin(axis=1)
    n_patches = n_larger[group[:, 0], best]
    return Groups(n_values, best, n_patches)


def _pack_planes(padded: np.ndarray, groups: Groups) -> np.ndarray:
    """Pack the planes of all groups, `(bytes,)` uint8."""
    n_bytes = groups.plane_bytes()
    starts = np.cumsum(n_bytes) - n_bytes
    planes = np.zeros(int(n_bytes.sum()) // 2, "<u2")
    for width, rows, chosen in groups.by_shape():
        values = padded[chosen].reshape(-1, ROWS, COLUMNS)[:, :rows]
        packed = []
        for first_bit in range(0, width, PLANE_BITS):
            in_plane = ((values >> first_bit) & 0xFFFF).astype(np.uint32)
            packed.append(_pack_plane(in_plane, min(width - first_bit, PLANE_BITS)))
        if packed:
            words = np.concatenate(packed, axis=1).reshape(len(chosen), -1)
            first_word = starts[chosen] // 2
            planes[first_word[:, None] + np.arange(words.shape[1])] = words
    return planes.view(np.uint8)


def _pack_plane(values: np.ndarray, width: int) -> np.ndarray:
    """Pack the lower `width` bits of `values`, `(groups, rows, columns)`.

    Returns words, `(groups, words, columns)` uint16.
    """
    n_groups, n_rows, _ = values.shape
    # one word more, since the last row may reach into it
    words = np.zeros((n_groups, -(-n_rows * width // PLANE_BITS) + 1, COLUMNS), np.uint32)
    for row in range(n_rows):
        word, shift = divmod(row * width, PLANE_BITS)
        mask = (1 << width) - 1
        moved = (values[:, row] & mask) << shift
        words[:, word] |= moved & 0xFFFF
        words[:, word + 1] |= moved >> PLANE_BITS
    return words[:, :-1].astype("<u2")


class PartLayouts(NamedTuple):
    """Where the groups and planes of parts are, by the parts' trailers. Arrays are int64."""

    groups: Groups
    part_of_group: np.ndarray  # `(groups,)`
    group_offsets: np.ndarray  # `(parts + 1,)`
    plane_starts: np.ndarray  # `(groups,)`: first byte of each group's planes, in its part
    plane_bytes_of_part: np.ndarray  # `(parts,)`


def unpack_parts(
    memory: np.ndarray, starts: np.ndarray, sizes: np.ndarray, n_values: np.ndarray
) -> np.ndarray:
    """Unpack all values of parts, `(values,)` uint32, one part after the other.

    A part has the `sizes` bytes of `memory`, uint8, from `starts` on, and `n_values` values. Raises
    ValueError for a damaged part.
    """
    layouts = _read_trailers(memory, starts, sizes, n_values)
    first_byte = starts[layouts.part_of_group] + layouts.plane_starts
    words = memory.view("<u2")
    values = _unpack_planes(words, first_byte // 2, layouts.groups)
    first_highs = starts + layouts.plane_bytes_of_part
    _apply_patches(values, memory, first_highs, layouts)
    is_value = np.arange(GROUP) < layouts.groups.n_values[:, None]
    return values[is_value]


def _read_trailers(
    memory: np.ndarray, starts: np.ndarray, sizes: np.ndarray, n_values: np.ndarray
) -> PartLayouts:
    """Read the trailers of parts. Raises ValueError unless each part has as many bytes as its groups need."""
    n_groups = -(-n_values // GROUP)
    if (sizes < 2 * n_groups).any():
        raise ValueError("a part has too few bytes for its groups")
    group_offsets = row_offsets(n_groups)
    part = np.repeat(np.arange(len(starts)), n_groups)
    number = positions_in_rows(group_offsets)  # number of each group in its part
    n_in_group = np.minimum(n_values[part] - number * GROUP, GROUP)
    # a trailer has the numbers of patches, then the widths
    trailer_starts = starts + sizes - 2 * n_groups
    entry = trailer_starts[part] + number
    n_patches = memory[entry].astype(np.int64)
    widths = memory[entry + n_groups[part]].astype(np.int64)
    groups = Groups(n_in_group, widths, n_patches)
    max_patches = np.where(widths > PLANE_BITS, 0, n_in_group)
    is_possible = (widths <= MAX_WIDTH) & (n_patches <= max_patches)
    # bytes that each part needs for its planes, patches and trailer
    plane_offsets = row_offsets(groups.plane_bytes())  # over all parts
    plane_offsets_of_parts = plane_offsets[group_offsets]
    plane_bytes_of_part = np.diff(plane_offsets_of_parts)
    patch_offsets = row_offsets(n_patches)
    patches_of_part = np.diff(patch_offsets[group_offsets])
    needed = plane_bytes_of_part + PATCH_BYTES * patches_of_part + 2 * n_groups
    if not is_possible.all() or (sizes != align_up(needed)).any():
        raise ValueError("a part has other bytes than its groups say")
    plane_starts = plane_offsets[:-1] - plane_offsets_of_parts[part]
    return PartLayouts(groups, part, group_offsets, plane_starts, plane_bytes_of_part)


def _apply_patches(
    values: np.ndarray, memory: np.ndarray, first_highs: np.ndarray, layouts: PartLayouts
) -> None:
    """Add the bits above the width to the patched values among `values`, `(groups, GROUP)` uint32.

    `first_highs` is the byte at which the patches of each part begin. Raises ValueError for a patch
    outside its group.
    """
    groups = layouts.groups
    patch_offsets = row_offsets(groups.n_patches)
    patch_offsets_of_parts = patch_offsets[layouts.group_offsets]
    group = np.repeat(np.arange(len(groups.widths)), groups.n_patches)
    part = layouts.part_of_group[group]
    # number of each patch in its part
    number = np.arange(patch_offsets[-1]) - patch_offsets_of_parts[part]
    words = memory.view("<u2")
    first_word = first_highs // 2
    highs = words[first_word[part] + number].astype(np.uint32)
    first_position = first_highs + 2 * np.diff(patch_offsets_of_parts)
    positions = memory[first_position[part] + number]
    if (positions >= groups.n_values[group]).any():
        raise ValueError("a patch is outside its group")
    widths = groups.widths[group].astype(np.uint32)
    # `.at` applies patches one by one, since a damaged part may have two patches of one value
    np.bitwise_or.at(values, (group, positions), highs << widths)


def _unpack_planes(words: np.ndarray, first_word: np.ndarray, groups: Groups) -> np.ndarray:
    """Unpack the lower bits of the values of all groups, `(groups, GROUP)` uint32.

    The planes of each group begin at `first_word` of `words`, uint16.
    """
    values = np.zeros((len(first_word), GROUP), np.uint32)
    for width, rows, chosen in groups.by_shape():
        first = first_word[chosen]
        unpacked = np.zeros((len(chosen), ROWS, COLUMNS), np.uint32)
        for first_bit in range(0, width, PLANE_BITS):
            width_of_plane = min(width - first_bit, PLANE_BITS)
            n_words = -(-rows * width_of_plane // PLANE_BITS) * COLUMNS
            word = first[:, None] + np.arange(n_words)
            plane = words[word].astype(np.uint32)
            plane = plane.reshape(len(chosen), -1, COLUMNS)
            in_plane = _unpack_plane(plane, rows, width_of_plane)
            unpacked[:, :rows] |= in_plane << first_bit
            first = first + n_words
        values[chosen] = unpacked.reshape(len(chosen), GROUP)
    return values


def _unpack_plane(words: np.ndarray, n_rows: int, width: int) -> np.ndarray:
    """Unpack words, `(groups, words, columns)`, to values, `(groups, n_rows, columns)` uint32."""
    values = np.empty((len(words), n_rows, COLUMNS), np.uint32)
    for row in range(n_rows):
        word, shift = divmod(row * width, PLANE_BITS)
        value = words[:, word] >> shift
        if shift + width > PLANE_BITS:
            n_low = PLANE_BITS - shift  # bits in the first of two words
            value = value | (words[:, word + 1] << n_low)
        mask = (1 << width) - 1
        values[:, row] = value & mask
    return values
