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

    Values `borders[i]` to `borders[i + 1]` are those of part i.
    """
    groups_of_parts = [group_sizes(n) for n in np.diff(borders).tolist()]
    n_groups = np.array([len(sizes) for sizes in groups_of_parts], np.int64)
    sizes = np.concatenate([np.zeros(0, np.int64), *groups_of_parts])
    padded = np.zeros((len(sizes), GROUP), np.uint32)
    padded[np.arange(GROUP) < sizes[:, None]] = values
    groups = _choose_widths(padded, sizes)
    planes = _pack_planes(padded, groups)
    widths = groups.widths.astype(np.uint32)
    is_patched = (padded >> np.minimum(widths, 31)[:, None]) > 0
    is_patched[groups.widths == MAX_WIDTH] = False
    group_of_patch, position = np.nonzero(is_patched)
    highs = (padded[group_of_patch, position] >> widths[group_of_patch]).astype("<u2")
    headers = (groups.n_patches.astype(np.uint8), groups.widths.astype(np.uint8))
    # bytes of planes, patches and headers before each part
    first_group = row_offsets(n_groups)
    first_plane = row_offsets(groups.plane_bytes())[first_group]
    first_patch = row_offsets(groups.n_patches)[first_group]
    packed = []
    spans = zip(*(pairwise(array.tolist()) for array in (first_plane, first_patch, first_group)))
    for in_planes, in_patches, in_groups in spans:
        contents = [
            planes[slice(*in_planes)],
            highs[slice(*in_patches)].view(np.uint8),
            position[slice(*in_patches)].astype(np.uint8),
        ]
        part_headers = [array[slice(*in_groups)] for array in headers]
        n_bytes = sum(map(len, contents)) + sum(map(len, part_headers))
        padding = np.zeros(aligned(n_bytes) - n_bytes, np.uint8)
        packed.append(np.concatenate([*contents, padding, *part_headers]))
    sizes_of_parts = np.array(list(map(len, packed)), np.int64)
    return np.concatenate([np.zeros(0, np.uint8), *packed]), sizes_of_parts


def _choose_widths(padded: np.ndarray, sizes: np.ndarray) -> Groups:
    """Width of each group that takes the fewest bytes; of equal ones the widest."""
    bits = np.where(
        padded >> PLANE_BITS, BITS[padded >> PLANE_BITS] + PLANE_BITS, BITS[padded & 0xFFFF]
    )
    most_bits = bits.max(axis=1, initial=0)
    n_groups = len(sizes)
    best = Groups(sizes, np.full(n_groups, MAX_WIDTH), np.zeros(n_groups, np.int64))
    fewest = best.plane_bytes()
    for width in reversed(range(MAX_WIDTH)):
        n_patches = (bits > width).sum(axis=1)
        candidate = Groups(sizes, np.full(n_groups, width), n_patches)
        n_bytes = candidate.plane_bytes() + PATCH_BYTES * n_patches
        may_patch = (width <= PLANE_BITS) & (most_bits <= width + PATCH_BITS) & (n_patches < GROUP)
        is_better = (n_bytes < fewest) & (may_patch | (n_patches == 0))
        best.widths[is_better] = width
        best.n_patches[is_better] = n_patches[is_better]
        fewest[is_better] = n_bytes[is_better]
    return best


def _pack_planes(padded: np.ndarray, groups: Groups) -> np.ndarray:
    """Planes of all groups, uint8."""
    n_bytes = groups.plane_bytes()
    ends = np.cumsum(n_bytes)
    planes = np.zeros(int(n_bytes.sum()) // 2, "<u2")
    n_rows = -(-groups.n_values // LANES)
    for width, rows in set(zip(groups.widths.tolist(), n_rows.tolist())):
        chosen = np.flatnonzero((groups.widths == width) & (n_rows == rows))
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
        moved = (values[:, row] & ((1 << width) - 1)) << shift
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
        raise ValueError("a block has too few bytes for its cells")
    first_group = row_offsets(n_groups)
    part = np.repeat(np.arange(len(starts)), n_groups)
    number = positions_in_rows(first_group)
    in_group = np.minimum(n_values[part] - number * GROUP, GROUP)
    header = (starts + sizes - 2 * n_groups)[part] + number
    n_patches = memory[header].astype(np.int64)
    widths = memory[header + n_groups[part]].astype(np.int64)
    groups = Groups(in_group, widths, n_patches)
    is_possible = (widths <= MAX_WIDTH) & (n_patches <= np.where(widths > PLANE_BITS, 0, in_group))
    plane_bytes = row_offsets(groups.plane_bytes())
    patches = row_offsets(n_patches)
    bytes_of_part = np.diff(plane_bytes[first_group])
    patches_of_part = np.diff(patches[first_group])
    needed = bytes_of_part + PATCH_BYTES * patches_of_part + 2 * n_groups
    if not is_possible.all() or (sizes != aligned(needed)).any():
        raise ValueError("the bytes of a block are not those of its groups")
    plane = starts[part] + plane_bytes[:-1] - plane_bytes[first_group][part]
    words = memory.view("<u2")
    values = _unpack_planes(words, plane // 2, groups)
    # patches of all parts
    group = np.repeat(np.arange(len(widths)), n_patches)
    part_of_patch = part[group]
    in_part = np.arange(patches[-1]) - patches[first_group][part_of_patch]
    first_high = (starts + bytes_of_part)[part_of_patch]
    highs = words[first_high // 2 + in_part].astype(np.uint32)
    positions = memory[first_high + 2 * patches_of_part[part_of_patch] + in_part]
    if (positions >= in_group[group]).any():
        raise ValueError("a patch is outside its group")
    np.bitwise_or.at(values, (group, positions), highs << widths[group].astype(np.uint32))
    return values[np.arange(GROUP) < in_group[:, None]]


def _unpack_planes(words: np.ndarray, first_word: np.ndarray, groups: Groups) -> np.ndarray:
    """Lower bits of the values of all groups, `(groups, GROUP)` uint32.

    The planes of each group begin at `first_word` of `words`, uint16.
    """
    values = np.zeros((len(first_word), GROUP), np.uint32)
    n_rows = -(-groups.n_values // LANES)
    for width, rows in set(zip(groups.widths.tolist(), n_rows.tolist())):
        chosen = np.flatnonzero((groups.widths == width) & (n_rows == rows))
        first = first_word[chosen]
        unpacked = np.zeros((len(chosen), ROWS, LANES), np.uint32)
        for first_bit in range(0, width, PLANE_BITS):
            width_of_plane = min(width - first_bit, PLANE_BITS)
            n_words = -(-rows * width_of_plane // PLANE_BITS) * LANES
            plane = words[first[:, None] + np.arange(n_words)].astype(np.uint32)
            plane = plane.reshape(len(chosen), -1, LANES)
            unpacked[:, :rows] |= _unpack_plane(plane, rows, width_of_plane) << first_bit
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
            value = value | (words[:, word + 1] << (PLANE_BITS - shift))
        values[:, row] = value & ((1 << width) - 1)
    return values
