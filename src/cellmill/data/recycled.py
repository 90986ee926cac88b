"""Memory of arrays that is used again as soon as nothing refers to them.

A fresh array of a megabyte costs a page fault for every 4 KiB, which takes longer than filling it, and the allocator
returns memory of this size to the kernel again and again. So the memory of batches is kept here. No consumer has to
release a batch: the memory is free when the last reference to the array, a view of it or a tensor over it is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict, deque

import numpy as np

_SMALLEST = 1 << 16  # bytes; below, an array is as cheap from the allocator
_KEPT = 8  # free blocks of each size: the arrays of the batches that are made, queued and used
_free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_KEPT))  # by bytes


def recycled_empty(size: int, dtype: np.dtype | type) -> np.ndarray:
    """`(size,)` of `dtype` with arbitrary values, as `np.empty`; may be called by any thread."""
    n_bytes = int(size) * np.dtype(dtype).itemsize
    if n_bytes < _SMALLEST:
        return np.empty(size, dtype)
    block = 1 << (n_bytes - 1).bit_length()  # few sizes, so that a later array fits; pages never written cost nothing
    free = _free[block]
    try:
        memory = free.pop()
    except IndexError:
        memory = np.empty(block, np.uint8)
    lent = (ctypes.c_char * block).from_buffer(memory.data)  # every view of the array refers to it
    weakref.finalize(lent, free.append, memory).atexit = False
    return np.frombuffer(memoryview(lent), dtype, int(size))
