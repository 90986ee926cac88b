"""Packing and unpacking of parts, by compiled loops or by numpy, which give the same bytes."""

from typing import NamedTuple

import numpy as np

from cellmill.data.packing import by_numpy, compiled_loops
from cellmill.data.packing.layout import max_bytes
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import positions_in_rows, row_offsets


class Parts(NamedTuple):
    """Parts in memory, and what is unpacked of each. Arrays are `(parts,)` int64."""

    memory: np.ndarray  # uint8, contiguous; its size is a multiple of 8
    begins: np.ndarray  # first byte, a multiple of 8
    sizes: np.ndarray  # bytes
    n_values: np.ndarray
    kept: np.ndarray  # number of first values to unpack
    targets: np.ndarray  # position of the first one in the output


class ValueCoding(NamedTuple):
    """Meaning of packed values."""

    # True: values ascend, and each is stored as its difference from the previous one minus 1,
    # starting from -1
    ascending: bool
    added: int  # to each stored value; 0 if they ascend
    limit: int  # a larger value is damage


class DamagedPart(ValueError):
    """A part whose bytes packing cannot have written."""

    def __init__(self, part: int) -> None:
        super().__init__("its packed bytes are invalid")
        self.part = part


def pack_parts(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parts, uint8 one after the other, and the bytes of each, int64.

    `values`, `(n,)`, are 0 to 2**32 - 1; `offsets[i]` to `offsets[i + 1]` are those of part i.
    """
    values = np.ascontiguousarray(values, dtype=np.uint32)
    loops = compiled_loops.COMPILED.loops_for(len(values))
    if loops is None:
        return by_numpy.pack_parts(values, offsets)
    offsets = np.array(offsets, np.int64)
    sizes = np.zeros(len(offsets) - 1, np.int64)
    memory = recycled_empty(max_bytes(len(values), len(sizes)), np.uint8)
    views = (memory, memory.view(np.uint16), memory.view(np.uint64))
    n_bytes = loops.pack_parts(values, offsets, *views, sizes)
    return memory[:n_bytes], sizes


def unpack_parts(parts: Parts, coding: ValueCoding, out: np.ndarray) -> None:
    """Unpack the first values of parts into `out`: int32, uint16 or uint32.

    Every byte is checked before it decides where another is read or written. Raises DamagedPart.
    """
    if not len(parts.kept):
        return
    value_ends = parts.targets + parts.kept
    if min(parts.kept.min(), parts.targets.min()) < 0 or value_ends.max() > len(out):
        raise IndexError(f"expected parts within {len(out):,} values, got one beyond")
    byte_ends = parts.begins + parts.sizes
    if min(parts.sizes.min(), parts.begins.min()) < 0 or byte_ends.max() > len(parts.memory):
        raise IndexError(f"expected parts within {len(parts.memory):,} bytes, got one beyond")
    loops = compiled_loops.COMPILED.loops_for(int(parts.kept.sum()))
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
    """Same as `unpack_parts`."""
    memory, begins, sizes, n_values, kept, targets = parts
    try:
        unpacked = by_numpy.unpack_parts(memory, begins, sizes, n_values)
    except ValueError:
        raise DamagedPart(_find_damaged(parts)) from None
    _refuse(kept > n_values)
    part = np.repeat(np.arange(len(kept)), kept)
    offsets = row_offsets(kept)
    in_part = positions_in_rows(offsets)
    first_value = row_offsets(n_values)
    stored = unpacked[first_value[part] + in_part].astype(np.int64)
    values = stored + coding.added
    if coding.ascending:
        total = np.cumsum(stored + 1)
        total_before = np.concatenate([[0], total])[offsets[:-1]]
        values = total - total_before[part] - 1
    is_large = np.zeros(len(kept), bool)
    is_large[part[values > coding.limit]] = True
    _refuse(is_large)
    out[targets[part] + in_part] = values.astype(out.dtype)


def _find_damaged(parts: Parts) -> int:
    """Number of the first damaged part; each is unpacked alone, as all together tell no number."""
    for number in range(len(parts.begins)):
        alone = slice(number, number + 1)
        try:
            by_numpy.unpack_parts(
                parts.memory, parts.begins[alone], parts.sizes[alone], parts.n_values[alone]
            )
        except ValueError:
            return number
    raise AssertionError("expected a damaged part, got none")


def _refuse(is_damaged: np.ndarray) -> None:
    """Raise DamagedPart for the first part of a mask."""
    if is_damaged.any():
        raise DamagedPart(int(is_damaged.argmax()))
