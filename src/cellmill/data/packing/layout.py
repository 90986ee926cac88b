"""Layout of a part: the genes, or the counts, of a cell in few bits.

Values are packed in groups of 256. All values of a group are packed with the same number of bits, the
group's width. A few values may be wider: their lower bits are packed, and a patch has the bits above.
This is PFOR (Zukowski et al., ICDE 2006) with vertical layout (Lemire and Boytsov, 2015): value i of a
group is in column i % 16 of row i // 16.

A group wider than 16 bits is split into a low plane, with the lower 16 bits of its values, and a high
plane, with the bits above. Other groups have only a low plane. In a plane of w bits, row r begins at
bit r * w of its column. A column is a chain of 16-bit words, so unpacking can shift words of several
columns at once. With w = 6, the bits of a column's first words, lowest first, belong to these rows:

    word 0    000000 111111 2222
    word 1    22 333333 444444 55

A part is, little-endian and in this order:

    planes      16-bit words of each group: its low plane, then its high plane if it has one
    highs       uint16 for each patch: the value without its lower `width` bits
    positions   uint8 for each patch: position in its group
    padding     zeros, so that the size is a multiple of 8
    n_patches   uint8 for each group: number of patches
    widths      uint8 for each group: bits of a value, 0 to 32

The last two arrays are the trailer. The number of values is not stored: the offsets of cells, which
are stored elsewhere, give it. Sizes of planes and patches follow from the trailer, so a reader checks
all sizes before it unpacks a value. A group wider than 16 bits has no patches. Any other group has at
most 255, each of at most 16 bits. Genes in rank order are packed as they are, ascending genes as
differences minus one, and counts minus one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

GROUP = 256
COLUMNS = 16
ROWS = GROUP // COLUMNS
MAX_WIDTH = 32
PATCH_BITS = 16  # most bits of a value above the width of its group
PATCH_BYTES = 3
PLANE_BITS = 16
WORD_ROW_BYTES = 2 * COLUMNS  # one 16-bit word of every column
ALIGNMENT = 8  # bytes; parts begin at multiples of it


class Groups(NamedTuple):
    """Groups of values. Arrays are `(groups,)` integers."""

    n_values: np.ndarray
    widths: np.ndarray  # bits of a packed value
    n_patches: np.ndarray

    def by_shape(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield each pair of a width and a number of rows, and the indices of the groups that have it.

        numpy handles groups of one shape at once.
        """
        n_rows = -(-self.n_values // COLUMNS)
        shapes = np.stack([self.widths, n_rows], axis=1)
        for width, rows in np.unique(shapes, axis=0).tolist():
            has_shape = (self.widths == width) & (n_rows == rows)
            yield width, rows, np.flatnonzero(has_shape)

    def plane_bytes(self) -> np.ndarray:
        """Number of bytes of the planes of each group."""
        return plane_bytes(self.n_values, self.widths)


def plane_bytes(n_values: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Number of bytes of the planes of groups; the arrays are broadcast."""
    n_rows = -(-n_values // COLUMNS)
    low_width = np.minimum(widths, PLANE_BITS)
    high_width = np.maximum(widths - PLANE_BITS, 0)
    n_words = -(-n_rows * low_width // PLANE_BITS) + -(-n_rows * high_width // PLANE_BITS)
    return np.asarray(n_words * WORD_ROW_BYTES)


def group_sizes(n_values: int) -> np.ndarray:
    """Number of values in each group of a part of `n_values`, `(groups,)`."""
    first = np.arange(0, n_values, GROUP)
    return np.minimum(n_values - first, GROUP)


def align_up(n_bytes: Any) -> Any:
    """The next multiple of the alignment."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def max_bytes(n_values: int, n_parts: int) -> int:
    """Upper bound of the bytes of `n_parts` parts with `n_values` in total: all 32 bits wide."""
    n_groups = n_values // GROUP + n_parts
    return int(n_groups * align_up(2 * ROWS * WORD_ROW_BYTES + 2))
