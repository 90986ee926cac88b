"""Packing and unpacking of parts, by compiled loops or by numpy.

Both give the same results. Only damage may be reported differently (`_unpack_by_numpy`).
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
    """How a part's values follow from its packed values."""

    # True: values ascend, and each is packed as its distance from the previous one, minus 1;
    # the first as its distance from -1, minus 1
    ascending: bool
    added: int  # what is added to each packed value; 0 if `ascending`
    limit: int  # a larger value means that the part is damaged


class DamagedPart(ValueError):
    """A part with bytes that packing never writes.

    `index` is its index in the `Parts`. It is also the index of its cell, since genes and counts are
    unpacked separately.
    """

    def __init__(self, index: int) -> None:
        super().__init__("its packed bytes are invalid")
        self.index = index


def pack_parts(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack values into parts; part i gets `values[offsets[i] : offsets[i + 1]]`.

    `values`, `(n,)`, are 0 to 2**32 - 1. Returns the bytes of all parts, one after the other, `(bytes,)`
    uint8, and the number of bytes of each, `(parts,)` int64.
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
    """Unpack the first `n_kept` values of each part into `out`, of int32, uint16 or uint32.

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
    """Do the same as `unpack_parts` by numpy, except for damage.

    This function checks the patches of all groups, and the loops only those of groups with kept values.
    It makes each check over all parts, and the loops all checks of a part before those of the next. So
    of several damaged parts it may report another one.
    """
    memory, starts, sizes, n_values, n_kept, targets = parts
    try:
        unpacked = by_numpy.unpack_parts(memory, starts, sizes, n_values)
    except ValueError:
        raise DamagedPart(_find_damaged(parts)) from None
    _raise_if_damaged(n_kept > n_values)
    # for each kept value: its part, its position in the part, and its packed value
    offsets = row_offsets(n_kept)
    part = row_numbers(offsets)
    position = positions_in_rows(offsets)
    first_value = row_offsets(n_values)
    packed = unpacked[first_value[part] + position].astype(np.int64)
    values = packed + coding.added
    if coding.ascending:
        total = np.cumsum(packed + 1)
        total_of_earlier_parts = np.concatenate([[0], total])[offsets[:-1]]
        values = total - total_of_earlier_parts[part] - 1
    exceeds_limit = np.zeros(len(n_kept), bool)
    exceeds_limit[part[values > coding.limit]] = True
    _raise_if_damaged(exceeds_limit)
    out[targets[part] + position] = values.astype(out.dtype)


def _find_damaged(parts: Parts) -> int:
    """Find the first damaged part: parts are unpacked again, one at a time."""
    for number in range(len(parts.starts)):
        one = slice(number, number + 1)
        try:
            by_numpy.unpack_parts(
                parts.memory, parts.starts[one], parts.sizes[one], parts.n_values[one]
            )
        except ValueError:
            return number
    raise AssertionError("expected a damaged part, got none")


def _raise_if_damaged(is_damaged: np.ndarray) -> None:
    """Raise DamagedPart for the first part with True in the mask `is_damaged`, `(parts,)`."""
    if is_damaged.any():
        raise DamagedPart(int(is_damaged.argmax()))
