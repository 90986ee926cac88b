"""Packing and unpacking of parts, by compiled loops or by numpy, which give the same results.

Only damage may be reported differently (`_unpack_by_numpy`).
"""

from typing import NamedTuple

import numpy as np

from cellmill.data import compiled_loops
from cellmill.data.packing import by_numpy
from cellmill.data.packing.layout import max_bytes
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import positions_in_rows, row_numbers, row_offsets


class Parts(NamedTuple):
    """Parts to unpack. Arrays are `(parts,)` int64, except `memory`."""

    memory: np.ndarray  # `(bytes,)` uint8, contiguous; its size is a multiple of 8
    starts: np.ndarray  # first byte, a multiple of 8
    sizes: np.ndarray  # number of bytes
    n_values: np.ndarray  # number of packed values
    n_kept: np.ndarray  # number of values to unpack, the first ones of each part
    targets: np.ndarray  # position of a part's first value in the output


class ValueCoding(NamedTuple):
    """How a part's values follow from the packed ones."""

    # True: values ascend, and each is stored as its difference from the previous one minus 1,
    # starting from -1
    ascending: bool
    added: int  # is added to each packed value; 0 if they ascend
    limit: int  # a larger value means that the part is damaged


class DamagedPart(ValueError):
    """A part with bytes that packing never writes.

    `index` is its index in the `Parts`, and so its cell, since genes and counts are unpacked
    separately.
    """

    def __init__(self, index: int) -> None:
        super().__init__("its packed bytes are invalid")
        self.index = index


def pack_parts(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack values into parts: `(bytes,)` uint8, one part after the other, and their sizes in bytes.

    `values`, `(n,)`, are 0 to 2**32 - 1, and part i gets `values[offsets[i] : offsets[i + 1]]`. Sizes
    are `(parts,)` int64.
    """
    values = np.ascontiguousarray(values, dtype=np.uint32)
    loops = compiled_loops.COMPILED.loops_for(len(values))
    if loops is None:
        return by_numpy.pack_parts(values, offsets)
    offsets = np.array(offsets, np.int64)
    sizes = np.zeros(len(offsets) - 1, np.int64)
    memory = recycled_empty(max_bytes(len(values), len(sizes)), np.uint8)
    n_bytes = loops.pack_parts(
        values, offsets, memory, memory.view(np.uint16), memory.view(np.uint64), sizes
    )
    return memory[:n_bytes], sizes


def unpack_parts(parts: Parts, coding: ValueCoding, out: np.ndarray) -> None:
    """Unpack the first `n_kept` values of each part into `out`: int32, uint16 or uint32.

    Every byte is checked before it decides where another is read or written. Raises DamagedPart.
    """
    if not len(parts.n_kept):
        return
    value_stops = parts.targets + parts.n_kept
    if min(parts.n_kept.min(), parts.targets.min()) < 0 or value_stops.max() > len(out):
        raise IndexError(f"expected parts within {len(out):,} values, got one beyond")
    byte_stops = parts.starts + parts.sizes
    if min(parts.sizes.min(), parts.starts.min()) < 0 or byte_stops.max() > len(parts.memory):
        raise IndexError(f"expected parts within {len(parts.memory):,} bytes, got one beyond")
    loops = compiled_loops.COMPILED.loops_for(int(parts.n_kept.sum()))
    if loops is None:
        _unpack_by_numpy(parts, coding, out)
        return
    memory = parts.memory
    damaged = loops.unpack_parts(
        memory,
        memory.view(np.uint16),
        memory.view(np.uint64),
        *parts[1:],
        coding.ascending,
        np.uint32(coding.added),
        coding.limit,
        out,
    )
    if damaged >= 0:
        raise DamagedPart(damaged)


def _unpack_by_numpy(parts: Parts, coding: ValueCoding, out: np.ndarray) -> None:
    """Same as `unpack_parts` for valid parts, by numpy; damage may be reported differently.

    This checks the patches of all groups, the loops only those of groups with kept values. The loops
    make all checks of a part before those of the next, this makes each check over all parts. So of
    several damaged parts another may be reported first.
    """
    memory, starts, sizes, n_values, n_kept, targets = parts
    try:
        unpacked = by_numpy.unpack_parts(memory, starts, sizes, n_values)
    except ValueError:
        raise DamagedPart(_find_damaged(parts)) from None
    _raise_if_damaged(n_kept > n_values)
    # part of each kept value, its position in the part, and its packed value
    offsets = row_offsets(n_kept)
    part = row_numbers(offsets)
    position = positions_in_rows(offsets)
    first_value = row_offsets(n_values)
    packed = unpacked[first_value[part] + position].astype(np.int64)
    values = packed + coding.added
    if coding.ascending:
        total = np.cumsum(packed + 1)
        total_before = np.concatenate([[0], total])[offsets[:-1]]  # of earlier parts
        values = total - total_before[part] - 1
    has_large = np.zeros(len(n_kept), bool)
    has_large[part[values > coding.limit]] = True
    _raise_if_damaged(has_large)
    out[targets[part] + position] = values.astype(out.dtype)


def _find_damaged(parts: Parts) -> int:
    """Find the first damaged part. Parts are unpacked one at a time, since the error names none."""
    for number in range(len(parts.starts)):
        this = slice(number, number + 1)
        try:
            by_numpy.unpack_parts(
                parts.memory, parts.starts[this], parts.sizes[this], parts.n_values[this]
            )
        except ValueError:
            return number
    raise AssertionError("expected a damaged part, got none")


def _raise_if_damaged(is_damaged: np.ndarray) -> None:
    """Raise DamagedPart for the first part that is True in a mask, `(parts,)`."""
    if is_damaged.any():
        raise DamagedPart(int(is_damaged.argmax()))
